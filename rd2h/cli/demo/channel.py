"""A pipe between the parent and one rank that carries typed messages."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from rd2h.cli.demo.messages import FromRank, ToRank

__all__ = ["Channel", "ChannelClosedError", "parent_channel", "rank_channel"]

_Out = TypeVar("_Out")
_In = TypeVar("_In")


class ChannelClosedError(Exception):
    """The other end is gone."""


class Channel(Generic[_Out, _In]):
    """One end of a pipe. Any thread may send; one thread receives.

    Args:
        connection: The pipe; closed with the channel.
        decoder: Of the messages that the other end sends.
    """

    def __init__(self, connection: Connection, decoder: msgspec.msgpack.Decoder[_In]) -> None:
        self.connection = connection
        self._decoder = decoder
        self._sending = threading.Lock()

    def send(self, message: _Out) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        with self._sending:
            try:
                self.connection.send_bytes(msgspec.msgpack.encode(message))
            except OSError as error:
                raise ChannelClosedError(str(error)) from error

    def receive(self) -> _In:
        """Wait for a message.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        try:
            return self._decoder.decode(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise ChannelClosedError(str(error)) from error

    def close(self) -> None:
        """Close this end; the other end notices."""
        self.connection.close()


def parent_channel(connection: Connection) -> Channel[ToRank, FromRank]:
    """Make the parent's end."""
    return Channel(connection, msgspec.msgpack.Decoder(FromRank))


def rank_channel(connection: Connection) -> Channel[FromRank, ToRank]:
    """Make a rank's end."""
    return Channel(connection, msgspec.msgpack.Decoder(ToRank))
