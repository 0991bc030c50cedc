"""The sender's socket thread: one DEALER for each connection, and one poll for all.

The thread owns the machine, the sockets and their monitors. It never waits for a device or for
one Decode rank: it moves messages. Other threads put work into its inbox and wake it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from rd2h.prefill.actions import Action, Announcement, Close, Connect, Failed, Release, Send
from rd2h.prefill.machine import SenderMachine
from rd2h.sockets import (
    MESSAGES_AT_A_TIME,
    Ask,
    Inbox,
    LimitedLog,
    drain_monitor,
    new_socket,
    payload_of,
)
from rd2h.wire import MfMeta, MfMetaAck, ReadDone, ReadFailed, ReadReadyBatch
from rd2h.wire import decode as decode_message
from rd2h.wire import encode as encode_message

__all__ = ["Forget", "Item", "SenderLoop"]

logger = logging.getLogger(__name__)

_WATCHED = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True)
class Forget:
    """A request is over."""

    ext_id: str


Item: TypeAlias = Announcement | Forget | Ask


@dataclass(frozen=True, eq=False)
class _Connection:
    endpoint: str
    number: int
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class SenderLoop:
    """Carries out what the machine decides; `run`, then `close` is the thread's body.

    Args:
        machine: The state machine, used by this thread only.
        inbox: Where work arrives.
        stopping: Says whether to end; whoever changes its answer wakes the inbox.
        release: Called for each batch that no longer holds its slots.
        failed: Called for whatever was lost.
    """

    def __init__(
        self,
        machine: SenderMachine,
        inbox: Inbox[Item],
        stopping: Callable[[], bool],
        release: Callable[[Release], None],
        failed: Callable[[Failed], None],
    ) -> None:
        self._machine = machine
        self._inbox = inbox
        self._stopping = stopping
        self._release = release
        self._failed = failed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Three for each connection, with the two ends of its monitor; zmq's limit is 1023.
        self._context.set(zmq.MAX_SOCKETS, 65535)
        self._poller = zmq.Poller()
        self._connections: dict[str, _Connection] = {}
        self._garbage = LimitedLog(logger)

    def run(self) -> None:
        """Move messages until stopping; `close` must follow, on the same thread."""
        self._poller.register(self._inbox.wakeup.fileno(), zmq.POLLIN)
        while not self._stopping():
            self._turn({source for source, _ in self._poller.poll(self._timeout())})

    def close(self) -> None:
        """Release every hold and close every socket, also after a fault in `run`."""
        self._perform(self._machine.close())
        for connection in list(self._connections.values()):
            self._disconnect(connection)
        # Not `term`, which would wait for a socket that a fault has left open.
        self._context.destroy(0)

    def _timeout(self) -> int | None:
        deadline = self._machine.next_deadline()
        if deadline is None:
            return None
        # Rounded up: waking a moment early would only be a turn for nothing.
        return max(0, int((deadline - time.monotonic()) * 1000) + 1)

    def _turn(self, ready: set[zmq.Socket[bytes] | int]) -> None:
        """Hear everything there is to hear, replies before losses, then take new work."""
        for connection in list(self._connections.values()):
            if connection.socket in ready:
                self._receive(connection)
            if connection.monitor in ready:
                self._watch(connection)
        for item in self._inbox.take():
            match item:
                case Forget(ext_id):
                    self._perform(self._machine.forget(ext_id))
                case Ask(answer):
                    answer.put(self._machine.sizes())
                case Announcement():
                    self._perform(self._machine.announce(item, time.monotonic()))
        self._perform(self._machine.tick(time.monotonic()))

    def _receive(self, connection: _Connection) -> None:
        for _ in range(MESSAGES_AT_A_TIME):
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            try:
                payload = payload_of(frames)
                message = None if payload is None else decode_message(payload)
            except ValueError as error:  # WireError is one
                self._garbage.warning(now, "%s sent garbage: %s", connection.endpoint, error)
                continue
            match message:
                case None:
                    continue  # a probe: Decode asks whether we are still there
                case MfMetaAck() | ReadDone() | ReadFailed():
                    self._perform(
                        self._machine.received(connection.endpoint, connection.number, message, now)
                    )
                case MfMeta() | ReadReadyBatch():
                    name = type(message).__name__
                    self._garbage.warning(
                        now, "%s sent %s, which only Prefill sends", connection.endpoint, name
                    )
            if self._connections.get(connection.endpoint) is not connection:
                return

    def _watch(self, connection: _Connection) -> None:
        if self._connections.get(connection.endpoint) is not connection:
            return
        for event in list(drain_monitor(connection.monitor)):
            if event.event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                actions = self._machine.connected(connection.endpoint, connection.number)
            else:
                reason = "the connection was lost"
                actions = self._machine.lost(
                    connection.endpoint, connection.number, reason, time.monotonic()
                )
            self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(endpoint, number, message, payload):
                    self._send(endpoint, number, payload or encode_message(message))
                case Release():
                    self._release(action)
                case Failed():
                    self._failed(action)
                case Connect():
                    self._connect(action)
                case Close(endpoint, number):
                    connection = self._connections.get(endpoint)
                    if connection is not None and connection.number == number:
                        self._disconnect(connection)

    def _send(self, endpoint: str, number: int, payload: bytes) -> None:
        connection = self._connections.get(endpoint)
        if connection is None or connection.number != number:
            return
        try:
            connection.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            # Nothing reconnects after a fault in the peer's ZMTP; the monitor has yet to say so.
            reason = "the connection was lost"
            self._perform(self._machine.lost(endpoint, number, reason, time.monotonic()))

    def _connect(self, action: Connect) -> None:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = new_socket(self._context, zmq.DEALER, action.endpoint)
            monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close(0)
            reason = f"no socket can be opened for {action.endpoint}: {error}"
            self._perform(self._machine.refused(action.endpoint, action.connection, reason))
            return
        connection = _Connection(action.endpoint, action.connection, socket, monitor)
        self._connections[action.endpoint] = connection
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            socket.connect(action.endpoint)
        except (zmq.ZMQError, ValueError) as error:  # ValueError: no text that can be encoded
            reason = f"{action.endpoint} is no address to connect to: {error}"
            self._perform(self._machine.refused(action.endpoint, action.connection, reason))

    def _disconnect(self, connection: _Connection) -> None:
        del self._connections[connection.endpoint]
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)
        connection.socket.disable_monitor()
        connection.monitor.close(0)
        connection.socket.close(0)
