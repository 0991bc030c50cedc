"""Each pair of versions talks, in both directions, and only what a version lacks is lost."""

from typing import TypeGuard

import msgspec
import pytest

from rd2h.wire import (
    MINIMUM_VERSION,
    PROTOCOL_VERSION,
    LayerMetadata,
    Message,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    UnencodableMessageError,
    UnsupportedVersionError,
    decode,
    encode,
)
from tests.compat.vectors import VECTORS, Vector

VERSIONS = range(MINIMUM_VERSION, PROTOCOL_VERSION + 1)

# Messages that say nothing a version could lack: every later field holds its default.
PLAIN: list[Message] = [
    MfMeta("host", {"layer.0": LayerMetadata([0, 64], [8, 4])}),
    MfMetaAck(),
    ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1, 2]), ReadRequest("b", [])]),
    ReadDone(7),
    ReadFailed(7),
]


@pytest.mark.parametrize("message", PLAIN, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_plain_message_reaches_every_version(message: Message, version: int) -> None:
    assert decode(encode(message, version)) == message


# Readers of older versions, written down by hand: they know these fields and no others.


class RequestV1(msgspec.Struct, array_like=True):
    ext_id: str
    main_block_ids: list[int]


class BatchV1(msgspec.Struct, array_like=True):
    tag: bytes
    layer_idx: int
    layer_name: str
    read_reqs: list[RequestV1]


class LayerV1(msgspec.Struct):
    base_addrs: list[int]
    block_len: list[int]


class RequestV2(msgspec.Struct, array_like=True):
    ext_id: str
    main_block_ids: list[int]
    indexer_block_ids: list[int]
    main_start_block: int
    indexer_start_block: int


class BatchV2(msgspec.Struct, array_like=True):
    tag: bytes
    layer_idx: int
    layer_name: str
    read_reqs: list[RequestV2]
    done_ext_ids: list[str]


class ReplyV1(msgspec.Struct, array_like=True):
    tag: bytes
    layer_idx: int


class MetaFrame(msgspec.Struct, array_like=True):
    tag: bytes
    session: str
    layers: bytes


def known_to(reader: object, message: object) -> None:
    """Assert that ``reader`` holds, for every field it has, what ``message`` says."""
    assert isinstance(reader, msgspec.Struct)
    for name in reader.__struct_fields__:
        if name == "tag":
            continue
        theirs, ours = getattr(reader, name), getattr(message, name)
        if name == "read_reqs":
            for one, other in zip(theirs, ours, strict=True):
                known_to(one, other)
        else:
            assert theirs == ours


@pytest.mark.parametrize(
    ("writer", "batch_reader"),
    [(3, BatchV1), (3, BatchV2), (2, BatchV1), (2, BatchV2), (1, BatchV1)],
)
@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v.message == "ReadReadyBatch"], ids=lambda v: v.id
)
def test_a_batch_is_read_by_a_reader_of_an_older_version(
    vector: Vector, writer: int, batch_reader: type[BatchV1 | BatchV2]
) -> None:
    message = vector.build()
    try:
        payload = encode(message, writer)
    except UnencodableMessageError:
        # It says something that `writer` has no words for; a peer of that version could not.
        assert writer < vector.protocol_version
        return
    known_to(msgspec.msgpack.decode(payload, type=batch_reader), message)


@pytest.mark.parametrize("writer", VERSIONS)
@pytest.mark.parametrize("message", [ReadDone(7), ReadFailed(7, "why")], ids=["done", "failed"])
def test_a_reply_is_read_by_a_reader_of_version_1(
    message: ReadDone | ReadFailed, writer: int
) -> None:
    known_to(msgspec.msgpack.decode(encode(message, writer), type=ReplyV1), message)


@pytest.mark.parametrize("writer", VERSIONS)
def test_the_acknowledgement_is_the_same_in_every_version(writer: int) -> None:
    assert encode(MfMetaAck(), writer) == b"ACK"


@pytest.mark.parametrize("writer", [2, 3])
@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v.message == "MfMeta"], ids=lambda v: v.id
)
def test_metadata_is_read_by_a_reader_of_version_1(vector: Vector, writer: int) -> None:
    message = vector.build()
    assert isinstance(message, MfMeta)
    frame = msgspec.msgpack.decode(encode(message, writer), type=MetaFrame)
    layers = msgspec.msgpack.decode(frame.layers, type=dict[str, LayerV1])
    assert frame.session == message.session
    assert layers.keys() == message.layers.keys()
    for name, layer in layers.items():
        known_to(layer, message.layers[name])


