"""Prefill's end: the control port, one ROUTER in the calling thread.

It waits for messages, and while it serves a check also asks once a second whether that Decode is
still there: an empty frame to an identity that has left fails at once.
"""

from __future__ import annotations

import logging
import time

import zmq

from rd2h.cli.check.failures import CheckFailed, Step
from rd2h.cli.check.messages import (
    MAX_BYTES,
    ControlError,
    Failed,
    VersionError,
    encode,
    from_decode,
)
from rd2h.cli.check.options import PrefillOptions
from rd2h.cli.check.service import PrefillService
from rd2h.cli.check.steps import Steps
from rd2h.sockets import (
    MESSAGES_AT_A_TIME,
    LimitedLog,
    new_socket,
    payload_of,
    tcp_address,
)

__all__ = ["PrefillServer"]

logger = logging.getLogger(__name__)

_PROBE_INTERVAL = 1.0
_LINGER_MS = 500
_QUEUE = 64
"""Messages of one sender that wait while a check is being prepared."""


class PrefillServer:
    """Listens, and serves until it is told to stop.

    Args:
        options: Where to listen, and for how long.
        service: What it answers.
        steps: How steps are run.

    Attributes:
        port: The control port.

    Raises:
        CheckFailed: it cannot listen there.
    """

    def __init__(self, options: PrefillOptions, service: PrefillService, steps: Steps) -> None:
        self._options = options
        self._service = service
        self._steps = steps
        self._garbage = LimitedLog(logger)
        self._probed = 0.0
        address = tcp_address(options.bind, options.port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.set_hwm(_QUEUE)
        try:
            with steps.step(Step.BIND):
                self._bind(address)
        except CheckFailed:
            self.close()
            raise
        endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])

    def close(self) -> None:
        """Stop listening, after answers have gone out; idempotent."""
        self._socket.close(_LINGER_MS)
        self._context.term()

    def serve(self) -> None:
        """Serve checks: one with ``--once``, else until the thread is interrupted.

        Raises:
            CheckFailed: with ``--once``: no check has begun in time.
        """
        until = time.monotonic() + self._options.wait if self._options.once else None
        while not (self._options.once and self._service.passed + self._service.failed):
            serving = self._service.sender is not None
            left = None if until is None or serving else until - time.monotonic()
            if left is not None and left <= 0:
                raise CheckFailed(
                    self._steps.failure(
                        Step.WAIT, f"no decode began a check in {self._options.wait:g} s"
                    )
                )
            timeout = _PROBE_INTERVAL if serving else left
            self._socket.poll(None if timeout is None else int(timeout * 1000) + 1)
            self._receive()
            self._probe()

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ControlError(f"cannot listen on {address}: {error.strerror}") from error

    def _receive(self) -> None:
        for _ in range(MESSAGES_AT_A_TIME):
            try:
                sender, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                payload = payload_of(frames)
                if payload is None:
                    continue
                reply = self._service.answer(sender, from_decode(payload))
            except VersionError as error:
                self._complain(error)
                reply = Failed(failure=self._steps.failure(Step.HANDSHAKE, str(error)))
            except (ControlError, ValueError) as error:
                self._complain(error)
                continue
            if reply is not None:
                self._send(sender, encode(reply))

    def _complain(self, error: Exception) -> None:
        self._garbage.warning(time.monotonic(), "the control port got %s", error)

    def _probe(self) -> None:
        now, sender = time.monotonic(), self._service.sender
        if sender is not None and now - self._probed >= _PROBE_INTERVAL:
            self._probed = now
            self._send(sender, b"")

    def _send(self, sender: bytes, payload: bytes) -> None:
        try:
            self._socket.send_multipart([sender, payload], zmq.DONTWAIT)
        except zmq.ZMQError:  # it has left, or does not take its answers
            if sender == self._service.sender:
                self._service.lost()
