"""A real sender and a real receiver in one process, over real sockets and real copies."""

from __future__ import annotations

import time

import pytest

from rd2h.decode import Outcome, ReceiverOptions
from rd2h.prefill import LayerSendError, LayerTask
from tests.engines.peers import in_thread
from tests.transfer.caches import PATIENCE, Cache, Shape, descriptors, eventually, threads
from tests.transfer.ranks import PATIENT, Log, Site, ask, batch, quick

RAISING = quick("raise", handshake=PATIENCE, answer=PATIENCE)


def test_request_is_handed_over_layer_by_layer(site: Site) -> None:
    decode, prefill = site.decode(), site.prefill(options=RAISING)
    decode.register("a", [9, 4])
    prefill.submit(0, decode.endpoint, ask("a", [1, 2]))
    prefill.submit(1, decode.endpoint, ask("a", [1, 2]), done=["a"])
    prefill.sender.drain()
    decode.wait_done("a")
    for layer in range(2):
        assert decode.has_read(prefill.cache, layer, {9: 1, 4: 2})


@pytest.mark.parametrize("policy", ["raise", "contain"])
def test_decode_restarted_on_the_same_port(site: Site, policy: str) -> None:
    prefill = site.prefill(options=quick(policy, handshake=PATIENCE, answer=PATIENCE))
    old, other = site.decode(), site.decode()
    endpoint = old.endpoint
    old.register("a", [1])
    prefill.submit(0, endpoint, ask("a", [3]))
    prefill.sender.drain()
    prefill.submit(1, endpoint, ask("parked", [3]))  # which nobody has registered
    with Log() as log:
        old.receiver.close()
        if policy == "raise":
            with pytest.raises(LayerSendError) as caught:
                prefill.sender.wait("layer.1")
            assert (caught.value.layer_names, caught.value.endpoint) == (("layer.1",), endpoint)
            assert "connection was lost" in caught.value.reason
            # Of "a", every layer so far was answered, but it had more to come.
            assert caught.value.ext_ids == ("parked", "a")
        else:
            prefill.sender.wait("layer.1")
            eventually(lambda: any("(requests parked, a)" in line for line in log.lines), "the log")
    new = site.decode(address=endpoint)
    # Both are dropped from further sends: `a` lacks what the old one had.
    prefill.submit(1, endpoint, ask("a", [3]), ask("parked", [3]), ask("b", [4]), done=["a", "b"])
    for ext_id, block in (("a", 10), ("parked", 11), ("b", 12)):
        new.register(ext_id, [block])
    prefill.sender.drain()
    new.wait_done("b")
    assert new.has_read(prefill.cache, 1, {12: 4})
    assert new.receiver.take_finished() == []
    # Forgotten, an id may be handed over again.
    prefill.sender.forget("a")
    prefill.submit(0, endpoint, ask("a", [5]), done=["a"])
    new.wait_done("a")
    assert new.has_read(prefill.cache, 0, {10: 5})
    other.register("c", [1])
    prefill.submit(0, other.endpoint, ask("c", [5]), done=["c"])
    other.wait_done("c")


def test_prefill_that_closes_fails_what_it_feeds_and_a_new_one_is_served(site: Site) -> None:
    decode = site.decode()
    leaver = site.prefill(options=PATIENT)
    decode.register("a", [1])
    leaver.submit(0, decode.endpoint, ask("a", [3]))
    leaver.sender.drain()
    leaver.sender.close()
    (finished,) = decode.wait("a")
    assert finished.outcome is Outcome.FAILED
    successor = site.prefill(options=RAISING)
    decode.register("a", [2])
    successor.submit(0, decode.endpoint, ask("a", [3]), done=["a"])
    decode.wait_done("a")


def test_prefill_whose_memory_is_gone(site: Site) -> None:
    decode = site.decode()
    gone, good = site.prefill(options=RAISING), site.prefill(options=RAISING)
    site.fabric.drop(gone.engine.session)
    decode.register("a", [1])
    decode.register("b", [2])
    with Log():
        gone.submit(0, decode.endpoint, ask("a", [3]))
        with pytest.raises(LayerSendError, match=r"layer\.0: peer .* has gone \(requests a\)"):
            gone.sender.drain()
    assert decode.wait("a")[0].outcome is Outcome.FAILED
    good.submit(0, decode.endpoint, ask("b", [3]), done=["b"])
    decode.wait_done("b")


