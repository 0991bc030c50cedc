"""What all requests share, and the list of those in flight.

Owner: the event loop; made before it runs, by `rd2h.proxy.server.ProxyServer`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rd2h.proxy.addresses import Metaserver
from rd2h.proxy.body import Endpoint
from rd2h.proxy.config import Options
from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.proxy.ids import Minter
from rd2h.proxy.metrics import Metrics
from rd2h.proxy.pool import Backoff, Engine, Pool, Role
from rd2h.proxy.rendezvous import Registry, Waiter
from rd2h.proxy.transport import Transport, explain

__all__ = ["InFlight", "Services"]

log = logging.getLogger("rd2h.proxy")


@dataclass(eq=False)
class InFlight:
    """One client request, as the status page shows it.

    Attributes:
        request_id: The id of the attempt at hand, which the engines get.
        endpoint: Path.
        started: When it came in; seconds of the loop's clock.
        stage: What it is waiting for.
        decode: URL of its Decode engine.
        prefill: URLs of the Prefill engines that work on it.
        expected: How many rendezvous it needs.
        waiter: Where they come in.
        task: The task that serves it.
    """

    request_id: str
    endpoint: str
    started: float
    stage: str = "reading the body"
    decode: str = ""
    prefill: list[str] = field(default_factory=list)
    expected: int = 0
    waiter: Waiter | None = None
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task)

    @property
    def arrived(self) -> int:
        """How many rendezvous have come."""
        return 0 if self.waiter is None else self.waiter.arrived


class Services:
    """The shared state of one proxy.

    Args:
        options: See `Options`.
        port: The port that it listens on.

    Raises:
        AddressError: if a Decode engine could not reach the metaserver.
    """

    def __init__(self, options: Options, port: int) -> None:
        metaserver = Metaserver(options.host, port, options.advertise)
        self.options = options
        self.metaservers = {url: metaserver.for_engine(url) for url in options.decode}
        backoff = Backoff(
            options.failures, options.probe_interval, options.backoff, options.backoff_max
        )
        self.prefill = Pool(Role.PREFILL, options.prefill, backoff)
        self.decode = Pool(Role.DECODE, options.decode, backoff)
        self.minter = Minter(secrets.token_hex)
        self.registry = Registry(self.now, self.minter.is_ours)
        self.transport = Transport({*options.prefill, *options.decode}, options)
        self.metrics = Metrics()
        self.in_flight: dict[InFlight, None] = {}
        self.draining = False
        self.started_at = time.time()

    def now(self) -> float:
        """The loop's clock, in seconds."""
        return asyncio.get_running_loop().time()

    @property
    def ready(self) -> bool:
        """Whether a request could be served: an engine is in on each side, and we stay."""
        return self.prefill.up > 0 and self.decode.up > 0 and not self.draining

    def pool_of(self, engine: Engine) -> Pool:
        """The pool that an engine belongs to."""
        return self.prefill if engine.role is Role.PREFILL else self.decode

    @contextmanager
    def track(self, request_id: str, endpoint: Endpoint) -> Iterator[InFlight]:
        """Keep a request in the list while the context lasts.

        Raises:
            ProxyError: ``shutting_down`` if no new request is taken.
        """
        if self.draining:
            raise ProxyError(ErrorKind.SHUTTING_DOWN, "this proxy is shutting down")
        entry = InFlight(request_id, endpoint.path, self.now())
        self.in_flight[entry] = None
        try:
            yield entry
        finally:
            del self.in_flight[entry]

    def failed(self, engine: Engine, reason: str, *, down: bool) -> None:
        """An engine failed a request: count it, log it, take it out if that is due."""
        was_up = engine.up
        self.pool_of(engine).failed(engine, reason, self.now(), down=down)
        self.metrics.engine_failures.labels(engine.role, engine.url).inc()
        log.warning("%s engine %s failed a request: %s", engine.role, engine.url, reason)
        if was_up and not engine.up:
            log.warning("%s engine %s is out until it answers a probe", engine.role, engine.url)

    async def probe(self, engine: Engine) -> None:
        """Ask an engine's ``/health``, and take it in or out by what it says."""
        error: str | None = None
        try:
            async with asyncio.timeout(self.options.probe_timeout):
                response = await self.transport.send("GET", engine.url, "/health", [])
                try:
                    await response.aread()
                finally:
                    await response.aclose()
            if response.status_code != 200:
                error = f"/health answered {response.status_code}"
        except TimeoutError:
            error = f"/health did not answer within {self.options.probe_timeout:g} s"
        except Exception as failure:
            error = explain(failure)[0]
        was_up, was_missing = engine.up, engine.misses
        self.pool_of(engine).probed(engine, error, self.now())
        if engine.up and not was_up:
            log.info("%s engine %s is in", engine.role, engine.url)
        elif not engine.up and (was_up or was_missing == 0):
            log.warning("%s engine %s is out: %s", engine.role, engine.url, error)
