"""The engines of one side: which to choose, what each is doing, which are out and for how long.

An engine starts out, and comes in when it first answers a probe. A connection that fails takes it
out at once; answers of 5xx and timeouts do so when several follow each other. While it is out it is
probed, with a growing delay.

No I/O, no clock: the time (seconds) is passed in. Owner: the event loop.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Backoff", "Engine", "Lease", "NoEngineError", "Pool", "Role"]


class Role(StrEnum):
    """Which side an engine is on."""

    PREFILL = "prefill"
    DECODE = "decode"


class NoEngineError(Exception):
    """No engine of this side is in, apart from those that were tried already."""


@dataclass(frozen=True)
class Backoff:
    """How an engine is taken out and probed; seconds, but for ``failures``.

    Attributes:
        failures: Failed requests in a row that take an engine out.
        interval: Between probes of an engine that is in.
        first: Before the second probe of one that is out; doubled for each one after it.
        longest: The most that it is doubled to.
    """

    failures: int
    interval: float
    first: float
    longest: float

    def delay(self, misses: int) -> float:
        """Seconds before the next probe after ``misses`` in a row; the first comes at once."""
        if misses <= 0:
            return 0.0
        return float(min(self.longest, self.first * 2 ** min(misses - 1, 32)))


@dataclass(eq=False)
class Engine:
    """One engine, and all that is known of it; written by its `Pool` alone.

    Attributes:
        role: Its side.
        url: Its base URL.
        up: Whether it is in.
        load: Outstanding prompt tokens on P, sequences on D.
        requests: Requests of ours that it is working on.
        chosen: When it was last chosen, as a count of choices; ties go to the lowest.
        streak: Failed requests since the last good one, and since a probe took it in.
        outs: How often requests took it out since the last good one.
        misses: Failed probes since it was last in.
        failures: Failed requests and probes since the proxy started.
        last_error: Why it failed last.
        next_probe: When it is to be probed next.
    """

    role: Role
    url: str
    up: bool = False
    load: int = 0
    requests: int = 0
    chosen: int = 0
    streak: int = 0
    outs: int = 0
    misses: int = 0
    failures: int = 0
    last_error: str = ""
    next_probe: float = 0.0


@dataclass
class Lease:
    """An engine in use; `release` may be called any number of times."""

    engine: Engine
    weight: int
    _held: bool = field(default=True, init=False)

    def release(self) -> None:
        """Give the load back."""
        if self._held:
            self._held = False
            self.engine.load -= self.weight
            self.engine.requests -= 1


class Pool:
    """The engines of one side.

    Args:
        role: Which side.
        urls: Base URLs, each once.
        backoff: When to take an engine out, and when to probe it.
        changed: Called with an engine when its state or the time of its next probe changed.
    """

    def __init__(
        self,
        role: Role,
        urls: Collection[str],
        backoff: Backoff,
        changed: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self.role = role
        self.engines = tuple(Engine(role, url) for url in urls)
        self.changed = changed
        self._backoff = backoff
        self._choices = 0

    @property
    def up(self) -> int:
        """How many engines are in."""
        return sum(engine.up for engine in self.engines)

    def choose(self, exclude: Collection[Engine] = ()) -> Engine:
        """The least loaded engine that is in; among equals, the one whose turn is longest ago.

        Raises:
            NoEngineError: if there is none.
        """
        able = [engine for engine in self.engines if engine.up and engine not in exclude]
        if not able:
            raise NoEngineError
        engine = min(able, key=lambda e: (e.load, e.chosen))
        self._choices += 1
        engine.chosen = self._choices
        return engine

    @contextmanager
    def lease(self, weight: int, exclude: Collection[Engine] = ()) -> Iterator[Lease]:
        """Choose an engine and count ``weight`` on it until the context ends.

        Raises:
            NoEngineError: if there is none.
        """
        lease = Lease(self.choose(exclude), weight)
        lease.engine.load += weight
        lease.engine.requests += 1
        try:
            yield lease
        finally:
            lease.release()

    def succeeded(self, engine: Engine) -> None:
        """It answered a request."""
        engine.streak = engine.outs = 0

    def failed(self, engine: Engine, error: str, now: float, *, down: bool) -> None:
        """It failed a request; ``down`` if that says that it is not there at all."""
        engine.failures += 1
        engine.last_error = error
        if not engine.up:
            # What it was working on fails with it, and says nothing new.
            return
        engine.streak += 1
        if down or engine.streak >= self._backoff.failures:
            engine.up = False
            engine.misses = 0
            engine.outs += 1
            # It may answer probes while it fails requests: that must not let it in at once. A
            # connection that breaks is probed at once the first time: it may be that one alone.
            engine.next_probe = now + self._backoff.delay(engine.outs - down)
            self.changed(engine)

    def probed(self, engine: Engine, error: str | None, now: float) -> None:
        """A probe was answered well (None), or failed."""
        was_up = engine.up
        if error is None:
            if not was_up:
                engine.streak = 0
            engine.up = True
            engine.misses = 0
            engine.next_probe = now + self._backoff.interval
        else:
            engine.up = False
            engine.misses += 1
            engine.failures += 1
            engine.last_error = error
            engine.next_probe = now + self._backoff.delay(engine.misses)
        if engine.up is not was_up:
            self.changed(engine)
