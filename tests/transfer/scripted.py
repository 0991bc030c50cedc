"""Scripted ranks: bare sockets that speak whatever a test makes them speak."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from rd2h.wire import Message, MfMeta, MfMetaAck, ReadReadyBatch, decode, encode
from tests.transfer.caches import ANY_PORT, PATIENCE, Cache


class _Scripted:
    """A raw socket and its context."""

    def __init__(self, kind: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.linger = 0
        self.socket.set_hwm(0)

    def frames(self) -> list[bytes]:
        """The next multipart message; it must come."""
        assert self.socket.poll(round(PATIENCE * 1000)), f"waited {PATIENCE:g} s for a message"
        return self.socket.recv_multipart()

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class ScriptedDecode(_Scripted):
    """Plays Decode: a bare ROUTER."""

    def __init__(self, address: str = ANY_PORT) -> None:
        super().__init__(zmq.ROUTER)
        self.socket.bind(address)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def hear(self) -> tuple[bytes, Message]:
        """The next message and who sent it; it must be one frame, without a delimiter."""
        peer, payload = self.frames()
        return peer, decode(payload)

    def hear_batch(self) -> tuple[bytes, ReadReadyBatch]:
        peer, message = self.hear()
        assert isinstance(message, ReadReadyBatch), message
        return peer, message

    def greet(self) -> tuple[bytes, MfMeta]:
        """Wait for a handshake and answer it."""
        peer, message = self.hear()
        assert isinstance(message, MfMeta), message
        self.say(peer, MfMetaAck())
        return peer, message

    def say(self, peer: bytes, *messages: Message | bytes) -> None:
        for message in messages:
            payload = message if isinstance(message, bytes) else encode(message)
            self.socket.send_multipart([peer, b"", payload])


class ScriptedPrefill(_Scripted):
    """Plays Prefill: a bare DEALER."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.DEALER)
        self.socket.connect(endpoint)

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def hear(self) -> Message:
        """The next message that is no probe; it must be an empty delimiter and one frame."""
        while (frames := self.frames()) == [b""]:
            pass
        delimiter, payload = frames
        assert delimiter == b""
        return decode(payload)

    def greet(self, session: str, cache: Cache) -> None:
        """Shake hands as the Prefill that has this memory."""
        self.say(MfMeta(session, {name: lay.to_wire() for name, lay in cache.layouts.items()}))
        assert self.hear() == MfMetaAck()

    def ask(self, message: ReadReadyBatch) -> Message:
        """Send a batch and wait for its answer; nothing else may be outstanding."""
        self.say(message)
        return self.hear()


def garbage(rng: np.random.Generator) -> list[list[bytes]]:
    """Multipart messages that are none, for either side: empty, random, huge, deep, too many."""
    deep = b"\x91" * 100_000
    tag = b"\x93\xc4\x10read_ready_batch"
    return [
        [b""],
        [b"", b"", b""],
        [b"one", b"two"],
        [b"", b"x"] * 200,
        [deep],
        [b"\x92" + encode(MfMetaAck()) + deep],
        [b"\x81\xa1a" * 50_000],
        [rng.bytes(4 << 20)],
        [b"\x00" * (1 << 20)],
        [tag],
        [tag + b"\x00\xa1x\x91\xc0"],
        [b"\x92\xc4\x09read_done\xff"],
        [b"\x93\xc4\x0bread_failed\x00\xa2\xff\xfe"],
        [b"\x92\xc4\xff" + b"t" * 255],
        [b"\x94\xc4\x07mf_meta\xa1s\xc4\x03abc\xc0"],
        [os.urandom(3), b""],
        *([rng.bytes(int(rng.integers(1, 60)))] for _ in range(150)),
    ]
