"""What a check found out, typed, for the table and for JSON."""

from __future__ import annotations

from statistics import median

from msgspec import Struct, field

from rd2h.cli.check.failures import Failure
from rd2h.cli.check.options import EngineName, MemoryName, Pattern

__all__ = ["CheckResult", "ReadFigures", "StepDone"]


class StepDone(Struct, frozen=True):
    """A step that went well, and what it showed."""

    step: str
    detail: str


class ReadFigures(Struct, frozen=True):
    """One size in one pattern, of which every round was right.

    Attributes:
        size: Bytes that a read moves.
        pattern: How its blocks lie.
        segments: Pieces of memory in one read.
        seconds: Time of each round.
    """

    size: int
    pattern: Pattern
    segments: int
    seconds: list[float]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of a usual round."""
        return median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Of a usual round."""
        return self.size / self.median if self.median else 0.0


class CheckResult(Struct):
    """A whole check, as Decode saw it; filled while it goes on.

    Attributes:
        prefill: Where Prefill is.
        memory: Where Decode's memory is.
        block: Bytes of one block.
        engine: What both ends agreed on.
        steps: What went well, in order.
        reads: Kinds of read that went well, in order.
        failure: What did not.
    """

    prefill: str
    memory: MemoryName
    block: int
    engine: EngineName = EngineName.AUTO
    steps: list[StepDone] = field(default_factory=list)
    reads: list[ReadFigures] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether everything was right, and there was something."""
        return self.failure is None and bool(self.reads)
