"""What the two ZMQ shells share: waking a poll, noticing peers, frames, quiet logs.

A shell is one thread that owns its sockets and blocks in one poll. Other threads reach it
through a :class:`Wakeup`; nothing here sleeps.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = [
    "Ask",
    "Inbox",
    "LimitedLog",
    "MonitorEvent",
    "Wakeup",
    "drain_monitor",
    "new_socket",
    "payload_of",
    "tcp_address",
]

T = TypeVar("T")

HEARTBEAT_INTERVAL = 2.0
"""Seconds between ZMQ heartbeats; a peer that is silent for ``HEARTBEAT_TIMEOUT`` is gone."""

HEARTBEAT_TIMEOUT = 10.0
"""Seconds without any sign of life after which a connection counts as lost."""

MESSAGES_AT_A_TIME = 256
"""Messages that a shell takes from one socket before it looks at everything else: a peer that
sends faster than they can be looked at must not keep it from results, deadlines and its end."""


class Wakeup:
    """Makes a poll in another thread return.

    Any thread may call `set`; the polling thread watches `fileno`, and calls `clear` before it
    looks at whatever it was woken for.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._fd

    def set(self) -> None:
        """Wake the poll; many calls before it looks count as one."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Arm again."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Free the descriptor; only after the polling thread has ended."""
        os.close(self._fd)


@dataclass(frozen=True)
class Ask:
    """Somebody wants to know how much a machine keeps; the answer goes into the queue."""

    answer: SimpleQueue[dict[str, int]]


class Inbox(Generic[T]):
    """What other threads want of a socket thread, in order.

    Any thread may `put`; the socket thread watches `wakeup` and takes.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.wakeup = Wakeup()

    def put(self, *items: T) -> None:
        """Hand work over and wake the thread."""
        self._items.extend(items)
        self.wakeup.set()

    def take(self) -> Iterator[T]:
        """Yield what there is."""
        self.wakeup.clear()
        while self._items:
            yield self._items.popleft()


@dataclass(frozen=True)
class MonitorEvent:
    """Something that happened to a socket's connections: one of ``zmq.Event``."""

    event: int
    endpoint: str


def tcp_address(host: str, port: int) -> str:
    """Write ZMQ's address of a TCP port; an IPv6 address goes into brackets, if it has none.

    Args:
        host: Name or address; ``*`` and ``::`` are every address of this machine.
        port: TCP port.
    """
    bare = ":" in host and not host.startswith("[")
    return f"tcp://[{host}]:{port}" if bare else f"tcp://{host}:{port}"


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str
) -> zmq.Socket[bytes]:
    """Make a socket with heartbeats on, no queue limit, and nothing that lingers after close.

    Args:
        context: The shell's context.
        kind: ``zmq.DEALER`` or ``zmq.ROUTER``.
        address: Where it will bind or connect: ``tcp://host:port``, IPv6 hosts in brackets.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.linger = 0
    # A full queue would block or drop; what is in flight is bounded by the gates instead.
    socket.set_hwm(0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_INTERVAL * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(HEARTBEAT_TIMEOUT * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, round(HEARTBEAT_TIMEOUT * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def drain_monitor(monitor: zmq.Socket[bytes]) -> Iterator[MonitorEvent]:
    """Yield every event that a monitor socket holds, without waiting."""
    while monitor.poll(0):
        message = recv_monitor_message(monitor)
        yield MonitorEvent(
            int(message["event"]), message["endpoint"].decode(errors="backslashreplace")
        )


def payload_of(frames: Sequence[bytes]) -> bytes | None:
    """The payload of a multipart message: empty frames are dropped (protocol, "Transport").

    Returns:
        The one frame that remains; None if none does (a probe).

    Raises:
        ValueError: if more than one remains.
    """
    left = [frame for frame in frames if frame]
    if len(left) > 1:
        raise ValueError(f"{len(left)} frames that are not empty; a message has one")
    return left[0] if left else None


class LimitedLog:
    """Logs at a bounded rate, so that a peer's garbage cannot fill a disk.

    Owned by one thread.
    """

    def __init__(self, logger: logging.Logger, interval: float = 10.0, burst: int = 5) -> None:
        """``burst`` lines in every ``interval`` seconds; the rest is counted."""
        self._logger = logger
        self._interval = interval
        self._burst = burst
        self._since = float("-inf")
        self._count = 0

    def warning(self, now: float, message: str, *arguments: object) -> None:
        """Log a warning, unless there were too many; ``now`` in seconds of any steady clock."""
        if now - self._since >= self._interval:
            if self._count > self._burst:
                self._logger.warning("%d more such messages", self._count - self._burst)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= self._burst:
            self._logger.warning(message, *arguments)
