"""A frame's arrays and maps, cut into the bytes of their parts.

Pure. msgspec does the reading; what it cannot read raises `UNREADABLE`.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

__all__ = ["UNREADABLE", "array_parts", "bin_content", "map_parts", "text_of"]

UNREADABLE = (ValueError, RecursionError, MemoryError)

_ARRAY = msgspec.msgpack.Decoder(list[Raw])
_BIN = msgspec.msgpack.Decoder(bytes)
_TEXT = msgspec.msgpack.Decoder(str)

# The first byte of a map with a length field, and how wide that is. Others: the low four bits.
_MAP_WIDTH = {0xDE: 2, 0xDF: 4}


def array_parts(data: bytes) -> list[bytes]:
    """The elements of an array; its header is what ``data`` has before them."""
    return [bytes(part) for part in _ARRAY.decode(data)]


def map_parts(data: bytes) -> list[tuple[bytes, bytes]]:
    """The keys and values of a map in the order of the wire, whatever the keys are.

    The bytes after a map's header are those of an array twice as long, and read as one here:
    msgspec would refuse keys that are no text, which a frame that is fine may have.
    """
    if not data or not (data[0] & 0xF0 == 0x80 or data[0] in _MAP_WIDTH):
        raise ValueError("not a map")
    width = _MAP_WIDTH.get(data[0], 0)
    size = int.from_bytes(data[1 : 1 + width], "big") if width else data[0] & 0x0F
    if size >= len(data):
        raise ValueError("the map ends too soon")
    parts = array_parts(b"\xdd" + (2 * size).to_bytes(4, "big") + data[1 + width :])
    return list(zip(parts[::2], parts[1::2], strict=True))


def bin_content(data: bytes) -> bytes:
    """What a bin value holds."""
    return _BIN.decode(data)


def text_of(data: bytes) -> str:
    """A str value; one that is no text is shown by its bytes."""
    try:
        return _TEXT.decode(data)
    except UNREADABLE:
        return f"0x{data.hex()}"
