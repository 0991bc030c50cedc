"""The sender as a state machine: events in, actions out, no sockets, no clock, no threads.

One :class:`SenderMachine` speaks for one Prefill rank. It keeps a *link* to each Decode rank
(endpoint) that has something to be told. The life of a link:

```text
 IDLE ── announce ──▶ CONNECTING ── connected: send MfMeta ──▶ GREETING ── MfMetaAck ──▶ READY
  ▲                    │      ▲                                 │    │                    │
  │                    │      └── pause is over ── WAITING ◀── lost  │                    │
  │                 deadline                          │              │                    │
  │                    │                           deadline       deadline                │
  └────────────────────┴──────────────────────────────┴──────────────┴── lost, no answer ─┘
```

A handshake that breaks off is tried anew on another socket, after a pause that grows with every
attempt until one succeeds: a server that hangs up must not be called thousands of times. The
deadline of the handshake counts from the first announcement, over all attempts.

Batches that are announced before READY wait in the link's queue; in READY they are sent at
once. A reply names only its layer, and a peer answers the batches of one layer in the order in
which they were sent, so replies are matched first in, first out, layer by layer; one that
matches nothing changes nothing.

A connection that is lost or does not answer is never used again: what was sent there is failed,
the socket is closed, so that the peer notices too, and the next announcement starts anew with a
handshake (protocol, "Transport"). Requests that were on their way there are lost with it, also
those of which every batch so far was answered: somebody is told, and later batches leave them
out, until they are forgotten.

Owned by one thread, the sender's.
"""

from __future__ import annotations

from collections import deque

from rd2h.prefill.actions import Action, Announcement, Close, Connect, Failed, Release, Send
from rd2h.prefill.links import FIRST_PAUSE, Link, Sent, State
from rd2h.wire import DecodeMessage, MfMeta, MfMetaAck, ReadDone, ReadFailed

__all__ = ["SenderMachine"]

REASON_LENGTH = 500
"""Characters of a reason that are kept: Decode may send any number, and each is logged."""


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
        self._links: dict[str, Link] = {}
        self._connections = 0

    # ----------------------------------------------------------------------------------- events

    def announce(self, announcement: Announcement, now: float) -> list[Action]:
        """A layer's KV is in memory: tell the Decode rank, or queue it until that can be told."""
        link = self._links.setdefault(announcement.endpoint, Link(announcement.endpoint))
        trimmed = announcement.without(link.lost_requests)
        if trimmed is None:
            return [Release(announcement.hold)]
        link.open_requests.update(trimmed.ext_ids)
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
                link.pause = FIRST_PAUSE
                queued, link.queue = link.queue, deque()
                return [self._send(link, announcement, now) for announcement in queued]
            case ReadDone(layer_idx):
                return self._answered(link, layer_idx, None)
            case ReadFailed(layer_idx, error):
                return self._answered(link, layer_idx, error or "Decode gave no reason")
            case _:
                return []

    def lost(self, endpoint: str, connection: int, reason: str, now: float) -> list[Action]:
        """The connection broke."""
        link = self._link(endpoint, connection)
        # While connecting, the socket tries again by itself in most cases; the handshake's
        # deadline ends the others.
        if link is None or link.state is State.CONNECTING:
            return []
        if link.state is State.GREETING:
            # Nothing was announced on this connection yet, so nothing is lost with it.
            link.wait(now)
            return [Close(endpoint, connection)]
        return self._abandon(link, reason)

    def refused(self, endpoint: str, connection: int, reason: str) -> list[Action]:
        """No socket could be opened for the connection: the address makes no sense."""
        link = self._link(endpoint, connection)
        return [] if link is None else self._abandon(link, reason)

    def tick(self, now: float) -> list[Action]:
        """Deadlines that have passed; call it when `next_deadline` has come, or at any time."""
        actions: list[Action] = []
        for link in list(self._links.values()):
            if link.in_handshake and now >= link.deadline:
                what = "a connection" if link.state is State.CONNECTING else "MfMetaAck"
                reason = f"waited {self._handshake_timeout:g} s for {what}"
                actions += self._abandon(link, reason)
            if link.state is State.WAITING and now >= link.retry_at:
                actions.append(self._connect(link))
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
            if link.in_handshake:
                deadlines.append(link.deadline)
            if link.state is State.WAITING:
                deadlines.append(link.retry_at)
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

    def _link(self, endpoint: str, connection: int) -> Link | None:
        """The link, if ``connection`` is its present one: what is heard from others is late."""
        link = self._links.get(endpoint)
        if link is None or not link.has_connection or link.connection != connection:
            return None
        return link

    def _connect(self, link: Link) -> Connect:
        self._connections += 1
        link.connection = self._connections
        link.state = State.CONNECTING
        return Connect(link.endpoint, link.connection)

    def _send(self, link: Link, announcement: Announcement, now: float) -> Send:
        batches = link.sent.setdefault(announcement.batch.layer_idx, deque())
        batches.append(Sent(announcement, now))
        return Send(link.endpoint, link.connection, announcement.batch, announcement.payload)

    def _answered(self, link: Link, layer_idx: int, error: str | None) -> list[Action]:
        batches = link.sent.get(layer_idx)
        if not batches:
            return []
        announcement = batches.popleft().announcement
        if not batches:
            del link.sent[layer_idx]
        if error is None:
            link.open_requests.difference_update(announcement.batch.done_ext_ids)
            return [Release(announcement.hold)]
        failed = self._fail(link, [announcement], announcement.ext_ids, error)
        return [failed, Release(announcement.hold)]

    def _abandon(self, link: Link, reason: str) -> list[Action]:
        """Give up a connection: close it, and fail everything that hung on it."""
        actions: list[Action] = []
        if link.has_connection:
            # Close comes first: only a peer that can no longer count what it reads from this
            # memory may see it overwritten.
            actions.append(Close(link.endpoint, link.connection))
        sent = sorted(link.outstanding(), key=lambda sent: sent.at)
        waiting = [*(batch.announcement for batch in sent), *link.queue]
        link.state = State.IDLE
        link.sent.clear()
        link.queue.clear()
        # A request of which every batch was answered still had more to come: it is lost too.
        named = [ext_id for announcement in waiting for ext_id in announcement.ext_ids]
        ids = tuple(dict.fromkeys([*named, *sorted(link.open_requests)]))
        if waiting or ids:
            actions.append(self._fail(link, waiting, ids, reason))
        actions += [Release(announcement.hold) for announcement in waiting]
        self._drop_unused(link)
        return actions

    def _fail(
        self, link: Link, batches: list[Announcement], ext_ids: tuple[str, ...], reason: str
    ) -> Failed:
        link.lose(ext_ids)
        names = dict.fromkeys(announcement.batch.layer_name for announcement in batches)
        return Failed(tuple(names), link.endpoint, ext_ids, _shortened(reason))

    def _drop_unused(self, link: Link) -> None:
        if link.unused:
            self._links.pop(link.endpoint, None)


def _shortened(reason: str) -> str:
    """A reason that a log can bear."""
    more = len(reason) - REASON_LENGTH
    return reason if more <= 0 else f"{reason[:REASON_LENGTH]}... ({more} more characters)"
