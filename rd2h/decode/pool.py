"""A few threads that read memory, beside the socket thread.

The pool knows nothing of peers or of their order: the machine hands it at most one batch of a
peer at a time. A worker plans a batch, reads it, and says how that went; nothing that a peer
sent, and nothing that an engine raises, ends a worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.decode.machine import Read
from rd2h.reads import PullScope, plan_reads

__all__ = ["PullStats", "ReadPool", "ReadResult", "Reader"]

logger = logging.getLogger(__name__)

Addresses: TypeAlias = NDArray[np.uint64]


class Reader(Protocol):
    """What the receiver needs of a transfer engine; every engine of rd2h.engines is one."""

    def read(
        self, session: str, local_addrs: Addresses, remote_addrs: Addresses, lengths: Addresses, /
    ) -> None:
        """Read segments of a peer's memory; return when every byte is there, raise otherwise.

        Called from several threads at once, for different peers.
        """

    def forget(self, session: str, /) -> None:
        """Drop what is kept about a peer that is gone."""


@dataclass(frozen=True)
class PullStats:
    """What one batch was: counted after planning, before reading.

    Attributes:
        bytes: Bytes that fell to this rank.
        segments_before: Reads before neighbours were merged.
        segments: Reads after.
        seconds: Time in planning and reading.
    """

    bytes: int = 0
    segments_before: int = 0
    segments: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ReadResult:
    """How a read went; ``error`` is None if every byte is there."""

    batch_id: int
    error: str | None
    stats: PullStats


class ReadPool:
    """``size`` threads that carry out reads.

    Args:
        size: How many threads, so how many peers are read from at a time.
        reader: The transfer engine.
        scope: Which blocks fall to this rank.
        wake: Called, on a worker, whenever there is a new result.
    """

    def __init__(
        self, size: int, reader: Reader, scope: PullScope, wake: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._scope = scope
        self._wake = wake
        self._jobs: SimpleQueue[Read | None] = SimpleQueue()
        self._results: deque[ReadResult] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"rd2h-read-{index}", daemon=True)
            for index in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read) -> None:
        """Have a batch read by whichever worker is free first."""
        self._jobs.put(read)

    def results(self) -> Iterator[ReadResult]:
        """Yield what has ended since the last call. The socket thread's."""
        while self._results:
            yield self._results.popleft()

    def close(self, deadline: float) -> list[str]:
        """End the workers once their reads in flight are over.

        Args:
            deadline: Until when to wait for them, on ``time.monotonic``.

        Returns:
            The names of those that are still reading then.
        """
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        while (read := self._jobs.get()) is not None:
            self._results.append(self._carry_out(read))
            self._wake()

    def _carry_out(self, read: Read) -> ReadResult:
        start = time.perf_counter()
        stats = PullStats()
        try:
            plan = plan_reads(read.batch, read.remote, read.local, read.destinations, self._scope)
            stats = PullStats(plan.total_bytes, plan.segments_before, plan.segments)
            if plan.segments:
                self._reader.read(read.session, plan.local_addrs, plan.remote_addrs, plan.lengths)
        except ValueError as error:
            # The batch does not fit: the planner's text names layer, request and values.
            return ReadResult(read.batch_id, str(error), stats)
        except Exception as error:
            requests = ", ".join(request.ext_id for request in read.batch.read_reqs)
            reason = f"layer {read.batch.layer_name}, requests {requests}: {error}"
            logger.warning("a read failed: %s", reason, exc_info=True)
            return ReadResult(read.batch_id, reason, stats)
        seconds = time.perf_counter() - start
        return ReadResult(
            read.batch_id,
            None,
            PullStats(stats.bytes, stats.segments_before, stats.segments, seconds),
        )
