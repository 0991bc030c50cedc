"""The receiver's socket thread: one ROUTER, its monitor, and what other threads want.

The thread owns the machine and the sockets. It never reads memory and never waits for a read or
for a peer: it moves messages between the ROUTER, the machine and the read pool.

Whether a peer is still there is found out in two steps that work with any peer (libzmq does
not say which one left): the monitor tells that some connection broke, or that a silent one was
given up after the heartbeat timeout; then an empty frame goes to each peer whose handshake is
over, which fails at once for one that has left and is dropped by one that lives.

A read must not count if Prefill has given this Decode up before it ended, for its memory may
hold something else by then. Mostly the connection's end is known first. But a process that was
stopped for longer than the heartbeat timeout, and goes on, may end its read before its own
sockets have noticed anything. So a read that took nearly as long is not believed at once: its
result is kept for a moment, in which losses are noticed, and the peers are asked once more
before the machine hears of it. What is left is a process that is stopped while a batch waits,
goes on, and reads it to the end before its sockets notice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import zmq

import rd2h.sockets
from rd2h.decode.machine import Action, Finish, ForgetSession, Read, ReceiverMachine, Reply
from rd2h.decode.pool import ReadPool, ReadResult
from rd2h.decode.requests import Finished
from rd2h.reads import RequestDestination
from rd2h.sockets import MESSAGES_AT_A_TIME, Ask, Inbox, LimitedLog, drain_monitor, payload_of
from rd2h.wire import MfMeta, MfMetaAck, ReadDone, ReadFailed, ReadReadyBatch
from rd2h.wire import decode as decode_message
from rd2h.wire import encode as encode_message

__all__ = ["Abort", "Callbacks", "Item", "ReceiverLoop", "Register"]

logger = logging.getLogger(__name__)

_PROBE_DELAYS = (0.0, 0.02, 0.1, 0.5, 2.0)
"""When to ask peers after a connection broke, in seconds: the monitor may speak a moment before
the ROUTER has let go of the connection."""

_DOUBT = 1.0
"""Seconds for which the result of a read that took suspiciously long is kept back."""

_LINGER_MS = 500
"""At most how long a closed socket goes on sending what it was given, in milliseconds."""


@dataclass(frozen=True)
class Register:
    """Decode has allocated a request's blocks."""

    destination: RequestDestination


@dataclass(frozen=True)
class Abort:
    """A request is not wanted any more."""

    ext_id: str


Item: TypeAlias = Register | Abort | Ask


@dataclass(frozen=True)
class Callbacks:
    """What the socket thread tells its owner.

    Attributes:
        finished: A request has ended.
        read: A read has ended.
        stopping: Says until when reads in flight may go on (on ``time.monotonic``); None while
            the receiver works. Whoever changes its answer wakes the inbox.
    """

    finished: Callable[[Finished], None]
    read: Callable[[ReadResult], None]
    stopping: Callable[[], float | None]


