"""Can Prefill reach Decode? In a hand-off Prefill opens the connection, to Decode's ``kv_port``.

Prefill connects to wherever the control connection asks it to, and sends a token there: whoever
can reach the control port can make it do that, as long as the check runs.
"""

from __future__ import annotations

import socket
import time

from rd2h.cli.check.messages import TOKEN_BYTES

__all__ = ["KvPort", "connect_back"]

_MOST_STRANGERS = 64
"""Connections from others that are looked at; a port scanner must not keep the check busy."""

_FIRST_WORDS = 1.0


class KvPort:
    """A listening port of Decode; closed on leaving its ``with`` block. For one thread.

    Args:
        host: The address by which Prefill shall come; it decides about IPv4 and IPv6.
        port: TCP port; 0 takes a free one.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # On every address, as an engine does: the advertised one may be that of a gateway.
            self._socket = socket.create_server(("", port), family=family, backlog=8)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on TCP port {port}: {error.strerror}"
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> KvPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def came(self, token: bytes, timeout: float) -> bool:
        """Whether the connection that sends ``token`` is here, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for _ in range(_MOST_STRANGERS):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(min(left, _FIRST_WORDS))
                    if connection.recv(TOKEN_BYTES, socket.MSG_WAITALL) == token:
                        return True
            except OSError:  # nobody came, or a stranger who said nothing
                continue
        return False


def connect_back(host: str, port: int, token: bytes, timeout: float) -> None:
    """Open Prefill's connection to Decode, and say who it is.

    Raises:
        OSError: no connection within ``timeout`` seconds; the text names the address.
    """
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.sendall(token)
    except OSError as error:
        reason = error.strerror or f"no answer in {timeout:g} s"
        raise OSError(
            error.errno, f"prefill cannot connect to decode at {host} port {port}: {reason}"
        ) from error