def test_layout_mismatch_fails_its_layer_on_both_sides(site: Site) -> None:
    decode = site.decode({"layer.0": Shape(main=(64, 32)), "layer.1": Shape()})
    prefill = site.prefill(options=RAISING)
    decode.register("a", [1])
    decode.register("b", [2])
    prefill.submit(0, decode.endpoint, ask("a", [3]))
    with pytest.raises(LayerSendError) as caught:
        prefill.sender.drain()
    for word in ("layer.0", decode.endpoint, "prefill 16, decode 32", "--block-size"):
        assert word in str(caught.value)
    (failed,) = decode.wait("a")
    assert failed.reason == caught.value.reason
    prefill.submit(1, decode.endpoint, ask("b", [3]), done=["b"])
    decode.wait_done("b")
    assert decode.cache.untouched(["layer.0"])


def test_gate_stays_shut_while_a_slow_decode_reads_and_for_nobody_else(site: Site) -> None:
    prefill = site.prefill(options=RAISING)
    slow, fast = site.decode(), site.decode()
    held = slow.engine.hold_read()
    slow.register("a", [1])
    fast.register("b", [1])
    prefill.submit(0, slow.endpoint, ask("a", [3]), done=["a"])
    assert held.started.wait(PATIENCE)
    for _ in range(3):
        prefill.submit(1, fast.endpoint, ask("b", [3]))
        prefill.sender.wait("layer.1")
    with pytest.raises(TimeoutError, match=f"layer.0 at {slow.endpoint}"):
        prefill.sender.wait("layer.0", timeout=0.01)
    held.release()
    prefill.sender.wait("layer.0")
    slow.wait_done("a")
    assert slow.has_read(prefill.cache, 0, {1: 3})


@pytest.mark.slow
def test_shutdown_of_both_while_a_read_is_in_flight(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.decode()
    held = decode.engine.hold_read()
    decode.register("a", [1])
    prefill.submit(0, decode.endpoint, ask("a", [3]))
    assert held.started.wait(PATIENCE)
    start = time.monotonic()
    thread, raised = in_thread(decode.receiver.close)
    prefill.sender.close()  # it waits for nobody: what is not answered has failed
    assert thread.is_alive()
    held.release()
    thread.join(PATIENCE)
    assert time.monotonic() - start < 5.0
    assert not raised
    assert not threads()
    assert decode.has_read(prefill.cache, 0, {1: 3})


@pytest.mark.slow
def test_fifty_decodes_at_once(site: Site) -> None:
    shapes = {"layer.0": Shape(blocks=64), "layer.1": Shape(blocks=64)}
    prefill = site.prefill(shapes, RAISING)
    decodes = [site.decode(shapes, ReceiverOptions(read_threads=1)) for _ in range(50)]
    for layer in range(2):
        batches = {}
        for index, decode in enumerate(decodes):
            if not layer:
                decode.register(f"r{index}", [63 - index])
            request = ask(f"r{index}", [index])
            batches[decode.endpoint] = batch(layer, [request], [f"r{index}"] if layer else [])
        prefill.sender.submit(LayerTask(f"layer.{layer}", batches))
    prefill.sender.drain()
    for index, decode in enumerate(decodes):
        decode.wait_done(f"r{index}")
        assert all(decode.has_read(prefill.cache, layer, {63 - index: index}) for layer in range(2))


@pytest.mark.slow
def test_fifty_prefills_at_once(site: Site) -> None:
    shapes = {"layer.0": Shape(blocks=64)}
    decode = site.decode(shapes)
    source = Cache(shapes)
    prefills = [site.prefill(cache=source, options=RAISING) for _ in range(50)]
    for index, prefill in enumerate(prefills):
        prefill.submit(0, decode.endpoint, ask(f"r{index}", [index]), done=[f"r{index}"])
    for index in range(50):
        decode.register(f"r{index}", [63 - index])
    decode.wait_done(*(f"r{index}" for index in range(50)))
    for prefill in prefills:
        prefill.sender.drain()
    assert decode.has_read(source, 0, {63 - index: index for index in range(50)})


@pytest.mark.slow
def test_many_lives_leave_no_thread_and_no_descriptor(site: Site) -> None:
    def live() -> None:
        decode, prefill = site.decode(), site.prefill(options=RAISING)
        decode.register("a", [1])
        prefill.submit(0, decode.endpoint, ask("a", [3]), done=["a"])
        decode.wait_done("a")
        prefill.sender.drain()
        decode.receiver.close()
        prefill.sender.close()

    live()
    before = descriptors()
    for _ in range(10):
        live()
    assert not threads()
    eventually(lambda: descriptors() <= before, "the descriptors to be closed")