class ReceiverLoop:
    """Carries out what the machine decides; `run` is the thread's body.

    Args:
        socket: A ROUTER that is bound, with ``ROUTER_MANDATORY``.
        machine: The state machine, used by this thread only.
        inbox: Where work arrives.
        pool: Where memory is read.
        callbacks: What to tell the owner.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        machine: ReceiverMachine,
        inbox: Inbox[Item],
        pool: ReadPool,
        callbacks: Callbacks,
    ) -> None:
        self._socket = socket
        self._machine = machine
        self._inbox = inbox
        self._pool = pool
        self._callbacks = callbacks
        self._probes: list[float] = []  # when to probe, soonest first
        self._begun: dict[int, float] = {}  # batch -> when its read was asked for
        self._doubted: deque[tuple[float, ReadResult]] = deque()  # until when, soonest first
        self._garbage = LimitedLog(logger)

    def run(self) -> None:
        """Move messages until told to stop and reads in flight are over."""
        monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        poller = zmq.Poller()
        for source in (self._socket, monitor, self._inbox.wakeup.fileno()):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._over():
                ready = {source for source, _ in poller.poll(self._timeout())}
                self._turn(self._socket in ready, monitor if monitor in ready else None)
        finally:
            self._socket.disable_monitor()
            monitor.close(0)
            # The answers to the last reads may still be on their way out.
            self._socket.close(self._linger())

    def _over(self) -> bool:
        until = self._callbacks.stopping()
        if until is None:
            return False
        self._machine.stop()
        return self._machine.reads_in_flight == 0 or time.monotonic() >= until

    def _linger(self) -> int:
        until = self._callbacks.stopping()
        if until is None:
            return _LINGER_MS
        return min(_LINGER_MS, max(0, int((until - time.monotonic()) * 1000)))

    def _timeout(self) -> int | None:
        deadlines = [
            self._machine.next_deadline(),
            self._callbacks.stopping(),
            *self._probes[:1],
            *(until for until, _ in list(self._doubted)[:1]),
        ]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if due is None:
            return None
        # Rounded up: waking a moment early would only be a turn for nothing.
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def _turn(self, readable: bool, monitor: zmq.Socket[bytes] | None) -> None:
        # Losses come before results of reads: what was read from a peer that has left does
        # not count (see the machine).
        if monitor is not None and list(drain_monitor(monitor)):
            self._probe_soon()
        if self._probes and time.monotonic() >= self._probes[0]:
            self._probe()
        if readable:
            self._receive()
        for item in self._inbox.take():
            now = time.monotonic()
            match item:
                case Register(destination):
                    self._perform(self._machine.register(destination, now))
                case Abort(ext_id):
                    self._perform(self._machine.abort(ext_id, now))
                case Ask(answer):
                    answer.put(self._machine.sizes())
        self._take_results()
        self._perform(self._machine.tick(time.monotonic()))

    def _take_results(self) -> None:
        limit = rd2h.sockets.HEARTBEAT_TIMEOUT - rd2h.sockets.HEARTBEAT_INTERVAL
        for result in self._pool.results():
            self._callbacks.read(result)
            now = time.monotonic()
            if result.error is None and now - self._begun.pop(result.batch_id) > limit:
                self._doubted.append((now + _DOUBT, result))
                self._probe_soon()
            else:
                self._read_finished(result)
        if self._doubted and time.monotonic() >= self._doubted[0][0]:
            self._probe()
            self._read_finished(self._doubted.popleft()[1])

    def _read_finished(self, result: ReadResult) -> None:
        self._begun.pop(result.batch_id, None)
        self._perform(self._machine.read_finished(result.batch_id, result.error, time.monotonic()))

    def _receive(self) -> None:
        for _ in range(MESSAGES_AT_A_TIME):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            try:
                payload = payload_of(frames)
                message = None if payload is None else decode_message(payload)
            except ValueError as error:  # WireError is one
                self._garbage.warning(now, "peer %s sent garbage: %s", peer.hex(), error)
                continue
            match message:
                case None:
                    continue
                case MfMeta() | ReadReadyBatch():
                    self._perform(self._machine.received(peer, message, now))
                case MfMetaAck() | ReadDone() | ReadFailed():
                    name = type(message).__name__
                    self._garbage.warning(
                        now, "peer %s sent %s, which only Decode sends", peer.hex(), name
                    )

    def _probe_soon(self) -> None:
        now = time.monotonic()
        self._probes = sorted([*self._probes, *(now + delay for delay in _PROBE_DELAYS)])

    def _probe(self) -> None:
        now = time.monotonic()
        self._probes = [due for due in self._probes if due > now]
        for peer in self._machine.peers():
            if not self._send([peer, b""]):
                self._perform(self._machine.peer_lost(peer, "Prefill closed the connection", now))

    def _send(self, frames: list[bytes]) -> bool:
        """Send without waiting; False if the peer has no connection any more."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _perform(self, actions: list[Action]) -> None:
        """Carry actions out, and those that follow from them, in order."""
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Reply(peer, message, batch_id):
                    delivered = self._send([peer, b"", encode_message(message)])
                    now = time.monotonic()
                    if batch_id is not None:
                        todo.extend(self._machine.replied(batch_id, delivered, now))
                case Read() as read:
                    self._begun[read.batch_id] = time.monotonic()
                    self._pool.submit(read)
                case ForgetSession() as forget:
                    self._pool.submit(forget)
                case Finish(finished):
                    self._callbacks.finished(finished)