@pytest.mark.parametrize("writer", VERSIONS)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)
def test_an_older_writer_is_read_with_the_defaults_of_what_it_lacks(
    vector: Vector, writer: int
) -> None:
    message = vector.build()
    try:
        payload = encode(message, writer)
    except UnencodableMessageError:
        # It says something that `writer` has no words for; a peer of that version could not.
        assert writer < vector.protocol_version
        return
    back = decode(payload)
    assert back == (ReadFailed(message.layer_idx) if dropped(message, writer) else message)


def dropped(message: Message, version: int) -> TypeGuard[ReadFailed]:
    return isinstance(message, ReadFailed) and version == 1


@pytest.mark.parametrize(
    ("message", "version", "path"),
    [
        (ReadReadyBatch(0, "l", [], tp_ratio=4), 2, "$[6]"),
        (ReadReadyBatch(0, "l", [], group_member_idx=1, tp_ratio=2), 2, "$[5]"),
        (ReadReadyBatch(0, "l", [], done_ext_ids=["a"]), 1, "$[4]"),
        (ReadReadyBatch(0, "l", [ReadRequest("a", [1], [2])]), 1, "$[3][0][2]"),
        (ReadReadyBatch(0, "l", [ReadRequest("a", [1], [])]), 1, "$[3][0][2]"),
        (ReadReadyBatch(0, "l", [ReadRequest("a", [1], [1], 3)]), 1, "$[3][0][3]"),
        (ReadReadyBatch(0, "l", [ReadRequest("a", [1], [1], 0, 3)]), 1, "$[3][0][4]"),
        (MfMeta("s", {"l.0": LayerMetadata([1], [1], [2], [0], 1)}), 1, '$[2]["l.0"]'),
        (MfMeta("s", {"l.0": LayerMetadata([1, 2], [1, 1], [1, 2])}), 1, '$[2]["l.0"].block_size'),
        (
            MfMeta("s", {"l.0": LayerMetadata([1, 2, 3], [1, 1, 1], has_indexer=False)}),
            1,
            "indexer",
        ),
    ],
)
def test_what_a_version_lacks_is_not_dropped_in_silence(
    message: Message, version: int, path: str
) -> None:
    with pytest.raises(UnencodableMessageError) as caught:
        encode(message, version)
    assert path in caught.value.path
    assert decode(encode(message)) == message


def test_the_error_says_what_the_peer_would_have_understood() -> None:
    with pytest.raises(
        UnencodableMessageError,
        match=r"version 2 cannot carry 4: the peer would read 1 \(at \$\[6\]",
    ):
        encode(ReadReadyBatch(0, "l", [], tp_ratio=4), 2)


def test_the_text_of_a_failure_may_be_dropped() -> None:
    assert decode(encode(ReadFailed(9, "engine error"), 1)) == ReadFailed(9, "")


@pytest.mark.parametrize("version", [MINIMUM_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_version_that_nobody_speaks_is_refused(version: int) -> None:
    with pytest.raises(UnsupportedVersionError, match=f"version {version} is not in 1 to 3"):
        encode(ReadDone(0), version)


def test_fields_of_a_newer_peer_are_ignored() -> None:
    newer: list[tuple[object, Message]] = [
        ((b"read_done", 3, "new", {"x": [1]}), ReadDone(3)),
        ((b"read_failed", 3, "why", None), ReadFailed(3, "why")),
        (
            (b"read_ready_batch", 0, "l", [("a", [1], [2], 0, 0, "new")], [], 0, 1, 2.5),
            ReadReadyBatch(0, "l", [ReadRequest("a", [1], [2])]),
        ),
        (
            (
                b"mf_meta",
                "s",
                msgspec.msgpack.encode(
                    {"l": {"new": {"deep": [None]}, "base_addrs": [1, 2], "block_len": [3, 4]}}
                ),
                b"new",
            ),
            MfMeta("s", {"l": LayerMetadata([1, 2], [3, 4])}),
        ),
    ]
    for elements, message in newer:
        assert decode(msgspec.msgpack.encode(elements)) == message
