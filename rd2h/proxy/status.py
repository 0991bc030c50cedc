"""What the proxy is doing now: as a typed report, and as gauges.

Owner: the event loop.
"""

import time
from collections.abc import Iterator

import msgspec

from rd2h import __version__
from rd2h.proxy.metrics import Gauge
from rd2h.proxy.pool import Engine
from rd2h.proxy.services import Services

__all__ = ["EngineStatus", "RequestStatus", "Status", "gauges", "report"]

# A page for people: the oldest requests are those that somebody looks for.
SHOWN = 100


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        role: ``prefill`` or ``decode``.
        url: Base URL.
        up: Whether it is in.
        load: Outstanding prompt tokens (prefill) or sequences (decode).
        requests: Requests of ours that it works on.
        failures: Failed requests and probes since the proxy started.
        last_error: Why it failed last; empty if it never did.
        next_probe_seconds: Until its next probe.
        metaserver: The address that a Decode engine is told; empty for Prefill.
    """

    role: str
    url: str
    up: bool
    load: int
    requests: int
    failures: int
    last_error: str
    next_probe_seconds: float
    metaserver: str


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request in flight.

    Attributes:
        id: What the engines' ids are made of.
        endpoint: Path.
        stage: What it is waiting for.
        age_seconds: Since it came in.
        decode: URL of its Decode engine; empty before there is one.
        prefill: URLs of the Prefill engines that work on it.
        rendezvous: How many have come.
        rendezvous_expected: How many it needs.
    """

    id: str
    endpoint: str
    stage: str
    age_seconds: float
    decode: str
    prefill: list[str]
    rendezvous: int
    rendezvous_expected: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report.

    Attributes:
        version: Of rd2h.
        uptime_seconds: Since the proxy started.
        ready: Whether ``/ready`` says 200.
        draining: Whether it takes no more requests because it is shutting down.
        engines: All engines, Prefill first.
        requests_in_flight: How many there are.
        rendezvous_waiting: How many rendezvous are awaited.
        rendezvous_registered: External ids that a rendezvous could come for.
        requests: The oldest requests in flight.
    """

    version: str
    uptime_seconds: float
    ready: bool
    draining: bool
    engines: list[EngineStatus]
    requests_in_flight: int
    rendezvous_waiting: int
    rendezvous_registered: int
    requests: list[RequestStatus]


def report(services: Services) -> Status:
    """The state at this moment."""
    now = services.now()

    def engine_status(engine: Engine) -> EngineStatus:
        return EngineStatus(
            role=engine.role.value,
            url=engine.url,
            up=engine.up,
            load=engine.load,
            requests=engine.requests,
            failures=engine.failures,
            last_error=engine.last_error,
            next_probe_seconds=round(max(0.0, engine.next_probe - now), 3),
            metaserver=services.metaservers[engine.url] if engine.role == "decode" else "",
        )

    # The list is in order of arrival.
    oldest = [entry for entry, _ in zip(services.in_flight, range(SHOWN), strict=False)]
    return Status(
        version=__version__,
        uptime_seconds=round(time.time() - services.started_at, 3),
        ready=services.ready,
        draining=services.draining,
        engines=[engine_status(e) for p in (services.prefill, services.decode) for e in p.engines],
        requests_in_flight=len(services.in_flight),
        rendezvous_waiting=services.registry.waiting,
        rendezvous_registered=len(services.registry),
        requests=[
            RequestStatus(
                id=entry.request_id,
                endpoint=entry.endpoint,
                stage=entry.stage,
                age_seconds=round(now - entry.started, 3),
                decode=entry.decode,
                prefill=list(entry.prefill),
                rendezvous=entry.arrived,
                rendezvous_expected=entry.expected,
            )
            for entry in oldest
        ],
    )


def gauges(services: Services) -> Iterator[Gauge]:
    """The same as Prometheus gauges."""
    engines = [engine for pool in (services.prefill, services.decode) for engine in pool.engines]

    def of_engines(name: str, text: str, field: str) -> Gauge:
        series: list[tuple[tuple[str, ...], float]] = [
            ((e.role.value, e.url), float(getattr(e, field))) for e in engines
        ]
        return f"rd2h_proxy_{name}", text, ("role", "engine"), series

    def single(name: str, text: str, value: float) -> Gauge:
        return f"rd2h_proxy_{name}", text, (), [((), value)]

    yield of_engines("engine_up", "1 if the engine is in", "up")
    yield of_engines(
        "engine_load", "Outstanding prompt tokens (prefill) or sequences (decode)", "load"
    )
    yield of_engines("engine_requests", "Requests that the engine works on", "requests")
    yield single("requests_in_flight", "Client requests in flight", len(services.in_flight))
    yield single("rendezvous_waiting", "Rendezvous awaited", services.registry.waiting)
    yield single("ready", "1 if an engine is in on each side", services.ready)
