"""What a schema's types, defaults and docs look like in Python."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.schema import (
    CopyOf,
    Default,
    Field,
    LongerThan,
    OnesForEach,
    Record,
    ZerosThenOnes,
)
from codegen.text import one_line, split_summary, wrap
from codegen.types import ListOf, MapOf, Msgpack, Named, Scalar, Type

__all__ = [
    "WIDTH",
    "annotation",
    "default_source",
    "derived_source",
    "docstring",
    "field_annotation",
]

WIDTH = 100

_SCALARS = {"bool": "bool", "string": "str", "uint64": "UInt64"}


def annotation(type_: Type) -> str:
    """The Python annotation of a type as programs see it (no msgpack-in-msgpack)."""
    match type_:
        case Scalar(name):
            return _SCALARS[name]
        case Named(name):
            return name
        case ListOf(item):
            return f"list[{annotation(item)}]"
        case MapOf(value):
            return f"dict[str, {annotation(value)}]"
        case Msgpack(content):
            return annotation(content)


def field_annotation(field: Field) -> str:
    """The annotation of a field, with the bounds that msgspec checks by itself."""
    if field.minimum is None and field.maximum is None:
        return annotation(field.parsed_type)
    bounds = [f"ge={field.minimum or 0}"]
    bounds += [] if field.maximum is None else [f"le={field.maximum}"]
    return f"Annotated[int, Meta({', '.join(bounds)})]"


def default_source(default: Default) -> str:
    """The Python expression that stands after ``=`` in a class body."""
    match default:
        case CopyOf() | OnesForEach() | ZerosThenOnes() | LongerThan():
            return "DERIVED"
        case list():
            return "field(default_factory=list)"
        case dict():
            return "field(default_factory=dict)"
        case str():
            return '"' + default.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case _:
            return repr(default)


def derived_source(default: Default) -> str | None:
    """The Python expression that computes a derived default from ``self``; None if it is plain."""
    match default:
        case CopyOf(copy_of=name):
            return f"list(self.{name})"
        case OnesForEach(ones_for_each=name):
            return f"[1] * len(self.{name})"
        case ZerosThenOnes(zeros_then_ones=(items, count)):
            return f"[int(i >= self.{count}) for i in range(len(self.{items}))]"
        case LongerThan(longer_than=(items, count)):
            return f"len(self.{items}) > self.{count}"
        case _:
            return None


def docstring(record: Record) -> Iterator[str]:
    """The lines of a class docstring: what the record means, and its own fields with units."""
    summary, rest = split_summary(record.meaning)
    yield f'    """{summary}'
    if rest:
        yield ""
        yield from wrap(rest, width=WIDTH, indent="    ")
    if record.fields:
        yield ""
        yield "    Attributes:"
        for field in record.fields:
            yield from wrap(_field_doc(field), width=WIDTH, indent="        ", hang="    ")
    yield '    """'


def _field_doc(field: Field) -> str:
    unit = "" if field.unit == "none" else f" Unit: {field.unit}."
    since = "" if field.since == 1 else f" Since version {field.since}."
    return f"{field.name}: {one_line(field.meaning)}{unit}{since}"
