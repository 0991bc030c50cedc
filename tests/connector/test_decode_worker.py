"""D's worker alone; with P's in ``test_workers.py``."""

from __future__ import annotations

import pytest
import torch

from rd2h.connector.decode_worker import DecodeWorker, Ended
from rd2h.decode import ReceiverClosedError
from rd2h.destinations import paged_destination
from rd2h.engines import EngineClosedError
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from serving.ports import free_ports
from tests.connector.hosts import BLOCKS, engine_setup, hosts, load
from tests.transfer.caches import threads


def test_a_step_with_nothing_outstanding_asks_nobody() -> None:
    with hosts() as site:
        decode = site.decode({"model.layers.0.attn": torch.zeros(BLOCKS, 4)})
        (worker,) = decode.workers
        decode.begin()
        assert worker.ended() == Ended()
        # Not even a receiver that has ended.
        worker._receiver.close()
        assert worker.ended() == Ended()


def test_a_receiver_that_has_ended_is_told_where_something_is_outstanding() -> None:
    with hosts() as site:
        decode = site.decode({"model.layers.0.attn": torch.zeros(BLOCKS, 4)})
        (worker,) = decode.workers
        decode.begin(load("a", [1]))
        worker.sizes()
        worker._receiver.close()
        with pytest.raises(ReceiverClosedError):
            worker.ended()


def test_an_id_twice_at_once_is_a_fault_of_the_scheduler() -> None:
    with hosts() as site:
        decode = site.decode({"model.layers.0.attn": torch.zeros(BLOCKS, 4)})
        decode.begin(load("a", [1]))
        with pytest.raises(ValueError, match="request a is registered already"):
            decode.begin(load("a", [2]))


def test_close_ends_threads_and_engine_and_may_be_repeated() -> None:
    fabric = MemoryFabric()
    engine = MemoryEngine(fabric)
    destination = paged_destination({"model.layers.0.attn": torch.zeros(BLOCKS, 4)}, BLOCKS)
    worker = DecodeWorker(engine_setup("decode", port=free_ports()), 0, engine, destination)
    assert len(threads()) > 0
    worker.close()
    worker.close()
    assert threads() == []
    with pytest.raises(EngineClosedError):
        _ = engine.session
    assert fabric.sessions == frozenset()
