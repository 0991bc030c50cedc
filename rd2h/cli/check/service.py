"""Prefill's end without its socket: what it answers, and what it keeps for the check it serves.

One check at a time: an engine takes no further memory while it is read. Others are told to ask
again. Not thread-safe; the socket's thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import rd2h
from rd2h.cli.check.content import PIECE, content, digest
from rd2h.cli.check.engine import Disagreement, StartEngine, agree
from rd2h.cli.check.failures import CheckFailed, Failure, Side, Step, clean
from rd2h.cli.check.kv_port import connect_back
from rd2h.cli.check.memory import Allocate, Memory
from rd2h.cli.check.messages import (
    Busy,
    ConnectBack,
    ConnectedBack,
    ControlError,
    Failed,
    FromDecode,
    FromPrefill,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    Run,
    Welcome,
)
from rd2h.cli.check.options import MAX_SEGMENTS, EngineName, PrefillOptions, size_text
from rd2h.cli.check.patterns import plan_run, pool_bytes
from rd2h.cli.check.steps import Steps
from rd2h.engines import TransferEngine

__all__ = ["Outcome", "PrefillService"]


@dataclass(frozen=True)
class Outcome:
    """How a check ended.

    Attributes:
        host: Decode's address, as it says itself.
        failure: Why it failed; None if it passed.
    """

    host: str
    failure: Failure | None


@dataclass
class _Check:
    """The check that is being served."""

    sender: bytes
    host: str
    engine_name: EngineName
    engine: TransferEngine | None = None
    memory: Memory | None = None


@dataclass
class PrefillService:
    """Serves checks, one after the other.

    Attributes:
        options: What it may do.
        steps: How steps are run.
        start_engine: Makes an engine.
        allocate: Makes the source memory.
        machine: This machine, as `Hello` names Decode's.
        begun: Called when a check begins, with Decode's address and the engine.
        ended: Called when one has ended.
        passed: How many have passed.
        failed: How many have not.
    """

    options: PrefillOptions
    steps: Steps
    start_engine: StartEngine
    allocate: Allocate
    machine: str
    begun: Callable[[str, EngineName], None]
    ended: Callable[[Outcome], None]
    passed: int = 0
    failed: int = 0
    _check: _Check | None = field(default=None, init=False)

    @property
    def sender(self) -> bytes | None:
        """Who is being served."""
        return self._check.sender if self._check else None

    def answer(self, sender: bytes, message: FromDecode) -> FromPrefill | None:
        """Do what a Decode asks for.

        Args:
            sender: Its identity on the socket.
            message: What it asks.

        Returns:
            The answer; None for a `Goodbye`.

        Raises:
            ControlError: it may not ask that now; nothing has happened.
        """
        check = self._check
        if isinstance(message, Hello):
            return self._welcome(sender, message)
        if check is None or check.sender != sender:
            if isinstance(message, Goodbye):
                return None  # of a check that has failed at this end
            raise ControlError(f"{type(message).__name__} without a check")
        try:
            match message:
                case ConnectBack(host=host, port=port, token=token, timeout=timeout):
                    with self.steps.step(Step.CONNECT_BACK):
                        connect_back(host, port, token, timeout)
                    return ConnectedBack()
                case Prepare(seed=seed, runs=runs):
                    if check.engine is not None:
                        raise ControlError("Prepare for the second time")
                    return self._prepare(check, seed, runs)
                case Goodbye(failure=failure):
                    self._end(failure)
                    return None
        except CheckFailed as error:
            self._end(error.failure)
            return Failed(failure=error.failure)

    def lost(self) -> None:
        """The Decode that is being served has gone."""
        if self._check is not None:
            self._end(self.steps.failure(Step.RESULT, "decode left before the check was over"))

    def close(self) -> None:
        """End the check that is being served, if there is one, as failed."""
        if self._check is not None:
            self._end(self.steps.failure(Step.RESULT, "prefill was ended during the check"))

    def _welcome(self, sender: bytes, hello: Hello) -> FromPrefill:
        if self._check is not None:
            return Busy(host=self._check.host)
        host = clean(hello.host)
        try:
            same_machine = bool(self.machine) and hello.machine == self.machine
            name = agree(hello.engine, self.options.engine, same_machine=same_machine)
        except Disagreement as error:
            failure = Failure(
                Side.PREFILL, Step.HANDSHAKE, str(error), ["engine: --engine at both ends"]
            )
            self._count(Outcome(host, failure))
            return Failed(failure=failure)
        self._check = _Check(sender, host, name)
        self.steps.engine = name
        self.begun(host, name)
        return Welcome(release=rd2h.__version__, engine=name)

    def _prepare(self, check: _Check, seed: int, runs: list[Run]) -> Prepared:
        steps, size = self.steps, max(map(pool_bytes, runs))
        with steps.step(Step.ALLOCATE):
            self._check_limits(size, runs)
        with steps.step(Step.ENGINE_START):
            engine = check.engine = self.start_engine(check.engine_name, self.options.bind)
        with steps.step(Step.ALLOCATE):
            memory = check.memory = self.allocate(size)
            for offset in range(0, size, PIECE):
                memory.write(offset, content(seed, offset, min(PIECE, size - offset)))
            found = memory.fetch(size)
            plans = [plan_run(run, seed) for run in runs]
            digests = [digest(found, plan.source, plan.lengths) for plan in plans]
        with steps.step(Step.REGISTER):
            engine.register([memory.region])
            session = engine.session
        return Prepared(session=session, address=memory.region.address, digests=digests)

    def _check_limits(self, size: int, runs: list[Run]) -> None:
        if size > self.options.limit:
            raise MemoryError(
                f"decode asks for {size_text(size)} of memory, and --limit is "
                f"{size_text(self.options.limit)}: a read of random blocks takes twice its size"
            )
        if any(run.size > run.block * MAX_SEGMENTS for run in runs):
            raise MemoryError(f"decode asks for a read of more than {MAX_SEGMENTS:,} blocks")

    def _end(self, failure: Failure | None) -> None:
        """Give back what the check has, then say how it ended."""
        check, self._check = self._check, None
        if check is None:
            return
        if check.engine is not None:
            try:
                with self.steps.step(Step.CLOSE):
                    check.engine.close()
            except CheckFailed as error:
                failure = failure or error.failure
            else:
                if check.memory is not None:
                    check.memory.release()
        self.steps.engine = EngineName.AUTO
        self._count(Outcome(check.host, failure))

    def _count(self, outcome: Outcome) -> None:
        if outcome.failure is None:
            self.passed += 1
        else:
            self.failed += 1
        self.ended(outcome)
