"""`check` finds what is stale, missing or extra; `generate` mends it."""

import shutil
from pathlib import Path

import pytest

from codegen.outputs import Project, render, stale_files, write_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A copy of everything that the generator reads and writes."""
    for folder in ("schemas", "codegen/templates", "tests/compat/golden", "rd2h/wire", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return Project(tmp_path)


def test_the_checkout_is_up_to_date() -> None:
    assert stale_files(Project(ROOT)) == []


@pytest.mark.parametrize("path", sorted(render(Project(ROOT))))
def test_a_stale_file_is_found_and_mended(project: Project, path: str) -> None:
    target = project.root / path
    target.write_text(target.read_text() + "\n")
    assert stale_files(project) == [f"{path} is stale"]
    assert write_files(project) == [path]
    assert stale_files(project) == []


@pytest.mark.parametrize("path", sorted(render(Project(ROOT))))
def test_a_missing_file_is_found_and_mended(project: Project, path: str) -> None:
    (project.root / path).unlink()
    assert stale_files(project) == [f"{path} is missing"]
    assert write_files(project) == [path]
    assert stale_files(project) == []


def test_an_extra_file_is_found_and_removed(project: Project) -> None:
    extra = project.root / "rd2h" / "wire" / "old_messages.py"
    shutil.copy(project.root / "rd2h" / "wire" / "messages.py", extra)
    assert stale_files(project) == ["rd2h/wire/old_messages.py is extra: no schema generates it"]
    assert write_files(project) == ["rd2h/wire/old_messages.py"]
    assert not extra.exists()


def test_a_file_that_a_person_wrote_is_left_alone(project: Project) -> None:
    (project.root / "docs" / "notes.md").write_text("Written by hand.\n")
    assert stale_files(project) == []
    assert write_files(project) == []


def test_a_change_of_the_schema_makes_the_outputs_stale(project: Project) -> None:
    schema = project.root / "schemas" / "control.toml"
    schema.write_text(schema.read_text().replace("D has taken P's metadata.", "Taken."))
    assert stale_files(Project(project.root)) == [
        "rd2h/wire/messages.py is stale",
        "docs/protocol.md is stale",
    ]
