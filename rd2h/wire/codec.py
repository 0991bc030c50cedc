"""Bytes to messages and back: the only place that reads or writes the control protocol.

The layout of each message is in the generated :mod:`rd2h.wire.tables`. Both functions are pure
and may be called from any thread.

The writer checks the class of what each field holds, and then proves what it wrote by reading it
back: a frame leaves here only if the peer's reader, which is the same code, takes it. That covers
a number out of range, lists that do not belong together, and (by comparing what came back) a
field that the peer's version cannot carry.
"""

import reprlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from rd2h.wire.errors import (
    MalformedMessageError,
    UnencodableMessageError,
    UnknownMessageError,
    UnsupportedVersionError,
)
from rd2h.wire.messages import MINIMUM_VERSION, PROTOCOL_VERSION, Message
from rd2h.wire.support import Payload, at_key, unpack
from rd2h.wire.tables import DROPPABLE, FIELD_TYPES, MESSAGES

__all__ = ["decode", "encode"]


class _Tagged(Struct, frozen=True, array_like=True):
    """The part that all messages but the raw ones have in common."""

    tag: bytes


_ENCODER = msgspec.msgpack.Encoder()
_TAGGED = msgspec.msgpack.Decoder(_Tagged)
_BY_TYPE = {spec.message: spec for spec in MESSAGES}
_BY_TAG = {spec.tag: spec for spec in MESSAGES if not spec.raw}
_RAW = {spec.tag: spec for spec in MESSAGES if spec.raw}
_LONGEST_RAW = max(map(len, _RAW))
_LONG = 256  # bytes; skipping through less than that costs less than looking at its head


def decode(payload: Payload) -> Message:
    """Read one message, of any version.

    Fields that the sender's version lacks hold their defaults; trailing fields and map keys of a
    newer sender are ignored. Nothing is coerced: a number that arrives as text is a fault.

    Args:
        payload: One ZMQ frame; the empty delimiter frames are dropped before.

    Raises:
        UnknownMessageError: for a well-formed array with a tag that no message has.
        MalformedMessageError: for anything else that is not a message, trailing bytes included.
    """
    if len(payload) == 0:
        raise MalformedMessageError("$", "the payload is empty")
    # A raw message is looked up before msgpack is tried: its bytes mean something else there.
    spec = _RAW.get(bytes(payload)) if len(payload) <= _LONGEST_RAW else None
    if spec is None and len(payload) > _LONG and payload[0] >> 4 == 0x9 and payload[1] == 0xC4:
        # The usual form: a short array that begins with a short bin. What is wrong with the rest
        # is found when the frame is read; this only spares looking at all of it twice.
        spec = _BY_TAG.get(bytes(payload[3 : 3 + payload[2]]))
    if spec is None:
        tag = unpack(_TAGGED, payload).tag
        spec = _BY_TAG.get(tag)
        if spec is None:
            known = ", ".join(sorted(tag.decode() for tag in _BY_TAG))
            raise UnknownMessageError("$[0]", f"unknown tag {reprlib.repr(tag)}; known: {known}")
    message: Message = spec.unpack(payload)
    return message


def encode(message: Message, version: int = PROTOCOL_VERSION) -> bytes:
    """Write one message as a peer of ``version`` would write it.

    Args:
        message: What to say.
        version: Protocol version of the peer, ``MINIMUM_VERSION`` to ``PROTOCOL_VERSION``.

    Raises:
        UnsupportedVersionError: for a version outside that range.
        UnencodableMessageError: if the message holds what its types do not allow, or if a field
            that ``version`` lacks carries something other than its default (unless the schema
            lets it be dropped).
    """
    if type(version) is not int or not MINIMUM_VERSION <= version <= PROTOCOL_VERSION:
        raise UnsupportedVersionError(
            "$", f"version {version!r} is not in {MINIMUM_VERSION} to {PROTOCOL_VERSION}"
        )
    spec = _BY_TYPE.get(type(message))
    if spec is None:
        raise UnencodableMessageError("$", f"{type(message).__name__} is not a message")
    if spec.since > version:
        raise UnencodableMessageError(
            "$", f"{type(message).__name__} is new in {spec.since}, and the peer has {version}"
        )
    if not _sound(message):
        _check_classes("$", message, first=1)
    if spec.raw:
        return spec.tag
    try:
        payload = _ENCODER.encode(spec.pack(message, version))
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _unencodable(message, error) from error
    try:
        back = spec.unpack(payload)
    except MalformedMessageError as error:
        raise UnencodableMessageError(error.path, error.reason) from error
    if version < PROTOCOL_VERSION:
        _check_nothing_lost(message, back, version)
    return payload


