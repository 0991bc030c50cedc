"""The command line, as the Makefile and a person use it."""

import shutil
from pathlib import Path

import pytest

from codegen.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("schemas", "codegen/templates", "tests/compat/golden", "rd2h/wire", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def run(checkout: Path, *arguments: str) -> int:
    return main(["--root", str(checkout), *arguments])


def edit(checkout: Path, old: str, new: str) -> None:
    path = checkout / "schemas" / "control.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_check_says_nothing_when_all_is_well(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkout, "check") == 0
    assert capsys.readouterr() == ("", "")


def test_check_fails_on_a_stale_file(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "docs" / "protocol.md").write_text("")
    assert run(checkout, "check") == 1
    assert "docs/protocol.md is stale" in capsys.readouterr().err


def test_check_fails_on_a_broken_release_even_when_generated_anew(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, 'name = "tp_ratio"', 'name = "ratio"')
    edit(checkout, 'less_than = "tp_ratio"', 'less_than = "ratio"')
    assert run(checkout, "generate") == 0
    capsys.readouterr()
    assert run(checkout, "check") == 1
    assert "FIELD_RENAMED control:ReadReadyBatch.tp_ratio" in capsys.readouterr().err


EDITS = {
    "FIELD_RETYPED control:MfMeta.session": (
        'name = "session"\ntype = "string"',
        'name = "session"\ntype = "uint64"',
    ),
    "FIELD_RETYPED control:ReadReadyBatch.layer_name": (
        'name = "layer_name"\ntype = "string"',
        'name = "layer_name"\ntype = "uint64"',
    ),
    "FIELD_RETYPED control:ReadReadyBatch.read_reqs": ("list<ReadRequest>", "list<uint64>"),
    "MESSAGE_CHANGED control:LayerMetadata": ('form = "map"', 'form = "array"'),
    "FIELD_RENAMED control:LayerMetadata.block_len": ('name = "block_len"', 'name = "block_size"'),
    "FIELD_CONSTRAINT_CHANGED control:ReadReadyBatch.tp_ratio": ("minimum = 1\n", ""),
    "FIELD_CONSTRAINT_CHANGED control:ReadFailed.error": ("droppable = true\n", ""),
    "FIELD_DEFAULT_CHANGED control:LayerMetadata.main_tensor_count": ("default = 2", "default = 1"),
    "SINCE_REGRESSED control:ReadReadyBatch.tp_ratio": (
        'name = "tp_ratio"\ntype = "uint64"\nsince = 3',
        'name = "tp_ratio"\ntype = "uint64"\nsince = 2',
    ),
    "TAG_REUSED control:ReadFailed": ('tag = "read_failed"', 'tag = "read_done"'),
    "FIELD_INSERTED control:ReadReadyBatch.extra": (
        '[[message.field]]\nname = "layer_name"',
        '[[message.field]]\nname = "extra"\ntype = "bool"\nsince = 1\nunit = "none"\n'
        'meaning = "New."\n\n[[message.field]]\nname = "layer_name"',
    ),
}


@pytest.mark.parametrize("complaint", EDITS)
def test_an_edit_of_the_real_schema_names_its_rule_and_place(
    checkout: Path, capsys: pytest.CaptureFixture[str], complaint: str
) -> None:
    edit(checkout, *EDITS[complaint])
    assert run(checkout, "check") == 1
    assert complaint in capsys.readouterr().err


def test_a_schema_that_golden_frames_do_not_fit_is_one_line(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, 'name = "block_len"', 'name = "block_bytes"')
    assert run(checkout, "generate") == 2
    assert "a golden frame does not fit the schema any more" in capsys.readouterr().err


def test_check_fails_when_a_frozen_file_is_gone(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "schemas" / "frozen" / "control-2.toml").unlink()
    assert run(checkout, "check") == 1
    assert "version 2 is released but not frozen" in capsys.readouterr().err


def test_a_version_of_which_frames_were_captured_cannot_be_taken_back(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "released = [1, 2, 3]", "released = [1, 2]")
    (checkout / "schemas" / "frozen" / "control-3.toml").unlink()
    assert run(checkout, "check") == 1
    assert "golden frames of version 3, which is not released" in capsys.readouterr().err


def test_check_fails_on_other_line_ends(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = checkout / "docs" / "protocol.md"
    page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))
    assert run(checkout, "check") == 1
    assert "docs/protocol.md is stale" in capsys.readouterr().err


def test_generate_names_what_it_wrote(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "docs" / "protocol.md").unlink()
    assert run(checkout, "generate") == 0
    assert capsys.readouterr().out == "wrote docs/protocol.md\n"


def test_a_version_is_frozen_once_it_is_released(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkout, "freeze", "control", "4") == 2
    assert "add 4 to `released` first" in capsys.readouterr().err
    edit(checkout, "version = 3", "version = 4")
    edit(checkout, "released = [1, 2, 3]", "released = [1, 2, 3, 4]")
    assert run(checkout, "freeze", "control", "4") == 0
    assert "control-4.toml" in capsys.readouterr().out
    assert run(checkout, "generate") == 0
    assert run(checkout, "check") == 0


def test_an_unreadable_schema_is_one_line(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "version = 3", "version = three")
    assert run(checkout, "check") == 2
    error = capsys.readouterr().err
    assert "control.toml" in error
    assert error.count("\n") == 1
