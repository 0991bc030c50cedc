"""``python -m codegen generate | check | freeze VERSION``, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from codegen.freeze import freeze
from codegen.outputs import Project, find_breakages, stale_files, write_files
from codegen.schema import SchemaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a check failed, 2 if a schema is unreadable."""
    parser = argparse.ArgumentParser(prog="python -m codegen", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="write everything that follows from schemas/")
    commands.add_parser("check", help="fail if anything is stale or a released version is broken")
    freezing = commands.add_parser("freeze", help="write the frozen schema of a released version")
    freezing.add_argument("schema", choices=["control", "rendezvous"])
    freezing.add_argument("version", type=int)
    options = parser.parse_args(arguments)
    try:
        project = Project(options.root)
        if options.command == "generate":
            return _say([f"wrote {path}" for path in write_files(project)], failed=False)
        if options.command == "freeze":
            schema = next(s for s in project.schemas if s.name == options.schema)
            path = freeze(schema, project.frozen, options.version)
            return _say([f"wrote {path}"], failed=False)
        # What breaks a released version comes first, and alone: the outputs of such a schema are
        # of no interest, and may not even be possible.
        problems = [*map(str, find_breakages(project))] or stale_files(project)
        advice = ["CONTRIBUTING.md says how the protocol may change; `make generate` writes files."]
        return _say([*problems, *(advice if problems else [])], failed=bool(problems))
    except SchemaError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _say(lines: list[str], *, failed: bool) -> int:
    (sys.stderr if failed else sys.stdout).writelines(f"{line}\n" for line in lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
