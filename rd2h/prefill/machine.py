"""The sender as a state machine: events in, actions out, no sockets, no clock, no threads.

One :class:`SenderMachine` speaks for one Prefill rank. It keeps a *link* to each Decode rank
(endpoint) that has something to be told. The life of a link:

```text
 IDLE ── announce ──▶ CONNECTING ── connected: send MfMeta ──▶ GREETING ── MfMetaAck ──▶ READY
  ▲                       │                                     │    ▲                    │
  │                   deadline                       deadline   │    └── lost: new socket │
  └───────────────────────┴─────────────────────────────────────┴──── lost, no answer ────┘
```

Batches that are announced before READY wait in the link's queue; in READY they are sent at
once. A reply names only its layer, and a peer answers the batches of one layer in the order in
which they were sent, so replies are matched first in, first out, layer by layer; one that
matches nothing changes nothing.

A connection that is lost or does not answer is never used again: what was sent there is failed,
the socket is closed, so that the peer notices too, and the next announcement starts anew with a
handshake (protocol, "Transport"). Requests that were on their way there are lost with it, and
later batches leave them out.

Owned by one thread, the sender's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from rd2h.prefill.gates import Hold
from rd2h.wire import (
    DecodeMessage,
    MfMeta,
    MfMetaAck,
    PrefillMessage,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
)

__all__ = [
    "Action",
    "Announcement",
    "Close",
    "Connect",
    "Failed",
    "Release",
    "Send",
    "SenderMachine",
    "State",
]


@dataclass(frozen=True, eq=False)
class Announcement:
    """One batch for one Decode rank, and the hold that it has on storage slots."""

    hold: Hold
    batch: ReadReadyBatch

    @property
    def endpoint(self) -> str:
        """The Decode rank it goes to."""
        return self.hold.endpoint


# ------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Connect:
    """Open a new socket to ``endpoint`` and watch it; ``connection`` numbers it."""

    endpoint: str
    connection: int


@dataclass(frozen=True)
class Close:
    """Close a socket; nothing is heard from that connection again."""

    endpoint: str
    connection: int


@dataclass(frozen=True)
class Send:
    """Send a message on a connection that is established."""

    endpoint: str
    connection: int
    message: PrefillMessage


@dataclass(frozen=True)
class Release:
    """The batch no longer keeps its slots shut."""

    hold: Hold


@dataclass(frozen=True)
class Failed:
    """Batches for one Decode rank could not be handed over; their requests are lost there.

    It comes before the `Release` of each: whoever waits at a gate must find the failure when the
    gate opens.

    Attributes:
        layer_names: The layers of the batches, oldest first.
        endpoint: The Decode rank.
        ext_ids: The requests of these batches.
        reason: Why.
    """

    layer_names: tuple[str, ...]
    endpoint: str
    ext_ids: tuple[str, ...]
    reason: str


Action: TypeAlias = Connect | Close | Send | Release | Failed


# --------------------------------------------------------------------------------------- links


class State(Enum):
    """Where a link is in its life; the picture is in the module's docstring."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"


@dataclass
class _Sent:
    announcement: Announcement
    at: float


@dataclass
class _Link:
    endpoint: str
    state: State = State.IDLE
    connection: int = 0
    deadline: float = 0.0  # of the handshake, in CONNECTING and GREETING
    queue: deque[Announcement] = field(default_factory=deque)
    sent: dict[int, deque[_Sent]] = field(default_factory=dict)  # by layer_idx, oldest first
    open_requests: set[str] = field(default_factory=set)  # announced, not complete
    lost_requests: set[str] = field(default_factory=set)  # failed there; left out from then on

    def outstanding(self) -> Iterable[_Sent]:
        for batches in self.sent.values():
            yield from batches

    def oldest(self) -> _Sent | None:
        """The batch that has waited longest: each layer's queue is in order of time."""
        heads = (batches[0] for batches in self.sent.values())
        return min(heads, key=lambda sent: sent.at, default=None)

    @property
    def unused(self) -> bool:
        return (
            self.state is State.IDLE
            and not self.queue
            and not self.open_requests
            and not self.lost_requests
        )


