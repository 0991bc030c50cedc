"""What a peer may send, and what this side may not."""

import uuid
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.wire import (
    LayerMetadata,
    MalformedMessageError,
    Message,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    UnencodableMessageError,
    UnknownMessageError,
    UnsupportedVersionError,
    WireError,
    decode,
    encode,
)

pack = msgspec.msgpack.encode

# ------------------------------------------------------------------------------ a peer's faults


def batch(**changed: object) -> bytes:
    """A well-formed batch with some elements replaced by whatever."""
    elements: dict[str, object] = {
        "tag": b"read_ready_batch",
        "layer_idx": 0,
        "layer_name": "layer.0",
        "read_reqs": [("a", [1, 2], [3], 0, 0), ("b", [4], [5], 1, 1)],
        "done_ext_ids": ["a"],
        "group_member_idx": 0,
        "tp_ratio": 1,
    }
    return pack(list((elements | changed).values()))


def metadata(layer: object, name: object = "layer.0") -> bytes:
    return pack((b"mf_meta", "session", pack({name: layer})))


LAYER: dict[str, object] = {
    "base_addrs": [4096, 8192, 12288],
    "block_len": [64, 32, 16],
    "block_size_scale": [1, 1, 1],
    "tensor_group_idx": [0, 0, 1],
    "main_tensor_count": 2,
    "has_indexer": True,
}

