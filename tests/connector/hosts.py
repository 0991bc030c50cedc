"""Workers of both engines in one process: real sockets, real tensors, copies through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from rd2h.connector.decode_worker import DecodeWorker, Ended
from rd2h.connector.groups import CacheGroups
from rd2h.connector.metadata import (
    AnnouncedRequest,
    DecodeEndpoint,
    DecodeStep,
    Loading,
    PrefillStep,
)
from rd2h.connector.options import ConnectorOptions
from rd2h.connector.prefill_worker import PrefillWorker
from rd2h.connector.setup import EngineSetup, Side
from rd2h.destinations import CacheTensors, paged_destination
from rd2h.devices import CpuDevice, Device
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from rd2h.prefill import FailurePolicy
from serving.ports import free_ports
from tests.transfer.caches import PATIENCE, eventually, threads

__all__ = [
    "BLOCKS",
    "CANARY",
    "Decode",
    "Hosts",
    "announced",
    "beside",
    "engine_setup",
    "filled",
    "hosts",
    "load",
    "prefill_step",
    "run_step",
    "tensors_of",
]

BLOCKS = 16
CANARY = 77.0
"""What Decode's memory holds before anything is read to it."""


def engine_setup(
    side: Side,
    *,
    tp: int = 1,
    port: int = 1,
    host: str = "127.0.0.1",
    policy: FailurePolicy = "raise",
    times: Mapping[str, object] | None = None,
) -> EngineSetup:
    return EngineSetup(
        side=side,
        engine_id=side,
        host=host,
        base_port=port,
        tp_size=tp,
        num_blocks=BLOCKS,
        groups=CacheGroups(0, 0, 4, 4),
        options=ConnectorOptions.from_extra_config(
            {"prefill_failure_policy": policy, "shutdown_timeout": PATIENCE, **(times or {})}
        ),
    )


def filled(*shape: int) -> torch.Tensor:
    """A tensor of numbers that are all different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def beside(work: Callable[[], object]) -> Future[object]:
    """Run something in a thread of its own."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def tensors_of(registered: CacheTensors) -> list[torch.Tensor]:
    return [registered] if isinstance(registered, torch.Tensor) else list(registered)


def load(
    ext_id: str, main: Sequence[int], indexer: Sequence[int] | None = None, *, cached: int = 0
) -> Loading:
    """A request whose prompt is awaited in these blocks, by the internal id ``<ext_id>!``."""
    ids = list(main if indexer is None else indexer)
    return Loading(f"{ext_id}!", ext_id, list(main), ids, cached, cached)


def announced(
    ext_id: str,
    endpoint: DecodeEndpoint,
    main: Sequence[int],
    indexer: Sequence[int] | None = None,
    *,
    start: int = 0,
    done: bool = True,
) -> AnnouncedRequest:
    ids = list(main if indexer is None else indexer)
    return AnnouncedRequest(ext_id, endpoint, list(main), ids, start, start, done)


@dataclass
class Decode:
    """A Decode engine: one worker for each rank, with a cache of its own."""

    endpoint: DecodeEndpoint
    workers: list[DecodeWorker]
    engines: list[MemoryEngine]
    caches: list[dict[str, CacheTensors]]

    def begin(self, *loads: Loading, aborted: Sequence[str] = ()) -> None:
        for worker in self.workers:
            worker.begin(DecodeStep(loads, tuple(aborted)))

    def wait(self, *request_ids: str, rank: int = 0) -> Ended:
        """What a rank has reported once these requests have ended there, by internal id."""
        found = Ended()

        def look() -> bool:
            ended = self.workers[rank].ended()
            found.all |= ended.all
            found.failed |= ended.failed
            found.failed_blocks |= ended.failed_blocks
            found.aborted += ended.aborted
            return found.all.issuperset(request_ids)

        eventually(look, f"the end of {request_ids} on rank {rank}")
        return found


@dataclass
class Hosts:
    """Where both engines run."""

    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    stack: ExitStack = field(default_factory=ExitStack)

    def prefill(
        self,
        caches: Mapping[str, CacheTensors],
        *,
        rank: int = 0,
        tp: int = 1,
        device: Device | None = None,
        writes_before_wait: bool = True,
        policy: FailurePolicy = "raise",
        times: Mapping[str, object] | None = None,
    ) -> PrefillWorker:
        worker = PrefillWorker(
            engine_setup("prefill", tp=tp, policy=policy, times=times),
            rank,
            MemoryEngine(self.fabric),
            device or CpuDevice(),
            caches,
            writes_before_wait=writes_before_wait,
        )
        self.stack.callback(worker.close)
        return worker

    def decode(
        self,
        *caches: dict[str, CacheTensors],
        host: str = "127.0.0.1",
        times: Mapping[str, object] | None = None,
    ) -> Decode:
        """A Decode engine with one rank for each mapping of cache tensors."""
        size = len(caches)
        port = free_ports(size)
        setup = engine_setup("decode", tp=size, port=port, host=host, times=times)
        engines = [MemoryEngine(self.fabric) for _ in caches]
        workers = []
        for rank, (engine, own) in enumerate(zip(engines, caches, strict=True)):
            worker = DecodeWorker(setup, rank, engine, paged_destination(own, BLOCKS))
            self.stack.callback(worker.close)
            workers.append(worker)
        return Decode(DecodeEndpoint(host, port, size), workers, engines, list(caches))


@contextmanager
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    with made.stack:
        yield made
    assert threads() == []


def run_step(worker: PrefillWorker, step: PrefillStep, layers: Sequence[str]) -> None:
    """What vLLM does with a step in which ``layers`` are computed in this order."""
    worker.begin(step)
    for name in layers:
        worker.wait_for_layer(name)
        worker.written(name)
    worker.end()


def prefill_step(
    *requests: AnnouncedRequest, finished: Sequence[str] = (), written: Sequence[int] = ()
) -> PrefillStep:
    return PrefillStep(frozenset(written), requests, tuple(finished))