class SenderMachine:
    """All links of one Prefill rank.

    Every method is an event and returns the actions that follow, to be carried out in order.
    Times are seconds of any steady clock, always the same one.

    Args:
        metadata: What to tell each Decode rank in the handshake.
        handshake_timeout: Seconds from the first announcement until MfMetaAck.
        answer_timeout: Seconds from sending a batch until its answer. It must be longer than
            Decode lets a batch wait for its request to be registered.
    """

    def __init__(
        self, metadata: MfMeta, *, handshake_timeout: float, answer_timeout: float
    ) -> None:
        self._metadata = metadata
        self._handshake_timeout = handshake_timeout
        self._answer_timeout = answer_timeout
        self._links: dict[str, _Link] = {}
        self._connections = 0

    # ----------------------------------------------------------------------------------- events

    def announce(self, announcement: Announcement, now: float) -> list[Action]:
        """A layer's KV is in memory: tell the Decode rank, or queue it until that can be told."""
        link = self._links.setdefault(announcement.endpoint, _Link(announcement.endpoint))
        trimmed = _without(announcement, link.lost_requests)
        if trimmed is None:
            return [Release(announcement.hold)]
        link.open_requests.update(_requests(trimmed.batch))
        if link.state is State.READY:
            return [self._send(link, trimmed, now)]
        link.queue.append(trimmed)
        if link.state is State.IDLE:
            link.deadline = now + self._handshake_timeout
            return [self._connect(link)]
        return []

    def connected(self, endpoint: str, connection: int) -> list[Action]:
        """The connection is established: greet."""
        link = self._link(endpoint, connection)
        if link is None or link.state is not State.CONNECTING:
            return []
        link.state = State.GREETING
        return [Send(endpoint, connection, self._metadata)]

    def received(
        self, endpoint: str, connection: int, message: DecodeMessage, now: float
    ) -> list[Action]:
        """The Decode rank said something."""
        link = self._link(endpoint, connection)
        if link is None:
            return []
        match message:
            case MfMetaAck() if link.state is State.GREETING:
                link.state = State.READY
                queued, link.queue = link.queue, deque()
                return [self._send(link, announcement, now) for announcement in queued]
            case ReadDone(layer_idx):
                return self._answered(link, layer_idx, None)
            case ReadFailed(layer_idx, error):
                return self._answered(link, layer_idx, error or "Decode gave no reason")
            case _:
                return []

    def lost(self, endpoint: str, connection: int, reason: str) -> list[Action]:
        """The connection broke."""
        link = self._link(endpoint, connection)
        # While connecting, the socket tries again by itself in most cases; the handshake's
        # deadline ends the others.
        if link is None or link.state is State.CONNECTING:
            return []
        if link.state is State.GREETING:
            # Nothing was announced on this connection yet, so nothing is lost with it.
            return [Close(endpoint, connection), self._connect(link)]
        return self._abandon(link, reason)

    def refused(self, endpoint: str, connection: int, reason: str) -> list[Action]:
        """No socket could be opened for the connection: the address makes no sense."""
        link = self._link(endpoint, connection)
        return [] if link is None else self._abandon(link, reason)

    def tick(self, now: float) -> list[Action]:
        """Deadlines that have passed; call it when `next_deadline` has come, or at any time."""
        actions: list[Action] = []
        for link in list(self._links.values()):
            if link.state in (State.CONNECTING, State.GREETING) and now >= link.deadline:
                what = "a connection" if link.state is State.CONNECTING else "MfMetaAck"
                reason = f"waited {self._handshake_timeout:g} s for {what}"
                actions += self._abandon(link, reason)
            oldest = link.oldest()
            if oldest is not None and now >= oldest.at + self._answer_timeout:
                layer = oldest.announcement.batch.layer_name
                reason = f"waited {self._answer_timeout:g} s for the answer to {layer}"
                actions += self._abandon(link, reason)
        return actions

    def forget(self, ext_id: str) -> list[Action]:
        """The request is over on Prefill: nothing more will be announced for it."""
        for link in list(self._links.values()):
            link.open_requests.discard(ext_id)
            link.lost_requests.discard(ext_id)
            self._drop_unused(link)
        return []

    def close(self) -> list[Action]:
        """The sender ends: give every hold back and close every socket."""
        actions: list[Action] = []
        for link in list(self._links.values()):
            actions += self._abandon(link, "the sender is closing")
        self._links.clear()
        return actions

    # ---------------------------------------------------------------------------------- queries

    def next_deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        deadlines = []
        for link in self._links.values():
            if link.state in (State.CONNECTING, State.GREETING):
                deadlines.append(link.deadline)
            if (oldest := link.oldest()) is not None:
                deadlines.append(oldest.at + self._answer_timeout)
        return min(deadlines, default=None)

    def state_of(self, endpoint: str) -> State:
        """Where the link to ``endpoint`` is; IDLE if there is none."""
        link = self._links.get(endpoint)
        return State.IDLE if link is None else link.state

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind; all zero when every request is over and forgotten."""
        links = self._links.values()
        return {
            "queued": sum(len(link.queue) for link in links),
            "outstanding": sum(len(batches) for link in links for batches in link.sent.values()),
            "open_requests": sum(len(link.open_requests) for link in links),
            "lost_requests": sum(len(link.lost_requests) for link in links),
        }

    # -------------------------------------------------------------------------------- internals

    def _link(self, endpoint: str, connection: int) -> _Link | None:
        """The link, if ``connection`` is its present one: what is heard from others is late."""
        link = self._links.get(endpoint)
        if link is None or link.state is State.IDLE or link.connection != connection:
            return None
        return link

    def _connect(self, link: _Link) -> Connect:
        self._connections += 1
        link.connection = self._connections
        link.state = State.CONNECTING
        return Connect(link.endpoint, link.connection)

    def _send(self, link: _Link, announcement: Announcement, now: float) -> Send:
        batches = link.sent.setdefault(announcement.batch.layer_idx, deque())
        batches.append(_Sent(announcement, now))
        return Send(link.endpoint, link.connection, announcement.batch)

    def _answered(self, link: _Link, layer_idx: int, error: str | None) -> list[Action]:
        batches = link.sent.get(layer_idx)
        if not batches:
            return []
        announcement = batches.popleft().announcement
        if not batches:
            del link.sent[layer_idx]
        if error is None:
            link.open_requests.difference_update(announcement.batch.done_ext_ids)
            return [Release(announcement.hold)]
        failed = self._fail(link, [announcement], _requests(announcement.batch), error)
        return [failed, Release(announcement.hold)]

    def _abandon(self, link: _Link, reason: str) -> list[Action]:
        """Give up a connection: close it, and fail everything that hung on it."""
        actions: list[Action] = []
        if link.state is not State.IDLE:
            # Close comes first: only a peer that can no longer count what it reads from this
            # memory may see it overwritten.
            actions.append(Close(link.endpoint, link.connection))
        sent = sorted(link.outstanding(), key=lambda sent: sent.at)
        waiting = [*(batch.announcement for batch in sent), *link.queue]
        link.state = State.IDLE
        link.sent.clear()
        link.queue.clear()
        if waiting:
            # A request whose batches were all answered still had more to come: it is lost too.
            # Nobody is told of it unless it shares a batch; its next batch is left out instead.
            ids = dict.fromkeys(i for item in waiting for i in _requests(item.batch))
            actions.append(self._fail(link, waiting, tuple(ids), reason))
            actions += [Release(announcement.hold) for announcement in waiting]
        link.lost_requests |= link.open_requests
        link.open_requests.clear()
        self._drop_unused(link)
        return actions

    def _fail(
        self, link: _Link, batches: list[Announcement], ext_ids: tuple[str, ...], reason: str
    ) -> Failed:
        link.open_requests.difference_update(ext_ids)
        link.lost_requests.update(ext_ids)
        names = dict.fromkeys(announcement.batch.layer_name for announcement in batches)
        return Failed(tuple(names), link.endpoint, ext_ids, reason)

    def _drop_unused(self, link: _Link) -> None:
        if link.unused:
            self._links.pop(link.endpoint, None)


def _requests(batch: ReadReadyBatch) -> tuple[str, ...]:
    """Every request that a batch speaks of, each once, in order."""
    ids = [request.ext_id for request in batch.read_reqs]
    return tuple(dict.fromkeys([*ids, *batch.done_ext_ids]))


def _without(announcement: Announcement, lost: set[str]) -> Announcement | None:
    """An announcement with lost requests left out; None if nothing is left to say."""
    batch = announcement.batch
    if lost.isdisjoint(_requests(batch)):
        return announcement
    read_reqs = [request for request in batch.read_reqs if request.ext_id not in lost]
    done_ext_ids = [ext_id for ext_id in batch.done_ext_ids if ext_id not in lost]
    if not read_reqs and not done_ext_ids:
        return None
    trimmed = msgspec.structs.replace(batch, read_reqs=read_reqs, done_ext_ids=done_ext_ids)
    return Announcement(announcement.hold, trimmed)
