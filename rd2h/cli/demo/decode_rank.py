"""One Decode rank: receives requests into its memory, and checks that memory at the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from rd2h.cli.demo.memory import decode_memory
from rd2h.cli.demo.messages import (
    Abort,
    AtFault,
    Begin,
    Broken,
    DecodeProgress,
    DecodeStats,
    Ended,
    Ready,
    Reclaim,
    Stop,
    Verdict,
    Verified,
    Verify,
)
from rd2h.cli.demo.options import DemoOptions, Fault, Sabotage
from rd2h.cli.demo.plan import Plan
from rd2h.cli.demo.rank import Control, threads_left
from rd2h.cli.demo.reader import WatchedReader
from rd2h.cli.demo.verify import Verifier
from rd2h.decode import (
    Outcome,
    Receiver,
    ReceiverBrokenError,
    ReceiverClosedError,
    ReceiverOptions,
)
from rd2h.engines import create_engine
from rd2h.reads import PullScope, RequestDestination

__all__ = ["DecodeRank"]

_TEMPTATION = 0.5
"""Seconds for which a read stays in flight after its requests were aborted."""

_VERDICTS = {
    Outcome.DONE: Verdict.DONE,
    Outcome.FAILED: Verdict.FAILED,
    Outcome.ABORTED: Verdict.ABORTED,
}


class DecodeRank:
    """The body of a Decode process.

    Args:
        plan: The run.
        engine: The Decode engine.
        rank: This rank in it.
        memory_fd: The engine's main pool.
        control: The parent.
    """

    def __init__(
        self, plan: Plan, engine: int, rank: int, memory_fd: int, control: Control
    ) -> None:
        options = plan.options
        self._plan = plan
        self._engine_index = engine
        self._rank = rank
        self._control = control
        self._aborts_taken = threading.Event()
        self._reclaimed = threading.Event()
        memory = decode_memory(plan, engine, memory_fd)
        self._verifier = Verifier(plan, engine, rank, memory)
        self._verifier.clear()
        self._engine = create_engine(options.engine, timeout=options.timeout / 4)
        self._engine.register(memory.regions)
        first = engine == 0 and rank == 0
        reader = WatchedReader(
            self._engine,
            plan.expected_bytes(engine, rank),
            lambda done: control.send(DecodeProgress(done)),
            self._halfway(),
            plan.slow_read_seconds if first and options.fault is Fault.SLOW_DECODE else 0.0,
        )
        self._receiver = Receiver(
            "tcp://127.0.0.1:0",
            memory.layouts,
            PullScope(rank, options.decode_tp, main_shared=True),
            reader,
            _receiver_options(options),
        )
        self._ends = threading.Thread(target=self._tell_ends, name="rd2h-demo-ends", daemon=True)
        self._ends.start()

    def run(self) -> list[str]:
        """Do what the parent says until it says stop; as `RankBody`."""
        self._control.send(Ready(self._receiver.endpoint))
        while True:
            match self._control.wait("what comes next"):
                case Begin():
                    self._register()
                case Abort(ext_ids):
                    for ext_id in ext_ids:
                        self._receiver.abort(ext_id)
                    self._aborts_taken.set()
                case Reclaim(request):
                    self._verifier.reclaim(request)
                    self._reclaimed.set()
                case Verify(done):
                    self._verify(done)
                case Stop():
                    return self._close()
                case message:
                    raise AssertionError(message)

    def _register(self) -> None:
        """Stand in for Decode's scheduler. Prefill may be faster; its batches wait then."""
        table = self._plan.decode[self._engine_index]
        for request in self._plan.requests_of(self._engine_index):
            main, indexer = table.main[request.index], table.indexer[request.index]
            has_indexer = self._plan.shape.indexed_layers > 0
            self._receiver.register(
                RequestDestination(
                    request.ext_id, main.tolist(), indexer.tolist() if has_indexer else []
                )
            )

    def _tell_ends(self) -> None:
        """Body of the thread that reports requests."""
        try:
            while True:
                for end in self._receiver.wait_finished(self._plan.options.timeout):
                    self._control.send(Ended(end.ext_id, _VERDICTS[end.outcome], end.reason))
        except ReceiverClosedError:
            return
        except ReceiverBrokenError as error:
            self._control.send(Broken(str(error)))

    def _verify(self, done: list[int]) -> None:
        if self._plan.options.sabotage is Sabotage.GUARD and self._rank == 0:
            self._verifier.spoil()
        found = self._verifier.check(done)
        stats = self._receiver.stats
        self._control.send(
            Verified(
                found.blocks,
                found.bytes,
                found.guards,
                found.wrong,
                found.examples,
                DecodeStats(
                    stats.batches,
                    stats.bytes,
                    stats.segments_before,
                    stats.segments,
                    stats.read_seconds,
                ),
            )
        )

    def _close(self) -> list[str]:
        untold = self._receiver.take_finished()
        # Connections and the ids of ended requests are kept on purpose.
        kept = {
            kind: count
            for kind, count in self._receiver.sizes().items()
            if count and kind not in ("peers", "ended")
        }
        if self._plan.options.sabotage is not Sabotage.LEFTOVER:
            self._receiver.close()
            self._engine.close()
            self._ends.join(self._plan.options.timeout)
        return [
            *(f"request {end.ext_id}, untold" for end in untold),
            *(f"{count} {kind} in the receiver" for kind, count in kept.items()),
            *threads_left(),
        ]

    def _halfway(self) -> Callable[[], None] | None:
        """What is to happen in the middle of this rank's reads."""
        match self._plan.options.fault:
            case Fault.KILL_DECODE if (self._engine_index, self._rank) == (1, 0):
                return lambda: os.kill(os.getpid(), signal.SIGKILL)
            case Fault.ABORT:
                return self._hold_for_aborts
            case _:
                return None

    def _hold_for_aborts(self) -> None:
        """Keep a read in flight until this rank has taken the aborts, whatever the timing."""
        self._control.send(AtFault())
        timeout = self._plan.options.timeout / 4
        if not self._aborts_taken.wait(timeout):
            raise TimeoutError(f"waited {timeout:g} s for the aborts")
        # The requests must not be reported while this read is in flight. If they are, their
        # blocks are reclaimed within this time, and what the read writes then will be found.
        self._reclaimed.wait(_TEMPTATION)


def _receiver_options(options: DemoOptions) -> ReceiverOptions:
    """Every wait ends before the parent's own does."""
    return ReceiverOptions(park_timeout=options.timeout / 4, idle_timeout=options.timeout / 2)
