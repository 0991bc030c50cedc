"""How far a run is: bars on a terminal, a few lines elsewhere, nothing for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

__all__ = ["Bar", "Bars", "Lines", "LogLimit", "Progress", "Silent", "size_text"]

_QUARTER = 25
_MOST_LOG_LINES = 4


def size_text(done: int, total: int) -> str:
    """``done`` of ``total`` bytes, in the unit that suits the total."""
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1e9, "GB"), (1e6, "MB")) if total >= factor),
        (1e3, "kB"),
    )
    return f"{done / factor:.2f} of {total / factor:.2f} {unit}"


@dataclass(frozen=True)
class Bar:
    """What one rank has to do.

    Attributes:
        name: The rank.
        total: How much.
        unit: Of what.
    """

    name: str
    total: int
    unit: Literal["layers", "bytes"]

    def text(self, done: int) -> str:
        """How much is done, for people."""
        if self.unit == "bytes":
            return size_text(done, self.total)
        return f"{done} of {self.total} layers"


class Progress(Protocol):
    """Where a run shows how far it is. For one thread."""

    def start(self, bars: Sequence[Bar]) -> None:
        """The transfer begins."""

    def update(self, name: str, done: int) -> None:
        """A rank has done so much in all."""

    def phase(self, text: str) -> None:
        """Something else than the transfer begins."""

    def log(self, text: str) -> None:
        """Something worth a line has happened."""

    def close(self) -> None:
        """Nothing is shown any more. Idempotent."""


class LogLimit:
    """Shows the first few lines that ranks log: a fault makes many that say the same.

    Args:
        progress: Where to.
        everything: Show all of them.
    """

    def __init__(self, progress: Progress, everything: bool) -> None:
        self._progress = progress
        self._everything = everything
        self._count = 0

    def __call__(self, text: str) -> None:
        """Show a line, or count it."""
        self._count += 1
        if self._everything or self._count <= _MOST_LOG_LINES:
            self._progress.log(text)

    def close(self) -> None:
        """Say how many there were besides those shown."""
        hidden = self._count - _MOST_LOG_LINES
        if hidden > 0 and not self._everything:
            self._progress.log(f"{hidden} more lines were logged; --verbose shows them")


class Silent:
    """Shows nothing: standard output belongs to a program."""

    def start(self, bars: Sequence[Bar]) -> None:
        """As `Progress`."""

    def update(self, name: str, done: int) -> None:
        """As `Progress`."""

    def phase(self, text: str) -> None:
        """As `Progress`."""

    def log(self, text: str) -> None:
        """As `Progress`."""

    def close(self) -> None:
        """As `Progress`."""


class Lines:
    """A line for each quarter that Decode has read, for a file or a pipe.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done: dict[str, int] = {}
        self._total = 0
        self._next = _QUARTER

    def start(self, bars: Sequence[Bar]) -> None:
        """As `Progress`."""
        self._done = {bar.name: 0 for bar in bars if bar.unit == "bytes"}
        self._total = sum(bar.total for bar in bars if bar.unit == "bytes")

    def update(self, name: str, done: int) -> None:
        """As `Progress`."""
        if name not in self._done:
            return
        self._done[name] = done
        read = sum(self._done.values())
        percent = 100 * read // max(1, self._total)
        if percent >= self._next:
            self._next = percent - percent % _QUARTER + _QUARTER
            self._say(f"{percent:3} % read, {size_text(read, self._total)}")

    def phase(self, text: str) -> None:
        """As `Progress`."""
        self._say(text)

    def log(self, text: str) -> None:
        """As `Progress`."""
        self._say(text)

    def close(self) -> None:
        """As `Progress`."""

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars:
    """A live bar for each rank.

    Args:
        console: A terminal.
    """

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, tuple[Bar, TaskID]] = {}

    def start(self, bars: Sequence[Bar]) -> None:
        """As `Progress`."""
        for bar in bars:
            task = self._bars.add_task(bar.name, total=bar.total, text=bar.text(0))
            self._tasks[bar.name] = bar, task
        self._bars.start()

    def update(self, name: str, done: int) -> None:
        """As `Progress`."""
        bar, task = self._tasks[name]
        self._bars.update(task, completed=done, text=bar.text(done))

    def phase(self, text: str) -> None:
        """As `Progress`."""
        self.log(text)

    def log(self, text: str) -> None:
        """As `Progress`."""
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """As `Progress`."""
        self._bars.stop()
