"""What the generated tables stand on: reading with a path, and relations between fields.

Everything here is pure and may be called from any thread; msgspec decoders hold no state
between calls.
"""

import re
from collections.abc import Callable, Mapping, Sized
from typing import Any, Generic, TypeVar

import msgspec

from rd2h.wire.errors import MalformedMessageError

__all__ = [
    "MessageSpec",
    "Payload",
    "at_key",
    "explain_map",
    "malformed",
    "require_at_most",
    "require_below",
    "require_length",
    "require_longer",
    "unpack",
    "unpack_map",
]

T = TypeVar("T")
M = TypeVar("M")

Payload = bytes | bytearray | memoryview

# msgspec appends the place to its message: "Expected `int`, got `str` - at `$[1]`", or
# "... - at `key` in `$[2]`" when a map's key is at fault.
_PLACE = re.compile(r"(?s)(?P<reason>.*) - at (?P<key>`key` in )?`(?P<path>\$.*)`")

# What msgspec raises for bytes that are not what they should be. RecursionError: arrays nested
# without end; MemoryError: a length field of gigabytes.
_READ_ERRORS = (msgspec.DecodeError, RecursionError, MemoryError)


# A Struct, and no dataclass: importing dataclasses would cost more than all the rest.
class MessageSpec(msgspec.Struct, Generic[M], frozen=True):
    """What the codec knows of one message; the table of them is generated.

    Attributes:
        message: The class that programs see.
        tag: Element 0 on the wire; for a raw message, the whole payload.
        raw: Whether the payload is the tag alone and not msgpack.
        since: First protocol version that has the message.
        pack: ``(message, version)`` to what msgpack encodes: an array with the tag first.
        unpack: Payload to message; raises MalformedMessageError.
    """

    message: type[M]
    tag: bytes
    raw: bool
    since: int
    # Any: a spec is looked up by the type of the message that is then handed to it.
    pack: Callable[[Any, int], tuple[object, ...]]
    unpack: Callable[[Payload], M]


def at_key(path: str, key: str) -> str:
    """The path of an entry of a map; whatever the key holds, the path is plain ASCII."""
    shown = key.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'{path}["{shown}"]'


def malformed(error: BaseException, base: str = "$") -> MalformedMessageError:
    """Turn what msgspec raised into our error; ``base`` is the path of what was being read."""
    found = _PLACE.fullmatch(str(error))
    if found is None:
        return MalformedMessageError(base, str(error) or type(error).__name__)
    reason = f"a key of the map: {found['reason']}" if found["key"] else found["reason"]
    return MalformedMessageError(base + found["path"].removeprefix("$"), reason)


def unpack(decoder: msgspec.msgpack.Decoder[T], payload: Payload, path: str = "$") -> T:
    """Decode a payload; ``path`` is where it stands in the whole message.

    Raises:
        MalformedMessageError: if it is not what ``decoder`` reads, to the last byte.
    """
    try:
        return decoder.decode(payload)
    except _READ_ERRORS as error:
        raise malformed(error, path) from error


_RAW_MAP = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def unpack_map(
    decoder: msgspec.msgpack.Decoder[dict[str, T]], item_type: type[T], payload: Payload, path: str
) -> dict[str, T]:
    """Decode msgpack that holds a map of structures, naming the key at which it fails.

    Raises:
        MalformedMessageError: if it is not such a map, or has a key twice.
    """
    try:
        items = decoder.decode(payload)
    except _READ_ERRORS as error:
        # msgspec does not say which key: read the values one by one to find it.
        for key, raw in unpack(_RAW_MAP, payload, path).items():
            unpack(msgspec.msgpack.Decoder(item_type), raw, at_key(path, key))
        raise malformed(error, path) from error
    if len(items) != _map_size(payload):
        raise MalformedMessageError(path, "the map has a key twice")
    return items


def _map_size(payload: Payload) -> int:
    """How many entries the header of a msgpack map that is known to be valid announces."""
    first = payload[0]
    width = {0xDE: 2, 0xDF: 4}.get(first, 0)
    return int.from_bytes(payload[1 : 1 + width], "big") if width else first & 0x0F


def require_length(path: str, items: Sized, other: str, others: Sized) -> None:
    """Require a list to have as many items as the list in field ``other``."""
    if len(items) != len(others):
        raise MalformedMessageError(
            path, f"{len(items)} items, but `{other}` has {len(others)}: they must be as many"
        )


def require_at_most(path: str, value: int, other: str, others: Sized) -> None:
    """Require a count to be no more than the items of the list in field ``other``."""
    if value > len(others):
        raise MalformedMessageError(path, f"{value}, but `{other}` has only {len(others)} items")


def require_below(path: str, value: int, other: str, limit: int) -> None:
    """Require a number to be below that of field ``other``."""
    if value >= limit:
        raise MalformedMessageError(path, f"{value}, but it must be below `{other}`, {limit}")


def require_longer(path: str, items: str, values: Sized, other: str, count: int) -> None:
    """Require the list in field ``items`` to have more items than field ``other`` says."""
    if len(values) <= count:
        raise MalformedMessageError(
            path, f"true, but `{items}` has {len(values)} items and `{other}` is {count}"
        )


def explain_map(params: Mapping[str, object], item_type: type[T], path: str) -> None:
    """Convert the values of a map of plain objects one by one, to name the key that fails."""
    for key, value in params.items():
        try:
            msgspec.convert(value, item_type)
        except msgspec.ValidationError as error:
            raise malformed(error, at_key(path, key)) from error
