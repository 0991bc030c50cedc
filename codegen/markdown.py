"""Writes ``docs/protocol.md``: the prose of a template, with tables and examples filled in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from codegen.annotate import annotate
from codegen.golden import Golden, example_of
from codegen.schema import (
    CopyOf,
    Default,
    Field,
    LongerThan,
    Message,
    OnesForEach,
    Record,
    Schema,
    ZerosThenOnes,
)
from codegen.text import header, markdown_table, one_line

__all__ = ["write_protocol"]

_DIRECTIONS = {
    "prefill->decode": "P to D",
    "decode->prefill": "D to P",
    "proxy->decode": "proxy to D",
    "proxy->prefill": "proxy to P",
    "decode->proxy": "D to the proxy's metaserver",
}


def write_protocol(
    template: str, control: Schema, rendezvous: Schema, golden: list[Golden], sources: str
) -> str:
    """The text of the page.

    Args:
        template: Markdown with ``{{name}}`` where a part goes.
        control: The control protocol's schema.
        rendezvous: The rendezvous's schema.
        golden: The frames to take examples from.
        sources: What the page is made from, for its first line.
    """
    parts = {
        "header": f"<!-- {header(sources)} -->",
        "version": str(control.version),
        "minimum_version": str(control.minimum_version),
        "overview": _overview(control),
        "messages": "\n\n".join(_message(control, m, golden) for m in control.messages),
        "structs": "\n\n".join(_record(s, f"### `{s.name}`") for s in control.structs),
        "rendezvous": "\n\n".join(
            _record(m, f"### `{m.name}`: {_DIRECTIONS[m.direction]}") for m in rendezvous.messages
        ),
    }
    for name, text in parts.items():
        template = template.replace(f"{{{{{name}}}}}", text)
    return template


def _overview(schema: Schema) -> str:
    rows = [
        (
            f"[`{message.name}`](#{message.name.lower()})",
            f"`{message.tag}`" if message.tag else f"raw bytes `{message.raw}`",
            _DIRECTIONS[message.direction],
            str(message.since),
            one_line(message.meaning).partition(". ")[0].rstrip("."),
        )
        for message in schema.messages
    ]
    return markdown_table(("message", "tag", "direction", "since", "meaning"), rows)


def _message(schema: Schema, message: Message, golden: list[Golden]) -> str:
    parts = [_record(message, f"### `{message.name}`")]
    example = example_of(message.name, golden)
    if example is not None:
        parts.append(
            f"Example: golden frame `{example.name}`, version {example.protocol_version}, "
            f"{len(example.payload)} bytes."
        )
        parts.append("\n".join(["```text", *_example_lines(schema, message, example), "```"]))
    return "\n\n".join(parts)


def _record(record: Record, heading: str) -> str:
    parts = [heading, one_line(record.meaning)]
    if isinstance(record, Message) and record.extends is not None:
        parts.append(f"It has every field of `{record.extends}`, and:")
    rows = list(_rows(record))
    if rows:
        # Arrays are told by position, maps and objects by name.
        positional = record.form == "array"
        columns = ["element", "name", "type", "since", "default", "unit", "meaning"]
        shown = [columns, *rows] if positional else [row[1:] for row in [columns, *rows]]
        parts.append(markdown_table(shown[0], shown[1:]))
    return "\n\n".join(parts)


def _rows(record: Record) -> Iterator[list[str]]:
    tagged = isinstance(record, Message) and record.form == "array"
    if isinstance(record, Message) and tagged:
        yield ["0", "(tag)", "bin", "1", "", "", f"The bytes `{record.tag}`."]
    for index, field in enumerate(record.fields, start=int(tagged)):
        yield [
            str(index),
            f"`{field.name}`",
            f"`{field.type}`",
            str(field.since),
            _default_text(field.default_value) if field.has_default else "",
            "" if field.unit == "none" else field.unit,
            " ".join([one_line(field.meaning), *_rules(field)]),
        ]


def _default_text(default: Default) -> str:
    match default:
        case CopyOf(copy_of=name):
            return f"the same list as `{name}`"
        case OnesForEach(ones_for_each=name):
            return f"1 for each of `{name}`"
        case ZerosThenOnes(zeros_then_ones=(items, count)):
            return f"for each of `{items}`: 0 for the first `{count}`, 1 for the others"
        case LongerThan(longer_than=(items, count)):
            return f"true if `{items}` has more items than `{count}` says"
        case bool():
            return f"`{str(default).lower()}`"
        case str():
            return f'`"{default}"`'
        case _:
            return f"`{default}`"


def _rules(field: Field) -> Iterator[str]:
    """What bounds the value beyond its type, in words."""
    if field.minimum is not None and field.maximum is not None:
        yield f"From {field.minimum} to {field.maximum}."
    elif field.minimum is not None:
        yield f"At least {field.minimum}."
    if field.same_length_as is not None:
        yield f"As many items as `{field.same_length_as}`."
    if field.at_most_length_of is not None:
        yield f"No more than `{field.at_most_length_of}` has items."
    if field.less_than is not None:
        yield f"Below `{field.less_than}`."
    if field.if_true_longer_than is not None:
        items, count = field.if_true_longer_than
        yield f"If true, `{items}` has more items than `{count}` says."


def _example_lines(schema: Schema, message: Message, example: Golden) -> Iterator[str]:
    """Offset, bytes and meaning of each run; long runs go on in further lines."""
    offset = 0
    for run in annotate(schema, message, example.payload):
        columns = textwrap.wrap(run.data.hex(" "), width=36)
        text = textwrap.wrap("  " * run.depth + run.text, width=72, subsequent_indent="  " * 12)
        rows = max(len(columns), len(text))
        columns += [""] * (rows - len(columns))
        text += [""] * (rows - len(text))
        for row, (data, words) in enumerate(zip(columns, text, strict=True)):
            place = f"{offset:04x}" if row == 0 else "    "
            yield f"{place}  {data:<36} {words}".rstrip()
        offset += len(run.data)
