"""One run, from the parent's side: start, transfer, check, end.

Every wait has a deadline and says what it waits for. Nothing here polls: the parent sleeps
until a process says something.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from rd2h.cli.demo.checks import run_checks
from rd2h.cli.demo.ends import EndBook
from rd2h.cli.demo.fleet import Deadline, DemoError, Fleet, Gone, Rank, mappings_of
from rd2h.cli.demo.memory import create_segment, main_segment_bytes
from rd2h.cli.demo.messages import (
    Abort,
    AtFault,
    Begin,
    Closed,
    DecodeProgress,
    Ended,
    PrefillDone,
    PrefillProgress,
    Ready,
    Reclaim,
    Role,
    Start,
    Stop,
    Verdict,
    Verified,
    Verify,
)
from rd2h.cli.demo.plan import Plan
from rd2h.cli.demo.progress import Bar, LogLimit, Progress
from rd2h.cli.demo.result import DecodeResult, PrefillResult, RequestResult, RunResult

__all__ = ["run_demo"]


def run_demo(plan: Plan, progress: Progress, *, verbose: bool = False) -> RunResult:
    """Carry a run out.

    Args:
        plan: The run; its options are checked.
        progress: Where to show how far it is.
        verbose: Show every line that a rank logs.

    Raises:
        DemoError: it cannot go on. Every process has ended then, also at any other exception.
    """
    before = _open_descriptors()
    log = LogLimit(progress, verbose)
    segments = [
        create_segment(main_segment_bytes(plan, engine)) for engine in range(len(plan.decode))
    ]
    try:
        with Fleet(log) as fleet:
            run = _Run(plan, fleet, progress)
            run.start(segments)
            run.transfer()
            run.verify()
            run.stop()
            run.leftovers += fleet.end()
        for fd in segments:
            run.leftovers += mappings_of(fd)
    finally:
        for fd in segments:
            os.close(fd)
        log.close()
    if (more := _open_descriptors() - before) > 0:
        run.leftovers.append(f"{more} open descriptors")
    return run.result()


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a Path would not be shorter


class _Run:
    """The state of a run; each public method is one of its phases, in order."""

    def __init__(self, plan: Plan, fleet: Fleet, progress: Progress) -> None:
        self._plan = plan
        self._fleet = fleet
        self._progress = progress
        self._timeout = plan.options.timeout
        self._decode: list[Rank] = []
        self._prefill: list[Rank] = []
        self._endpoints: dict[tuple[int, int], str] = {}  # by Decode engine and rank
        self._ends = EndBook(plan)
        self._done: dict[Rank, PrefillDone] = {}
        self._verified: dict[Rank, Verified] = {}
        self._closed: dict[Rank, Closed] = {}
        self._deaths: dict[Rank, int] = {}
        self._abort_sent = False
        self._killed_at = self._failed_at = 0.0
        self._start_seconds = self._transfer_seconds = self._verify_seconds = 0.0
        self.leftovers: list[str] = []

    # ----------------------------------------------------------------------------------- phases

    def start(self, segments: list[int]) -> None:
        """Start every process, and wait until all are set up."""
        plan, options, began = self._plan, self._plan.options, time.perf_counter()
        for engine, fd in enumerate(segments):
            for rank in range(options.decode_tp):
                start = Start(Role.DECODE, engine, rank, options, fd)
                self._decode.append(self._fleet.start(plan.decode_name(engine, rank), start))
        for rank in range(options.prefill_tp):
            start = Start(Role.PREFILL, 0, rank, options, None)
            self._prefill.append(self._fleet.start(plan.prefill_name(rank), start))
        everyone = [*self._decode, *self._prefill]
        ready = self._fleet.collect(everyone, Ready, "that it is ready", self._timeout)
        self._endpoints = {(r.engine, r.index): ready[r].endpoint for r in self._decode}
        self._start_seconds = time.perf_counter() - began

    def transfer(self) -> None:
        """Let Prefill compute and Decode read, until both are done with every request."""
        self._progress.start(self._bars())
        began = time.perf_counter()
        for rank in self._decode:
            self._fleet.send(rank, Begin([]))
        for rank in self._prefill:
            fed = self._plan.mapping.decode_rank(rank.index)
            engines = range(len(self._plan.decode))
            self._fleet.send(rank, Begin([self._endpoints[engine, fed] for engine in engines]))
        for rank, event in self._fleet.events(Deadline(self._timeout), self._waited_for):
            match event:
                case DecodeProgress(count) | PrefillProgress(count):
                    self._progress.update(rank.name, count)
                case Ended(_, verdict):
                    self._transfer_seconds = time.perf_counter() - began
                    if verdict is Verdict.FAILED:
                        self._failed_at = time.perf_counter()
                    self._on_ended(rank, event)
                case PrefillDone():
                    self._done[rank] = event
                    self._progress.update(rank.name, event.layers)
                case AtFault():
                    self._on_fault(rank.engine)
                case Gone(status):
                    self._on_gone(rank, status)
                case _:
                    raise DemoError(f"{rank} said {event!r} in the middle of the transfer")
            if not any(self._missing()):
                return

    def verify(self) -> None:
        """Have every Decode rank that lives check its memory."""
        began = time.perf_counter()
        self._progress.phase("checking every byte on Decode")
        ranks = self._living(self._decode)
        for rank in ranks:
            requests = self._plan.requests_of(rank.engine)
            ends = ((request.index, self._ends.end_of(request)) for request in requests)
            done = [index for index, end in ends if end and end.verdict is Verdict.DONE]
            self._fleet.send(rank, Verify(done))
        self._verified = self._fleet.collect(
            ranks, Verified, "what its memory holds", self._timeout
        )
        self._verify_seconds = time.perf_counter() - began

    def stop(self) -> None:
        """Have every process close everything and end by itself."""
        missing = set(self._living([*self._decode, *self._prefill]))
        for rank in missing:
            self._fleet.send(rank, Stop())

        def waited_for() -> str:
            return f"the end of {', '.join(sorted(map(str, missing)))}"

        for rank, event in self._fleet.events(Deadline(self._timeout), waited_for):
            if isinstance(event, Closed):
                self._closed[rank] = event
                self.leftovers += [f"{leftover} of {rank}" for leftover in event.leftovers]
            elif isinstance(event, Gone):
                missing.discard(rank)
                if event.status or rank not in self._closed:
                    self.leftovers.append(f"{rank}, which ended with status {event.status}")
            if not missing:
                return

    def result(self) -> RunResult:
        """Put everything together, and judge it."""
        requests = []
        for request in self._plan.requests:
            end = self._ends.end_of(request)
            requests.append(
                RequestResult(
                    request.ext_id,
                    end.verdict if end else None,
                    request.verdict,
                    end.reason if end else "",
                )
            )
        result = RunResult(
            self._plan.options,
            self._start_seconds,
            self._transfer_seconds,
            self._verify_seconds,
            max(0.0, self._failed_at - self._killed_at) if self._failed_at else 0.0,
            requests,
            [self._prefill_result(rank) for rank in self._prefill if rank in self._done],
            [self._decode_result(rank) for rank in self._decode if rank in self._verified],
        )
        deaths = {rank.name: status for rank, status in self._deaths.items()}
        return run_checks(self._plan, result, list(self._verified.values()), deaths, self.leftovers)

    # ----------------------------------------------------------------------------------- events

    def _on_ended(self, rank: Rank, ended: Ended) -> None:
        """Once every rank has reported a request that is not done, reuse its blocks.

        As a Decode engine would; a read that came after the report would be found there.
        """
        try:
            request = self._ends.record(rank.engine, rank.index, ended)
        except ValueError as error:
            raise DemoError(f"{rank}: {error}") from None
        if request is None:
            return
        end = self._ends.end_of(request)
        if end is not None and end.verdict is not Verdict.DONE:
            for other in self._decode:
                if other.engine == rank.engine:
                    self._fleet.send(other, Reclaim(request.index))

    def _on_fault(self, engine: int) -> None:
        """A rank is in the middle: clients leave. Every rank hears it, as from its scheduler."""
        if self._abort_sent:
            return
        self._abort_sent = True
        leaving = [r.ext_id for r in self._plan.requests if r.verdict is Verdict.ABORTED]
        for rank in self._decode:
            if rank.engine == engine:
                self._fleet.send(rank, Abort(leaving))

    def _on_gone(self, rank: Rank, status: int) -> None:
        """A process has ended. If the fault says so, go on without it."""
        self._deaths[rank] = status
        self._killed_at = time.perf_counter()
        if rank in self._decode and self._ends.is_dead(rank.engine):
            return
        if rank.name not in self._plan.victims:
            raise DemoError(f"{rank} ended with status {status} in the middle of the transfer")
        self._progress.log(f"{rank} was killed")
        if rank in self._decode:
            # An engine that has lost a rank is taken down whole.
            self._ends.engine_died(rank.engine)
            for other in self._living(self._decode):
                if other.engine == rank.engine:
                    other.process.kill()

    # ---------------------------------------------------------------------------------- queries

    def _bars(self) -> list[Bar]:
        plan = self._plan
        layers = len(plan.steps) * plan.options.layers
        return [
            *(Bar(rank.name, layers, "layers") for rank in self._prefill),
            *(
                Bar(rank.name, plan.expected_bytes(rank.engine, rank.index), "bytes")
                for rank in self._decode
            ),
        ]

    def _living(self, ranks: Iterable[Rank]) -> list[Rank]:
        return [rank for rank in ranks if rank in self._fleet.ranks]

    def _missing(self) -> Iterable[str]:
        """What the transfer waits for."""
        yield from self._ends.missing()
        for rank in self._prefill:
            if rank not in self._done and rank not in self._deaths:
                yield f"{rank} to be done"
        for rank in self._decode:
            if self._ends.is_dead(rank.engine) and rank not in self._deaths:
                yield f"{rank} to be gone"
        dead = {rank.name for rank in self._deaths}
        yield from (f"{name} to be killed" for name in self._plan.victims if name not in dead)

    def _waited_for(self) -> str:
        missing = list(self._missing())
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return "; ".join(missing[:4]) + more

    def _prefill_result(self, rank: Rank) -> PrefillResult:
        done = self._done[rank]
        return PrefillResult(
            rank.name,
            done.layers,
            done.batches,
            done.failures,
            done.gate_wait,
            done.seconds,
            self._peak(rank),
        )

    def _decode_result(self, rank: Rank) -> DecodeResult:
        stats = self._verified[rank].stats
        return DecodeResult(
            rank.name,
            stats.batches,
            stats.bytes,
            self._plan.expected_bytes(rank.engine, rank.index),
            stats.segments_before,
            stats.segments,
            stats.read_seconds,
            self._peak(rank),
        )

    def _peak(self, rank: Rank) -> int:
        return self._closed[rank].peak_bytes if rank in self._closed else 0
