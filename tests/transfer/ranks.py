"""Ranks for tests with real sockets: a Prefill and a Decode, and the site they are on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from rd2h.decode import Finished, Outcome, Reader, Receiver, ReceiverOptions
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from rd2h.prefill import DeviceEvent, LayerTask, Sender, SenderOptions
from rd2h.reads import PullScope, RequestDestination
from rd2h.wire import ReadReadyBatch, ReadRequest
from tests.transfer.caches import (
    ANY_PORT,
    PATIENCE,
    TWO_LAYERS,
    UNTOUCHED,
    Cache,
    Shape,
    eventually,
    threads,
)
from tests.transfer.scripted import ScriptedDecode, ScriptedPrefill


def ask(ext_id: str, source: Sequence[int], start: int = 0) -> ReadRequest:
    """One request's share of a batch, for layers without an indexer."""
    return ReadRequest(ext_id, list(source), [], start, 0)


def batch(
    layer: int, requests: Sequence[ReadRequest], done: Sequence[str] = (), *, name: str = ""
) -> ReadReadyBatch:
    """A batch of ``layer.<layer>``."""
    return ReadReadyBatch(layer, name or f"layer.{layer}", list(requests), list(done))


@dataclass
class Prefill:
    """A Prefill rank: a real sender over memory of its own."""

    cache: Cache
    engine: MemoryEngine
    sender: Sender

    def submit(
        self,
        layer: int,
        endpoints: str | Iterable[str],
        *requests: ReadRequest,
        done: Sequence[str] = (),
        event: DeviceEvent | None = None,
    ) -> None:
        """Announce ``layer.<layer>`` with the same requests to each endpoint."""
        where = [endpoints] if isinstance(endpoints, str) else endpoints
        batches = {endpoint: batch(layer, requests, done) for endpoint in where}
        self.sender.submit(LayerTask(f"layer.{layer}", batches, event))


@dataclass
class Destination:
    """A Decode rank: a real receiver over memory of its own."""

    cache: Cache
    receiver: Receiver
    ended: dict[str, Finished] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return self.receiver.endpoint

    def register(self, ext_id: str, main: Sequence[int], indexer: Sequence[int] = ()) -> None:
        self.ended.pop(ext_id, None)
        self.receiver.register(RequestDestination(ext_id, main, indexer))

    def wait(self, *ext_ids: str) -> list[Finished]:
        """Wait until all of these requests have ended; each may be reported once only."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended.keys() >= set(ext_ids):
            missing = set(ext_ids) - self.ended.keys()
            assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {missing}"
            for finished in self.receiver.wait_finished(0.5):
                assert finished.ext_id not in self.ended, "reported twice"
                self.ended[finished.ext_id] = finished
        return [self.ended[ext_id] for ext_id in ext_ids]

    def wait_done(self, *ext_ids: str) -> None:
        for finished in self.wait(*ext_ids):
            assert finished.outcome is Outcome.DONE, finished

    def has_read(self, source: Cache, layer: int, blocks: Mapping[int, int]) -> bool:
        """Whether exactly these blocks (destination to source) of a layer were read."""
        name = f"layer.{layer}"
        for ours, theirs in zip(self.cache.tensors[name], source.tensors[name], strict=True):
            expected = np.full_like(ours, UNTOUCHED)
            for destination, origin in blocks.items():
                expected[destination] = theirs[origin]
            if not np.array_equal(ours, expected):
                return False
        return True


@dataclass
class Decode(Destination):
    """A Decode rank on the memory engine."""

    engine: MemoryEngine = field(kw_only=True)


class Site:
    """Everything that a test has made, closed in reverse at the end."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.stack = ExitStack()

    def engine(self, cache: Cache) -> MemoryEngine:
        engine = MemoryEngine(self.fabric)
        engine.register(cache.regions)
        self.stack.callback(engine.close)
        return engine

    def prefill(
        self,
        shapes: Mapping[str, Shape] | None = None,
        options: SenderOptions | None = None,
        cache: Cache | None = None,
    ) -> Prefill:
        cache = cache or Cache(shapes or TWO_LAYERS)
        engine = self.engine(cache)
        sender = Sender(engine.session, cache.layouts, options)
        self.stack.callback(sender.close)
        return Prefill(cache, engine, sender)

    def decode(
        self,
        shapes: Mapping[str, Shape] | None = None,
        options: ReceiverOptions | None = None,
        address: str = ANY_PORT,
        cache: Cache | None = None,
        scope: PullScope | None = None,
        reader: Reader | None = None,
    ) -> Decode:
        cache = cache or Cache(shapes or TWO_LAYERS, UNTOUCHED)
        engine = self.engine(cache)
        receiver = Receiver(
            address, cache.layouts, scope or PullScope(0, 1, False), reader or engine, options
        )
        self.stack.callback(receiver.close)
        return Decode(cache, receiver, engine=engine)

    def scripted_decode(self, address: str = ANY_PORT) -> ScriptedDecode:
        return self.stack.enter_context(ScriptedDecode(address))

    def scripted_prefill(self, endpoint: str) -> ScriptedPrefill:
        return self.stack.enter_context(ScriptedPrefill(endpoint))


@contextmanager
def make_site() -> Iterator[Site]:
    """A site that leaves no thread behind."""
    site = Site()
    with site.stack:
        yield site
    eventually(lambda: not threads(), f"the end of {threads()}")


def quick(policy: str = "contain", handshake: float = 0.3, answer: float = 0.3) -> SenderOptions:
    """Options whose deadlines pass within a test."""
    assert policy in ("raise", "contain")
    return SenderOptions(
        failure_policy="raise" if policy == "raise" else "contain",
        handshake_timeout=handshake,
        answer_timeout=answer,
        wait_timeout=handshake + answer + PATIENCE,
    )


PATIENT = SenderOptions("contain", PATIENCE, PATIENCE, 2 * PATIENCE)
"""Contain, with deadlines that only pass when something is wrong."""


class Log(logging.Handler):
    """Gathers what a logger says, from any thread."""

    def __init__(self, name: str = "rd2h", level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self._logger = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    @property
    def size(self) -> int:
        """Characters in all."""
        return sum(map(len, self.lines))
