"""docs/protocol.md has what a person who implements a peer needs."""

from pathlib import Path

import pytest

from codegen.golden import load_golden
from codegen.markdown import write_protocol
from codegen.schema import Message, load_schema
from codegen.text import markdown_table

ROOT = Path(__file__).parents[2]
CONTROL = load_schema(ROOT / "schemas" / "control.toml")
RENDEZVOUS = load_schema(ROOT / "schemas" / "rendezvous.toml")
GOLDEN = load_golden(ROOT / "tests" / "compat" / "golden")
TEMPLATE = (ROOT / "codegen" / "templates" / "protocol.md").read_text()
PAGE = write_protocol(TEMPLATE, CONTROL, RENDEZVOUS, GOLDEN, "here")


def test_every_part_of_the_template_is_filled_in() -> None:
    assert "{{" not in PAGE


@pytest.mark.parametrize("record", [*CONTROL.records, *RENDEZVOUS.records], ids=lambda r: r.name)
def test_every_record_has_a_section_with_every_field(record: Message) -> None:
    heading = f"### `{record.name}`"
    assert PAGE.count(heading) == 1
    section = PAGE[PAGE.index(heading) + 1 :].partition("\n### ")[0].partition("\n## ")[0]
    for field in record.fields:
        assert f"| `{field.name}` | `{field.type}` | {field.since} |" in section


@pytest.mark.parametrize("message", CONTROL.messages, ids=lambda m: m.name)
def test_every_message_has_one_worked_example(message: Message) -> None:
    section = PAGE[PAGE.index(f"### `{message.name}`") + 1 :].partition("\n### ")[0]
    assert section.count("Example: golden frame") == 1
    assert section.count("```text") == 1


def test_the_bytes_of_an_example_are_those_of_the_golden_frame() -> None:
    section = PAGE[PAGE.index("### `MfMeta`") :]
    lines = section.partition("```text\n")[2].partition("```")[0].splitlines()
    shown = bytes.fromhex("".join(line[6:42] for line in lines))
    assert shown == next(
        f.payload for f in GOLDEN if f.message == "MfMeta" and f.protocol_version == 3
    )


def test_a_pipe_in_a_cell_does_not_end_it() -> None:
    assert markdown_table(["a"], [["x | y"]]).splitlines()[2] == "| x \\| y |"
