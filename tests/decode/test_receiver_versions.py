"""The receiver and Prefills of every protocol version, on a real socket, frame by frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from rd2h.decode import Outcome, ReceiverOptions
from rd2h.wire import (
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    decode,
    encode,
)
from tests.compat.vectors import VECTORS, Vector
from tests.transfer.caches import TWO_LAYERS, Cache, Shape
from tests.transfer.ranks import Decode, Site, ask, batch, make_site
from tests.transfer.scripted import ScriptedPrefill


class Recorder:
    """A transfer engine that only writes down what it is asked to read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sessions: set[str] = set()
        self.remote: dict[int, int] = {}  # address -> bytes

    def read(
        self,
        session: str,
        local_addrs: NDArray[np.uint64],
        remote_addrs: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        with self._lock:
            self.sessions.add(session)
            assert len(local_addrs) == len(remote_addrs)
            self.remote.update(zip(remote_addrs.tolist(), lengths.tolist(), strict=True))

    def forget(self, session: str) -> None:
        del session


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


def golden(version: int, message: str) -> list[Vector]:
    return [v for v in VECTORS if (v.protocol_version, v.message) == (version, message)]


def replay(prefill: ScriptedPrefill, vector: Vector) -> list[bytes]:
    """Send a golden frame as it is; return the frames of the answer as they are."""
    prefill.socket.send_multipart([bytes.fromhex(frame) for frame in vector.zmq_frames_hex])
    while (frames := prefill.frames()) == [b""]:
        pass
    return frames


def golden_decode(
    site: Site, version: int, options: ReceiverOptions | None = None
) -> tuple[Decode, Recorder]:
    """A Decode whose layers are those of a golden MfMeta."""
    meta = golden(version, "MfMeta")[0].build()
    assert isinstance(meta, MfMeta)
    shapes = {}
    for name, layer in meta.layers.items():
        sizes = [a * b for a, b in zip(layer.block_len, layer.block_size_scale, strict=True)]
        indexed = [*sizes[2:], None, None]
        shapes[name] = Shape((sizes[0], sizes[1]), indexed[0], indexed[1], blocks=16)
    recorder = Recorder()
    return site.decode(shapes, options, reader=recorder), recorder


ACK_FRAMES = [bytes.fromhex(f) for f in golden(3, "MfMetaAck")[0].zmq_frames_hex]
DONE_FRAMES = [bytes.fromhex(f) for f in golden(3, "ReadDone")[0].zmq_frames_hex]


@pytest.mark.parametrize("version", [2, 3])
def test_golden_prefill_is_answered_in_golden_form(site: Site, version: int) -> None:
    receiver, recorder = golden_decode(site, version)
    prefill = site.scripted_prefill(receiver.endpoint)
    (greeting,) = golden(version, "MfMeta")
    meta = greeting.build()
    assert isinstance(meta, MfMeta)
    assert replay(prefill, greeting) == ACK_FRAMES
    ids = {"cmpl-aaaa-0", "cmpl-bbbb-0", "chatcmpl-cccc", "cmpl-dddd-0", "cmpl-eeee-0"}
    starts = {"cmpl-bbbb-0": 3, "chatcmpl-cccc": 13}
    for ext_id in ids:
        # Requests that share a batch have blocks of their own.
        first = starts.get(ext_id, 0)
        receiver.register(
            ext_id, range(first, min(first + 10, 16)), range(first, min(first + 10, 16))
        )
    for vector in golden(version, "ReadReadyBatch"):
        message = vector.build()
        assert isinstance(message, ReadReadyBatch)
        recorder.remote.clear()
        frames = replay(prefill, vector)
        assert decode(frames[1]) == ReadDone(message.layer_idx), vector.id
        assert frames[0] == b""
        if message.layer_idx == 0:
            assert frames == DONE_FRAMES
        if vector.name == "read_ready.one_request_first_layer":
            # Blocks 7 to 9 are neighbours, 300 and 70000 are not.
            layer = meta.layers[message.layer_name]
            expected = {}
            for index, ids_of in enumerate(([7, 300], [7, 300], [17, 70000])):
                size = layer.block_len[index]
                for block, count in zip(ids_of, (3, 1), strict=True):
                    expected[layer.base_addrs[index] + block * size] = count * size
            assert recorder.remote == expected
    assert recorder.sessions == {meta.session}
    receiver.wait_done("cmpl-aaaa-0", "chatcmpl-cccc")
    assert receiver.receiver.take_finished() == []  # others lack contributors or the last chunk
    prefill.socket.close(0)
    ended = {finished.ext_id for finished in receiver.wait("cmpl-bbbb-0")}
    assert ended == {"cmpl-bbbb-0"}


def test_golden_version_1_frames(site: Site) -> None:
    receiver, _ = golden_decode(site, 1)
    prefill = site.scripted_prefill(receiver.endpoint)
    assert replay(prefill, golden(1, "MfMeta")[0]) == ACK_FRAMES
    shared, empty = golden(1, "ReadReadyBatch")
    if not shared.fields["read_reqs"]:
        shared, empty = empty, shared
    assert replay(prefill, empty) == DONE_FRAMES
    receiver.register("cmpl-a-0", [0, 1, 2])
    answer = decode(replay(prefill, shared)[1])  # of a layer that its metadata lacks
    assert isinstance(answer, ReadFailed)
    assert "model.layers.4.self_attn.attn" in answer.error


@pytest.mark.parametrize("version", [1, 2, 3])
def test_whole_exchange_with_a_prefill_of_each_version(site: Site, version: int) -> None:
    options = ReceiverOptions(idle_timeout=0.2) if version == 1 else None
    receiver, source = site.decode(options=options), Cache(TWO_LAYERS)
    prefill = site.scripted_prefill(receiver.endpoint)
    layers = {name: layout.to_wire() for name, layout in source.layouts.items()}
    prefill.say(encode(MfMeta(site.engine(source).session, layers), version))
    assert prefill.hear() == MfMetaAck()
    receiver.register("a", [9, 4])
    for layer in range(2):
        # What version 1 cannot say: which request is done, and separate indexer ids.
        if version == 1:
            frame = encode(ReadReadyBatch(layer, f"layer.{layer}", [ReadRequest("a", [1, 2])]), 1)
        else:
            frame = encode(batch(layer, [ask("a", [1, 2])], ["a"] if layer else []), version)
        prefill.say(frame)
        assert prefill.hear() == ReadDone(layer)
        assert receiver.has_read(source, layer, {9: 1, 4: 2})
    (finished,) = receiver.wait("a")
    if version == 1:
        # Nobody ever says that it is complete, so all that is left is the deadline.
        assert finished.outcome is Outcome.FAILED
        assert "waited 0.2 s for a batch" in finished.reason
    else:
        assert finished.outcome is Outcome.DONE


def test_newer_prefill_is_understood_as_far_as_it_can_be(site: Site) -> None:
    """Unknown trailing fields are ignored, in messages and in their entries."""
    receiver, source = site.decode(), Cache(TWO_LAYERS)
    prefill = site.scripted_prefill(receiver.endpoint)
    prefill.greet(site.engine(source).session, source)
    receiver.register("a", [9])
    frame = encode(batch(1, [ask("a", [1])], ["a"]))
    assert frame[0] == 0x97  # an array of seven
    prefill.say(b"\x99" + frame[1:] + b"\xc0\xa6newest")
    assert prefill.hear() == ReadDone(1)
    receiver.wait_done("a")
    assert receiver.has_read(source, 1, {9: 1})
