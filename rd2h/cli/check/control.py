"""Decode's end of the control connection. For one thread; every wait has a deadline."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from types import TracebackType

import zmq

from rd2h.cli.check.failures import CheckFailed
from rd2h.cli.check.messages import (
    MAX_BYTES,
    ControlError,
    Failed,
    FromDecode,
    FromPrefill,
    Goodbye,
    encode,
    from_prefill,
)
from rd2h.sockets import drain_monitor, new_socket, tcp_address

__all__ = ["Control", "reach"]

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINGER_MS = 500
_LAST_WORDS_MS = 200
"""How long an answer may need from libzmq's thread when the connection's end is known already."""
_NEVER_MS = 86_400_000
_RETRY = 0.1


def reach(host: str, port: int, *, timeout: float, wait: float) -> tuple[str, str]:
    """Open a plain TCP connection to see what the network says; ZMQ would only try for ever.

    Args:
        host: Address or name.
        port: TCP port.
        timeout: Seconds until an answer.
        wait: Seconds to go on while the port is refused.

    Returns:
        The peer's numeric address, and this machine's that leads there.

    Raises:
        OSError: no connection; of the class and with the text that the system gives.
    """
    refused_until = time.monotonic() + wait
    while True:
        try:
            with socket.create_connection((host, port), timeout) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except ConnectionRefusedError as error:
            if time.monotonic() >= refused_until:
                raise ConnectionRefusedError(
                    error.errno, f"nobody listens at {host} port {port}: connection refused"
                ) from error
            time.sleep(_RETRY)
        except TimeoutError as error:
            raise TimeoutError(
                errno.ETIMEDOUT, f"{host} port {port} did not answer in {timeout:g} s"
            ) from error
        except OSError as error:
            raise OSError(error.errno, f"{host} port {port}: {error.strerror}") from error


class Control:
    """The connection to Prefill; closed on leaving its ``with`` block.

    Args:
        host: Numeric address.
        port: Control port.
    """

    def __init__(self, host: str, port: int) -> None:
        address = tcp_address(host, port)
        self._name = f"{host} port {port}"
        self._answered = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, address)
        # A connection that broke has lost what Prefill prepared for it: it is not made again while
        # the check lasts. Not -1, with which libzmq also drops an answer that nobody has read yet.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(int(_LOST))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_LINGER_MS)
        self._context.term()

    def ask(self, message: FromDecode, timeout: float) -> FromPrefill:
        """Send a message and wait for the answer.

        Args:
            message: What to ask.
            timeout: Seconds until the answer.

        Raises:
            CheckFailed: Prefill says that it cannot go on, with its own failure.
            ControlError: no answer in time, the connection is lost, or the answer is none.
        """
        self._socket.send(encode(message))
        answer = self._receive(time.monotonic() + timeout, timeout)
        if isinstance(answer, Failed):
            raise CheckFailed(answer.failure)
        return answer

    def part(self, goodbye: Goodbye) -> None:
        """Say how it ended, if anybody listens; never waits and never raises."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(encode(goodbye), zmq.DONTWAIT)

    def check_alive(self) -> None:
        """Notice that Prefill has gone.

        Raises:
            ControlError: the connection is lost.
        """
        if list(drain_monitor(self._monitor)):
            raise self._lost()

    def _receive(self, deadline: float, timeout: float) -> FromPrefill:
        while (left := deadline - time.monotonic()) > 0:
            ready = {source for source, _ in self._poller.poll(int(left * 1000) + 1)}
            lost = self._monitor in ready
            if self._socket in ready or (lost and self._socket.poll(_LAST_WORDS_MS)):
                payload = self._socket.recv()
                if payload:  # an empty frame only asks whether this end is there
                    self._answered = True
                    return from_prefill(payload)
            elif lost:
                raise self._lost()
        raise ControlError(f"prefill at {self._name} did not answer in {timeout:g} s")

    def _lost(self) -> ControlError:
        if self._answered:
            return ControlError(f"prefill at {self._name} closed the connection: it has ended")
        return ControlError(
            f"{self._name} closed the connection: what listens there is no `rd2h check prefill`"
        )
