"""What the two ends say to each other on the control port: msgpack maps, one a ZMQ frame.

This is not the hand-off's wire protocol: it lives for one check, between two `rd2h check` of one
`VERSION`, and carries that version in every message. Decode asks and Prefill answers::

    Hello        Welcome, Busy
    ConnectBack  ConnectedBack
    Prepare      Prepared
    Goodbye      nothing

Instead of any answer there may be `Failed`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from rd2h.cli.check.failures import Failure
from rd2h.cli.check.options import MAX_RUNS, MAX_SIZE, EngineName, Pattern

__all__ = [
    "MAX_BYTES",
    "TOKEN_BYTES",
    "VERSION",
    "Busy",
    "ConnectBack",
    "ConnectedBack",
    "ControlError",
    "Failed",
    "FromDecode",
    "FromPrefill",
    "Goodbye",
    "Hello",
    "Prepare",
    "Prepared",
    "Run",
    "VersionError",
    "Welcome",
    "encode",
    "from_decode",
    "from_prefill",
]

VERSION = 1
"""Of the messages, and of what seeds and patterns mean: both ends derive them by themselves."""

MAX_BYTES = 1 << 20
"""Longest message; a session of the nixl engine has a few kilobytes."""

TOKEN_BYTES = 16
"""What Prefill sends when it connects back, so that Decode knows that it was Prefill."""

_Name: TypeAlias = Annotated[str, Meta(max_length=255)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
_Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class ControlError(Exception):
    """The other end did not say what it should; the text is one line."""


class VersionError(ControlError):
    """The other end speaks another version."""


class Run(Struct, frozen=True):
    """One kind of read.

    Attributes:
        size: Bytes that it moves.
        block: Bytes of one block.
        pattern: How the blocks lie.
    """

    size: _Size
    block: _Size
    pattern: Pattern


class _Message(Struct, frozen=True, kw_only=True, tag_field="kind"):
    version: int = VERSION


class Hello(_Message, frozen=True, tag="hello"):
    """Decode begins.

    Attributes:
        release: Of rd2h.
        host: Decode's address, for Prefill's lines.
        machine: Boot id and PID namespace; empty if they cannot be told.
        engine: What it was asked to use.
    """

    release: _Name
    host: _Name
    machine: _Name
    engine: EngineName


class ConnectBack(_Message, frozen=True, tag="connect_back"):
    """Prefill shall open a TCP connection to Decode within ``timeout`` seconds."""

    host: _Name
    port: _Port
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    timeout: Annotated[float, Meta(gt=0, le=60)]


class Prepare(_Message, frozen=True, tag="prepare"):
    """Prefill shall fill memory from ``seed``, large enough for all ``runs``."""

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    runs: Annotated[list[Run], Meta(min_length=1, max_length=MAX_RUNS)]


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The check is over: with a failure, or without."""

    failure: Failure | None = None


class Welcome(_Message, frozen=True, tag="welcome"):
    """Prefill serves this check, with this engine."""

    release: _Name
    engine: EngineName


class Busy(_Message, frozen=True, tag="busy"):
    """Prefill serves another check; ask again."""

    host: _Name


class ConnectedBack(_Message, frozen=True, tag="connected_back"):
    """The connection was made."""


class Prepared(_Message, frozen=True, tag="prepared"):
    """Memory is there and registered.

    Attributes:
        session: Of Prefill's engine.
        address: First byte of the source memory.
        digests: BLAKE2b of what each run reads, in the order of its segments.
    """

    session: str
    address: Annotated[int, Meta(ge=0)]
    digests: list[bytes]


class Failed(_Message, frozen=True, tag="failed"):
    """Prefill cannot go on with this check."""

    failure: Failure


FromDecode: TypeAlias = Hello | ConnectBack | Prepare | Goodbye
FromPrefill: TypeAlias = Welcome | Busy | ConnectedBack | Prepared | Failed

T = TypeVar("T")


class _Versioned(Struct, frozen=True):
    version: int


_VERSIONED = msgspec.msgpack.Decoder(_Versioned)
_FROM_DECODE: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
_FROM_PREFILL: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)


def encode(message: FromDecode | FromPrefill) -> bytes:
    """Write a message."""
    return msgspec.msgpack.encode(message)


def from_decode(payload: bytes) -> FromDecode:
    """Read a message of Decode.

    Raises:
        VersionError: it has another version.
        ControlError: it is none.
    """
    return _read(_FROM_DECODE, payload)


def from_prefill(payload: bytes) -> FromPrefill:
    """Read a message of Prefill.

    Raises:
        VersionError: it has another version.
        ControlError: it is none.
    """
    return _read(_FROM_PREFILL, payload)


def _read(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        # First: another version may have other messages.
        version = _VERSIONED.decode(payload).version
        if version == VERSION:
            return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ControlError(f"{len(payload)} bytes that are no message: {error}") from error
    raise VersionError(
        f"the other end speaks version {version} of the check's messages, this one {VERSION}; "
        "install the same release of rd2h on both"
    )
