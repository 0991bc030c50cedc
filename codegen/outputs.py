"""Everything that is generated, in one place: what it is, writing it, and comparing it.

Comparison goes over whole folders, because a file that nobody generates any more is as wrong
as one that is stale, and version control alone would not tell.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from codegen.evolution import Breakage, Rule, check_evolution
from codegen.freeze import load_frozen
from codegen.golden import load_golden
from codegen.json_schema import write_json_schema
from codegen.markdown import write_protocol
from codegen.python_messages import write_messages
from codegen.python_rendezvous import write_rendezvous
from codegen.python_tables import write_tables
from codegen.schema import Schema, load_schema
from codegen.text import MARK

__all__ = ["Project", "find_breakages", "render", "stale_files", "write_files"]

_CONTROL = "schemas/control.toml"
_RENDEZVOUS = "schemas/rendezvous.toml"
_GOLDEN = "tests/compat/golden"
_TEMPLATE = "codegen/templates/protocol.md"
# Folders that hold generated files, beside others.
_FOLDERS = ("rd2h/wire", "docs")


@dataclass(frozen=True)
class Project:
    """A checkout: where the schemas are read and where the outputs go.

    Attributes:
        root: The folder with ``schemas/`` in it.
        control: The control protocol's schema.
        rendezvous: The rendezvous's schema.
    """

    root: Path
    control: Schema = field(init=False)
    rendezvous: Schema = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "control", load_schema(self.root / _CONTROL))
        object.__setattr__(self, "rendezvous", load_schema(self.root / _RENDEZVOUS))

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """All schemas."""
        return (self.control, self.rendezvous)

    @property
    def frozen(self) -> Path:
        """The folder of released versions."""
        return self.root / "schemas" / "frozen"


def find_breakages(project: Project) -> list[Breakage]:
    """Every way in which a schema breaks a version that is released."""
    found = [
        breakage
        for schema in project.schemas
        for breakage in check_evolution(schema, load_frozen(project.frozen, schema.name))
    ]
    # A version of which frames were captured is in use, whatever the schema says.
    captured = {frame.protocol_version for frame in load_golden(project.root / _GOLDEN)}
    for version in sorted(captured - set(project.control.released)):
        detail = f"there are golden frames of version {version}, which is not released"
        found.append(Breakage(Rule.RELEASE_MISSING, project.control.name, detail))
    return found


def render(project: Project) -> dict[str, str]:
    """The text of every generated file, by its path below the root."""
    template = (project.root / _TEMPLATE).read_text(encoding="utf-8")
    golden = load_golden(project.root / _GOLDEN)
    page = write_protocol(
        template, project.control, project.rendezvous, golden, "schemas/ and the golden frames"
    )
    return {
        "rd2h/wire/messages.py": _format(write_messages(project.control, _CONTROL)),
        "rd2h/wire/tables.py": _format(write_tables(project.control, _CONTROL)),
        "rd2h/wire/rendezvous.py": _format(write_rendezvous(project.rendezvous, _RENDEZVOUS)),
        "docs/protocol.md": page,
        "docs/rendezvous.schema.json": write_json_schema(project.rendezvous, _RENDEZVOUS),
    }


def write_files(project: Project) -> list[str]:
    """Write every generated file and remove those that are generated no more.

    Returns:
        The paths, below the root, of the files that changed.
    """
    files = render(project)
    changed = []
    for path, text in files.items():
        target = project.root / path
        if not target.exists() or target.read_bytes() != text.encode():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            changed.append(path)
    for path in _extra(project, files):
        (project.root / path).unlink()
        changed.append(path)
    return changed


def stale_files(project: Project) -> list[str]:
    """One line for each generated file that is missing, stale or extra; nothing is written."""
    files = render(project)
    problems = []
    for path, text in files.items():
        target = project.root / path
        if not target.exists():
            problems.append(f"{path} is missing")
        elif target.read_bytes() != text.encode():
            problems.append(f"{path} is stale")
    problems += [f"{path} is extra: no schema generates it" for path in _extra(project, files)]
    return problems


def _extra(project: Project, files: dict[str, str]) -> Iterator[str]:
    """Files that say that they are generated, and are not."""
    for folder in _FOLDERS:
        for path in sorted((project.root / folder).rglob("*")):
            name = path.relative_to(project.root).as_posix()
            if path.suffix not in (".py", ".md", ".json") or name in files:
                continue
            if MARK.encode() in path.read_bytes()[:300]:
                yield name


def _format(text: str) -> str:
    """Lay Python out as the project's formatter does, by asking it."""
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
