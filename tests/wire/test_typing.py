"""The public surface as a type checker sees it; ``mypy --strict`` runs over this file."""

from typing import assert_never, assert_type

import rd2h.wire
from rd2h.wire import (
    Advertisement,
    DecodeMessage,
    LayerMetadata,
    Message,
    MfMeta,
    MfMetaAck,
    PrefillMessage,
    PrefillParams,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    decode,
    encode,
)


def direction(message: Message) -> str:
    """The checker must find this match exhaustive."""
    match message:
        case MfMeta() | ReadReadyBatch():
            assert_type(message, PrefillMessage)
            return "P to D"
        case MfMetaAck() | ReadDone() | ReadFailed():
            assert_type(message, DecodeMessage)
            return "D to P"
        case _:
            assert_never(message)


def test_types_are_what_they_say() -> None:
    message = decode(encode(ReadReadyBatch(0, "l", [ReadRequest("a", [1])])))
    assert_type(message, Message)
    assert_type(encode(message), bytes)
    assert direction(message) == "P to D"
    assert isinstance(message, ReadReadyBatch)
    assert_type(message.read_reqs, list[ReadRequest])
    assert_type(message.read_reqs[0].indexer_block_ids, list[int])
    layer = LayerMetadata([1], [2])
    assert_type(layer.block_size_scale, list[int])
    assert_type(layer.has_indexer, bool)


def test_parameters_are_read_as_their_own_type() -> None:
    fields: dict[str, object] = {
        "request_id": "a",
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 1,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }
    params = PrefillParams.from_params(fields)
    assert_type(params, PrefillParams)
    assert_type(params.batch_kv_transfer_params, dict[str, Advertisement])


def test_everything_public_is_there() -> None:
    assert sorted(rd2h.wire.__all__) == sorted(set(rd2h.wire.__all__))
    assert all(hasattr(rd2h.wire, name) for name in rd2h.wire.__all__)
