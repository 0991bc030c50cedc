"""Ranks in processes of their own that are killed or frozen, on the host engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import rd2h.sockets
from rd2h.decode import Outcome, Receiver, ReceiverOptions
from rd2h.engines.host import HostEngine
from rd2h.prefill import LayerSendError, LayerTask, Sender, SenderOptions
from rd2h.reads import PullScope
from tests.transfer.caches import ANY_PORT, PATIENCE, UNTOUCHED, Cache, threads
from tests.transfer.processes import LAYERS, SHAPES, RankProcess, digest, fill
from tests.transfer.ranks import Destination, ask, batch

pytestmark = pytest.mark.slow

DEADLINE = 10 * PATIENCE
"""Of everything that these tests must not wait for."""

RAISING = SenderOptions("raise", DEADLINE, DEADLINE, 2 * DEADLINE)


@contextmanager
def decode_here() -> Iterator[Destination]:
    """A Decode rank in this process."""
    cache, engine = Cache(SHAPES, UNTOUCHED), HostEngine()
    engine.register(cache.regions)
    scope, options = PullScope(0, 1, False), ReceiverOptions(idle_timeout=DEADLINE)
    receiver = Receiver(ANY_PORT, cache.layouts, scope, engine, options)
    try:
        yield Destination(cache, receiver)
    finally:
        receiver.close()
        engine.close()
    assert not threads()


@contextmanager
def prefill_here(options: SenderOptions, seed: int) -> Iterator[tuple[Cache, Sender]]:
    """A Prefill rank in this process."""
    cache, engine = fill(Cache(SHAPES), seed), HostEngine()
    engine.register(cache.regions)
    sender = Sender(engine.session, cache.layouts, options)
    try:
        yield cache, sender
    finally:
        sender.close()
        engine.close()
    assert not threads()


def send(sender: Sender, endpoint: str, ext_id: str, blocks: list[int], layer: int) -> None:
    done = [ext_id] if layer == LAYERS - 1 else []
    announced = batch(layer, [ask(ext_id, blocks)], done)
    sender.submit(LayerTask(f"layer.{layer}", {endpoint: announced}))
    sender.drain()


def holds(decode: Destination, seed: int, blocks: dict[int, int]) -> bool:
    """Whether blocks (destination to source) of every layer are those of the Prefill ``seed``."""
    source = fill(Cache(SHAPES), seed)
    return all(
        np.array_equal(ours[list(blocks)], theirs[list(blocks.values())])
        for name in SHAPES
        for ours, theirs in zip(decode.cache.tensors[name], source.tensors[name], strict=True)
    )


def hand_over(
    decode: Destination, stop: RankProcess, good: RankProcess, stopping: signal.Signals
) -> None:
    """Two Prefills; one is stopped between two layers, the other goes on to the end."""
    decode.register("stopped", [0, 1, 2])
    decode.register("good", [10, 11])
    for layer in range(2):
        assert stop.ask(layer, "stopped", [4, 5, 6], False) == "handed over"
        assert good.ask(layer, "good", [7, 3], False) == "handed over"
    start = time.monotonic()
    stop.signal(stopping)
    (failed,) = decode.wait("stopped")
    assert time.monotonic() - start < PATIENCE
    assert failed.outcome is Outcome.FAILED
    assert "closed the connection" in failed.reason
    for layer in range(2, LAYERS):
        assert good.ask(layer, "good", [7, 3], layer == LAYERS - 1) == "handed over"
    decode.wait_done("good")
    assert holds(decode, 2, {10: 7, 11: 3})


def test_prefill_that_is_killed_in_the_middle_hurts_its_own_request_only() -> None:
    with (
        decode_here() as decode,
        RankProcess("prefill", decode.endpoint, 1) as stop,
        RankProcess("prefill", decode.endpoint, 2) as good,
    ):
        hand_over(decode, stop, good, signal.SIGKILL)


def test_prefill_that_freezes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_INTERVAL", 0.5)
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_TIMEOUT", 3.0)
    with (
        decode_here() as decode,
        RankProcess("prefill", decode.endpoint, 1) as stop,
        RankProcess("prefill", decode.endpoint, 2) as good,
    ):
        hand_over(decode, stop, good, signal.SIGSTOP)
        # When it wakes it learns that its connection is gone, and starts anew.
        stop.signal(signal.SIGCONT)
        decode.register("later", [30])
        outcomes = [stop.ask(2, "later", [8], True) for _ in range(3)]
        assert outcomes[-1] == "handed over"
        decode.wait_done("later")


def test_decode_that_is_killed_and_started_again_on_its_port() -> None:
    with (
        RankProcess("decode", ANY_PORT) as decode,
        prefill_here(RAISING, 3) as (cache, sender),
    ):
        endpoint = str(decode.hello)
        assert decode.ask("a", [1, 2]) == "registered"
        send(sender, endpoint, "a", [5, 6], 0)
        # Nobody has registered `b`: its batch is parked when Decode dies.
        sender.submit(LayerTask("layer.1", {endpoint: batch(1, [ask("b", [5])])}))
        start = time.monotonic()
        decode.kill()
        with pytest.raises(LayerSendError) as caught:
            sender.drain()
        assert (caught.value.layer_names, caught.value.endpoint) == (("layer.1",), endpoint)
        assert caught.value.reason == "the connection was lost"
        assert time.monotonic() - start < PATIENCE
        with RankProcess("decode", endpoint) as again:
            assert again.hello == endpoint
            assert again.ask("c", [3, 9]) == "registered"
            for layer in range(LAYERS):
                send(sender, endpoint, "c", [7, 8], layer)
            expected = Cache(SHAPES, UNTOUCHED)
            for name, tensors in expected.tensors.items():
                for ours, theirs in zip(tensors, cache.tensors[name], strict=True):
                    ours[[3, 9]] = theirs[[7, 8]]
            assert again.ask() == ["c", "done", "", digest(expected)]


def test_decode_that_freezes_is_given_up_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_INTERVAL", 0.5)
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_TIMEOUT", 3.0)
    with (
        RankProcess("decode", ANY_PORT) as frozen,
        RankProcess("decode", ANY_PORT) as good,
        prefill_here(RAISING, 3) as (_, sender),
    ):
        assert frozen.ask("a", [1]) == "registered"
        assert good.ask("b", [1]) == "registered"
        send(sender, str(frozen.hello), "a", [5], 0)
        start = time.monotonic()
        frozen.signal(signal.SIGSTOP)
        sender.submit(LayerTask("layer.1", {str(frozen.hello): batch(1, [ask("a", [5])])}))
        for layer in (0, 2, 3):  # in other memory than what the frozen one holds
            done = ["b"] if layer == 3 else []
            announced = batch(layer, [ask("b", [6])], done)
            sender.submit(LayerTask(f"layer.{layer}", {str(good.hello): announced}))
        assert good.ask()[:3] == ["b", "done", ""]
        with pytest.raises(LayerSendError, match="the connection was lost") as caught:
            sender.wait("layer.1")
        assert caught.value.endpoint == frozen.hello
        assert time.monotonic() - start < PATIENCE
