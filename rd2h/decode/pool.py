"""A few threads that read memory, beside the socket thread.

The pool knows nothing of peers or of their order: the machine hands it at most one batch of a
peer at a time. A worker plans a batch, reads it, and says how that went; nothing that a peer
sent, and nothing that an engine raises, ends a worker. Workers also tell the engine which peers
to forget, since it may take its time over that.

Once the pool is told to stop, no read begins: what still waits for a worker fails.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.decode.machine import ForgetSession, Read
from rd2h.reads import PullScope, plan_reads
from rd2h.sockets import LimitedLog
from rd2h.texts import cut, short, text_of

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
        """Drop what is kept about a peer that is gone.

        Called from one of the threads that read. No read of this session goes on meanwhile.
        """


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


@dataclass(frozen=True)
class _Forget:
    session: str
    over: threading.Event


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
        self._jobs: SimpleQueue[Read | _Forget | None] = SimpleQueue()
        # By session; set by the socket thread, and dropped by the worker that is done with it.
        self._forgetting: dict[str, threading.Event] = {}
        self._stopping = False
        self._log = LimitedLog(logger)
        self._log_lock = threading.Lock()  # a LimitedLog is for one thread
        self._results: deque[ReadResult] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"rd2h-read-{index}", daemon=True)
            for index in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Read | ForgetSession) -> None:
        """Have a batch read, or a peer forgotten, by whichever worker is free first."""
        match job:
            case Read():
                self._jobs.put(job)
            case ForgetSession(session):
                over = self._forgetting[session] = threading.Event()
                self._jobs.put(_Forget(session, over))

    def results(self) -> Iterator[ReadResult]:
        """Yield what has ended since the last call. The socket thread's."""
        while self._results:
            yield self._results.popleft()

    def stop(self) -> None:
        """Begin no more reads; those that wait fail at once. Any thread may call it."""
        self._stopping = True
        for over in list(self._forgetting.values()):
            over.set()

    def close(self, deadline: float) -> list[str]:
        """End the workers once their reads in flight are over.

        Args:
            deadline: Until when to wait for them, on ``time.monotonic``.

        Returns:
            The names of those that are still reading then.
        """
        self.stop()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Forget):
                self._forget(job)
                continue
            # A peer that came back at once has the session that is being forgotten.
            if (over := self._forgetting.get(job.session)) is not None:
                over.wait()
            if self._stopping:
                result = ReadResult(job.batch_id, "Decode is shutting down", PullStats())
            else:
                result = self._carry_out(job)
            self._results.append(result)
            self._wake()

    def _forget(self, job: _Forget) -> None:
        try:
            if not self._stopping:
                self._reader.forget(job.session)
        except BaseException:
            # It is a courtesy to the engine: a peer that cannot be forgotten is only kept.
            self._warn("the transfer engine could not forget a peer", traced=True)
        finally:
            job.over.set()
            if self._forgetting.get(job.session) is job.over:
                self._forgetting.pop(job.session, None)

    def _warn(self, text: str, *, traced: bool) -> None:
        """Log what has just been caught, with where it came from if that says anything."""
        trace = f"\n{cut(traceback.format_exc(), 4000)}" if traced else ""
        with self._log_lock:
            self._log.warning(time.monotonic(), "%s%s", cut(text), trace)

    def _carry_out(self, read: Read) -> ReadResult:
        start = time.perf_counter()
        stats = PullStats()
        try:
            plan = plan_reads(read.batch, read.remote, read.local, read.destinations, self._scope)
            stats = PullStats(plan.total_bytes, plan.segments_before, plan.segments)
            if plan.segments:
                self._reader.read(read.session, plan.local_addrs, plan.remote_addrs, plan.lengths)
        except BaseException as error:
            # The planner's texts name the layer, and the machine adds the requests.
            reason = text_of(error)
            planned = not isinstance(error, ValueError)
            if planned:
                reason = f"layer {short(read.batch.layer_name)}: {reason}"
            self._warn(f"a read failed: {reason}", traced=planned)
            return ReadResult(read.batch_id, reason, stats)
        seconds = time.perf_counter() - start
        return ReadResult(
            read.batch_id,
            None,
            PullStats(stats.bytes, stats.segments_before, stats.segments, seconds),
        )
