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
same peer overtake one that waits (:mod:`rd2h.decode.batches`). Each peer has at most one read
at a time, different peers read side by side.

A failed batch fails every request in it. That holds too for one that waited in vain for one of
its requests to be registered: it has one reply, and Prefill must learn of the loss. So that
this does not happen to a batch with a request that has ended, ended ids are remembered for
hours.

What was read counts for a request only once the reply was accepted by a connection that still
stands: a Prefill that gave this Decode up may have overwritten the memory meanwhile.

Owned by one thread, the receiver's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rd2h.decode.batches import Batch, Peer, Stage
from rd2h.decode.requests import Finished, RequestBook
from rd2h.layout import LayerLayout, LayoutError
from rd2h.reads import RequestDestination
from rd2h.texts import listed, reason_of, short
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


class ReceiverMachine:
    """All peers and requests of one Decode rank.

    Every method but the queries is an event and returns the actions that follow, to be carried
    out in order. Times are seconds of any steady clock, always the same one.

    Args:
        layers: This rank's cache layouts, by layer name.
        park_timeout: Seconds that a batch waits for its requests to be registered.
        idle_timeout: Seconds without a batch after which a registered request fails.
        remember: Seconds for which an ended request's id is remembered.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerLayout],
        *,
        park_timeout: float,
        idle_timeout: float,
        remember: float = 600.0,
    ) -> None:
        self._layers = layers
        self._park_timeout = park_timeout
        self._requests = RequestBook(idle_timeout=idle_timeout, memory=remember)
        self._peers: dict[bytes, Peer] = {}
        self._active: dict[int, Batch] = {}  # READING or ANSWERING
        self._next_id = 0
        # WAITING and not past their deadline, soonest first: all wait equally long.
        self._parked: OrderedDict[int, Batch] = OrderedDict()
        self._stopping = False

    # ------------------------------------------------------------------------------ from peers

    def received(self, peer: bytes, message: PrefillMessage, now: float) -> list[Action]:
        """A peer said something."""
        if isinstance(message, MfMeta):
            return self._greet(peer, message, now)
        known = self._peers.get(peer)
        if known is None:
            reason = (
                f"layer {short(message.layer_name)} was announced before MfMeta on this "
                f"connection; Decode may have restarted: greet it again"
            )
            stranger = Batch(self._new_id(), Peer(peer), message, now)
            return [*self._answer(stranger, reason, now), *self._finishes()]
        batch = Batch(self._new_id(), known, message, now + self._park_timeout)
        known.add(batch)
        self._parked[batch.id] = batch
        member, ratio = message.group_member_idx, message.tp_ratio
        self._requests.feed(batch.ext_ids, peer, member, ratio, now)
        return [*self._judge(batch, now), *self._finishes()]

    def peer_lost(self, peer: bytes, reason: str, now: float) -> list[Action]:
        """A peer's connection is gone; what it feeds fails, once reads in flight are over."""
        known = self._peers.get(peer)
        if known is None:
            return []
        self._lose(known, reason, now)
        return [*self._forget_session(known.session), *self._finishes()]

    # -------------------------------------------------------------------- from reads and replies

    def read_finished(self, batch_id: int, error: str | None, now: float) -> list[Action]:
        """A read has ended; ``error`` says why it failed, None that every byte is there."""
        batch = self._active[batch_id]
        batch.peer.reading = False
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
        freed = batch.peer.remove(batch)
        return [*self._advance(batch.peer, freed, now), *self._finishes()]

    # --------------------------------------------------------------------- from the connector

    def register(self, destination: RequestDestination, now: float) -> list[Action]:
        """Decode has allocated a request's blocks: batches that wait for it may go on.

        Raises:
            ValueError: if the request is registered already.
        """
        ext_id = destination.ext_id
        self._requests.register(destination, now)
        waiting = self._waiting_with(ext_id)
        for batch in waiting:
            member, ratio = batch.message.group_member_idx, batch.message.tp_ratio
            self._requests.feed([ext_id], batch.peer.identity, member, ratio, now)
        return [*self._judge_all(waiting, now), *self._finishes()]

    def abort(self, ext_id: str, now: float) -> list[Action]:
        """The request is not wanted any more: start no read for it, then report it."""
        self._requests.abort(ext_id, now)
        return [*self._judge_all(self._waiting_with(ext_id), now), *self._finishes()]

    def stop(self) -> None:
        """Start no more reads; those in flight go on and are answered."""
        self._stopping = True

    def tick(self, now: float) -> list[Action]:
        """Deadlines that have passed; call it when `next_deadline` has come, or at any time."""
        self._requests.fail_idle(now)
        actions: list[Action] = []
        while (deadline := self._park_deadline()) is not None and deadline <= now:
            # One that waits for another batch is judged, with its deadline, when that is gone.
            _, batch = self._parked.popitem(last=False)
            actions += self._judge(batch, now)
        return [*actions, *self._finishes()]

    # ---------------------------------------------------------------------------------- queries

    def next_deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        deadlines = [self._park_deadline(), self._requests.next_deadline()]
        return min((d for d in deadlines if d is not None), default=None)

    def peers(self) -> list[bytes]:
        """Peers whose handshake is over."""
        return list(self._peers)

    @property
    def reads_in_flight(self) -> int:
        """Batches that are being read."""
        return sum(batch.stage is Stage.READING for batch in self._active.values())

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

    def _park_deadline(self) -> float | None:
        return next((batch.deadline for batch in self._parked.values()), None)

    def _greet(self, identity: bytes, metadata: MfMeta, now: float) -> list[Action]:
        before = self._peers.get(identity)
        if before is not None and (before.batches or self._requests.is_fed_by(identity)):
            # Prefill has begun anew: it does not wait for these answers, and its memory may be
            # another.
            self._lose(before, "Prefill greeted again and started anew", now)
        peer = self._peers[identity] = Peer(identity, metadata.session)
        for name, layer in metadata.layers.items():
            # A layer that makes no sense fails when it is announced, and hurts no other.
            try:
                peer.layers[name] = LayerLayout.from_wire(name, layer)
            except LayoutError as error:
                peer.layers[name] = error
        actions: list[Action] = [Reply(identity, MfMetaAck(), None)]
        if before is not None:
            actions += self._forget_session(before.session)
        return [*actions, *self._finishes()]

    def _lose(self, peer: Peer, reason: str, now: float) -> None:
        """A peer is gone; its read in flight is still to end."""
        del self._peers[peer.identity]
        peer.lost = True
        for batch in peer.batches.values():
            self._parked.pop(batch.id, None)
            if batch.stage is Stage.ANSWERING:
                self._close_batch(batch, now)
        self._requests.peer_lost(peer.identity, reason, now)

    def _waiting_with(self, ext_id: str) -> list[Batch]:
        return [batch for peer in self._peers.values() for batch in peer.waiting_with(ext_id)]

    def _advance(self, peer: Peer, freed: Iterable[Batch], now: float) -> list[Action]:
        """A batch was answered: go on with what waited for it, or for its read."""
        actions: list[Action] = []
        while peer.ready and not peer.reading and not self._stopping:
            actions += self._judge(peer.ready.pop(next(iter(peer.ready))), now)
        return [*actions, *self._judge_all(freed, now)]

    def _judge_all(self, batches: Iterable[Batch], now: float) -> list[Action]:
        return [action for batch in batches for action in self._judge(batch, now)]

    def _judge(self, batch: Batch, now: float) -> list[Action]:
        """Start or answer a batch, if nothing keeps it."""
        if batch.stage is not Stage.WAITING or batch.behind:
            return []
        unknown = [ext_id for ext_id in batch.ext_ids if self._requests.is_unknown(ext_id)]
        if not unknown:
            return self._start(batch, now)
        if now < batch.deadline:
            return []
        reason = (
            f"layer {short(batch.message.layer_name)}: waited {self._park_timeout:g} s for "
            f"request {listed(unknown)} to be registered on Decode"
        )
        return self._answer(batch, reason, now)

    def _start(self, batch: Batch, now: float) -> list[Action]:
        """Read a batch, or answer it if there is nothing to read; wait if the peer is busy."""
        message = batch.message
        destinations = {
            request.ext_id: destination
            for request in message.read_reqs
            if (destination := self._requests.live(request.ext_id)) is not None
        }
        self._requests.pass_over(batch.ext_ids)
        if not destinations:
            return self._answer(batch, None, now)
        name = short(message.layer_name)
        remote = batch.peer.layers.get(message.layer_name)
        local = self._layers.get(message.layer_name)
        if remote is None:
            return self._answer(batch, f"layer {name} is not in Prefill's metadata", now)
        if isinstance(remote, LayoutError):
            return self._answer(batch, f"Prefill's metadata: {remote}", now)
        if local is None:
            reason = f"layer {name} has no cache on Decode; serve the same model"
            return self._answer(batch, reason, now)
        if batch.peer.reading or self._stopping:
            batch.peer.ready[batch.id] = batch
            return []
        live = [request for request in message.read_reqs if request.ext_id in destinations]
        batch.stage = Stage.READING
        batch.peer.reading = True
        self._open_batch(batch)
        trimmed = msgspec.structs.replace(message, read_reqs=live)
        return [Read(batch.id, batch.peer.session, trimmed, remote, local, destinations)]

    def _answer(self, batch: Batch, error: str | None, now: float) -> list[Action]:
        if batch.stage is Stage.WAITING:
            self._open_batch(batch)
        batch.stage = Stage.ANSWERING
        batch.succeeded = error is None
        layer_idx = batch.message.layer_idx
        if error is None:
            return [Reply(batch.peer.identity, ReadDone(layer_idx), batch.id)]
        reason = reason_of(error, batch.ext_ids)
        self._requests.fail(batch.ext_ids, reason, now)
        return [Reply(batch.peer.identity, ReadFailed(layer_idx, reason), batch.id)]

    def _open_batch(self, batch: Batch) -> None:
        self._parked.pop(batch.id, None)
        self._active[batch.id] = batch
        batch.held = self._requests.hold(batch.ext_ids)

    def _close_batch(self, batch: Batch, now: float) -> None:
        del self._active[batch.id]
        self._requests.let_go(batch.held, now)

    def _forget_session(self, session: str) -> list[Action]:
        """Let the engine forget a session, unless somebody has it or is being read from."""
        reading = (b.peer for b in self._active.values() if b.stage is Stage.READING)
        used = any(peer.session == session for peer in (*self._peers.values(), *reading))
        return [] if used else [ForgetSession(session)]
