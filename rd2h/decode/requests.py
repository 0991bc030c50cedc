"""The requests that Decode waits for: who feeds each, how far it is, how it ended.

No I/O and no clock. Two kinds of completion are kept apart (``docs/architecture.md``): a
*batch* is complete when it was read and its reply is on its way, which opens gates on Prefill;
a *request* is complete when every contributor has reported its last layer. Only the second is
this module's.

A request that has ended, well or badly, is reported once and leaves only its id behind for a
while: batches for it may still be on their way, and they are acknowledged without reading.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from rd2h.reads import RequestDestination
from rd2h.texts import short

__all__ = ["Finished", "Outcome", "RequestBook", "registered_already"]


class Outcome(Enum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Finished:
    """A request's end; no byte of it is read or written afterwards.

    Attributes:
        ext_id: The request.
        outcome: How it ended. Only after DONE do its blocks hold the prompt's KV.
        reason: Why it failed; empty otherwise.
    """

    ext_id: str
    outcome: Outcome
    reason: str = ""


@dataclass
class _Request:
    destination: RequestDestination
    heard: float  # when it last made progress
    ratio: int | None = None  # contributors, known from the first batch
    feeders: dict[bytes, int] = field(default_factory=dict)  # peer identity -> member
    done_members: set[int] = field(default_factory=set)
    held: int = 0  # by batches that are being read or answered
    failure: str | None = None
    aborted: bool = False

    @property
    def live(self) -> bool:
        """Whether anything may still be read for it."""
        return self.failure is None and not self.aborted

    @property
    def complete(self) -> bool:
        return self.ratio is not None and len(self.done_members) == self.ratio


def registered_already(first: RequestDestination, again: RequestDestination) -> str:
    """Why a request cannot be registered a second time, and in what the two differ."""
    same = [*first.main_block_ids] == [*again.main_block_ids] and (
        [*first.indexer_block_ids] == [*again.indexer_block_ids]
    )
    return (
        f"request {short(first.ext_id)} is registered already with {_blocks(first)}, and now "
        f"again with {_blocks(again)}{', the same ones' if same else ''}; it must end and be "
        f"taken as finished before its id is used again"
    )


def _blocks(destination: RequestDestination) -> str:
    main, indexer = len(destination.main_block_ids), len(destination.indexer_block_ids)
    return f"{main} main and {indexer} indexer blocks"


class RequestBook:
    """All requests of one Decode rank. Owned by the receiver's socket thread.

    Args:
        idle_timeout: Seconds without a batch after which a request fails.
        memory: Seconds for which an ended request's id is remembered.
        most_remembered: How many ended ids are remembered at most, some 300 bytes each.
    """

    def __init__(
        self, *, idle_timeout: float, memory: float = 600.0, most_remembered: int = 1_000_000
    ) -> None:
        self._idle_timeout = idle_timeout
        self._memory = memory
        self._most_remembered = most_remembered
        self._requests: dict[str, _Request] = {}
        # Ended ids, oldest first, and when to forget each.
        self._ended: OrderedDict[str, float] = OrderedDict()
        # Those of them for which a batch was acknowledged without reading since.
        self._passed_over: set[str] = set()
        # No request can have been idle for long enough before this; see `fail_idle`.
        self._idle_check: float | None = None
        self._finished: list[Finished] = []

    # ------------------------------------------------------------------------ from the connector

    def register(self, destination: RequestDestination, now: float) -> None:
        """Decode has allocated a request's blocks.

        Raises:
            ValueError: if the request is registered already.
        """
        ext_id = destination.ext_id
        if ext_id in self._requests:
            raise ValueError(registered_already(self._requests[ext_id].destination, destination))
        self._ended.pop(ext_id, None)
        self._requests[ext_id] = _Request(destination, heard=now)
        if self._idle_check is None:
            self._idle_check = now + self._idle_timeout
        if ext_id in self._passed_over:
            self._passed_over.discard(ext_id)
            self.fail(
                [ext_id],
                f"request {ext_id} was registered after batches for it had been acknowledged "
                f"without reading: its id was aborted or had ended before; use a new id",
                now,
            )

    def abort(self, ext_id: str, now: float) -> None:
        """The request is not wanted any more, whether or not it was registered."""
        request = self._requests.get(ext_id)
        if request is None:
            self._remember(ext_id, now)
        else:
            request.aborted = True
            self._settle(ext_id, now)

    # ------------------------------------------------------------------------------- from peers

    def is_unknown(self, ext_id: str) -> bool:
        """Whether the request may still be registered: it is neither there nor ended."""
        return ext_id not in self._requests and ext_id not in self._ended

    def live(self, ext_id: str) -> RequestDestination | None:
        """Where to read a request's blocks to; None if nothing is to be read for it."""
        request = self._requests.get(ext_id)
        return request.destination if request is not None and request.live else None

    def pass_over(self, ext_ids: Iterable[str]) -> None:
        """A batch was acknowledged; what it had for those of these requests that ended is lost."""
        self._passed_over.update(ext_id for ext_id in ext_ids if ext_id in self._ended)

    def feed(
        self, ext_ids: Iterable[str], peer: bytes, member: int, ratio: int, now: float
    ) -> None:
        """A peer has sent a batch for these requests, as member ``member`` of ``ratio``."""
        for ext_id in ext_ids:
            request = self._requests.get(ext_id)
            if request is None:
                continue
            request.heard = now
            if request.ratio not in (None, ratio):
                self.fail(
                    [ext_id],
                    f"one Prefill rank says that {request.ratio} ranks feed this Decode rank, "
                    f"another that {ratio} do; they must be ranks of one engine",
                    now,
                )
                continue
            request.ratio = ratio
            request.feeders[peer] = member

    def hold(self, ext_ids: Iterable[str]) -> tuple[str, ...]:
        """Keep requests from ending while a batch of them is read or answered.

        Returns:
            Those that are there, for `let_go`.
        """
        held = tuple(ext_id for ext_id in ext_ids if ext_id in self._requests)
        for ext_id in held:
            self._requests[ext_id].held += 1
        return held

    def let_go(self, held: Iterable[str], now: float) -> None:
        """The batch that held these requests is over."""
        for ext_id in held:
            request = self._requests[ext_id]
            request.held -= 1
            request.heard = now
            self._settle(ext_id, now)

    def member_done(self, ext_ids: Iterable[str], member: int, now: float) -> None:
        """A contributor has reported its last layer; saying so twice changes nothing."""
        for ext_id in ext_ids:
            if (request := self._requests.get(ext_id)) is not None:
                request.done_members.add(member)
                self._settle(ext_id, now)

    def fail(self, ext_ids: Iterable[str], reason: str, now: float) -> None:
        """Something of these requests cannot be read; the first reason stays."""
        for ext_id in ext_ids:
            if (request := self._requests.get(ext_id)) is not None:
                request.failure = request.failure or reason
                self._settle(ext_id, now)

    def peer_lost(self, peer: bytes, reason: str, now: float) -> None:
        """A peer is gone: requests that it feeds and has not finished fail."""
        self.fail(self._fed_by(peer), reason, now)
        for request in self._requests.values():
            request.feeders.pop(peer, None)

    def fail_idle(self, now: float) -> None:
        """Fail what has heard nothing for too long, and forget ended requests whose time is up."""
        while self._ended and next(iter(self._ended.values())) <= now:
            self._forget_oldest()
        if self._idle_check is None or now < self._idle_check:
            return
        idle = [
            (ext_id, request)
            for ext_id, request in self._requests.items()
            if request.held == 0 and now - request.heard >= self._idle_timeout
        ]
        for ext_id, request in idle:
            of = "no contributor is known" if request.ratio is None else f"of {request.ratio}"
            self.fail(
                [ext_id],
                f"waited {self._idle_timeout:g} s for a batch from Prefill "
                f"({len(request.done_members)} contributors done, {of})",
                now,
            )
        # Times of hearing only grow, and later requests are heard later: nothing can be idle
        # for long enough before the least recently heard one of now is.
        heard = [max(r.heard, now) if r.held else r.heard for r in self._requests.values()]
        self._idle_check = min(heard) + self._idle_timeout if heard else None

    # ---------------------------------------------------------------------------------- queries

    def is_fed_by(self, peer: bytes) -> bool:
        """Whether a peer still has something to send for a request."""
        return bool(self._fed_by(peer))

    def next_deadline(self) -> float | None:
        """When `fail_idle` may have something to do."""
        return self._idle_check

    def take_finished(self) -> list[Finished]:
        """Requests that have ended since the last call, each once."""
        finished, self._finished = self._finished, []
        return finished

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind; `ended` shrinks with time, the others with the requests."""
        return {"requests": len(self._requests), "ended": len(self._ended)}

    # -------------------------------------------------------------------------------- internals

    def _fed_by(self, peer: bytes) -> list[str]:
        return [
            ext_id
            for ext_id, request in self._requests.items()
            if peer in request.feeders and request.feeders[peer] not in request.done_members
        ]

    def _settle(self, ext_id: str, now: float) -> None:
        """Report a request if it has ended and nothing of it is being read."""
        request = self._requests[ext_id]
        if request.held or (request.live and not request.complete):
            return
        del self._requests[ext_id]
        self._remember(ext_id, now)
        if request.aborted:
            self._finished.append(Finished(ext_id, Outcome.ABORTED))
        elif request.failure is not None:
            self._finished.append(Finished(ext_id, Outcome.FAILED, request.failure))
        else:
            self._finished.append(Finished(ext_id, Outcome.DONE))

    def _remember(self, ext_id: str, now: float) -> None:
        self._ended.pop(ext_id, None)
        self._ended[ext_id] = now + self._memory
        while len(self._ended) > self._most_remembered:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        ext_id, _ = self._ended.popitem(last=False)
        self._passed_over.discard(ext_id)
