"""A world of sender and receiver machines with a network, memory and time between them.

The network is TCP's: a connection keeps the order of what it carries and repeats nothing, but
it may be cut at any moment, lose any tail of what is on its way, and be noticed as cut by either
side at any later time. Replies of a connection that its Prefill has given up are not accepted.
Frames that answer nothing, and late frames of connections that are gone, are thrown in as well.

Memory is a number for each storage slot of each Prefill rank: which write it holds. A read is
*torn* if the slot was overwritten between the announcement and the read's end.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from rd2h.decode import machine as receiving
from rd2h.decode.requests import Outcome
from rd2h.layout import LayerLayout, TensorLayout
from rd2h.prefill import actions as sending
from rd2h.prefill.gates import Hold
from rd2h.prefill.machine import SenderMachine
from rd2h.reads import RequestDestination
from rd2h.wire import (
    DecodeMessage,
    MfMeta,
    PrefillMessage,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
)

LAYERS = 3
SLOTS = 2  # layer i lives in slot i % SLOTS: layers 0 and 2 share one
STEPS = 2
# Which steps compute a piece of each request: batches of one layer overlap in requests or not.
SPANS = {"a": range(2), "b": range(1), "c": range(1, 2)}
RATIO = 2  # Prefill ranks, all of which feed every Decode
DECODES = 2

HANDSHAKE_TIMEOUT = 10.0
ANSWER_TIMEOUT = 40.0
PARK_TIMEOUT = 20.0
IDLE_TIMEOUT = 100.0

LAYOUTS = {
    f"layer.{index}": LayerLayout(f"layer.{index}", (TensorLayout(1 << 20, 64, 1, 64),))
    for index in range(LAYERS)
}
METADATA = MfMeta("session", {name: layout.to_wire() for name, layout in LAYOUTS.items()})


@dataclass(eq=False)
class Connection:
    """One TCP connection, as both of its ends and the wire between them see it."""

    prefill: PrefillRank
    decode: DecodeRank
    number: int
    identity: bytes
    established: bool = False
    cut: bool = False
    prefill_knows: bool = False
    decode_knows: bool = False
    up: deque[PrefillMessage] = field(default_factory=deque)
    down: deque[DecodeMessage] = field(default_factory=deque)


@dataclass(eq=False)
class InFlight:
    """A read that a Decode is doing."""

    decode: DecodeRank
    read: receiving.Read
    connection: Connection
    written: dict[int, int]  # slot -> the write that was announced


@dataclass(eq=False)
class PrefillRank:
    """A Prefill rank: its machine, its gates, its memory, and where its computation is.

    ``failed`` are the requests that its machine has said to be lost, ``forgotten`` those that
    are over here; each request goes to one Decode only.
    """

    member: int
    machine: SenderMachine
    generation: int = 0
    holds: set[Hold] = field(default_factory=set)
    slots: list[int] = field(default_factory=lambda: [0] * SLOTS)
    position: tuple[int, int] = (0, 0)  # step, layer
    writes: int = 0
    failed: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)


@dataclass(eq=False)
class DecodeRank:
    """A Decode rank: its machine, and what it was told and has told."""

    index: int
    machine: receiving.ReceiverMachine
    generation: int = 0
    registered: set[str] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)
    # request -> batches read for it, as (member, step, layer), and whether any was torn
    good: dict[str, set[tuple[int, int, int]]] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    owed: Counter[bytes] = field(default_factory=Counter)  # batches delivered, not answered


class World:
    """All ranks, and every event that can happen to them."""

    def __init__(self, requests: dict[str, int]) -> None:
        """``requests``: external id to the Decode that it goes to."""
        self.requests = requests
        self.now = 0.0
        self.connections: list[Connection] = []
        self.in_flight: list[InFlight] = []
        self.ids = 0
        self.prefills = [PrefillRank(member, self._sender()) for member in range(RATIO)]
        self.decodes = [DecodeRank(index, self._receiver()) for index in range(DECODES)]

    def _sender(self) -> SenderMachine:
        return SenderMachine(
            METADATA, handshake_timeout=HANDSHAKE_TIMEOUT, answer_timeout=ANSWER_TIMEOUT
        )

    def _receiver(self) -> receiving.ReceiverMachine:
        return receiving.ReceiverMachine(
            LAYOUTS, park_timeout=PARK_TIMEOUT, idle_timeout=IDLE_TIMEOUT
        )

    # --------------------------------------------------------------------- computation and life

    def compute(self, rank: PrefillRank) -> bool:
        """Compute one layer, if its gates are open; False if it had to wait or is through."""
        step, layer = rank.position
        if step >= STEPS:
            return False
        slot = layer % SLOTS
        if any(slot in hold.slots for hold in rank.holds):
            return False
        rank.writes += 1
        rank.slots[slot] = rank.writes
        rank.position = (step, layer + 1) if layer + 1 < LAYERS else (step + 1, 0)
        for target in self.decodes:
            ids = [
                ext_id
                for ext_id, index in self.requests.items()
                if index == target.index and step in SPANS[ext_id] and ext_id not in rank.forgotten
            ]
            if not ids:
                continue
            done = [ext_id for ext_id in ids if step == SPANS[ext_id][-1] and layer == LAYERS - 1]
            # The block id says which step this is; layer and write are found from it.
            batch = ReadReadyBatch(
                layer,
                f"layer.{layer}",
                [ReadRequest(ext_id, [step], [], step, 0) for ext_id in ids],
                done,
                rank.member,
                RATIO,
            )
            hold = Hold(frozenset([slot]), batch.layer_name, f"decode-{target.index}")
            rank.holds.add(hold)
            self._prefill(rank, rank.machine.announce(sending.Announcement(hold, batch), self.now))
        return True

    def register(self, ext_id: str) -> None:
        target = self.decodes[self.requests[ext_id]]
        if ext_id not in target.registered:
            target.registered.add(ext_id)
            destination = RequestDestination(ext_id, list(range(STEPS)), [])
            self._decode(target, target.machine.register(destination, self.now))

    def abort(self, ext_id: str) -> None:
        target = self.decodes[self.requests[ext_id]]
        self._decode(target, target.machine.abort(ext_id, self.now))

    def forget(self, rank: PrefillRank, ext_id: str) -> None:
        """The request is over on one Prefill rank, wherever its batches are."""
        rank.forgotten.add(ext_id)
        self._prefill(rank, rank.machine.forget(ext_id))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.prefills:
            self._prefill(rank, rank.machine.tick(self.now))
        for target in self.decodes:
            self._decode(target, target.machine.tick(self.now))

    def restart_prefill(self, rank: PrefillRank) -> None:
        """The process dies, and computes nothing more; reads from it fail from now on."""
        for connection in self.connections:
            if connection.prefill is rank:
                self.cut(connection, keep=0)
                connection.prefill_knows = True
        rank.machine = self._sender()
        rank.generation += 1
        rank.holds.clear()
        rank.failed.clear()
        rank.position = (STEPS, 0)

    def restart_decode(self, target: DecodeRank) -> None:
        """The process dies with all it knew; what it was reading is never finished."""
        for connection in self.connections:
            if connection.decode is target:
                self.cut(connection, keep=0)
                connection.decode_knows = True
        self.in_flight = [flight for flight in self.in_flight if flight.decode is not target]
        fresh = DecodeRank(target.index, self._receiver(), target.generation + 1)
        target.__dict__.update(fresh.__dict__)

    # ----------------------------------------------------------------------------- the network

    def establish(self, connection: Connection) -> None:
        if not connection.established and not connection.cut:
            connection.established = True
            rank = connection.prefill
            endpoint = f"decode-{connection.decode.index}"
            self._prefill(rank, rank.machine.connected(endpoint, connection.number))

    def deliver_up(self, connection: Connection) -> None:
        if connection.up and not connection.decode_knows:
            message = connection.up.popleft()
            target = connection.decode
            if isinstance(message, ReadReadyBatch):
                target.owed[connection.identity] += 1
            self._decode(target, target.machine.received(connection.identity, message, self.now))

    def deliver_down(self, connection: Connection) -> None:
        if connection.down and not connection.prefill_knows:
            self._hear(connection, connection.down.popleft())

    def disturb(self, connection: Connection, layer: int, failed: bool) -> None:
        """A frame that answers nothing: of a layer that is not outstanding, or far too late."""
        rank = connection.prefill
        endpoint = f"decode-{connection.decode.index}"
        outstanding = any(
            hold.endpoint == endpoint and hold.layer_name == f"layer.{layer}" for hold in rank.holds
        )
        if connection.prefill_knows or not outstanding:
            before = set(rank.holds)
            self._hear(connection, ReadFailed(layer, "disturbed") if failed else ReadDone(layer))
            assert rank.holds == before

    def cut(self, connection: Connection, keep: int) -> None:
        """Break a connection; of what is on its way, ``keep`` messages still arrive."""
        connection.cut = True
        for queue in (connection.up, connection.down):
            while len(queue) > keep:
                queue.pop()

    def prefill_notices(self, connection: Connection) -> None:
        if connection.cut and not connection.prefill_knows:
            connection.prefill_knows = True
            rank = connection.prefill
            endpoint = f"decode-{connection.decode.index}"
            self._prefill(rank, rank.machine.lost(endpoint, connection.number, "cut", self.now))

    def decode_notices(self, connection: Connection) -> None:
        if connection.cut and not connection.decode_knows:
            connection.decode_knows = True
            target = connection.decode
            target.owed.pop(connection.identity, None)
            self._decode(target, target.machine.peer_lost(connection.identity, "cut", self.now))

    def finish_read(self, flight: InFlight, failed: bool) -> None:
        self.in_flight.remove(flight)
        rank, batch = flight.connection.prefill, flight.read.batch
        gone = flight.connection.identity.split(b"/")[1] != str(rank.generation).encode()
        torn = any(rank.slots[slot] != write for slot, write in flight.written.items())
        error = "the process has gone" if gone else "engine error" if failed else None
        if error is None:
            for request in batch.read_reqs:
                key = (rank.member, request.main_block_ids[0], batch.layer_idx)
                flight.decode.good.setdefault(request.ext_id, set()).add(key)
                if torn:
                    flight.decode.torn.add(request.ext_id)
        machine = flight.decode.machine
        self._decode(flight.decode, machine.read_finished(flight.read.batch_id, error, self.now))

    # -------------------------------------------------------------------------- carrying out

    def _hear(self, connection: Connection, message: DecodeMessage) -> None:
        rank = connection.prefill
        endpoint = f"decode-{connection.decode.index}"
        if connection.identity.split(b"/")[1] == str(rank.generation).encode():
            self._prefill(
                rank, rank.machine.received(endpoint, connection.number, message, self.now)
            )

    def _prefill(self, rank: PrefillRank, actions: list[sending.Action]) -> None:
        for action in actions:
            match action:
                case sending.Connect(endpoint, number):
                    target = self.decodes[int(endpoint.removeprefix("decode-"))]
                    identity = f"{rank.member}/{rank.generation}/{number}".encode()
                    self.connections.append(Connection(rank, target, number, identity))
                case sending.Close(_, number):
                    connection = self._find(rank, number)
                    connection.cut = connection.prefill_knows = True
                case sending.Send(_, number, message):
                    connection = self._find(rank, number)
                    if not connection.cut:
                        connection.up.append(message)
                case sending.Release(hold):
                    rank.holds.discard(hold)
                case sending.Failed(_, _, ext_ids):
                    rank.failed.update(ext_ids)
        left_out = rank.machine.sizes()["lost_requests"]
        assert left_out <= len(rank.failed - rank.forgotten), "a request was lost without a word"

    def _find(self, rank: PrefillRank, number: int) -> Connection:
        identity = f"{rank.member}/{rank.generation}/{number}".encode()
        return next(c for c in self.connections if c.identity == identity)

    def _decode(self, target: DecodeRank, actions: list[receiving.Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case receiving.Reply(identity, message, batch_id):
                    connection = next(c for c in self.connections if c.identity == identity)
                    accepted = not connection.prefill_knows and not connection.decode_knows
                    if accepted and not connection.cut:
                        connection.down.append(message)
                    if batch_id is not None:
                        if not connection.decode_knows:
                            target.owed[identity] -= 1
                            assert target.owed[identity] >= 0, "a batch was answered twice"
                        if not accepted:
                            connection.decode_knows = True
                            target.owed.pop(identity, None)
                        todo.extend(target.machine.replied(batch_id, accepted, self.now))
                case receiving.Read() as read:
                    self._start_read(target, read)
                case receiving.Finish(finished):
                    self._finish(target, finished.ext_id, finished.outcome)
                case receiving.ForgetSession():
                    pass

    def _start_read(self, target: DecodeRank, read: receiving.Read) -> None:
        member = read.batch.group_member_idx
        rank = self.prefills[member]
        connection = next(
            c
            for c in reversed(self.connections)
            if c.prefill is rank and c.decode is target and not c.decode_knows
        )
        assert all(flight.connection is not connection for flight in self.in_flight), (
            "two reads of one peer at a time"
        )
        slot = read.batch.layer_idx % SLOTS
        step = read.batch.read_reqs[0].main_block_ids[0]
        # Writes are numbered in the order of computation.
        write = step * LAYERS + read.batch.layer_idx + 1
        self.in_flight.append(InFlight(target, read, connection, {slot: write}))

    def _finish(self, target: DecodeRank, ext_id: str, outcome: Outcome) -> None:
        target.ended[ext_id] += 1
        assert target.ended[ext_id] == 1, "a request was reported twice"
        assert ext_id in target.registered
        busy = [f for f in self.in_flight if f.decode is target]
        assert all(
            request.ext_id != ext_id for flight in busy for request in flight.read.batch.read_reqs
        ), "a request was reported while its blocks are being written"
        if outcome is Outcome.DONE:
            everything = {
                (member, step, layer)
                for member in range(RATIO)
                for step in SPANS[ext_id]
                for layer in range(LAYERS)
            }
            assert target.good.get(ext_id) == everything, "a request is done with layers missing"
            assert ext_id not in target.torn, "a request is done with memory that was overwritten"

    # ------------------------------------------------------------------------------- the end

    def settle(self) -> None:
        """Let everything that is on its way arrive, and every deadline pass."""
        for _ in range(200):
            for connection in list(self.connections):
                self.establish(connection)
                while connection.up and not connection.decode_knows:
                    self.deliver_up(connection)
                while connection.down and not connection.prefill_knows:
                    self.deliver_down(connection)
                self.prefill_notices(connection)
                self.decode_notices(connection)
            for flight in list(self.in_flight):
                self.finish_read(flight, failed=False)
            computed = [self.compute(rank) for rank in self.prefills]
            if not any(computed) and not self.in_flight and self._silent():
                return
        raise AssertionError("the world never comes to rest")

    def _silent(self) -> bool:
        return not any(
            (c.up and not c.decode_knows) or c.down for c in self.connections if not c.cut
        )

    def check_idle(self) -> None:
        """After everything: gates open, requests reported once, containers at their idle size."""
        for rank in self.prefills:
            assert not rank.holds, "a gate is shut for ever"
            for ext_id in self.requests.keys() - rank.forgotten:
                rank.machine.forget(ext_id)
            assert set(rank.machine.sizes().values()) == {0}
        for target in self.decodes:
            assert target.ended.keys() == target.registered, "a request was lost"
            sizes = target.machine.sizes()
            assert sizes["batches"] == sizes["active"] == sizes["requests"] == 0
            target.machine.tick(self.now + 10_000)
            assert target.machine.sizes()["ended"] == 0
            assert not any(target.owed.values()), "a batch was never answered"
