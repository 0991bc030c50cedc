"""Prometheus metrics, in a registry of their own.

Counters and histograms are written where things happen. Gauges are read off the state at each
scrape, so that they cannot drift from it.

Owner: the event loop, the scrape included.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Gauges", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a short prompt on an idle pair to a long one behind a queue, in seconds.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# name, help, label names, and one (label values, value) for each series
Gauge = tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]


class Gauges(Collector):
    """Reads gauges when it is scraped."""

    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The gauges, as they are now."""
        for name, text, labels, series in self._read():
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, value in series:
                family.add_metric(values, value)
            yield family


class Metrics:
    """What the proxy counts and times. Names and meaning are in ``docs/proxy.md``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Client requests that are over, by HTTP status", "endpoint", "status"
        )
        self.stream_errors = self._counter(
            "stream_errors", "Streams that ended with an error event", "endpoint"
        )
        self.rendezvous = self._counter(
            "rendezvous", "Posts to the metaserver, by what came of them", "result"
        )
        self.dispatches = self._counter(
            "dispatches", "Requests to Prefill engines: whole, part of a list, or a retry", "kind"
        )
        self.engine_failures = self._counter(
            "engine_failures", "Requests that an engine failed", "role", "engine"
        )
        self.retries = self._counter("retries", "Requests that went to another engine", "role")
        self.request_seconds = self._histogram(
            "request_seconds", "From the request's arrival until its answer is complete", "endpoint"
        )
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds",
            "From the request's arrival until Decode's answer begins",
            "endpoint",
        )
        self.rendezvous_seconds = self._histogram(
            "rendezvous_seconds", "From the request to Decode until its prompts are dispatched"
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "From a dispatch until the Prefill engine's answer"
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"rd2h_proxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            f"rd2h_proxy_{name}", text, labels, registry=self.registry, buckets=_SECONDS
        )