MALFORMED: dict[str, tuple[bytes, str, str]] = {
    # name: payload, path of the fault, part of the reason
    "empty payload": (b"", "$", "empty"),
    "not an array": (pack({"tag": b"read_done"}), "$", "Expected `array`, got `object`"),
    "a bare number": (b"\x07", "$", "Expected `array`, got `int`"),
    "no elements": (pack([]), "$", "at least length 1"),
    "cut short": (batch()[:-1], "$", "truncated"),
    "trailing bytes": (batch() + b"\x00", "$", "trailing"),
    "trailing bytes after the acknowledgement": (b"ACK\x00", "$", "array"),
    "half an acknowledgement": (b"AC", "$", "array"),
    "an invalid opcode": (b"\xc1", "$", "invalid"),
    "tag is str": (batch(tag="read_ready_batch"), "$[0]", "Expected `bytes`, got `str`"),
    "tag is null": (batch(tag=None), "$[0]", "Expected `bytes`, got `None`"),
    "missing element": (pack((b"read_ready_batch", 0)), "$", "at least length 4, got 2"),
    "missing only element": (pack((b"read_done",)), "$", "at least length 2, got 1"),
    "missing element of an entry": (batch(read_reqs=[("a",)]), "$[3][0]", "at least length 2"),
    "number as str": (batch(layer_idx="0"), "$[1]", "Expected `int`, got `str`"),
    "number as float": (batch(layer_idx=0.0), "$[1]", "Expected `int`, got `float`"),
    "number as bool": (batch(layer_idx=False), "$[1]", "Expected `int`, got `bool`"),
    "number as null": (batch(layer_idx=None), "$[1]", "Expected `int`, got `None`"),
    "number as extension": (
        batch(layer_idx=msgspec.msgpack.Ext(1, b"12345678")),
        "$[1]",
        "Expected `int`, got `ext`",
    ),
    "negative layer": (batch(layer_idx=-1), "$[1]", "`int` >= 0"),
    "negative id": (batch(read_reqs=[("a", [1, -2])]), "$[3][0][1][1]", "`int` >= 0"),
    "negative indexer id": (batch(read_reqs=[("a", [1], [-2])]), "$[3][0][2][0]", "`int` >= 0"),
    "negative start": (batch(read_reqs=[("a", [1], [2], -1)]), "$[3][0][3]", "`int` >= 0"),
    "id past 64 bits": (batch(read_reqs=[("a", [2.0**64])]), "$[3][0][1][0]", "got `float`"),
    "name as bytes": (batch(layer_name=b"layer.0"), "$[2]", "Expected `str`, got `bytes`"),
    "id list as bytes": (batch(read_reqs=[("a", b"\x01")]), "$[3][0][1]", "Expected `array`"),
    "id list as map": (batch(read_reqs=[("a", {})]), "$[3][0][1]", "Expected `array`"),
    "entry as map": (batch(read_reqs=[{}]), "$[3][0]", "Expected `array`"),
    "done id as number": (batch(done_ext_ids=[7]), "$[4][0]", "Expected `str`, got `int`"),
    "ratio of zero": (batch(tp_ratio=0), "$[6]", "`int` >= 1"),
    "member beyond the ratio": (
        batch(group_member_idx=4, tp_ratio=4),
        "$[5]",
        "4, but it must be below `tp_ratio`, 4",
    ),
    "text that is not UTF-8": (b"\x93\xc4\x0bread_failed\x00\xa1\xff", "$", "UTF-8"),
    "nested without end": (b"\x98" + batch()[1:] + b"\x91" * 100_000, "$", "recursion"),
    "a length of gigabytes": (b"\xdd\xff\xff\xff\xff", "$", "truncated"),
    "metadata as map": (pack((b"mf_meta", "s", {})), "$[2]", "Expected `bytes`, got `object`"),
    "metadata that is not msgpack": (pack((b"mf_meta", "s", b"\xc1")), "$[2]", "invalid"),
    "metadata that is empty": (pack((b"mf_meta", "s", b"")), "$[2]", "truncated"),
    "metadata with trailing bytes": (pack((b"mf_meta", "s", b"\x80\x00")), "$[2]", "trailing"),
    "metadata that is a list": (pack((b"mf_meta", "s", pack([]))), "$[2]", "Expected `object`"),
    "layer name as number": (metadata(LAYER, name=1), "$[2]", "Expected `str`, got `int`"),
    "layer twice": (
        pack((b"mf_meta", "s", b"\x82" + 2 * (pack("layer.0") + pack(LAYER)))),
        "$[2]",
        "a key twice",
    ),
    "layer twice in a long map": (
        pack((b"mf_meta", "s", b"\xde\x00\x02" + 2 * (pack("layer.0") + pack(LAYER)))),
        "$[2]",
        "a key twice",
    ),
    "layer as list": (metadata([]), '$[2]["layer.0"]', "Expected `object`, got `array`"),
    "missing addresses": (
        metadata({"block_len": [1]}),
        '$[2]["layer.0"]',
        "missing required field `base_addrs`",
    ),
    "address as str": (
        metadata(LAYER | {"base_addrs": [1, "2", 3]}),
        '$[2]["layer.0"].base_addrs[1]',
        "Expected `int`, got `str`",
    ),
    "negative address": (
        metadata(LAYER | {"base_addrs": [1, 2, -3]}),
        '$[2]["layer.0"].base_addrs[2]',
        "`int` >= 0",
    ),
    "flag as number": (
        metadata(LAYER | {"has_indexer": 1}),
        '$[2]["layer.0"].has_indexer',
        "Expected `bool`, got `int`",
    ),
    "lengths that differ": (
        metadata(LAYER | {"block_len": [64, 32]}),
        '$[2]["layer.0"].block_len',
        "2 items, but `base_addrs` has 3",
    ),
    "scales that differ": (
        metadata(LAYER | {"block_size_scale": [1] * 4}),
        '$[2]["layer.0"].block_size_scale',
        "4 items, but `base_addrs` has 3",
    ),
    "groups that differ": (
        metadata(LAYER | {"tensor_group_idx": []}),
        '$[2]["layer.0"].tensor_group_idx',
        "0 items, but `base_addrs` has 3",
    ),
    "more main tensors than tensors": (
        metadata(LAYER | {"main_tensor_count": 4}),
        '$[2]["layer.0"].main_tensor_count',
        "4, but `base_addrs` has only 3",
    ),
    "an indexer without a tensor": (
        metadata(LAYER | {"main_tensor_count": 3}),
        '$[2]["layer.0"].has_indexer',
        "true, but `base_addrs` has 3 items and `main_tensor_count` is 3",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_names_the_place(name: str) -> None:
    payload, path, reason = MALFORMED[name]
    with pytest.raises(MalformedMessageError) as caught:
        decode(payload)
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert str(caught.value) == f"{caught.value.reason} (at {path})"


def test_an_unknown_message_is_told_from_a_malformed_one() -> None:
    with pytest.raises(UnknownMessageError) as caught:
        decode(pack((b"read_soon", 1)))
    assert caught.value.path == "$[0]"
    assert "b'read_soon'; known: mf_meta, read_done" in caught.value.reason


def test_a_long_unknown_tag_does_not_fill_the_log() -> None:
    with pytest.raises(UnknownMessageError) as caught:
        decode(pack((b"x" * 1_000_000, 1)))
    assert len(str(caught.value)) < 200


def test_a_good_message_after_a_bad_one_is_read() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)
    assert decode(b"ACK") == MfMetaAck()


def test_another_form_of_the_same_value_is_read() -> None:
    """Long headers where short ones would do: valid msgpack of another library."""
    payload = b"\xdd\x00\x00\x00\x02" + b"\xc6\x00\x00\x00\x09read_done" + b"\xcd\x00\x07"
    assert decode(payload) == ReadDone(7)


def test_the_widest_numbers_are_read_as_they_are() -> None:
    top = 2**64 - 1
    message = ReadReadyBatch(top, "l", [ReadRequest("a", [top], [top], top, top)], [], 0, top)
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(payload: bytes) -> None:
    with pytest.raises(WireError):
        # No random payload of Hypothesis is a message: a tag is not found by luck.
        decode(b"\x00" + payload)
    try:
        decode(payload)
    except WireError as error:
        assert error.path.startswith("$")
        assert error.reason


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)
tags = st.sampled_from([b"mf_meta", b"read_ready_batch", b"read_done", b"read_failed"])


