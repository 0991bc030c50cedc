"""The routes.

Owner: the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rd2h.proxy.body import Endpoint
from rd2h.proxy.errors import Answer, ErrorKind, ProxyError
from rd2h.proxy.generation import ClientLeftError, Generation, read_body
from rd2h.proxy.health import probing
from rd2h.proxy.limiter import Limiter
from rd2h.proxy.metrics import CONTENT_TYPE, Gauges
from rd2h.proxy.page import CONTENT_SECURITY_POLICY, page
from rd2h.proxy.pool import Engine, NoEngineError
from rd2h.proxy.services import Services
from rd2h.proxy.status import gauges, report
from rd2h.proxy.transport import explain, for_client, for_engine
from rd2h.wire import Advertisement, MalformedMessageError

__all__ = ["build"]

log = logging.getLogger("rd2h.proxy")

# An advertisement is a few hundred bytes.
METASERVER_BODY = 1 << 16
METASERVER_SECONDS = 30.0


def build(services: Services) -> Starlette:
    """The application of one proxy."""
    services.metrics.registry.register(Gauges(lambda: gauges(services)))
    views = _Views(services)
    generation = [
        Route(endpoint.path, Generation(services, endpoint), methods=["POST"])
        for endpoint in Endpoint
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with probing(services):
                yield
        finally:
            await services.transport.close()

    return Starlette(
        routes=[
            *generation,
            Route("/v1/models", views.models),
            Route("/v1/metaserver", views.metaserver, methods=["POST"]),
            Route("/health", views.health),
            Route("/ready", views.ready),
            Route("/metrics", views.metrics),
            Route("/status", views.status),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ProxyError: _proxy_error,
            Exception: _bug,
        },
        lifespan=lifespan,
    )


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    length = response.headers["content-length"]
    response.raw_headers = [*answer.headers, (b"content-length", length.encode("ascii"))]
    return response


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _proxy_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return _response(error.answer())


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        kind, reason = ErrorKind.METHOD_NOT_ALLOWED, f"does not take {request.method}"
    else:
        kind, reason = ErrorKind.NOT_FOUND, "does not exist"
    response = _response(ProxyError(kind, f"{request.url.path} {reason}").answer())
    allowed = (error.headers or {}).get("Allow")
    if allowed is not None:
        response.raw_headers.append((b"allow", allowed.encode("ascii")))
    return response


async def _bug(request: Request, _: Exception) -> Response:
    # uvicorn logs the traceback.
    error = ProxyError(ErrorKind.INTERNAL, f"internal error of the proxy at {request.url.path}")
    return _response(error.answer())


class _Views:
    """Everything but generation."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # Somebody who posts rubbish must not fill the disk with our log.
        self._refusals = Limiter(rate=5.0, burst=20)

    async def health(self, _: Request) -> Response:
        """Live: the loop turns."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a request could be served."""
        services = self._services
        return _json(
            {
                "ready": services.ready,
                "draining": services.draining,
                "prefill": {"up": services.prefill.up, "total": len(services.prefill.engines)},
                "decode": {"up": services.decode.up, "total": len(services.decode.engines)},
            },
            200 if services.ready else 503,
        )

    async def metrics(self, _: Request) -> Response:
        """Prometheus."""
        return Response(self._services.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """JSON if it is asked for, else the page."""
        current = report(self._services)
        wanted = request.query_params.get("format")
        accept = request.headers.get("accept", "")
        if wanted is None and "application/json" in accept and "text/html" not in accept:
            wanted = "json"
        if wanted == "json":
            return _json(current, headers={"cache-control": "no-store"})
        return Response(
            page(current),
            media_type="text/html",
            headers={
                "cache-control": "no-store",
                "content-security-policy": CONTENT_SECURITY_POLICY,
                "x-content-type-options": "nosniff",
            },
        )

    async def metaserver(self, request: Request) -> Response:
        """D's rendezvous. The answer does not wait for P: D has nothing to do with that."""
        services = self._services
        try:
            try:
                async with asyncio.timeout(METASERVER_SECONDS):
                    body = await read_body(request.receive, METASERVER_BODY)
                advertisement = Advertisement.from_json(body)
            except TimeoutError:
                reason = f"the post did not end within {METASERVER_SECONDS:g} s"
                raise ProxyError(ErrorKind.RENDEZVOUS_MALFORMED, reason) from None
            except MalformedMessageError as error:
                raise ProxyError(ErrorKind.RENDEZVOUS_MALFORMED, str(error)) from None
            services.registry.post(advertisement)
        except ClientLeftError:
            return Response(status_code=400)
        except ProxyError as error:
            services.metrics.rendezvous.labels(error.kind.code.removeprefix("rendezvous_")).inc()
            unsaid = self._refusals.allow(services.now())
            if unsaid is not None:
                peer = request.client.host if request.client else "unknown"
                more = f" ({unsaid} refusals before it were not logged)" if unsaid else ""
                log.warning("refused a rendezvous from %s: %s%s", peer, error.message, more)
            return _response(error.answer())
        services.metrics.rendezvous.labels("accepted").inc()
        return _json({"status": "accepted"})

    async def models(self, request: Request) -> Response:
        """Passed through to a Decode engine."""
        services = self._services
        tried: list[Engine] = []
        reason = "no Decode engine is in"
        while len(tried) < services.options.attempts:
            try:
                engine = services.decode.choose(tried)
            except NoEngineError:
                break
            tried.append(engine)
            limit = services.options.probe_timeout
            try:
                async with asyncio.timeout(limit):
                    response = await services.transport.send(
                        "GET", engine.url, "/v1/models", for_engine(request.headers.raw)
                    )
                    try:
                        body = b"".join([chunk async for chunk in response.aiter_raw()])
                    finally:
                        await response.aclose()
            except TimeoutError:
                reason = f"no answer within {limit:g} s"
                services.failed(engine, reason, down=False)
                continue
            except httpx.HTTPError as failure:
                reason, down = explain(failure)
                services.failed(engine, reason, down=down)
                continue
            if response.status_code < 500:
                headers = for_client(response.headers.raw)
                return _response(Answer(response.status_code, headers, body))
            reason = f"it answered {response.status_code}"
            services.failed(engine, reason, down=False)
        raise ProxyError(ErrorKind.DECODE_UNAVAILABLE, f"no Decode engine lists models: {reason}")
