"""The sender against a scripted Decode on a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rd2h.layout import LayerLayout, LayoutError, TensorLayout
from rd2h.prefill import (
    LayerSendError,
    LayerTask,
    Sender,
    SenderBrokenError,
    SenderClosedError,
    SenderOptions,
    WaitTimeoutError,
)
from rd2h.prefill import loop as loop_module
from rd2h.prefill import sender as sender_module
from rd2h.wire import (
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    UnencodableMessageError,
    encode,
)
from tests.compat.vectors import VECTORS, Vector
from tests.prefill.meeting import RAISING, is_shut, meet
from tests.transfer.caches import (
    PATIENCE,
    TWO_LAYERS,
    Cache,
    Shape,
    descriptors,
    eventually,
    threads,
)
from tests.transfer.ranks import PATIENT, Log, Site, ask, batch, make_site
from tests.transfer.scripted import garbage


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


class Event:
    """A device event that a test records, or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached = threading.Event()
        self.ready = threading.Event()
        self.error = error

    def synchronize(self) -> None:
        self.reached.set()
        self.ready.wait(PATIENCE)
        if self.error is not None:
            raise self.error


# ---------------------------------------------------------------------------------- handshake


def test_handshake_comes_once_and_no_batch_before_its_ack(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    prefill.submit(0, decode.endpoint, ask("a", [1]))
    peer, meta = decode.hear()
    layers = {name: layout.to_wire() for name, layout in prefill.cache.layouts.items()}
    assert meta == MfMeta(prefill.engine.session, layers)
    prefill.submit(1, decode.endpoint, ask("a", [1]), done=["a"])
    decode.say(peer, ReadDone(0), b"nothing that could be taken for an ack")
    assert is_shut(prefill, 0)
    assert not decode.socket.poll(0)
    decode.say(peer, MfMetaAck())
    assert decode.hear_batch()[1].layer_idx == 0
    assert decode.hear_batch()[1].layer_idx == 1
    decode.say(peer, ReadDone(1), ReadDone(0))
    prefill.sender.drain()
    prefill.submit(0, decode.endpoint, ask("b", [1]))
    assert decode.hear_batch()[0] == peer


def test_gates_are_shut_when_submit_returns_and_open_with_the_last_answer(site: Site) -> None:
    cache = Cache({"layer.0": Shape(), "layer.1": Shape()}, reuse={"layer.1": "layer.0"})
    prefill = site.prefill(cache=cache, options=PATIENT)
    first, second = site.scripted_decode(), site.scripted_decode()
    prefill.submit(0, [first.endpoint, second.endpoint], ask("a", [1]))
    assert is_shut(prefill, 0)
    assert is_shut(prefill, 1)  # it lies in the same memory
    for decode, shut in ((first, True), (second, False)):
        peer, _ = decode.greet()
        decode.hear_batch()
        decode.say(peer, ReadDone(0))
        if shut:
            assert is_shut(prefill, 1)
    prefill.sender.wait("layer.1")


def test_a_step_waits_for_whoever_reads_a_block_that_it_writes(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    prefill.submit(0, decode.endpoint, ask("a", [1, 2]))
    prefill.submit(1, decode.endpoint, ask("a", [1, 2]))
    assert prefill.sender.wait_blocks(frozenset([3]), 0.0) == 0.0
    with pytest.raises(WaitTimeoutError, match="a step that writes 2 blocks waited"):
        prefill.sender.wait_blocks(frozenset([2, 3]), 0.0)
    peer, _ = decode.greet()
    decode.hear_batch()
    decode.say(peer, ReadDone(0))
    prefill.sender.wait("layer.0")
    with pytest.raises(WaitTimeoutError, match=r"layer\.1 at"):
        prefill.sender.wait_blocks(frozenset([1]), 0.0)
    decode.hear_batch()
    decode.say(peer, ReadDone(1))
    before = prefill.sender.stats.gate_wait
    waited = prefill.sender.wait_blocks(frozenset([1]))
    assert prefill.sender.stats.gate_wait == before + waited


def test_unknown_layer_is_refused_and_shuts_nothing(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    with pytest.raises(LayoutError, match=r"layer\.7"):
        prefill.submit(7, decode.endpoint, ask("a", [1]))
    assert prefill.sender.drain() == 0.0


@pytest.mark.parametrize("fault", ["request", "done", "layer", "type"])
@pytest.mark.parametrize("options", [PATIENT, RAISING], ids=lambda options: options.failure_policy)
def test_batch_that_cannot_be_encoded_is_refused_and_shuts_nothing(
    site: Site, options: SenderOptions, fault: str
) -> None:
    prefill, decode = site.prefill(options=options), site.scripted_decode()
    other = site.scripted_decode()
    peer = meet(prefill, decode)
    bad = {
        "request": batch(1, [ask("a\ud800", [1])]),
        "done": batch(1, [ask("a", [1])], done=["\udfff"]),
        "layer": batch(1, [ask("a", [1])], name="layer.\ud800"),
        "type": batch(1, [ask("a", [-1])]),
    }[fault]
    # Not even what could be announced to others is, or there would be no saying what was.
    batches = {other.endpoint: batch(1, [ask("a", [1])]), decode.endpoint: bad}
    before = replace(prefill.sender.stats)
    with pytest.raises(UnencodableMessageError):
        prefill.sender.submit(LayerTask("layer.1", batches))
    assert prefill.sender.stats == before
    assert not is_shut(prefill, 1)
    assert prefill.sender.sizes()["queued"] == 0
    prefill.submit(1, decode.endpoint, ask("a", [1]))
    assert decode.hear_batch() == (peer, batch(1, [ask("a", [1])]))
    decode.say(peer, ReadDone(0), ReadDone(1))
    prefill.sender.drain()


@pytest.mark.parametrize(("session", "layer"), [("s\ud800", "layer.0"), ("s", "layer.\ud800")])
def test_sender_whose_handshake_cannot_be_encoded_is_refused(session: str, layer: str) -> None:
    before = descriptors()
    with pytest.raises(UnencodableMessageError):
        Sender(session, {layer: LayerLayout(layer, (TensorLayout(4096, 64, 1, 8),))})
    assert not threads()
    assert descriptors() <= before


def test_batch_is_encoded_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    peer = meet(prefill, decode)
    decode.say(peer, ReadDone(0))
    encoded: list[str] = []

    def counting(message: ReadReadyBatch) -> bytes:
        encoded.append(threading.current_thread().name)
        return encode(message)

    for module in (sender_module, loop_module):
        monkeypatch.setattr(module, "encode_message", counting)
    for layer in (0, 1):
        prefill.submit(layer, decode.endpoint, ask("a", [1]))
        decode.hear_batch()
        decode.say(peer, ReadDone(layer))
    prefill.sender.drain()
    assert encoded == [threading.current_thread().name] * 2


# -------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS if v.message in ("ReadDone", "ReadFailed")],
    ids=lambda vector: vector.id,
)
def test_replies_of_every_version_open_the_gate(site: Site, vector: Vector) -> None:
    prefill = site.prefill({f"layer.{i}": Shape(blocks=2) for i in range(10)}, RAISING)
    decode = site.scripted_decode()
    layer = int(vector.fields["layer_idx"])
    prefill.submit(layer, decode.endpoint, ask("a", [1]))
    peer, _ = decode.hear()
    ack = next(v for v in VECTORS if v.message == "MfMetaAck")
    decode.socket.send_multipart([peer, *map(bytes.fromhex, ack.zmq_frames_hex)])
    decode.hear_batch()
    assert is_shut(prefill, layer)
    decode.socket.send_multipart([peer, *map(bytes.fromhex, vector.zmq_frames_hex)])
    if vector.message == "ReadDone":
        prefill.sender.wait(f"layer.{layer}")
        return
    with pytest.raises(LayerSendError) as caught:
        prefill.sender.wait(f"layer.{layer}")
    error = caught.value
    assert (error.layer_names, error.endpoint) == ((f"layer.{layer}",), decode.endpoint)
    assert error.ext_ids == ("a",)
    assert error.reason == vector.fields.get("error", "Decode gave no reason")
    assert not is_shut(prefill, layer)


def test_frames_are_those_of_the_golden_peer(site: Site) -> None:
    golden = [v for v in VECTORS if v.protocol_version == 3 and v.direction == "prefill->decode"]
    meta = next(v for v in golden if v.message == "MfMeta")
    message = meta.build()
    assert isinstance(message, MfMeta)
    layouts = {}
    for name, layer in message.layers.items():
        tensors = [
            TensorLayout(address, length, scale, 1)
            for address, length, scale in zip(
                layer.base_addrs, layer.block_len, layer.block_size_scale, strict=True
            )
        ]
        layouts[name] = LayerLayout(name, tuple(tensors[:2]), *tensors[2:])
    decode = site.scripted_decode()
    sender = Sender(message.session, layouts, PATIENT)
    site.stack.callback(sender.close)
    for vector in golden:
        if vector is meta:
            continue
        announced = vector.build()
        assert isinstance(announced, ReadReadyBatch)
        sender.submit(LayerTask(announced.layer_name, {decode.endpoint: announced}))
        if vector is golden[1]:
            peer, *frames = decode.frames()
            assert frames == [bytes.fromhex(frame) for frame in meta.zmq_frames_hex]
            decode.say(peer, MfMetaAck())
        peer, *frames = decode.frames()
        assert frames == [bytes.fromhex(frame) for frame in vector.zmq_frames_hex]
        decode.say(peer, ReadDone(announced.layer_idx))
    sender.drain()


# ------------------------------------------------------------------------------------ garbage


def test_garbage_changes_nothing_and_then_a_good_exchange_works(site: Site) -> None:
    prefill, decode = site.prefill(options=RAISING), site.scripted_decode()
    prefill.submit(0, decode.endpoint, ask("a", [1]))
    peer, _ = decode.hear()
    with Log() as log:
        for _ in range(2):  # before the handshake is over, and afterwards
            for frames in garbage(np.random.default_rng(2)):
                decode.socket.send_multipart([peer, *frames])
            decode.say(peer, MfMeta("s", {}), batch(0, [ask("a", [1])]))
            decode.say(peer, ReadDone(1), ReadFailed(77, "x"), ReadDone(2**64 - 1))
            decode.say(peer, MfMetaAck())
        decode.hear_batch()
        assert is_shut(prefill, 0)
        decode.say(peer, ReadDone(0))
        prefill.sender.drain()
    assert 1 <= len(log.lines) <= 15
    assert log.size < 10_000
    prefill.submit(1, decode.endpoint, ask("a", [1]))
    decode.hear_batch()
    decode.say(peer, ReadDone(1))
    prefill.sender.drain()


# -------------------------------------------------------------------------------------- events


def test_event_that_is_not_ready_holds_up_no_reply(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    peer = meet(prefill, decode)
    event = Event()
    prefill.submit(1, decode.endpoint, ask("a", [1]), event=event)
    assert event.reached.wait(PATIENCE)
    assert is_shut(prefill, 1)
    decode.say(peer, ReadDone(0))
    prefill.sender.wait("layer.0")
    assert not decode.socket.poll(0)  # what is not in memory is not announced
    event.ready.set()
    assert decode.hear_batch()[1].layer_idx == 1
    decode.say(peer, ReadDone(1))
    prefill.sender.drain()


def test_two_steps_in_flight_have_an_event_each(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    peer = meet(prefill, decode)
    decode.say(peer, ReadDone(0))
    prefill.sender.drain()
    first, second = Event(), Event()
    for step, event in enumerate((first, second)):
        prefill.submit(0, decode.endpoint, ask("a", [10 + step]), event=event)
    prefill.submit(1, decode.endpoint, ask("a", [20]))  # and one without keeps its place
    second.ready.set()
    assert first.reached.wait(PATIENCE)
    assert not second.reached.is_set()
    assert not decode.socket.poll(0)
    first.ready.set()
    heard = [decode.hear_batch()[1].read_reqs[0].main_block_ids for _ in range(3)]
    assert heard == [[10], [11], [20]]
    decode.say(peer, ReadDone(0))
    decode.say(peer, ReadDone(1))
    prefill.sender.wait("layer.1")
    assert is_shut(prefill, 0)  # one of two answers
    decode.say(peer, ReadDone(0))
    prefill.sender.wait("layer.0")


def test_request_is_not_forgotten_before_its_layers_are_announced(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    peer = meet(prefill, decode)
    decode.say(peer, ReadDone(0))
    prefill.sender.drain()
    event = Event()
    prefill.submit(1, decode.endpoint, ask("b", [1]), event=event)
    assert event.reached.wait(PATIENCE)
    prefill.sender.forget("a")
    prefill.sender.forget("b")
    assert prefill.sender.sizes()["open_requests"] == 1
    event.ready.set()
    decode.hear_batch()
    decode.say(peer, ReadDone(1))
    prefill.sender.drain()
    eventually(lambda: set(prefill.sender.sizes().values()) == {0}, "the request to be forgotten")


@pytest.mark.parametrize("options", [PATIENT, RAISING], ids=lambda options: options.failure_policy)
def test_event_that_fails_breaks_the_sender_whatever_the_policy(
    site: Site, options: SenderOptions
) -> None:
    prefill, decode = site.prefill(options=options), site.scripted_decode()
    meet(prefill, decode)
    event = Event(RuntimeError("device lost"))
    event.ready.set()
    with Log():
        prefill.submit(1, decode.endpoint, ask("a", [1]), event=event)
        for _ in range(2):
            for call in (
                lambda: prefill.sender.wait("layer.0"),
                prefill.sender.drain,
                lambda: prefill.submit(1, decode.endpoint, ask("a", [1])),
                lambda: prefill.sender.forget("a"),
            ):
                with pytest.raises(SenderBrokenError, match="device lost") as caught:
                    call()
                assert isinstance(caught.value.__cause__, RuntimeError)


# ------------------------------------------------------------------------------------- closing


def test_close_names_the_thread_of_an_event_that_never_comes(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    event = Event()
    prefill.submit(0, decode.endpoint, ask("a", [1]), event=event)
    assert event.reached.wait(PATIENCE)
    with pytest.raises(TimeoutError, match=r"^rd2h-events did not end within 0.1 s"):
        prefill.sender.close(0.1)
    event.ready.set()
    prefill.sender.close()


def test_closed_sender_says_so_and_leaves_nothing(site: Site) -> None:
    site.prefill().sender.close()  # whatever is opened once only
    decode = site.scripted_decode()
    before = descriptors()
    for _ in range(3):
        prefill = site.prefill(options=PATIENT)
        meet(prefill, decode)
        prefill.submit(1, decode.endpoint, ask("a", [1]))
        decode.hear_batch()
        start = time.monotonic()
        prefill.sender.close()
        prefill.sender.close()
        assert time.monotonic() - start < 5.0
        for call in (
            lambda: prefill.sender.wait("layer.0"),  # noqa: B023
            lambda: prefill.sender.drain(),  # noqa: B023
            lambda: prefill.submit(0, decode.endpoint),  # noqa: B023
            lambda: prefill.sender.forget("a"),  # noqa: B023
        ):
            with pytest.raises(SenderClosedError):
                call()
    assert not threads()
    eventually(lambda: descriptors() <= before, "the descriptors to be closed")


def test_layers_without_a_destination_need_no_connection(site: Site) -> None:
    prefill = site.prefill(TWO_LAYERS, PATIENT)
    prefill.submit(0, [], ask("a", [1]))
    assert prefill.sender.drain() == 0.0
    assert prefill.sender.stats.layers == 1
