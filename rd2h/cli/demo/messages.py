"""What the demo's processes tell one another, as typed messages.

The hand-off itself does not go this way: it uses rd2h's own sockets.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from rd2h.cli.demo.options import DemoOptions

__all__ = [
    "Abort",
    "AtFault",
    "Begin",
    "Broken",
    "Closed",
    "DecodeProgress",
    "DecodeStats",
    "Ended",
    "FromRank",
    "LogLine",
    "PrefillDone",
    "PrefillProgress",
    "Ready",
    "Reclaim",
    "Role",
    "Start",
    "Stop",
    "ToRank",
    "Verdict",
    "Verified",
    "Verify",
]


class Role(StrEnum):
    """What a process is."""

    PREFILL = "prefill"
    DECODE = "decode"


class Verdict(StrEnum):
    """How a request ended, over all ranks of its Decode engine."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"  # with its Decode engine


# ------------------------------------------------------------------------------ parent to rank


class Start(Struct, frozen=True, tag=True):
    """The first message: who you are. ``engine`` numbers Decode engines."""

    role: Role
    engine: int
    rank: int
    options: DemoOptions
    memory_fd: int | None


class Begin(Struct, frozen=True, tag=True):
    """Go. For Prefill: the endpoint of this rank's Decode rank, for each Decode engine."""

    endpoints: list[str]


class Abort(Struct, frozen=True, tag=True):
    """Decode: the clients of these requests have left."""

    ext_ids: list[str]


class Reclaim(Struct, frozen=True, tag=True):
    """Decode: all ranks have reported the request, not done; its blocks are somebody else's."""

    request: int


class Verify(Struct, frozen=True, tag=True):
    """Decode: check all memory. Only these requests, by index, have contents."""

    done: list[int]


class Stop(Struct, frozen=True, tag=True):
    """Close everything and end."""


ToRank: TypeAlias = Start | Begin | Abort | Reclaim | Verify | Stop


# ------------------------------------------------------------------------------ rank to parent


class Ready(Struct, frozen=True, tag=True):
    """Set up. For Decode: where it listens."""

    endpoint: str


class DecodeProgress(Struct, frozen=True, tag=True):
    """Bytes read so far."""

    bytes: int


class PrefillProgress(Struct, frozen=True, tag=True):
    """Layers computed so far, over all steps."""

    layers: int


class AtFault(Struct, frozen=True, tag=True):
    """The rank is in the middle of the transfer, where the fault is to happen, and waits."""


class Ended(Struct, frozen=True, tag=True):
    """A Decode rank reports a request."""

    ext_id: str
    verdict: Verdict
    reason: str


class PrefillDone(Struct, frozen=True, tag=True):
    """A Prefill rank has computed everything, and all of it is answered.

    Attributes:
        layers: Layers submitted.
        batches: Batches announced.
        failures: Batches that were lost.
        gate_wait: Seconds waited at gates before computing a layer.
        seconds: From the first layer until everything was answered.
    """

    layers: int
    batches: int
    failures: int
    gate_wait: float
    seconds: float


class DecodeStats(Struct, frozen=True):
    """The receiver's counters; as in `ReceiverStats`."""

    batches: int
    bytes: int
    segments_before: int
    segments: int
    read_seconds: float


class Verified(Struct, frozen=True, tag=True):
    """What a Decode rank found in its memory.

    Attributes:
        blocks: Blocks with contents that were checked, tensor by tensor.
        bytes: Their bytes.
        guards: Blocks that must be untouched, tensor by tensor.
        wrong: How many of either are wrong.
        examples: The first few of them, in words.
        stats: The receiver's counters.
    """

    blocks: int
    bytes: int
    guards: int
    wrong: int
    examples: list[str]
    stats: DecodeStats


class Closed(Struct, frozen=True, tag=True):
    """Everything is closed; what was left over all the same, and the peak of resident memory."""

    leftovers: list[str]
    peak_bytes: int


class Broken(Struct, frozen=True, tag=True):
    """The rank cannot go on."""

    reason: str


class LogLine(Struct, frozen=True, tag=True):
    """A warning or an error that rd2h has logged."""

    text: str


FromRank: TypeAlias = (
    Ready
    | DecodeProgress
    | PrefillProgress
    | AtFault
    | Ended
    | PrefillDone
    | Verified
    | Closed
    | Broken
    | LogLine
)
