"""The receiver as a state machine: events in, actions out, no sockets, no clock, no threads.

One :class:`ReceiverMachine` speaks for one Decode rank. A batch goes through it like this:

```text
 arrives ──▶ WAITING ──▶ READING ──▶ ANSWERING ──▶ gone
                │  for its requests to be registered, for an earlier batch of the same layer
                │  or request, or for another read of the same peer
                └──▶ ANSWERING at once: nothing to read, or something is wrong with it
```

Every batch gets exactly one reply, unless its peer is gone. A reply names only its layer, so
batches of one layer are answered in the order in which they came; so are batches of one
request, since the one that reports it done must be the last one counted. Other batches of the
same peer overtake one that waits. Each peer has at most one read at a time, different peers
read side by side.

What was read counts for a request only once the reply was accepted by a connection that still
stands: a Prefill that gave this Decode up may have overwritten the memory meanwhile.

Owned by one thread, the receiver's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from rd2h.decode.requests import Finished, RequestBook
from rd2h.layout import LayerLayout, LayoutError
from rd2h.reads import RequestDestination
from rd2h.wire import (
    DecodeMessage,
    MfMeta,
    MfMetaAck,
    PrefillMessage,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
)

__all__ = ["Action", "Finish", "ForgetSession", "Read", "ReceiverMachine", "Reply"]


# ------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Reply:
    """Send a message to a peer, then tell `replied` whether a connection took it.

    ``batch_id`` is None for a reply that answers no batch (the handshake's).
    """

    peer: bytes
    message: DecodeMessage
    batch_id: int | None


@dataclass(frozen=True)
class Read:
    """Plan and read a batch beside the socket thread, then tell `read_finished`.

    Attributes:
        batch_id: Of the batch.
        session: Of the peer's transfer engine.
        batch: The batch, without requests that are not to be read.
        remote: The peer's layout of the layer.
        local: This rank's layout of the layer.
        destinations: Of every request in the batch.
    """

    batch_id: int
    session: str
    batch: ReadReadyBatch
    remote: LayerLayout
    local: LayerLayout
    destinations: Mapping[str, RequestDestination]


@dataclass(frozen=True)
class ForgetSession:
    """No peer uses this session any more: the engine may drop what it keeps for it."""

    session: str


@dataclass(frozen=True)
class Finish:
    """A request has ended."""

    finished: Finished


Action: TypeAlias = Reply | Read | ForgetSession | Finish


# --------------------------------------------------------------------------------------- state


class _Stage(Enum):
    WAITING = "waiting"
    READING = "reading"
    ANSWERING = "answering"


@dataclass(eq=False)
class _Batch:
    id: int
    peer: _Peer
    message: ReadReadyBatch
    deadline: float  # until which its requests must be registered
    stage: _Stage = _Stage.WAITING
    held: tuple[str, ...] = ()  # requests that it keeps from ending
    succeeded: bool = False

    @property
    def ext_ids(self) -> dict[str, None]:
        """Every request that it speaks of, in order."""
        ids = [request.ext_id for request in self.message.read_reqs]
        return dict.fromkeys([*ids, *self.message.done_ext_ids])


@dataclass(eq=False)
class _Peer:
    identity: bytes
    session: str = ""
    layers: dict[str, LayerLayout | LayoutError] = field(default_factory=dict)
    batches: list[_Batch] = field(default_factory=list)  # unanswered, in order of arrival
    lost: bool = False


class ReceiverMachine:
    """All peers and requests of one Decode rank.

    Every method but the queries is an event and returns the actions that follow, to be carried
    out in order. Times are seconds of any steady clock, always the same one.

    Args:
        layers: This rank's cache layouts, by layer name.
        park_timeout: Seconds that a batch waits for its requests to be registered.
        idle_timeout: Seconds without a batch after which a registered request fails.
    """

    def __init__(
        self, layers: Mapping[str, LayerLayout], *, park_timeout: float, idle_timeout: float
    ) -> None:
        self._layers = layers
        self._park_timeout = park_timeout
        self._requests = RequestBook(idle_timeout=idle_timeout)
        self._peers: dict[bytes, _Peer] = {}
        self._active: dict[int, _Batch] = {}  # READING or ANSWERING
        self._next_id = 0
        self._park_check: float | None = None  # no batch has waited too long before this
        self._stopping = False

    # ------------------------------------------------------------------------------ from peers

    def received(self, peer: bytes, message: PrefillMessage, now: float) -> list[Action]:
        """A peer said something."""
        if isinstance(message, MfMeta):
            return self._greet(peer, message)
        known = self._peers.get(peer)
        if known is None:
            reason = (
                f"layer {message.layer_name} was announced before MfMeta on this connection; "
                f"Decode may have restarted: greet it again"
            )
            stranger = _Batch(self._new_id(), _Peer(peer), message, now)
            return [*self._answer(stranger, reason, now), *self._finishes()]
        batch = _Batch(self._new_id(), known, message, now + self._park_timeout)
        known.batches.append(batch)
        if self._park_check is None:
            self._park_check = batch.deadline
        member, ratio = message.group_member_idx, message.tp_ratio
        self._requests.feed(batch.ext_ids, peer, member, ratio, now)
        return [*self._advance(known, now), *self._finishes()]

    def peer_lost(self, peer: bytes, reason: str, now: float) -> list[Action]:
        """A peer's connection is gone; what it feeds fails, once reads in flight are over."""
        known = self._peers.pop(peer, None)
        if known is None:
            return []
        known.lost = True
        actions: list[Action] = []
        for batch in known.batches:
            if batch.stage is _Stage.ANSWERING:
                self._close_batch(batch, now)
        self._requests.peer_lost(peer, reason, now)
        known.batches = [batch for batch in known.batches if batch.stage is _Stage.READING]
        if not known.batches:
            actions += self._forget_session(known.session)
        return [*actions, *self._finishes()]

    # -------------------------------------------------------------------- from reads and replies

    def read_finished(self, batch_id: int, error: str | None, now: float) -> list[Action]:
        """A read has ended; ``error`` says why it failed, None that every byte is there."""
        batch = self._active[batch_id]
        if not batch.peer.lost:
            return [*self._answer(batch, error, now), *self._finishes()]
        self._close_batch(batch, now)
        return [*self._forget_session(batch.peer.session), *self._finishes()]

    def replied(self, batch_id: int, delivered: bool, now: float) -> list[Action]:
        """A reply was handed to the peer's connection, or there was none any more."""
        batch = self._active.get(batch_id)
        if batch is None or batch.peer.lost:
            return []
        if not delivered:
            actions = self.peer_lost(batch.peer.identity, "the connection to Prefill is gone", now)
            if batch_id in self._active:  # of a peer that was never greeted
                self._close_batch(batch, now)
            return [*actions, *self._finishes()]
        if batch.succeeded:
            member = batch.message.group_member_idx
            self._requests.member_done(batch.message.done_ext_ids, member, now)
        self._close_batch(batch, now)
        if batch in batch.peer.batches:
            batch.peer.batches.remove(batch)
        return [*self._advance(batch.peer, now), *self._finishes()]

    # --------------------------------------------------------------------- from the connector

    def register(self, destination: RequestDestination, now: float) -> list[Action]:
        """Decode has allocated a request's blocks: batches that wait for it may go on.

        Raises:
            ValueError: if the request is registered already.
        """
        self._requests.register(destination, now)
        for peer in self._peers.values():
            for batch in peer.batches:
                if destination.ext_id in batch.ext_ids:
                    message = batch.message
                    self._requests.feed(
                        [destination.ext_id],
                        peer.identity,
                        message.group_member_idx,
                        message.tp_ratio,
                        now,
                    )
        return self._advance_all(now)

    def abort(self, ext_id: str, now: float) -> list[Action]:
        """The request is not wanted any more: start no read for it, then report it."""
        self._requests.abort(ext_id, now)
        return self._advance_all(now)

    def stop(self) -> None:
        """Start no more reads; those in flight go on and are answered."""
        self._stopping = True

    def tick(self, now: float) -> list[Action]:
        """Deadlines that have passed; call it when `next_deadline` has come, or at any time."""
        self._requests.fail_idle(now)
        if self._park_check is None or now < self._park_check:
            return self._finishes()
        actions = self._advance_all(now)
        deadlines = [
            batch.deadline
            for peer in self._peers.values()
            for batch in peer.batches
            if batch.stage is _Stage.WAITING and batch.deadline > now
        ]
        self._park_check = min(deadlines, default=None)
        return actions

    # ---------------------------------------------------------------------------------- queries

    def next_deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        deadlines = [self._park_check, self._requests.next_deadline()]
        return min((d for d in deadlines if d is not None), default=None)

    def peers(self) -> list[bytes]:
        """Peers whose handshake is over."""
        return list(self._peers)

    @property
    def reads_in_flight(self) -> int:
        """Batches that are being read."""
        return sum(batch.stage is _Stage.READING for batch in self._active.values())

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind; all but `peers` and `ended` are zero when nothing goes on."""
        return {
            "peers": len(self._peers),
            "batches": sum(len(peer.batches) for peer in self._peers.values()),
            "active": len(self._active),
            **self._requests.sizes(),
        }

    # -------------------------------------------------------------------------------- internals

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _finishes(self) -> list[Action]:
        return [Finish(finished) for finished in self._requests.take_finished()]

    def _greet(self, identity: bytes, metadata: MfMeta) -> list[Action]:
        peer = self._peers.setdefault(identity, _Peer(identity))
        before, peer.session = peer.session, metadata.session
        peer.layers = {}
        for name, layer in metadata.layers.items():
            # A layer that makes no sense fails when it is announced, and hurts no other.
            try:
                peer.layers[name] = LayerLayout.from_wire(name, layer)
            except LayoutError as error:
                peer.layers[name] = error
        reply = Reply(identity, MfMetaAck(), None)
        return [reply, *self._forget_session(before)] if before else [reply]

    def _advance_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for peer in list(self._peers.values()):
            actions += self._advance(peer, now)
        return [*actions, *self._finishes()]

    def _advance(self, peer: _Peer, now: float) -> list[Action]:
        """Start or answer whatever of a peer's batches can be."""
        actions: list[Action] = []
        layers: set[int] = set()  # of earlier batches that are not answered
        ext_ids: set[str] = set()
        reading = any(batch.stage is _Stage.READING for batch in peer.batches)
        for batch in list(peer.batches):
            free = batch.message.layer_idx not in layers and ext_ids.isdisjoint(batch.ext_ids)
            if batch.stage is _Stage.WAITING and free:
                unknown = [ext_id for ext_id in batch.ext_ids if self._requests.is_unknown(ext_id)]
                if unknown and now >= batch.deadline:
                    actions += self._answer(batch, self._never_registered(batch, unknown), now)
                elif not unknown:
                    started = self._start(batch, reading, now)
                    reading = reading or any(isinstance(action, Read) for action in started)
                    actions += started
            layers.add(batch.message.layer_idx)
            ext_ids.update(batch.ext_ids)
        return actions

    def _start(self, batch: _Batch, reading: bool, now: float) -> list[Action]:
        """Read a batch, or answer it if there is nothing to read; wait if the peer is busy."""
        message = batch.message
        destinations = {
            request.ext_id: destination
            for request in message.read_reqs
            if (destination := self._requests.live(request.ext_id)) is not None
        }
        if not destinations:
            return self._answer(batch, None, now)
        remote = batch.peer.layers.get(message.layer_name)
        local = self._layers.get(message.layer_name)
        if remote is None:
            return self._answer(
                batch, f"layer {message.layer_name} is not in Prefill's metadata", now
            )
        if isinstance(remote, LayoutError):
            return self._answer(batch, f"Prefill's metadata: {remote}", now)
        if local is None:
            reason = f"layer {message.layer_name} has no cache on Decode; serve the same model"
            return self._answer(batch, reason, now)
        if reading or self._stopping:
            return []
        live = [request for request in message.read_reqs if request.ext_id in destinations]
        batch.stage = _Stage.READING
        self._open_batch(batch)
        trimmed = msgspec.structs.replace(message, read_reqs=live)
        return [Read(batch.id, batch.peer.session, trimmed, remote, local, destinations)]

    def _answer(self, batch: _Batch, error: str | None, now: float) -> list[Action]:
        if batch.stage is _Stage.WAITING:
            self._open_batch(batch)
        batch.stage = _Stage.ANSWERING
        batch.succeeded = error is None
        layer_idx = batch.message.layer_idx
        if error is None:
            return [Reply(batch.peer.identity, ReadDone(layer_idx), batch.id)]
        self._requests.fail(batch.ext_ids, error, now)
        return [Reply(batch.peer.identity, ReadFailed(layer_idx, error), batch.id)]

    def _open_batch(self, batch: _Batch) -> None:
        self._active[batch.id] = batch
        batch.held = self._requests.hold(batch.ext_ids)

    def _close_batch(self, batch: _Batch, now: float) -> None:
        del self._active[batch.id]
        self._requests.let_go(batch.held, now)

    def _forget_session(self, session: str) -> list[Action]:
        used = any(peer.session == session for peer in self._peers.values())
        return [] if used else [ForgetSession(session)]

    def _never_registered(self, batch: _Batch, unknown: list[str]) -> str:
        return (
            f"layer {batch.message.layer_name}: waited {self._park_timeout:g} s for request "
            f"{', '.join(unknown)} to be registered on Decode"
        )
