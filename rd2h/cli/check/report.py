"""What both ends print: steps, the table, and one block for a failure."""

from __future__ import annotations

import io
import os
import sys

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rd2h.cli.check.failures import Failure, clean
from rd2h.cli.check.options import EngineName, PrefillOptions, size_text
from rd2h.cli.check.result import CheckResult, StepDone
from rd2h.cli.check.service import Outcome

__all__ = ["PrefillLines", "as_json", "make_console", "print_result", "print_step"]


def make_console() -> Console:
    """A console for standard output that takes any text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return Console(width=120, highlight=False)  # a file or a pipe has no width
    return Console(highlight=False)


def as_json(result: CheckResult) -> str:
    """The result as JSON: ``ok``, and the ``check`` in detail."""
    document = {"ok": result.ok, "check": result}
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def print_step(console: Console, done: StepDone) -> None:
    """Print a step that went well."""
    line = Text("ok ", "green")
    line.append(f" {done.step:<16}", "bold").append(f" {clean(done.detail)}", "not bold default")
    console.print(line, soft_wrap=True)


def print_result(console: Console, result: CheckResult) -> None:
    """Print the table of all reads, the failure if there is one, and the verdict."""
    if result.reads:
        console.print(_reads(result))
    if result.failure is not None:
        _print_failure(console, result.failure)
    verdict = Text("PASSED", "bold green") if result.ok else Text("FAILED", "bold red")
    console.print(verdict)


def _print_failure(console: Console, failure: Failure) -> None:
    """Print which step failed where, what was seen, and what to look at."""
    console.print(Text(f"{failure.step} failed on {failure.side}", "bold red"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("  seen", Text(clean(failure.seen)))  # from the other end, perhaps
    for index, hint in enumerate(failure.look):
        table.add_row("" if index else "  look at", Text(clean(hint)))
    console.print(table)


def _reads(result: CheckResult) -> Table:
    rounds = len(result.reads[0].seconds)
    table = Table(
        title=(
            f"{result.engine} engine, {result.memory} memory, blocks of "
            f"{size_text(result.block)}, {rounds} rounds"
        ),
        title_justify="left",
    )
    table.add_column("size", justify="right")
    table.add_column("pattern")
    for name in ("segments", "median ms", "fastest ms", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for read in result.reads:
        table.add_row(
            size_text(read.size),
            read.pattern,
            f"{read.segments:,}",
            f"{read.median * 1e3:.3f}",
            f"{read.fastest * 1e3:.3f}",
            f"{read.bytes_per_second / 1e9:.3g}",
            Text("ok", "green"),
        )
    return table


class PrefillLines:
    """What Prefill prints.

    Args:
        console: Where.
        options: What it was started with.
    """

    def __init__(self, console: Console, options: PrefillOptions) -> None:
        self._console = console
        self._options = options

    def listening(self, port: int) -> None:
        """It listens."""
        options = self._options
        self._say(
            f"listening on {options.bind} port {port}; engine {options.engine}, up to "
            f"{size_text(options.limit)} of {options.memory} memory for a check"
            + ("" if options.once else "; Ctrl-C ends it")
        )

    def begun(self, host: str, engine: EngineName) -> None:
        """A check begins."""
        self._say(f"{host}: check begins, engine {engine}")

    def ended(self, outcome: Outcome) -> None:
        """A check has ended."""
        if outcome.failure is not None:
            _print_failure(self._console, outcome.failure)
        self._say(f"{outcome.host}: check {'failed' if outcome.failure else 'passed'}")

    def broken(self, failure: Failure) -> None:
        """It cannot go on."""
        _print_failure(self._console, failure)
        self._console.print(Text("FAILED", "bold red"))

    def verdict(self, passed: int, failed: int) -> None:
        """It has been ended."""
        if not passed + failed:
            self._say("no check was made")
        elif failed:
            self._console.print(Text(f"FAILED: {failed} of {passed + failed}", "bold red"))
        else:
            self._console.print(Text("PASSED", "bold green"))

    def _say(self, text: str) -> None:
        # Not with `print`, which writes its line again if Ctrl-C comes in the middle of it.
        self._console.file.write(f"{text}\n")
        self._console.file.flush()  # into a pipe, too: whoever started it waits for the port
