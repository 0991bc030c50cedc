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


def test_check_fails_when_a_frozen_file_is_gone(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "schemas" / "frozen" / "control-2.toml").unlink()
    assert run(checkout, "check") == 1
    assert "version 2 is released but not frozen" in capsys.readouterr().err


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
