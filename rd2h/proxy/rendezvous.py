"""The rendezvous of one request: which prompts D has asked for, and when to send them to P.

`Gathering` is the state machine: it takes arrivals and the time, and says what to do next. It does
no I/O and reads no clock. `Registry` finds the gathering of an external id, and `Waiter` turns
"wait until" into an await.

Owner: the event loop. Nothing here is safe to call from another thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.wire import Advertisement

__all__ = ["Complete", "Expired", "Gathering", "Registry", "Send", "WaitUntil", "Waiter"]


@dataclass(frozen=True)
class Send:
    """Send these to P now; ``whole`` if they are all that there will ever be."""

    arrived: tuple[Advertisement, ...]
    whole: bool


@dataclass(frozen=True)
class WaitUntil:
    """Nothing to do until the next arrival or this time (seconds; None: no limit of our own)."""

    time: float | None


@dataclass(frozen=True)
class Expired:
    """D has asked for nothing in time."""

    waited: float


@dataclass(frozen=True)
class Complete:
    """Every prompt was asked for and sent."""


Action = Send | WaitUntil | Expired | Complete


class Gathering:
    """Which of the expected ids have arrived, and what follows from it.

    All in: send them. Some in: wait a bounded time for the others, because D may admit the prompts
    of a list only as earlier ones finish and those never finish unless they are sent. None in:
    wait until the deadline; D may be full.

    Args:
        expected: External ids, each once. None means that D needs nothing of P.
        now: The time, in seconds of any clock that never goes back.
        timeout: Seconds within which something must arrive.
        batch_wait: Seconds that arrivals wait for more.
    """

    def __init__(
        self, expected: Iterable[str], *, now: float, timeout: float, batch_wait: float
    ) -> None:
        self._missing = set(expected)
        self._arrived: list[Advertisement] = []
        self._started = now
        self._deadline: float | None = now + timeout
        self._batch_wait = batch_wait
        self._due = now
        self._sent = 0

    @property
    def missing(self) -> int:
        """How many ids have not arrived."""
        return len(self._missing)

    def arrive(self, advertisement: Advertisement, now: float) -> bool:
        """D asks for a prompt; False if it is not expected, or not any more."""
        if advertisement.request_id not in self._missing:
            return False
        self._missing.remove(advertisement.request_id)
        if not self._arrived:
            self._due = now + self._batch_wait
        self._arrived.append(advertisement)
        # From now on D is known to work on the request. What it has not asked for waits for a free
        # place there, which takes as long as other answers do: the request's own limit applies.
        self._deadline = None
        return True

    def answering(self) -> None:
        """D has begun to answer: it does not need what it has not asked for in order to live."""
        self._deadline = None

    def step(self, now: float) -> Action:
        """What to do at this time. A `Send` is said once; ask again after each action."""
        if self._arrived and (not self._missing or now >= self._due):
            arrived = tuple(self._arrived)
            self._arrived.clear()
            whole = self._sent == 0 and not self._missing
            self._sent += len(arrived)
            return Send(arrived, whole)
        if self._arrived:
            return WaitUntil(self._due)
        if not self._missing:
            return Complete()
        if self._deadline is not None and now >= self._deadline:
            return Expired(now - self._started)
        return WaitUntil(self._deadline)


class Waiter:
    """One request's place in the `Registry`; made by `Registry.expect`."""

    def __init__(
        self,
        gathering: Gathering,
        expected: int,
        clock: Callable[[], float],
        forget: Callable[[], None],
    ) -> None:
        self._gathering = gathering
        self._clock = clock
        self._forget = forget
        self._wake = asyncio.Event()
        self._closed = False
        self.expected = expected

    @property
    def arrived(self) -> int:
        """How many rendezvous have arrived."""
        return self.expected - self._gathering.missing

    def arrive(self, advertisement: Advertisement) -> bool:
        """See `Gathering.arrive`."""
        accepted = self._gathering.arrive(advertisement, self._clock())
        if accepted:
            self._wake.set()
        return accepted

    def answering(self) -> None:
        """See `Gathering.answering`."""
        self._gathering.answering()
        self._wake.set()

    def close(self) -> None:
        """Nothing more is needed: `batches` ends, and what comes now is late. May be repeated."""
        if not self._closed:
            self._closed = True
            self._forget()
            self._wake.set()

    async def batches(self) -> AsyncIterator[Send]:
        """What to send to P, as it becomes due, until all is sent.

        Raises:
            ProxyError: ``rendezvous_timeout`` if D asks for nothing in time.
        """
        while not self._closed:
            self._wake.clear()
            match self._gathering.step(self._clock()):
                case Send() as send:
                    yield send
                case Complete():
                    return
                case Expired(waited):
                    raise ProxyError(
                        ErrorKind.RENDEZVOUS_TIMEOUT,
                        f"the Decode engine posted none of {self.expected} rendezvous to the "
                        f"metaserver within {waited:.1f} s",
                    )
                case WaitUntil(time):
                    try:
                        async with asyncio.timeout_at(time):
                            await self._wake.wait()
                    except TimeoutError:
                        continue


class Registry:
    """Finds the request that a rendezvous belongs to.

    Args:
        clock: The event loop's clock, in seconds.
        is_ours: Whether an external id was made from an id of this process.
    """

    def __init__(self, clock: Callable[[], float], is_ours: Callable[[str], bool]) -> None:
        self._clock = clock
        self._is_ours = is_ours
        self._waiters: dict[str, Waiter] = {}

    def __len__(self) -> int:
        """How many external ids are registered."""
        return len(self._waiters)

    @property
    def waiting(self) -> int:
        """How many rendezvous are awaited now."""
        return sum(w.expected - w.arrived for w in set(self._waiters.values()))

    @contextmanager
    def expect(self, ids: Sequence[str], *, timeout: float, batch_wait: float) -> Iterator[Waiter]:
        """Take rendezvous for these external ids while the context lasts."""

        def forget() -> None:
            for ext_id in ids:
                del self._waiters[ext_id]

        gathering = Gathering(ids, now=self._clock(), timeout=timeout, batch_wait=batch_wait)
        waiter = Waiter(gathering, len(ids), self._clock, forget)
        self._waiters.update(dict.fromkeys(ids, waiter))
        try:
            yield waiter
        finally:
            waiter.close()

    def post(self, advertisement: Advertisement) -> None:
        """A rendezvous has come in.

        Raises:
            ProxyError: if nobody waits for it: unknown, too late, or a repetition.
        """
        ext_id = advertisement.request_id
        # It goes into a log line, and anybody can post: escaped, and of bounded length.
        shown = repr(ext_id[:200])
        waiter = self._waiters.get(ext_id)
        if waiter is None:
            if self._is_ours(ext_id):
                raise ProxyError(
                    ErrorKind.RENDEZVOUS_LATE,
                    f"request {shown} is over: it was answered, cancelled or has failed",
                )
            raise ProxyError(
                ErrorKind.RENDEZVOUS_UNKNOWN,
                f"no request of this proxy has the external id {shown}",
            )
        if not waiter.arrive(advertisement):
            raise ProxyError(
                ErrorKind.RENDEZVOUS_DUPLICATE,
                f"the rendezvous of request {shown} was posted before; the first one counts",
            )
