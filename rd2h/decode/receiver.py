"""The receiver of one Decode rank: what the engine's worker calls.

Threads, each owner of its own state:

- the *worker thread* (the caller) registers and aborts requests and takes what has ended;
- the *socket thread* (:mod:`rd2h.decode.loop`) owns the machine and the ROUTER;
- the *read threads* (:mod:`rd2h.decode.pool`) plan and read, and own nothing.

What has ended goes from the socket thread to the worker thread through an outbox with a
condition of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from rd2h.decode.errors import PortTakenError, ReceiverBrokenError, ReceiverClosedError
from rd2h.decode.loop import Abort, Callbacks, Item, ReceiverLoop, Register
from rd2h.decode.machine import ReceiverMachine
from rd2h.decode.options import ReceiverOptions
from rd2h.decode.pool import Reader, ReadPool, ReadResult
from rd2h.decode.requests import Finished, registered_already
from rd2h.layout import LayerLayout
from rd2h.reads import PullScope, RequestDestination
from rd2h.sockets import Ask, Inbox, new_socket

__all__ = ["Receiver", "ReceiverStats"]

logger = logging.getLogger(__name__)

_GRACE = 0.2
"""Seconds beyond its time that `close` grants threads which wait for nothing any more, but
perhaps for a processor."""


@dataclass
class ReceiverStats:
    """Counters since the start. Written by the socket thread; a reader may see a moment's lag.

    Attributes:
        batches: Batches of which something was to be read.
        failed: Of these, how many failed.
        bytes: Bytes read.
        segments_before: Reads before neighbours were merged.
        segments: Reads after.
        read_seconds: Time of the read threads in planning and reading.
    """

    batches: int = 0
    failed: int = 0
    bytes: int = 0
    segments_before: int = 0
    segments: int = 0
    read_seconds: float = 0.0


class Receiver:
    """Listens for Prefill ranks and pulls what they announce into this rank's memory.

    `register`, `abort`, `take_finished` and `wait_finished` may be called from any thread.

    Args:
        address: Where to listen: ``tcp://host:port``; port 0 takes a free one.
        layers: This rank's cache layouts, by layer name.
        scope: Which blocks fall to this rank.
        reader: The transfer engine; its destinations are registered already.
        options: Deadlines and size.

    Raises:
        PortTakenError: if it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        layers: Mapping[str, LayerLayout],
        scope: PullScope,
        reader: Reader,
        options: ReceiverOptions | None = None,
    ) -> None:
        options = options or ReceiverOptions()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = new_socket(self._context, zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            self._context.term()
            raise PortTakenError(f"cannot listen on {address}: {error}") from error
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.stats = ReceiverStats()
        self._inbox: Inbox[Item] = Inbox()
        self._outbox = threading.Condition()
        self._finished: list[Finished] = []
        self._registered: dict[str, RequestDestination] = {}
        self._fault: Exception | None = None
        self._stop_at: float | None = None
        self._closed = False
        self._pool = ReadPool(options.read_threads, reader, scope, self._inbox.wakeup.set)
        machine = ReceiverMachine(
            layers,
            park_timeout=options.park_timeout,
            idle_timeout=options.idle_timeout,
            remember=options.remember,
        )
        callbacks = Callbacks(
            finished=self._on_finished,
            read=self._on_read,
            stopping=lambda: self._stop_at,
        )
        loop = ReceiverLoop(socket, machine, self._inbox, self._pool, callbacks)
        self._thread = threading.Thread(
            target=self._guard, args=(loop,), name="rd2h-receive", daemon=True
        )
        self._thread.start()

    def register(self, destination: RequestDestination) -> None:
        """A request's blocks are allocated: batches for it may be read from now on.

        Raises:
            ValueError: if the request is registered and was not taken as finished yet.
            ReceiverBrokenError, ReceiverClosedError: if nothing can be read any more.
        """
        with self._outbox:
            self._raise_fault()
            if (first := self._registered.get(destination.ext_id)) is not None:
                raise ValueError(registered_already(first, destination))
            self._registered[destination.ext_id] = destination
            self._inbox.put(Register(destination))

    def abort(self, ext_id: str) -> None:
        """A request is not wanted any more: no read starts for it from some moment on.

        It is reported as finished once reads in flight are over; only then may its blocks be
        used for anything else. Batches that still come for it are acknowledged without reading.
        A request that was never registered may be aborted too; it is not reported.

        Raises:
            ReceiverBrokenError, ReceiverClosedError: if nothing is reported any more.
        """
        with self._outbox:
            self._raise_fault()
            self._inbox.put(Abort(ext_id))

    def take_finished(self) -> list[Finished]:
        """Requests that have ended since the last call, each once; does not block.

        What has ended before the receiver was closed or failed is still handed out.

        Raises:
            ReceiverBrokenError, ReceiverClosedError: if there is nothing and will be nothing.
        """
        with self._outbox:
            return self._take()

    def wait_finished(self, timeout: float) -> list[Finished]:
        """As `take_finished`, but block until there is something, at most ``timeout`` seconds."""
        with self._outbox:
            self._outbox.wait_for(lambda: self._finished or self._fault, timeout)
            return self._take()

    def sizes(self, timeout: float = 5.0) -> dict[str, int]:
        """How much is kept, by kind.

        All but ``peers`` (connections) and ``ended`` (ids that are remembered for a while) are
        zero when nothing goes on.

        Args:
            timeout: Seconds to wait for the socket thread.

        Raises:
            TimeoutError: if it does not answer.
            ReceiverBrokenError, ReceiverClosedError: if it has ended.
        """
        answer: SimpleQueue[dict[str, int]] = SimpleQueue()
        with self._outbox:
            self._raise_fault()
            self._inbox.put(Ask(answer))
        try:
            return answer.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"waited {timeout:g} s for the receiver's socket thread") from None

    def close(self, timeout: float = 5.0) -> None:
        """Finish reads in flight, then end every thread and close the socket.

        No read begins any more; those that were about to fail at once. `take_finished` still
        hands out what has ended by then; requests that have not are not reported.

        Raises:
            TimeoutError: if a read or a thread does not end within ``timeout`` seconds; another
                call waits for it again.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        # The socket thread stops waiting for reads a little earlier, to end in time itself.
        self._stop_at = self._stop_at or deadline - min(0.5, timeout / 2)
        self._pool.stop()
        self._inbox.wakeup.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        alive = self._pool.close(deadline + _GRACE)
        self._thread.join(_GRACE)
        with self._outbox:
            self._fault = self._fault or ReceiverClosedError("the receiver is closed")
            self._outbox.notify_all()
        if self._thread.is_alive():
            alive.append(self._thread.name)
        else:
            # Not `term`, which would wait for a socket that a fault in there has left open.
            self._context.destroy(0)
        if alive:
            raise TimeoutError(f"{', '.join(alive)} did not end within {timeout:g} s")
        self._closed = True
        self._inbox.wakeup.close()

    # -------------------------------------------------------------------------------- internals

    def _take(self) -> list[Finished]:
        if not self._finished:
            self._raise_fault()
        finished, self._finished = self._finished, []
        for end in finished:
            self._registered.pop(end.ext_id, None)
        return finished

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _on_finished(self, finished: Finished) -> None:
        if finished.reason:
            logger.error("request %s failed: %s", finished.ext_id, finished.reason)
        with self._outbox:
            self._finished.append(finished)
            self._outbox.notify_all()

    def _on_read(self, result: ReadResult) -> None:
        stats = self.stats
        stats.batches += 1
        if result.error is not None:
            stats.failed += 1
            return
        stats.bytes += result.stats.bytes
        stats.segments_before += result.stats.segments_before
        stats.segments += result.stats.segments
        stats.read_seconds += result.stats.seconds

    def _guard(self, loop: ReceiverLoop) -> None:
        """Run the socket thread; a fault there must reach the worker thread, whatever it is."""
        try:
            loop.run()
        except BaseException as error:
            logger.exception("the receiver has failed")
            broken = ReceiverBrokenError(f"the receiver has failed: {error}")
            broken.__cause__ = error
            with self._outbox:
                self._fault = broken
                self._outbox.notify_all()
