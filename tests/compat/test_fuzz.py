"""Golden frames, damaged: only WireError ever comes out of `decode`, and memory stays bounded."""

import random
import tracemalloc

import msgspec
import pytest

from rd2h.wire import WireError, decode, encode
from tests.compat.vectors import VECTORS, Vector

# Lengths that a header may claim, and opcodes that change what follows.
NASTY = [0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF]


def damaged(payload: bytes, random_: random.Random) -> bytes:
    """A frame with a few bytes changed, cut out, doubled, or put in."""
    frame = bytearray(payload)
    for _ in range(random_.randint(1, 4)):
        position = random_.randrange(len(frame) + 1)
        match random_.randrange(5):
            case 0 if position < len(frame):
                frame[position] = random_.randrange(256)
            case 1 if position < len(frame):
                frame[position] = random_.choice(NASTY)
            case 2:
                del frame[position : position + random_.randint(1, 8)]
            case 3:
                frame[position:position] = frame[position : position + random_.randint(1, 8)]
            case _:
                frame[position:position] = random_.randbytes(random_.randint(1, 8))
    return bytes(frame)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)
def test_a_damaged_frame_is_read_or_refused(vector: Vector) -> None:
    payload = vector.payload
    random_ = random.Random(payload)
    for _ in range(1000):
        frame = damaged(payload, random_)
        try:
            message = decode(frame)
        except WireError as error:
            assert error.path.startswith("$")
            assert error.reason
        else:
            assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\x92\xc6\xff\xff\xff\xff",  # a tag of 4 GB
        b"\x95\xc4\x10read_ready_batch\x00\xa1l\xdd\xff\xff\xff\xff",
        b"\x95\xc4\x10read_ready_batch\x00\xa1l\x91\x92\xa1a\xdd\xff\xff\xff\xff\x01",
        b"\x93\xc4\x07mf_meta\xa1s\xc4\x05\xdf\xff\xff\xff\xff",
        b"\x93\xc4\x0bread_failed\x00\xdb\xff\xff\xff\xff",
        b"\x91" * 1_000_000,
    ],
)
def test_a_frame_that_claims_a_lot_costs_little(frame: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(frame) + 1_000_000


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)
def test_the_plain_tuple_of_a_version_is_read_typed(vector: Vector) -> None:
    """A peer without types sends tuples; so does this test, straight from the vector's fields."""
    payload = vector.payload
    if payload == b"ACK":
        assert encode(decode(payload)) == payload
        return
    elements = tuple(msgspec.msgpack.decode(payload, type=list[object]))
    assert decode(msgspec.msgpack.encode(elements)) == decode(payload)
