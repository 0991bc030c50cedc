"""Both ends of a check in one process, on engines of one `MemoryFabric`, for its tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import zmq

from rd2h.cli.check.decode import DecodeCheck
from rd2h.cli.check.engine import StartEngine
from rd2h.cli.check.failures import CheckFailed, Failure, Side
from rd2h.cli.check.memory import Allocate, HostMemory
from rd2h.cli.check.messages import FromDecode, FromPrefill, encode, from_prefill
from rd2h.cli.check.options import DecodeOptions, EngineName, Pattern, PrefillOptions
from rd2h.cli.check.result import CheckResult
from rd2h.cli.check.server import PrefillServer
from rd2h.cli.check.service import Outcome, PrefillService
from rd2h.cli.check.steps import Steps
from rd2h.engines import TransferEngine, UInt64Array
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from tests.engines.forwarding import ForwardingEngine

PREFILL = PrefillOptions("127.0.0.1", port=0, once=True, wait=20, timeout=10)
DECODE = DecodeOptions(
    "127.0.0.1",
    sizes=(100, 4096, 70_000),
    patterns=tuple(Pattern),
    block=4096,
    rounds=2,
    wait=0,
    timeout=10,
)


def unexpected(failure: Failure) -> None:
    raise AssertionError(f"a step hangs: {failure}")


def start_on(fabric: MemoryFabric) -> StartEngine:
    """How an end makes its engine, whatever its name."""

    def start(_name: EngineName, _host: str) -> TransferEngine:
        return MemoryEngine(fabric)

    return start


class Wrapped(ForwardingEngine):
    """An engine that does something of the test's after each read, and counts what it is asked.

    Args:
        engine: The engine.
        after: Called with the destinations and lengths of each read.
    """

    def __init__(
        self, engine: TransferEngine, after: Callable[[UInt64Array, UInt64Array], None]
    ) -> None:
        super().__init__(engine)
        self._after = after
        self.reads = 0
        self.closed = False

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        super().read(session, local_addrs, remote_addrs, lengths)
        self.reads += 1
        self._after(local_addrs, lengths)

    def close(self) -> None:
        self.closed = True
        super().close()


@dataclass
class PrefillEnd:
    """A Prefill that serves in a thread of its own."""

    port: int
    service: PrefillService
    thread: threading.Thread
    begun: list[tuple[str, EngineName]]
    outcomes: list[Outcome]
    failures: list[Failure] = field(default_factory=list)

    def ended(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def prefill_end(
    start: StartEngine,
    options: PrefillOptions = PREFILL,
    *,
    allocate: Allocate = HostMemory,
    machine: str = "",
) -> Iterator[PrefillEnd]:
    """Serve; with ``--once``, so that it ends by itself."""
    assert options.once
    begun: list[tuple[str, EngineName]] = []
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    steps = Steps(Side.PREFILL, options.timeout, unexpected)
    service = PrefillService(
        options,
        steps,
        start,
        allocate,
        machine,
        lambda host, engine: begun.append((host, engine)),
        outcomes.append,
    )
    server = PrefillServer(options, service, steps)

    def serve() -> None:
        try:
            server.serve()
        except CheckFailed as error:
            failures.append(error.failure)
        finally:
            server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    end = PrefillEnd(server.port, service, thread, begun, outcomes, failures)
    yield end
    end.ended()


def run_decode(
    port: int,
    start: StartEngine,
    options: DecodeOptions = DECODE,
    *,
    allocate: Allocate = HostMemory,
) -> CheckResult:
    """Run a check to its end."""
    steps = Steps(Side.DECODE, options.timeout, unexpected)
    options = replace(options, port=port)
    return DecodeCheck(options, steps, start, allocate, lambda _done: None).run()


class Dealer:
    """Something that talks to a control port by hand."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, message: FromDecode) -> None:
        self.send(encode(message))

    def hear(self) -> FromPrefill:
        while self._socket.poll(10_000):
            if payload := self._socket.recv():
                return from_prefill(payload)
        raise AssertionError("no answer")
