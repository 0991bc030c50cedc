"""The receiver against a scripted Prefill on a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from rd2h.decode import (
    Outcome,
    PortTakenError,
    Receiver,
    ReceiverBrokenError,
    ReceiverClosedError,
    ReceiverOptions,
)
from rd2h.reads import PullScope, RequestDestination
from rd2h.wire import MfMetaAck, ReadDone, ReadFailed, ReadRequest
from tests.decode.meeting import greeted
from tests.engines.peers import in_thread
from tests.transfer.caches import (
    PATIENCE,
    TWO_LAYERS,
    UNTOUCHED,
    Cache,
    Shape,
    descriptors,
    eventually,
    threads,
)
from tests.transfer.ranks import Log, Site, ask, batch, make_site
from tests.transfer.scripted import garbage


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


# ---------------------------------------------------------------------------------- listening


def test_port_zero_takes_a_free_port(site: Site) -> None:
    first, second = site.decode(), site.decode()
    assert first.endpoint.startswith("tcp://127.0.0.1:")
    assert first.endpoint != second.endpoint


def test_taken_port_fails_at_once_with_its_number_and_leaves_nothing(site: Site) -> None:
    taken = site.decode().endpoint
    before, running = descriptors(), threads()
    with pytest.raises(PortTakenError, match=f"{taken}.*in use"):
        site.decode(address=taken)
    assert threads() == running
    # What zmq opens for a context is closed when the context ends.
    eventually(lambda: descriptors() <= before, "the descriptors to be closed")


def test_address_that_makes_no_sense_is_named(site: Site) -> None:
    with pytest.raises(PortTakenError, match="tcp://:bad"):
        site.decode(address="tcp://:bad")


def test_ipv6_loopback(site: Site) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    decode, prefill = site.decode(address="tcp://[::1]:0"), site.prefill()
    assert decode.endpoint.startswith("tcp://[::1]:")
    decode.register("a", [3])
    prefill.submit(0, decode.endpoint, ask("a", [1]), done=["a"])
    decode.wait_done("a")


# ------------------------------------------------------------------------------------ garbage


def test_garbage_gets_nothing_and_then_a_good_exchange_works(site: Site) -> None:
    decode = site.decode()
    source = Cache(TWO_LAYERS)
    prefill = site.scripted_prefill(decode.endpoint)
    with Log() as log:
        for frames in garbage(np.random.default_rng(1)):
            prefill.socket.send_multipart(frames)
        prefill.say(MfMetaAck(), ReadDone(0), ReadFailed(0, "x"))
        prefill.greet(site.engine(source).session, source)  # the first thing it hears is the ack
    assert 1 <= len(log.lines) <= 10
    assert log.size < 10_000
    decode.register("a", [7, 8])
    assert prefill.ask(batch(1, [ask("a", [3, 4])], ["a"])) == ReadDone(1)
    decode.wait_done("a")
    assert decode.has_read(source, 1, {7: 3, 8: 4})


def test_what_is_no_zmq_at_all_hurts_nobody(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    host, port = decode.endpoint.removeprefix("tcp://").split(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" * 99,
        b"\xff" + bytes(8) + b"\x7f" * 99,
    ):
        stranger = site.stack.enter_context(socket.create_connection((host, int(port))))
        stranger.sendall(data)
    decode.register("a", [7])
    assert prefill.ask(batch(0, [ask("a", [3])], ["a"])) == ReadDone(0)
    decode.wait_done("a")


@pytest.mark.slow
def test_flood_of_garbage_starves_neither_other_peers_nor_close(site: Site) -> None:
    decode = site.decode()
    good = greeted(site, decode)
    host, port = decode.endpoint.removeprefix("tcp://").split(":")
    with Log(), socket.create_connection((host, int(port))) as flood:
        # ZMTP by hand: greeting and READY of a DEALER, then frames of one byte. Python needs
        # seconds to look at them, zmq takes them in at once.
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        flood.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        flood.sendall(bytes([4, len(ready)]) + ready)
        flood.settimeout(PATIENCE)
        heard = b""
        while b"Socket-Type" not in heard:  # no frame may come before its READY
            heard += flood.recv(1000)
        flood.sendall(b"\x00\x01\x91" * 1_500_000)
        decode.register("a", [7])
        assert good.ask(batch(0, [ask("a", [3])], ["a"])) == ReadDone(0)
        decode.wait_done("a")
        decode.receiver.close(1.0)


# ---------------------------------------------------------------------------------- answering


@pytest.mark.slow
def test_every_batch_gets_exactly_one_reply(site: Site) -> None:
    rng = np.random.default_rng(5)
    decode = site.decode(options=ReceiverOptions(park_timeout=0.5))
    peers = [greeted(site, decode) for _ in range(3)]
    for nth in rng.integers(1, 80, 15).tolist():
        decode.engine.fail_read(nth)
    sent: list[Counter[int]] = [Counter() for _ in peers]
    heard: list[Counter[int]] = [Counter() for _ in peers]
    kinds: Counter[type] = Counter()
    with Log():
        for step in range(400):
            who = int(rng.integers(len(peers)))
            layer = int(rng.integers(4))  # 2 and 3 are in nobody's metadata
            ids = [f"{who}-{step // 10}-{pick}" for pick in rng.integers(0, 3, 2)]
            if step % 10 == 0:
                for nth in range(len(peers)):  # of three ids, one is never registered
                    decode.register(f"{nth}-{step // 10}-0", range(16))
                    decode.register(f"{nth}-{step // 10}-1", range(16, 32))
            requests = [ask(ext_id, [step % 32], step % 17) for ext_id in dict.fromkeys(ids)]
            done = ids[:1] if rng.random() < 0.2 else []
            peers[who].say(batch(layer, requests, done))
            sent[who][layer] += 1
            if rng.random() < 0.05:
                decode.receiver.abort(ids[-1])
        for who, peer in enumerate(peers):
            for _ in range(sent[who].total()):
                answer = peer.hear()
                assert isinstance(answer, ReadDone | ReadFailed)
                heard[who][answer.layer_idx] += 1
                kinds[type(answer)] += 1
            # Had anything been answered twice, that would come before this.
            peer.say(batch(99, [], []))
            assert peer.hear() == ReadDone(99)
    assert heard == sent
    assert min(kinds[ReadDone], kinds[ReadFailed]) > 30


def test_batch_before_metadata_fails_and_greeting_helps(site: Site) -> None:
    decode = site.decode()
    prefill = site.scripted_prefill(decode.endpoint)
    answer = prefill.ask(batch(1, [ask("a", [3])]))
    assert isinstance(answer, ReadFailed)
    assert "layer.1" in answer.error
    assert "MfMeta" in answer.error
    cache = Cache(TWO_LAYERS)
    prefill.greet(site.engine(cache).session, cache)
    decode.register("b", [7])
    assert prefill.ask(batch(1, [ask("b", [3])], ["b"])) == ReadDone(1)
    decode.wait_done("b")


def test_failed_read_is_answered_with_layer_request_and_reason(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    decode.engine.fail_read()
    decode.register("a", [7])
    decode.register("b", [8])
    answer = prefill.ask(batch(1, [ask("a", [3])], ["a"]))
    assert isinstance(answer, ReadFailed)
    for word in ("layer.1", "a", "failed by the test"):
        assert word in answer.error
    (failed,) = decode.wait("a")
    assert (failed.outcome, failed.reason) == (Outcome.FAILED, answer.error)
    # What still comes for it is acknowledged, and not read.
    reads = decode.engine.reads
    assert prefill.ask(batch(0, [ask("a", [3])], ["a"])) == ReadDone(0)
    assert decode.engine.reads == reads
    assert prefill.ask(batch(1, [ask("b", [3])], ["b"])) == ReadDone(1)
    decode.wait_done("b")


def test_one_slow_read_holds_up_no_other_peer(site: Site) -> None:
    decode = site.decode()
    slow, fast = greeted(site, decode), greeted(site, decode)
    held = decode.engine.hold_read()
    decode.register("slow", [1])
    decode.register("fast", [2])
    slow.say(batch(0, [ask("slow", [3])], ["slow"]))
    assert held.started.wait(PATIENCE)
    assert fast.ask(batch(0, [ask("fast", [3])], ["fast"])) == ReadDone(0)
    decode.wait_done("fast")
    assert "slow" not in decode.ended
    held.release()
    assert slow.hear() == ReadDone(0)
    decode.wait_done("slow")


# ------------------------------------------------------------------------------------ closing


@pytest.mark.slow
def test_close_finishes_the_read_in_flight_first(site: Site) -> None:
    decode = site.decode()
    source = Cache(TWO_LAYERS)
    prefill = greeted(site, decode, source)
    held = decode.engine.hold_read()
    decode.register("a", [1])
    prefill.say(batch(0, [ask("a", [3])]), batch(1, [ask("a", [3])]))
    assert held.started.wait(PATIENCE)
    start = time.monotonic()
    thread, raised = in_thread(decode.receiver.close)
    thread.join(0.2)
    assert thread.is_alive()
    held.release()
    thread.join(PATIENCE)
    assert time.monotonic() - start < 5.0
    assert not raised
    assert not threads()
    assert decode.has_read(source, 0, {1: 3})
    assert decode.cache.untouched(["layer.1"])  # no read starts once it closes


@pytest.mark.slow
def test_close_names_the_thread_of_a_read_that_never_ends(site: Site) -> None:
    decode = site.decode(options=ReceiverOptions(read_threads=2))
    prefill = greeted(site, decode)
    held = decode.engine.hold_read()
    decode.register("a", [1])
    prefill.say(batch(0, [ask("a", [3])]))
    assert held.started.wait(PATIENCE)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rd2h-read-\d did not end within 0.3 s"):
        decode.receiver.close(0.3)
    assert time.monotonic() - start < 3.0
    held.release()
    decode.receiver.close()  # and now it does


def test_closed_receiver_says_so_and_leaves_nothing(site: Site) -> None:
    site.decode().receiver.close()  # whatever is opened once only
    before = descriptors()
    for _ in range(3):
        receiver = site.decode().receiver
        receiver.close()
        receiver.close()
        with pytest.raises(ReceiverClosedError):
            receiver.register(RequestDestination("a", [1], []))
        with pytest.raises(ReceiverClosedError):
            receiver.abort("a")
        with pytest.raises(ReceiverClosedError):
            receiver.take_finished()
        with pytest.raises(ReceiverClosedError):
            receiver.wait_finished(PATIENCE)
    assert not threads()
    eventually(lambda: descriptors() <= before, "the descriptors to be closed")


def test_fault_of_the_socket_thread_reaches_the_worker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("which nobody foresaw")

    with monkeypatch.context() as patch, Log():
        patch.setattr(zmq.Socket, "get_monitor_socket", broken)
        decode = site.decode()
        with pytest.raises(ReceiverBrokenError, match="which nobody foresaw"):
            decode.receiver.wait_finished(PATIENCE)
    with pytest.raises(ReceiverBrokenError):
        decode.register("a", [1])
    with pytest.raises(ReceiverBrokenError):
        decode.receiver.abort("a")
    decode.receiver.close()
    assert not threads()


def test_close_ends_a_wait_in_another_thread(site: Site) -> None:
    receiver = site.decode().receiver
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        receiver.wait_finished(PATIENCE)

    thread, raised = in_thread(wait)
    assert waiting.wait(PATIENCE)
    receiver.close()
    thread.join(PATIENCE)
    assert [type(error) for error in raised] == [ReceiverClosedError]


def test_destination_without_indexer_blocks_of_another_shape(site: Site) -> None:
    """Main and indexer lists are separate, of different lengths, and both are read."""
    shapes = {"layer.0": Shape(indexer=24, lic8=4)}
    decode, source = site.decode(shapes), Cache(shapes)
    prefill = greeted(site, decode, source)
    decode.register("a", [1, 2], [20, 21, 22])
    request = ReadRequest("a", [5, 6], [7, 8, 9], 0, 0)
    assert prefill.ask(batch(0, [request], ["a"])) == ReadDone(0)
    main, _, indexer, lic8 = decode.cache.tensors["layer.0"]
    theirs = source.tensors["layer.0"]
    np.testing.assert_array_equal(main[[1, 2]], theirs[0][[5, 6]])
    np.testing.assert_array_equal(indexer[[20, 21, 22]], theirs[2][[7, 8, 9]])
    np.testing.assert_array_equal(lic8[[20, 21, 22]], theirs[3][[7, 8, 9]])
    assert (np.delete(lic8, [20, 21, 22], 0) == UNTOUCHED).all()


def test_receiver_needs_no_site() -> None:
    """The class by itself: made, used and closed, with an engine that is never asked."""

    class Never:
        def read(self, *_: object) -> None:
            raise AssertionError

        def forget(self, _: str) -> None:
            raise AssertionError

    receiver = Receiver("tcp://127.0.0.1:0", {}, PullScope(0, 1, False), Never())
    assert receiver.take_finished() == []
    assert receiver.wait_finished(0.0) == []
    receiver.close()


def test_sizes_tell_what_is_kept_and_fall_back_to_idle(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    prefill.say(batch(0, [ask("a", [1])], ["a"]))
    eventually(lambda: decode.receiver.sizes()["batches"] == 1, "the batch to be parked")
    decode.register("a", [1])
    decode.wait_done("a")
    assert decode.receiver.sizes() == {
        "peers": 1,
        "batches": 0,
        "active": 0,
        "requests": 0,
        "ended": 1,
    }
    decode.receiver.close()
    with pytest.raises(ReceiverClosedError):
        decode.receiver.sizes()
