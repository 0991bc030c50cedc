"""What a run found out: figures, checks, and whether it passed. Typed, and written as JSON."""

from __future__ import annotations

from msgspec import Struct, field

from rd2h.cli.demo.messages import Verdict
from rd2h.cli.demo.options import DemoOptions

__all__ = ["Check", "DecodeResult", "PrefillResult", "RequestResult", "RunResult", "Totals"]


class Check(Struct, frozen=True):
    """One thing that must hold.

    Attributes:
        name: What.
        ok: Whether it does.
        detail: How much was checked, or what is wrong.
    """

    name: str
    ok: bool
    detail: str


class RequestResult(Struct, frozen=True):
    """How a request ended (None if it did not), and how it had to."""

    ext_id: str
    verdict: Verdict | None
    expected: Verdict
    reason: str


class PrefillResult(Struct, frozen=True):
    """One Prefill rank that reached the end; times in seconds."""

    name: str
    layers: int
    batches: int
    failures: int
    gate_wait: float
    seconds: float
    peak_bytes: int


class DecodeResult(Struct, frozen=True):
    """One Decode rank that reached the end; times in seconds, over all its read threads."""

    name: str
    batches: int
    bytes: int
    expected_bytes: int
    reads_before_merging: int
    reads: int
    read_seconds: float
    peak_bytes: int


class Totals(Struct, frozen=True):
    """What a run comes to.

    Attributes:
        bytes: Bytes that Decode has read.
        bytes_per_second: Of the transfer, Prefill's computing included.
        read_bytes_per_second: While a read thread reads, on average.
        layers: Layers that a Prefill rank has computed, over all steps.
        layers_per_second: Of the transfer.
        gate_wait_mean: Seconds that a Prefill rank waited at gates, on average.
        gate_wait_max: And at most.
        reads_before_merging: Blocks, tensor by tensor.
        reads: Reads after neighbours were merged.
    """

    bytes: int
    bytes_per_second: float
    read_bytes_per_second: float
    layers: int
    layers_per_second: float
    gate_wait_mean: float
    gate_wait_max: float
    reads_before_merging: int
    reads: int


class RunResult(Struct, frozen=True):
    """A whole run.

    Attributes:
        options: What was asked for.
        start_seconds: Until every process was ready.
        transfer_seconds: From the word go until every request had ended on every rank.
        verify_seconds: For checking all memory.
        notice_seconds: From a kill until Decode had reported the last request that it cost.
        requests: Every request.
        prefill: Prefill ranks that reached the end.
        decode: Decode ranks that reached the end.
        checks: What had to hold.
        error: Why the run could not go on; empty if it did.
    """

    options: DemoOptions
    start_seconds: float = 0.0
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    notice_seconds: float = 0.0
    requests: list[RequestResult] = field(default_factory=list)
    prefill: list[PrefillResult] = field(default_factory=list)
    decode: list[DecodeResult] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return not self.error and bool(self.checks) and all(check.ok for check in self.checks)

    def totals(self) -> Totals:
        """Add everything up; zeros if the run did not get that far."""
        size = sum(rank.bytes for rank in self.decode)
        layers = max((rank.layers for rank in self.prefill), default=0)
        waits = [rank.gate_wait for rank in self.prefill]
        return Totals(
            size,
            _ratio(size, self.transfer_seconds),
            _ratio(size, sum(rank.read_seconds for rank in self.decode)),
            layers,
            _ratio(layers, self.transfer_seconds),
            _ratio(sum(waits), len(waits)),
            max(waits, default=0.0),
            sum(rank.reads_before_merging for rank in self.decode),
            sum(rank.reads for rank in self.decode),
        )


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else 0.0
