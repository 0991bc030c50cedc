"""``rd2h inspect``: the command line. Needs typer alone until it runs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rd2h.cli.inspect.report import Report

__all__ = ["inspect"]


def inspect(
    frames: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HEX|FILE|-",
            show_default=False,
            help="Frames as hex, or files of them; - or nothing: standard input.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each frame.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show every id of a long list.")] = False,
    file: Annotated[
        bool, typer.Option("--file", help="Every argument is a file, even if it looks like hex.")
    ] = False,
) -> None:
    """Show what frames of the control protocol say, which version sent them, and what is wrong.

    Standard input and text files have one frame a line, in hex; 0x, spaces, colons,
    blank lines and # comments do no harm. Any other file is one binary frame.

    Exit status: 0 if every frame can be read, 1 if not.
    """
    from rd2h.cli.inspect.report import inspect_frame
    from rd2h.cli.inspect.sources import frames as find_frames

    show = _show_json if json else _tree_printer(full)
    found, good = False, True
    for captured in find_frames(frames or ["-"], _input_lines, only_files=file):
        report = inspect_frame(captured)
        show(report)
        found, good = True, good and report.fault is None
    if not found:
        typer.echo("rd2h inspect: no frames", err=True)
    if not good:
        raise typer.Exit(1)


def _input_lines() -> Iterable[bytes]:
    return sys.stdin.buffer


def _show_json(report: Report) -> None:
    from rd2h.cli.inspect.report import as_json

    # As bytes: JSON is UTF-8 whatever the locale says.
    typer.echo(as_json(report).encode())


def _tree_printer(full: bool) -> Callable[[Report], None]:
    from rich.console import Console

    from rd2h.cli.inspect.tree import print_report

    if isinstance(sys.stdout, io.TextIOWrapper):
        # An id may hold what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=160)  # a file or a pipe has no width: do not break lines early
    return lambda report: print_report(console, report, full=full)
