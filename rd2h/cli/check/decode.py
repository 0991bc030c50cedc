"""Decode's end: connects, agrees, pulls, compares. One thread, step by step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np

import rd2h
from rd2h.cli.check.content import CANARY, digest
from rd2h.cli.check.control import Control, reach
from rd2h.cli.check.engine import StartEngine, machine_name
from rd2h.cli.check.failures import CheckFailed, Step
from rd2h.cli.check.kv_port import KvPort
from rd2h.cli.check.memory import Allocate, Memory
from rd2h.cli.check.messages import (
    TOKEN_BYTES,
    Busy,
    ConnectBack,
    ConnectedBack,
    ControlError,
    FromPrefill,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    Run,
    Welcome,
)
from rd2h.cli.check.options import DecodeOptions, EngineName, size_text
from rd2h.cli.check.patterns import Plan, plan_run, pool_bytes
from rd2h.cli.check.result import CheckResult, ReadFigures, StepDone
from rd2h.cli.check.steps import Steps
from rd2h.cli.check.verify import find_strays, find_wrong
from rd2h.engines import TransferEngine, UInt64Array

__all__ = ["DecodeCheck", "Tell"]

Tell: TypeAlias = Callable[[StepDone], None]

_BUSY_PAUSE = 0.2
_CONNECT_BACK = 5.0
"""Seconds for a TCP connection: enough for its first packet to be sent three times."""
_PREPARE_TIMEOUTS = 2
_CAME = 1.0
"""Seconds in which a connection that Prefill has made must be here."""

T = TypeVar("T", bound=FromPrefill)


class DecodeCheck:
    """One check.

    Args:
        options: What to do.
        steps: How steps are run.
        start_engine: Makes the engine.
        allocate: Makes the destination memory.
        tell: Called with every step that went well.

    Attributes:
        result: What is known so far.
    """

    def __init__(
        self,
        options: DecodeOptions,
        steps: Steps,
        start_engine: StartEngine,
        allocate: Allocate,
        tell: Tell,
    ) -> None:
        self.result = CheckResult(
            f"{options.connect} port {options.port}", options.memory, options.block
        )
        self._options = options
        self._steps = steps
        self._start_engine = start_engine
        self._allocate = allocate
        self._tell = tell
        self._seed = secrets.randbits(63)  # a new one: bytes of an earlier check are wrong
        self._engine: TransferEngine | None = None
        self._memory: Memory | None = None

    def run(self) -> CheckResult:
        """Do it; a failure is in the result, and ends it."""
        options, steps = self._options, self._steps
        try:
            with steps.step(Step.CONNECT, options.timeout + options.wait):
                there, here = reach(
                    options.connect, options.port, timeout=options.timeout, wait=options.wait
                )
        except CheckFailed as error:
            self.result.failure = error.failure
            return self.result
        self._done(Step.CONNECT, f"prefill at {there} port {options.port}, from {here}")
        with Control(there, options.port) as control:
            try:
                self._check(control, options.advertise or here)
            except CheckFailed as error:
                self.result.failure = error.failure
            finally:
                self._close()
            control.part(Goodbye(failure=self.result.failure))
        return self.result

    def _check(self, control: Control, here: str) -> None:
        engine_name = self._greet(control, here)
        self._be_called(control, here)
        runs = [
            Run(size, self._options.block, pattern)
            for size in self._options.sizes
            for pattern in self._options.patterns
        ]
        prepared = self._prepare(control, runs)
        engine, memory = self._set_up(engine_name, here, max(map(pool_bytes, runs)))
        reader = _Reader(engine, memory, prepared)
        self._first_read(reader, plan_run(runs[0], self._seed))
        for run, theirs in zip(runs, prepared.digests, strict=True):
            plan = plan_run(run, self._seed)
            seconds = [
                self._round(reader, plan, theirs, control) for _ in range(self._options.rounds)
            ]
            self.result.reads.append(ReadFigures(run.size, run.pattern, len(plan.lengths), seconds))
        count = len(runs) * self._options.rounds
        self._done(Step.READ, f"{count} reads, {len(runs)} kinds")
        self._done(Step.COMPARE_BYTES, "every byte is what the seed says, in every read")
        self._done(Step.COMPARE_REST, "nothing beside the segments was written")
        self._done(Step.COMPARE_DIGEST, "prefill's own memory has the same digests")

    def _greet(self, control: Control, here: str) -> EngineName:
        options = self._options
        hello = Hello(
            release=rd2h.__version__, host=here, machine=machine_name(), engine=options.engine
        )
        deadline = time.monotonic() + options.timeout
        with self._steps.step(Step.HANDSHAKE, 2 * options.timeout):
            while isinstance(answer := control.ask(hello, options.timeout), Busy):
                if time.monotonic() >= deadline:
                    raise ControlError(
                        f"prefill is busy with the check of {answer.host} since "
                        f"{options.timeout:g} s"
                    )
                time.sleep(_BUSY_PAUSE)
            welcome = _expect(Welcome, answer)
        self.result.engine = self._steps.engine = welcome.engine
        self._done(Step.HANDSHAKE, f"rd2h {welcome.release} there; engine {welcome.engine}")
        return welcome.engine

    def _be_called(self, control: Control, here: str) -> None:
        steps = self._steps
        with steps.step(Step.KV_PORT):
            listener = KvPort(here, self._options.kv_port)
        with listener:
            token = secrets.token_bytes(TOKEN_BYTES)
            wait = min(_CONNECT_BACK, self._options.timeout / 2)
            with steps.step(Step.CONNECT_BACK):
                question = ConnectBack(host=here, port=listener.port, token=token, timeout=wait)
                _expect(ConnectedBack, control.ask(question, self._options.timeout))
                if not listener.came(token, _CAME):
                    raise ControlError(
                        f"prefill connected to {here} port {listener.port}, but not to this "
                        "process: something else answers at that address"
                    )
            self._done(Step.CONNECT_BACK, f"prefill reached {here} port {listener.port}")

    def _prepare(self, control: Control, runs: list[Run]) -> Prepared:
        # Longer than any one step there: what fails on Prefill is better told by Prefill.
        timeout = _PREPARE_TIMEOUTS * self._options.timeout
        with self._steps.step(Step.PREPARE, timeout):
            question = Prepare(seed=self._seed, runs=runs)
            prepared = _expect(Prepared, control.ask(question, timeout))
            if len(prepared.digests) != len(runs):
                raise ControlError(
                    f"prefill gives {len(prepared.digests)} digests of {len(runs)} reads"
                )
        most = size_text(max(map(pool_bytes, runs)))
        self._done(Step.PREPARE, f"prefill has filled and registered {most}")
        return prepared

    def _set_up(self, name: EngineName, here: str, size: int) -> tuple[TransferEngine, Memory]:
        steps = self._steps
        with steps.step(Step.ENGINE_START):
            engine = self._engine = self._start_engine(name, here)
        self._done(Step.ENGINE_START, f"{name}")
        with steps.step(Step.ALLOCATE):
            memory = self._memory = self._allocate(size)
            memory.fill(CANARY, size)
        self._done(Step.ALLOCATE, f"{size_text(size)} of {self._options.memory} memory")
        with steps.step(Step.REGISTER):
            engine.register([memory.region])
        self._done(Step.REGISTER, f"{size_text(size)}")
        return engine, memory

    def _first_read(self, reader: _Reader, plan: Plan) -> None:
        """One segment: whether the engine gets through at all, and how long that takes."""
        with self._steps.step(Step.FIRST_READ):
            seconds = reader.read(plan.source[:1], plan.destination[:1], plan.lengths[:1])
        size = int(plan.lengths[0])
        self._done(Step.FIRST_READ, f"{size_text(size)} in {seconds * 1e3:.2f} ms, once")

    def _round(self, reader: _Reader, plan: Plan, theirs: bytes, control: Control) -> float:
        """Read into memory that holds something else, compare all of it; return the seconds."""
        steps, extent = self._steps, plan.extent
        with steps.step(Step.READ):
            control.check_alive()
            reader.memory.fill(CANARY, extent)
            seconds = reader.read(plan.source, plan.destination, plan.lengths)
            found = reader.memory.fetch(extent)
        what = f"{size_text(plan.run.size)} {plan.run.pattern}"
        if wrong := find_wrong(found, plan, self._seed):
            raise CheckFailed(steps.failure(Step.COMPARE_BYTES, f"{what}: {wrong}"))
        if strays := find_strays(found, plan):
            raise CheckFailed(steps.failure(Step.COMPARE_REST, f"{what}: {strays}"))
        ours = digest(found, plan.destination, plan.lengths)
        if ours != theirs:
            raise CheckFailed(
                steps.failure(
                    Step.COMPARE_DIGEST,
                    f"{what}: the bytes are what the seed says, with digest {ours.hex()[:16]}, but "
                    f"prefill took {theirs.hex()[:16]} of its own memory",
                )
            )
        return seconds

    def _done(self, step: Step, detail: str) -> None:
        done = StepDone(step, detail)
        self.result.steps.append(done)
        self._tell(done)

    def _close(self) -> None:
        """Give back what there is; an earlier failure counts for more than one in here."""
        engine, memory = self._engine, self._memory
        if engine is None:
            return
        try:
            with self._steps.step(Step.CLOSE):
                engine.close()
        except CheckFailed as error:
            self.result.failure = self.result.failure or error.failure
        else:
            if memory is not None:
                memory.release()


class _Reader:
    """An engine with both memories."""

    def __init__(self, engine: TransferEngine, memory: Memory, prepared: Prepared) -> None:
        self.memory = memory
        self._engine = engine
        self._session = prepared.session
        self._source = np.uint64(prepared.address)
        self._destination = np.uint64(memory.region.address)

    def read(self, source: UInt64Array, destination: UInt64Array, lengths: UInt64Array) -> float:
        """Read segments, given as offsets; return the seconds."""
        local, remote = destination + self._destination, source + self._source
        begun = time.perf_counter()
        self._engine.read(self._session, local, remote, lengths)
        return time.perf_counter() - begun


def _expect(kind: type[T], answer: FromPrefill) -> T:
    if not isinstance(answer, kind):
        raise ControlError(f"prefill answers with {type(answer).__name__}, not {kind.__name__}")
    return answer
