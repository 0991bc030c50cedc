"""Every golden frame, both ways: bytes to message, and message to the same bytes."""

import pytest

from rd2h.wire import MINIMUM_VERSION, PROTOCOL_VERSION, ReadReadyBatch, decode, encode
from tests.compat.vectors import VECTORS, Vector

by_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)


def test_there_are_frames_of_every_version_and_message() -> None:
    assert {v.protocol_version for v in VECTORS} == {*range(MINIMUM_VERSION, PROTOCOL_VERSION + 1)}
    assert {v.message for v in VECTORS} == {
        "MfMeta",
        "MfMetaAck",
        "ReadDone",
        "ReadFailed",
        "ReadReadyBatch",
    }


@by_vector
def test_the_bytes_read_as_the_message(vector: Vector) -> None:
    assert decode(vector.payload) == vector.build()


@by_vector
def test_the_message_is_written_as_the_bytes(vector: Vector) -> None:
    assert encode(vector.build(), vector.protocol_version) == vector.payload


@by_vector
def test_what_was_read_is_written_as_it_came(vector: Vector) -> None:
    assert encode(decode(vector.payload), vector.protocol_version) == vector.payload


@by_vector
def test_any_buffer_is_read(vector: Vector) -> None:
    assert decode(bytearray(vector.payload)) == decode(memoryview(vector.payload)) == vector.build()


@by_vector
def test_frames_are_the_payload_with_empty_delimiters_only(vector: Vector) -> None:
    frames = [bytes.fromhex(frame) for frame in vector.zmq_frames_hex]
    assert [frame for frame in frames if frame] == [vector.payload]


def test_a_version_1_batch_means_what_it_meant() -> None:
    vector = next(v for v in VECTORS if v.name == "read_ready.two_field_entry_shared_blocks")
    batch = decode(vector.payload)
    assert isinstance(batch, ReadReadyBatch)
    (request,) = batch.read_reqs
    assert request.indexer_block_ids == request.main_block_ids == [3, 1, 2]
    assert (request.main_start_block, request.indexer_start_block) == (0, 0)
    assert (batch.done_ext_ids, batch.group_member_idx, batch.tp_ratio) == ([], 0, 1)