@given(tags, st.lists(json_like, max_size=7))
def test_a_known_tag_before_anything_never_raises_anything_else(
    tag: bytes, elements: list[object]
) -> None:
    payload = pack([tag, *elements])
    try:
        message = decode(payload)
    except WireError as error:
        assert error.path.startswith("$")
    else:
        assert decode(encode(message)) == message


# ------------------------------------------------------------------------------- our own faults


def wrong(value: object) -> Any:
    """A value of a type that the type checker would not let through. Any: that is the point."""
    return value


def request(*fields: object) -> ReadRequest:
    return ReadRequest(*cast("tuple[Any, ...]", fields))


def layer(**changed: object) -> dict[str, LayerMetadata]:
    return {"layer.0": LayerMetadata(**wrong(LAYER | changed))}


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)

UNENCODABLE: dict[str, tuple[Message, str, str]] = {
    "not a message": (wrong("ACK"), "$", "str is not a message"),
    "a part of a message": (wrong(request("a", [1])), "$", "ReadRequest is not a message"),
    "number as str": (ReadDone(wrong("1")), "$[1]", "got str"),
    "number as float": (ReadDone(wrong(1.0)), "$[1]", "got float"),
    "number as bool": (ReadDone(wrong(True)), "$[1]", "got bool"),
    "number as none": (ReadDone(wrong(None)), "$[1]", "got NoneType"),
    "negative": (ReadDone(-1), "$[1]", ">= 0"),
    "past 64 bits": (ReadDone(2**64), "$[1]", "2**64 - 1"),
    "far below zero": (ReadDone(-(2**64)), "$[1]", "2**63"),
    "id past 64 bits": (
        ReadReadyBatch(0, "l", [request("a", [1, 2**64], [])]),
        "$[3][0][1][1]",
        "18446744073709551616",
    ),
    "negative id": (ReadReadyBatch(0, "l", [request("a", [-1], [])]), "$[3][0][1][0]", ">= 0"),
    "text that is not Unicode": (ReadFailed(0, "\ud800"), "$[2]", "surrogates"),
    "text as bytes": (ReadFailed(0, wrong(b"why")), "$[2]", "got bytes"),
    "an object": (ReadFailed(0, wrong(object())), "$[2]", "object"),
    "requests as none": (ReadReadyBatch(0, "l", wrong(None)), "$[3]", "got NoneType"),
    "requests as number": (ReadReadyBatch(0, "l", wrong(5)), "$[3]", "got int"),
    "request as none": (ReadReadyBatch(0, "l", [wrong(None)]), "$[3][0]", "got NoneType"),
    "request as tuple": (
        ReadReadyBatch(0, "l", [wrong(("a", [1]))]),
        "$[3][0]",
        "expected ReadRequest, got tuple",
    ),
    "ids as tuple": (
        ReadReadyBatch(0, "l", [request("a", (1,), [1])]),
        "$[3][0][1]",
        "expected list, got tuple: (1,)",
    ),
    "member beyond the ratio": (ReadReadyBatch(0, "l", [], [], 2, 2), "$[5]", "below `tp_ratio`"),
    "ratio of zero": (ReadReadyBatch(0, "l", [], [], 0, 0), "$[6]", ">= 1"),
    "layers as none": (MfMeta("s", wrong(None)), "$[2]", "got NoneType"),
    "layers as list": (MfMeta("s", wrong([1])), "$[2]", "got list"),
    "layer name as number": (
        MfMeta("s", wrong({1: LayerMetadata([1], [1])})),
        '$[2]["1"]',
        "expected str, got int",
    ),
    "layer name that is not Unicode": (
        MfMeta("s", {"\ud800": LayerMetadata([1, 2], [1, 2])}),
        '$[2]["\\ud800"]',
        "surrogates",
    ),
    "text as something that msgpack turns into text": (
        ReadFailed(0, wrong(uuid.UUID(int=1))),
        "$[2]",
        "expected str, got UUID",
    ),
    "number of another library": (
        ReadReadyBatch(0, "l", [], [], wrong(np.int64(0))),
        "$[5]",
        "expected int, got int64",
    ),
    "flag as number": (
        MfMeta("s", {"layer.0": LayerMetadata([1, 2, 3], [1, 2, 3], has_indexer=wrong(1))}),
        '$[2]["layer.0"].has_indexer',
        "expected bool, got int",
    ),
    "done id as number": (ReadReadyBatch(0, "l", [], wrong([7])), "$[4][0]", "got int"),
    "an id as text": (ReadReadyBatch(0, "l", [request("a", ["1"], [])]), "$[3][0][1][0]", "`str`"),
    "an id as bool": (
        ReadReadyBatch(0, "l", [request("a", [True], [])]),
        "$[3][0][1][0]",
        "`bool`",
    ),
    "ids that hold themselves": (
        ReadReadyBatch(0, "l", [request("a", ENDLESS, [])]),
        "$",
        "recursion",
    ),
    "layer as none": (MfMeta("s", {"layer.0": wrong(None)}), '$[2]["layer.0"]', "got NoneType"),
    "address past 64 bits": (
        MfMeta("s", layer(base_addrs=[1, 2**64, 3])),
        '$[2]["layer.0"].base_addrs[1]',
        "18446744073709551616",
    ),
    "lengths that differ": (
        MfMeta("s", layer(block_len=[1])),
        '$[2]["layer.0"].block_len',
        "1 items, but `base_addrs` has 3",
    ),
    "an indexer without a tensor": (
        MfMeta("s", layer(main_tensor_count=3)),
        '$[2]["layer.0"].has_indexer',
        "true, but",
    ),
}