def _sound(value: Struct) -> bool:
    """Whether every field holds what it says, by class.

    Exactly that class: a bool is no number here, and nothing that msgspec would turn into text
    (a UUID, a date) is text.
    """
    for name, kind, item_kind in FIELD_TYPES[type(value)]:
        held = getattr(value, name)
        if type(held) is not kind:
            return False
        if item_kind is not None and not _sound_items(held, item_kind):
            return False
    return True


def _sound_items(held: Any, item_kind: type) -> bool:
    """Whether a list, or a dict with its keys, holds what it says. Any: a list or a dict."""
    if isinstance(held, dict):
        if not all(type(key) is str for key in held):
            return False
        held = held.values()
    return all(
        type(item) is item_kind and (not isinstance(item, Struct) or _sound(item)) for item in held
    )


def _check_classes(path: str, value: Struct, first: int = 0) -> None:
    """Raise for the first thing that `_sound` did not like; ``first``: the first field's index."""
    array_like = value.__struct_config__.array_like
    for index, (name, kind, item_kind) in enumerate(FIELD_TYPES[type(value)], start=first):
        held = getattr(value, name)
        here = f"{path}[{index}]" if array_like else f"{path}.{name}"
        _require_class(here, held, kind)
        if item_kind is None:
            continue
        keyed = isinstance(held, dict)
        for key, item in held.items() if keyed else enumerate(held):
            there = at_key(here, str(key)) if keyed else f"{here}[{key}]"
            if keyed:
                _require_class(there, key, str)
            _require_class(there, item, item_kind)
            if isinstance(item, Struct):
                _check_classes(there, item)


def _require_class(path: str, held: object, kind: type) -> None:
    if type(held) is not kind:
        raise UnencodableMessageError(
            path, f"expected {kind.__name__}, got {type(held).__name__}: {reprlib.repr(held)}"
        )


def _check_nothing_lost(message: Message, back: Message, version: int) -> None:
    """Raise if a peer of an older version would understand something else."""
    if back == message:
        return
    lost = next(_differences("$", message, back, first=1), None)
    if lost is not None:
        path, ours, theirs = lost
        raise UnencodableMessageError(
            path,
            f"version {version} cannot carry {reprlib.repr(ours)}: "
            f"the peer would read {reprlib.repr(theirs)}",
        )


def _differences(
    path: str, ours: object, theirs: object, first: int = 0
) -> Iterator[tuple[str, object, object]]:
    """Yield ``(path, ours, theirs)`` wherever two values differ that had to be equal."""
    if type(ours) is not type(theirs):
        yield path, ours, theirs
    elif isinstance(ours, Struct):
        for here, name, value in _fields(path, ours, first):
            if (type(ours), name) not in DROPPABLE:
                yield from _differences(here, value, getattr(theirs, name))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{path}[{index}]", one, other)
    elif isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key, value in ours.items():
            yield from _differences(at_key(path, key), value, theirs[key])
    elif ours != theirs:
        yield path, ours, theirs


def _fields(path: str, value: Struct, first: int) -> Iterator[tuple[str, str, object]]:
    """Yield ``(path, name, value)`` of each field; ``first`` is the first one's index."""
    for index, name in enumerate(value.__struct_fields__, start=first):
        here = f"[{index}]" if value.__struct_config__.array_like else f".{name}"
        yield path + here, name, getattr(value, name)


def _unencodable(message: Message, error: Exception) -> UnencodableMessageError:
    """Find the place of a fault that kept msgpack from encoding a message at all."""
    try:
        for path, reason in _unserialisable("$", message, first=1):
            return UnencodableMessageError(path, reason)
    except RecursionError:
        pass  # a list that holds itself has no last place
    return UnencodableMessageError("$", str(error))


def _unserialisable(path: str, value: object, first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ``(path, reason)`` for every value inside ``value`` that msgpack cannot carry."""
    if isinstance(value, Struct):
        for here, _, part in _fields(path, value, first):
            yield from _unserialisable(here, part)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unserialisable(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unserialisable(at_key(path, key), key)
            yield from _unserialisable(at_key(path, key), item)
    else:
        try:
            _ENCODER.encode(value)
        except (OverflowError, TypeError, ValueError) as error:
            yield path, f"{reprlib.repr(value)}: {error}"
