"""HTTP to the engines: connections, headers, and what a failure means.

Owner: the event loop.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial

import httpx

from rd2h.proxy.config import Options
from rd2h.proxy.errors import ErrorKind, ProxyError

__all__ = ["Headers", "Transport", "end_to_end", "explain", "for_engine"]

Headers = Iterable[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: about one connection, never passed on.
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
# Made anew for each engine, because the body and the id are.
_OURS = frozenset({
    b"accept-encoding", b"content-length", b"content-type", b"expect", b"host", b"x-request-id",
})  # fmt: skip
# Made anew for the client.
_ANSWERS = frozenset({b"content-length", b"date", b"server", b"x-request-id"})

# Servers commonly close an idle connection after 5 s; one that is used again just then fails.
KEEP_ALIVE = 2.0
# An engine whose machine has vanished sends no FIN: find out within about a minute.
_SOCKET_OPTIONS: list[tuple[int, int, int]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def end_to_end(headers: Headers, dropped: frozenset[bytes] = frozenset()) -> Headers:
    """The headers that are not about one connection, without those ``dropped``; names in lower.

    Blanks around a value are no part of it (RFC 9110, 5.5), and are not allowed to be sent.
    """
    items = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in items
        if name == b"connection"
        for token in value.split(b",")
    }
    gone = _HOP_BY_HOP | dropped | named
    return [(name, value) for name, value in items if name not in gone]


def for_engine(headers: Headers, request_id: str | None = None) -> list[tuple[bytes, bytes]]:
    """The headers of a request to an engine, from the client's; ``Authorization`` is among them.

    Args:
        headers: The client's.
        request_id: What the engine takes its ids from; a request with one has a JSON body.
    """
    passed = list(end_to_end(headers, _OURS))
    if request_id is None:
        # Bytes are passed on as they are, so only an encoding that the client takes will do.
        accepted = [v.strip() for n, v in headers if n.lower() == b"accept-encoding"]
        passed.append((b"accept-encoding", b", ".join(accepted or [b"identity"])))
    else:
        # The events of a compressed stream could not be told apart.
        passed.append((b"accept-encoding", b"identity"))
        passed.append((b"content-type", b"application/json"))
        passed.append((b"x-request-id", request_id.encode("ascii")))
    return passed


def for_client(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an answer to the client, from the engine's."""
    return tuple(end_to_end(headers, _ANSWERS))


def explain(error: Exception) -> tuple[str, bool]:
    """What a failed exchange with an engine was, and whether the engine is not there at all."""
    name = type(error).__name__
    text = str(error)
    reason = f"{name}: {text}" if text else name
    # It is there, only slow; everything else is a connection that could not be made or broke.
    slow = isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout)
    return reason, not slow


class Transport:
    """HTTP connections to all engines.

    Args:
        urls: Base URLs of all engines.
        options: Its ``connect_timeout`` applies; other waits are bounded by who waits.
    """

    def __init__(self, urls: Iterable[str], options: Options) -> None:
        self._timeout = httpx.Timeout(None, connect=options.connect_timeout).as_dict()
        self._connections = {url: _Connections(secure=url.startswith("https:")) for url in urls}

    async def send(
        self,
        method: str,
        url: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes | None = None,
    ) -> httpx.Response:
        """Send a request to the engine at ``url``; returns when its headers are in.

        The caller closes the response.

        Raises:
            httpx.HTTPError: see `explain`.
            ProxyError: ``invalid_request`` if a header of the client's cannot be sent.
        """
        target = httpx.URL(url + path)
        length = [] if body is None else [(b"content-length", str(len(body)).encode("ascii"))]
        request = httpx.Request(
            method,
            target,
            headers=[(b"host", target.netloc), *headers, *length],
            content=body,
            extensions={"timeout": self._timeout},
        )
        try:
            response = await self._connections[url].handle_async_request(request)
        except httpx.LocalProtocolError:
            # Its text has the header's value in it, which may be a password: never shown.
            raise ProxyError(
                ErrorKind.INVALID_REQUEST,
                "a header of the request has a character in it that HTTP does not allow",
            ) from None
        response.request = request
        return response

    async def close(self) -> None:
        """Close every connection."""
        for connections in self._connections.values():
            await connections.aclose()


class _Connections(httpx.AsyncBaseTransport):
    """The connections to one engine, each in a pool of its own.

    With one pool for all, every request costs a look at every pair of idle connections
    (httpcore 1.0), which is the larger part of a request's cost with a hundred of them.
    """

    def __init__(self, *, secure: bool) -> None:
        # Environment variables that send traffic through a web proxy are not meant for engines
        # (trust_env); certificates come from the system, or SSL_CERT_FILE. One for all: making a
        # context takes longer than a request.
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._verify = ssl.create_default_context() if secure else plain
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE)
        self._idle: list[tuple[float, httpx.AsyncHTTPTransport]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on the connection that was used last, or a new one."""
        connection = self._idle.pop()[1] if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            # A request that is cancelled just when it takes the connection leaves it in a state
            # from which httpcore neither uses nor closes it.
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, partial(self._done, connection))
        return response

    async def aclose(self) -> None:
        """Close the idle ones; those in use are closed by who uses them."""
        for _, connection in self._idle:
            await connection.aclose()
        self._idle.clear()

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._verify,
            limits=self._limits,
            socket_options=_SOCKET_OPTIONS,
            trust_env=False,
        )

    async def _done(self, connection: httpx.AsyncHTTPTransport, whole: bool) -> None:
        now = asyncio.get_running_loop().time()
        if whole:
            self._idle.append((now, connection))
        else:
            # Half an answer is still on its way: this connection serves no other request.
            await connection.aclose()
        while self._idle and self._idle[0][0] < now - KEEP_ALIVE:
            await self._idle.pop(0)[1].aclose()


class _Stream(httpx.AsyncByteStream):
    """A response's bytes, and what to do when it is closed."""

    def __init__(
        self, stream: httpx.AsyncByteStream, done: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._done: Callable[[bool], Awaitable[None]] | None = done
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk
        self._whole = True

    async def aclose(self) -> None:
        done, self._done = self._done, None
        whole = False
        try:
            await self._stream.aclose()
            # Not before: httpcore, cancelled in there, never knows that the connection is free.
            whole = self._whole
        finally:
            if done is not None:
                await done(whole)