# Version 1 has no text of a failure, and may drop what it says (but it must be text).
CASES = [
    (name, version)
    for name in UNENCODABLE
    for version in (1, 2, 3)
    if version > 1 or name != "text that is not Unicode"
]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_a_bug_on_this_side_fails_here_and_not_at_the_peer(name: str, version: int) -> None:
    message, path, reason = UNENCODABLE[name]
    with pytest.raises(UnencodableMessageError) as caught:
        encode(message, version)
    if version < 3 and "cannot carry" in caught.value.reason:
        return  # it is in a field that this version lacks, and refused for that
    assert caught.value.path == path
    assert reason in caught.value.reason


@pytest.mark.parametrize("version", [wrong("1"), wrong(None), wrong(2.0), wrong(True), 0, 4, -1])
def test_a_version_is_one_of_the_numbers_that_are_spoken(version: int) -> None:
    with pytest.raises(UnsupportedVersionError, match="is not in 1 to 3"):
        encode(ReadDone(0), version)


ids = st.lists(st.integers(0, 2**64 - 1), max_size=8)
requests = st.builds(ReadRequest, st.text(), ids, ids, st.integers(0, 2**64 - 1), st.just(0))
layers = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        LayerMetadata,
        *[st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n)] * 4,
        main_tensor_count=st.integers(0, n - 1),
        has_indexer=st.booleans(),
    )
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(MfMeta, st.text(), st.dictionaries(st.text(), layers, max_size=20)),
    st.builds(MfMetaAck),
    st.integers(1, 64).flatmap(
        lambda ratio: st.builds(
            ReadReadyBatch,
            st.integers(0, 2**64 - 1),
            st.text(),
            st.lists(requests, max_size=4),
            st.lists(st.text()),
            st.integers(0, ratio - 1),
            st.just(ratio),
        )
    ),
    st.builds(ReadDone, st.integers(0, 2**64 - 1)),
    st.builds(ReadFailed, st.integers(0, 2**64 - 1), st.text()),
)


@given(messages, st.integers(1, 3))
def test_any_message_survives_the_wire_or_is_refused(message: Message, version: int) -> None:
    try:
        payload = encode(message, version)
    except UnencodableMessageError as error:
        # "Cannot carry", or the default that an older peer takes makes no sense in this message.
        assert version < 3
        assert error.path.startswith("$[")
        return
    back = decode(payload)
    assert back == message or (version == 1 and isinstance(message, ReadFailed))
    # What is written at a version is a fixed point of it.
    assert encode(back, version) == payload


@given(messages, st.data())
def test_any_message_that_was_cut_or_altered_is_read_or_refused(
    message: Message, data: st.DataObject
) -> None:
    payload = bytearray(encode(message))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    for altered in (payload, payload[:position]):
        try:
            decode(altered)
        except WireError as error:
            assert error.path.startswith("$")
