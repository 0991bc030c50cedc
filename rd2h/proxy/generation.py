"""The two generation endpoints as ASGI applications: from the body to the answer.

Owner: the task that serves the request.
"""

import asyncio
import logging
from contextlib import ExitStack

from rd2h.proxy.body import Endpoint, parse
from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.proxy.flow import cancelled, serve
from rd2h.proxy.ids import usable
from rd2h.proxy.responder import Receive, Responder, Scope, Send
from rd2h.proxy.services import InFlight, Services

__all__ = ["CLIENT_LEFT", "Generation", "read_body"]

log = logging.getLogger("rd2h.proxy")

# What nginx logs when the client has gone; never sent.
CLIENT_LEFT = 499


# A body that is too large is read up to this many times the limit before it is refused.
OVERSIZE_READ = 4

# How long a client may take to read that its request has failed.
FAIL_SECONDS = 5.0


class ClientLeftError(Exception):
    """The client closed its connection: there is nobody to answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body, of at most ``limit`` bytes.

    Raises:
        ProxyError: ``body_too_large``.
        ClientLeftError: if the client leaves before its end.
    """
    too_large = ProxyError(
        ErrorKind.BODY_TOO_LARGE, f"the body is larger than the {limit} bytes that are taken"
    )
    body = bytearray()
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            body += chunk
        else:
            # Most clients read an answer only after they have sent everything: take it, drop it.
            body.clear()
            if size > limit * OVERSIZE_READ:
                raise too_large
        if not message.get("more_body", False):
            if size > limit:
                raise too_large
            return bytes(body)


class Generation:
    """An endpoint that generates.

    Args:
        services: Shared state.
        endpoint: Which one.
    """

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._services = services
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI); answers every error itself."""
        services, metrics, path = self._services, self._services.metrics, self._endpoint.path
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((v.decode("latin-1") for n, v in headers if n == b"x-request-id"), None)
        client_id = usable(given)
        request_id = services.minter.mint(client_id)
        started = services.now()

        def first_byte() -> None:
            metrics.first_byte_seconds.labels(path).observe(services.now() - started)

        responder = Responder(send, client_id or request_id, first_byte)
        entry: InFlight | None = None
        status = 0
        # Until its end, with whatever the client is told: a request that hangs is seen.
        with ExitStack() as tracked:
            try:
                entry = tracked.enter_context(services.track(request_id, self._endpoint))
                await self._serve(scope, receive, request_id, entry, responder)
            except ClientLeftError:
                status = CLIENT_LEFT
            except ProxyError as error:
                if responder.started and not responder.finished:
                    metrics.stream_errors.labels(path).inc()
                level = logging.WARNING if error.kind.status >= 500 else logging.INFO
                log.log(level, "request %s: %s: %s", request_id, error.kind.code, error.message)
                await self._fail(responder, error, request_id)
            except asyncio.CancelledError:
                if not services.draining:
                    raise
                # The end of a shutdown; swallowed, because uvicorn would log it as a bug.
                gone = ProxyError(
                    ErrorKind.SHUTTING_DOWN, "this proxy was shut down before the end"
                )
                await self._fail(responder, gone, request_id)
            except Exception:
                log.exception("request %s: a bug of the proxy", request_id)
                bug = ProxyError(ErrorKind.INTERNAL, "internal error of the proxy")
                await self._fail(responder, bug, request_id)
            finally:
                elapsed = services.now() - started
                status = status or responder.status
                metrics.requests.labels(path, str(status)).inc()
                metrics.request_seconds.labels(path).observe(elapsed)
                log.info(
                    "%s %d in %.3f s, id %s, decode %s",
                    path, status, elapsed, entry.request_id if entry else request_id,
                    entry.decode if entry and entry.decode else "none",
                )  # fmt: skip

    async def _fail(self, responder: Responder, error: ProxyError, request_id: str) -> None:
        """Tell the client, if it takes it; uvicorn drops a connection without a whole answer."""
        try:
            async with asyncio.timeout(FAIL_SECONDS):
                await responder.fail(error)
        except TimeoutError:
            log.warning("request %s: the client does not read; it is dropped", request_id)

    async def _serve(
        self, scope: Scope, receive: Receive, request_id: str, entry: InFlight, responder: Responder
    ) -> None:
        services, options = self._services, self._services.options
        try:
            async with asyncio.timeout(options.request_timeout):
                body = await read_body(receive, options.max_body_mib << 20)
                call = parse(self._endpoint, body, options.max_sequences)
                del body
                work = serve(services, call, scope["headers"], request_id, entry, responder)
                async with cancelled(work, _disconnected(receive)) as (serving, leaving):
                    await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done() and not responder.finished:
                        raise ClientLeftError
                    # A finished answer looks like a disconnect; what is left is ours to finish.
                    await serving
        except TimeoutError:
            if not responder.finished:
                raise ProxyError(
                    ErrorKind.REQUEST_TIMEOUT,
                    f"the request took longer than {options.request_timeout:g} s; it was last "
                    f"at: {entry.stage}"
                    + (f", Decode engine {entry.decode}" if entry.decode else ""),
                ) from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
