"""The receiver's rules one by one, without sockets, threads, reads or time."""

from __future__ import annotations

import time

import pytest

from rd2h.decode.machine import Action, Finish, ForgetSession, Read, ReceiverMachine, Reply
from rd2h.decode.requests import Finished, Outcome
from rd2h.layout import LayerLayout, TensorLayout
from rd2h.reads import RequestDestination
from rd2h.wire import (
    LayerMetadata,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    decode,
    encode,
)

LAYERS = {
    f"layer.{index}": LayerLayout(f"layer.{index}", (TensorLayout(4096, 64, 1, 32),))
    for index in range(4)
}
META = MfMeta("session", {name: layout.to_wire() for name, layout in LAYERS.items()})
P, Q = b"p", b"q"


@pytest.fixture
def machine() -> ReceiverMachine:
    machine = ReceiverMachine(LAYERS, park_timeout=10.0, idle_timeout=100.0)
    for peer in (P, Q):
        assert machine.received(peer, META, 0.0) == [Reply(peer, MfMetaAck(), None)]
    return machine


def batch(
    layer: int = 0, *ext_ids: str, done: tuple[str, ...] = (), member: int = 0, ratio: int = 1
) -> ReadReadyBatch:
    requests = [ReadRequest(ext_id, [1]) for ext_id in ext_ids]
    return ReadReadyBatch(layer, f"layer.{layer}", requests, list(done), member, ratio)


def register(machine: ReceiverMachine, *ext_ids: str, now: float = 0.0) -> list[Action]:
    actions: list[Action] = []
    for ext_id in ext_ids:
        actions += machine.register(RequestDestination(ext_id, [1], []), now)
    return actions


def one_read(actions: list[Action]) -> Read:
    (read,) = actions
    assert isinstance(read, Read)
    return read


def finish(
    machine: ReceiverMachine, read: Read, error: str | None = None, *, delivered: bool = True
) -> tuple[Reply, list[Action]]:
    """End a read and deliver its reply; returns the reply and what followed."""
    reply, *rest = machine.read_finished(read.batch_id, error, 1.0)
    assert isinstance(reply, Reply)
    assert reply.batch_id == read.batch_id
    return reply, [*rest, *machine.replied(read.batch_id, delivered, 1.0)]


def test_a_batch_is_read_answered_and_ends_its_request(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(3, "a", done=("a",)), 0.0))
    assert read.session == "session"
    assert read.destinations["a"].ext_id == "a"
    reply, actions = finish(machine, read)
    assert reply == Reply(P, ReadDone(3), read.batch_id)
    assert actions == [Finish(Finished("a", Outcome.DONE))]
    assert machine.sizes()["batches"] == machine.sizes()["active"] == 0


def test_a_request_counts_only_once_its_reply_is_delivered(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(0, "a", done=("a",)), 0.0))
    _, actions = finish(machine, read, delivered=False)
    assert actions == [Finish(Finished("a", Outcome.FAILED, "the connection to Prefill is gone"))]
    assert machine.peers() == [Q]


def test_a_failed_read_fails_every_request_of_its_batch(machine: ReceiverMachine) -> None:
    register(machine, "a", "b", "c")
    read = one_read(machine.received(P, batch(0, "a", "b", done=("b", "c")), 0.0))
    reply, actions = finish(machine, read, "engine error")
    assert reply.message == ReadFailed(0, "engine error (requests a, b, c)")
    assert {action.finished.ext_id for action in actions if isinstance(action, Finish)} == {
        "a",
        "b",
        "c",
    }
    assert all(
        action.finished.outcome is Outcome.FAILED
        for action in actions
        if isinstance(action, Finish)
    )


def test_one_peer_has_one_read_at_a_time_and_peers_read_side_by_side(
    machine: ReceiverMachine,
) -> None:
    register(machine, "a", "b", "c")
    first = one_read(machine.received(P, batch(0, "a"), 0.0))
    assert machine.received(P, batch(1, "b"), 0.0) == []
    one_read(machine.received(Q, batch(0, "c"), 0.0))
    _, actions = finish(machine, first)
    assert one_read(actions).batch.layer_idx == 1


def test_a_batch_waits_until_its_request_is_registered(machine: ReceiverMachine) -> None:
    register(machine, "a")
    assert machine.received(P, batch(0, "early"), 0.0) == []
    # Another layer of another request goes on meanwhile.
    other = one_read(machine.received(P, batch(1, "a"), 0.0))
    finish(machine, other)
    assert one_read(register(machine, "early")).batch.layer_idx == 0


def test_batches_of_one_layer_are_answered_in_order(machine: ReceiverMachine) -> None:
    register(machine, "a")
    assert machine.received(P, batch(0, "early"), 0.0) == []
    assert machine.received(P, batch(0, "a"), 0.0) == []
    first = one_read(register(machine, "early"))
    assert first.batch.read_reqs[0].ext_id == "early"
    _, actions = finish(machine, first)
    assert one_read(actions).batch.read_reqs[0].ext_id == "a"


def test_batches_of_one_request_are_read_in_order(machine: ReceiverMachine) -> None:
    register(machine, "a")
    assert machine.received(P, batch(0, "a", "early"), 0.0) == []
    assert machine.received(P, batch(1, "a", done=("a",)), 0.0) == []
    assert one_read(register(machine, "early")).batch.layer_idx == 0


def test_a_batch_that_waited_too_long_fails_and_names_the_request(
    machine: ReceiverMachine,
) -> None:
    register(machine, "a")
    machine.received(P, batch(0, "early", "a"), 5.0)
    assert machine.next_deadline() == 15.0
    assert machine.tick(14.9) == []
    (reply,) = machine.tick(15.0)
    assert isinstance(reply, Reply)
    reason = (
        "layer layer.0: waited 10 s for request early to be registered on Decode "
        "(requests early, a)"
    )
    assert reply.message == ReadFailed(0, reason)
    # The other request of the batch fails with it, once Prefill has been told.
    assert machine.replied(reply.batch_id or 0, True, 15.0) == [
        Finish(Finished("a", Outcome.FAILED, reason))
    ]


def test_a_batch_behind_another_is_failed_when_its_turn_comes(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    machine.received(P, batch(0, "early"), 0.0)
    assert machine.tick(30.0) == []
    # Its own time has passed, but the answers of one layer keep their order.
    machine.read_finished(read.batch_id, None, 31.0)
    (reply,) = machine.replied(read.batch_id, True, 31.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ReadFailed)


def test_a_request_that_is_not_wanted_is_acknowledged_without_reading(
    machine: ReceiverMachine,
) -> None:
    register(machine, "a", "b")
    assert machine.abort("a", 0.0) == [Finish(Finished("a", Outcome.ABORTED))]
    (reply,) = machine.received(P, batch(0, "a", done=("a",)), 0.0)
    assert isinstance(reply, Reply)
    assert reply.message == ReadDone(0)
    machine.replied(reply.batch_id or 0, True, 0.0)
    read = one_read(machine.received(P, batch(0, "a", "b"), 0.0))
    assert [request.ext_id for request in read.batch.read_reqs] == ["b"]


def test_aborting_lets_reads_in_flight_finish_first(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    assert machine.abort("a", 0.0) == []
    reply, actions = finish(machine, read)
    assert reply.message == ReadDone(0)
    assert actions == [Finish(Finished("a", Outcome.ABORTED))]


def test_aborting_what_is_not_registered_lets_its_batches_through(
    machine: ReceiverMachine,
) -> None:
    machine.received(P, batch(0, "early"), 0.0)
    (reply,) = machine.abort("early", 0.0)
    assert isinstance(reply, Reply)
    assert reply.message == ReadDone(0)


def test_a_lost_peer_fails_its_requests_after_reads_in_flight(machine: ReceiverMachine) -> None:
    register(machine, "reading", "waiting", "other")
    read = one_read(machine.received(P, batch(0, "reading"), 0.0))
    machine.received(P, batch(1, "waiting"), 0.0)
    one_read(machine.received(Q, batch(0, "other"), 0.0))
    assert machine.peer_lost(P, "gone", 1.0) == [
        Finish(Finished("waiting", Outcome.FAILED, "gone"))
    ]
    # What was read from memory that Prefill may have overwritten meanwhile does not count.
    assert machine.read_finished(read.batch_id, None, 2.0) == [
        Finish(Finished("reading", Outcome.FAILED, "gone"))
    ]
    assert machine.sizes()["active"] == 1


def test_a_session_is_forgotten_with_its_last_peer_and_read(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    assert machine.peer_lost(Q, "gone", 1.0) == []
    assert machine.peer_lost(P, "gone", 1.0) == []
    assert ForgetSession("session") in machine.read_finished(read.batch_id, None, 2.0)


def test_losing_a_peer_twice_or_one_that_never_was_changes_nothing(
    machine: ReceiverMachine,
) -> None:
    machine.peer_lost(P, "gone", 0.0)
    assert machine.peer_lost(P, "gone", 0.0) == []
    assert machine.peer_lost(b"nobody", "gone", 0.0) == []


def test_a_batch_before_the_metadata_fails_at_once(machine: ReceiverMachine) -> None:
    register(machine, "a")
    (reply,) = machine.received(b"stranger", batch(2, "a"), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ReadFailed)
    assert "layer.2 was announced before MfMeta" in reply.message.error
    assert reply.message.error.endswith("(requests a)")
    (finished,) = machine.replied(reply.batch_id or 0, True, 0.0)
    assert isinstance(finished, Finish)
    assert finished.finished.outcome is Outcome.FAILED
    assert machine.sizes()["active"] == 0


def test_a_stranger_that_is_gone_before_its_reply_leaves_nothing(
    machine: ReceiverMachine,
) -> None:
    (reply,) = machine.received(b"stranger", batch(2, "a"), 0.0)
    assert isinstance(reply, Reply)
    assert machine.replied(reply.batch_id or 0, False, 0.0) == []
    assert machine.sizes()["active"] == 0


@pytest.mark.parametrize(
    ("name", "metadata", "reason"),
    [
        ("layer.9", None, "layer layer.9 is not in Prefill's metadata"),
        ("new", LAYERS["layer.0"].to_wire(), "layer new has no cache on Decode"),
        (
            "layer.0",
            LayerMetadata([], [], main_tensor_count=0),
            "Prefill's metadata: layer layer.0",
        ),
    ],
)
def test_a_layer_that_cannot_be_read_fails_before_its_first_byte(
    machine: ReceiverMachine, name: str, metadata: LayerMetadata | None, reason: str
) -> None:
    layers = META.layers if metadata is None else META.layers | {name: metadata}
    machine.received(P, MfMeta("session", layers), 0.0)
    register(machine, "a", "b")
    message = ReadReadyBatch(0, name, [ReadRequest("a", [1])])
    (reply,) = machine.received(P, message, 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ReadFailed)
    assert reason in reply.message.error
    assert reply.message.error.endswith("(requests a)")
    machine.replied(reply.batch_id or 0, True, 0.0)
    # Nothing else is hurt.
    one_read(machine.received(P, batch(1, "b"), 0.0))


def test_a_batch_that_only_reports_requests_done_needs_no_read(machine: ReceiverMachine) -> None:
    register(machine, "cached")
    (reply,) = machine.received(P, batch(3, done=("cached",)), 0.0)
    assert isinstance(reply, Reply)
    assert machine.replied(reply.batch_id or 0, True, 0.0) == [
        Finish(Finished("cached", Outcome.DONE))
    ]


def test_every_contributor_must_report_its_last_layer(machine: ReceiverMachine) -> None:
    register(machine, "a")
    for peer, member, expected in ((P, 0, 0), (P, 0, 0), (Q, 1, 1)):
        message = batch(3, "a", done=("a",), member=member, ratio=2)
        _, actions = finish(machine, one_read(machine.received(peer, message, 0.0)))
        assert len(actions) == expected


def test_stopping_starts_no_more_reads_and_answers_those_in_flight(
    machine: ReceiverMachine,
) -> None:
    register(machine, "a", "b")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    machine.stop()
    assert machine.received(Q, batch(0, "b"), 0.0) == []
    assert machine.reads_in_flight == 1
    reply, _ = finish(machine, read)
    assert reply.message == ReadDone(0)
    assert machine.reads_in_flight == 0


def test_registering_twice_is_refused(machine: ReceiverMachine) -> None:
    register(machine, "a")
    with pytest.raises(ValueError, match="request a is registered already"):
        register(machine, "a")


# ------------------------------------------------------------------------------- many batches


def test_thousands_of_parked_batches_of_one_peer_cost_little(machine: ReceiverMachine) -> None:
    """Each of them, and whatever else happens, looks at its own neighbours only."""
    count, start = 3000, time.process_time()
    for index in range(count):
        message = ReadReadyBatch(index, "layer.0", [ReadRequest(f"early.{index}", [1])])
        assert machine.received(P, message, 0.0) == []
    replies = [action for index in range(count) for action in machine.abort(f"early.{index}", 1.0)]
    for reply in replies:
        assert isinstance(reply, Reply)
        assert machine.replied(reply.batch_id or 0, True, 1.0) == []
    assert len(replies) == count
    # 0.1 s here; 27 s when each event looked at every batch.
    assert time.process_time() - start < 3.0
    assert machine.sizes()["batches"] == 0


def test_thousands_of_batches_that_wait_for_a_read_go_one_by_one(machine: ReceiverMachine) -> None:
    count, start = 3000, time.process_time()
    register(machine, *(f"r{index}" for index in range(count)))
    actions: list[Action] = []
    for index in range(count):
        message = ReadReadyBatch(index, "layer.0", [ReadRequest(f"r{index}", [1])])
        actions += machine.received(P, message, 0.0)
    for index in range(count):
        read = one_read(actions)
        assert read.batch.layer_idx == index
        _, actions = finish(machine, read)
    assert actions == []
    assert time.process_time() - start < 3.0


def test_a_chain_of_layers_and_requests_is_answered_in_order(machine: ReceiverMachine) -> None:
    register(machine, "a", "b")
    first = one_read(machine.received(P, batch(0, "a"), 0.0))
    for layer, ext_id in ((0, "b"), (1, "b"), (1, "a"), (2, "a")):
        assert machine.received(P, batch(layer, ext_id), 0.0) == []
    order, actions = [], finish(machine, first)[1]
    while actions:
        read = one_read(actions)
        order.append((read.batch.layer_idx, read.batch.read_reqs[0].ext_id))
        _, actions = finish(machine, read)
    assert order == [(0, "b"), (1, "b"), (1, "a"), (2, "a")]
    assert machine.sizes()["batches"] == 0


def test_a_batch_behind_a_request_that_ended_goes_on_without_it(machine: ReceiverMachine) -> None:
    register(machine, "a", "b")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    assert machine.received(P, batch(1, "a"), 0.0) == []
    assert machine.received(P, batch(1, "b"), 0.0) == []
    _, (reply, *rest) = finish(machine, read, "engine error")
    # `a` has failed: its second batch is acknowledged, and frees the layer for `b`.
    assert isinstance(reply, Reply)
    assert reply.message == ReadDone(1)
    assert len(rest) == 1
    assert one_read(machine.replied(reply.batch_id or 0, True, 1.0)).batch.layer_idx == 1


# -------------------------------------------------------------------------- what it says, keeps


def test_no_text_is_longer_than_a_log_line_should_be(machine: ReceiverMachine) -> None:
    huge = "x" * 10_000_000
    messages = [
        ReadReadyBatch(0, huge, [ReadRequest(huge, [1])]),
        batch(1, *(f"request-{index:040}" for index in range(5000))),
    ]
    for message in messages:
        assert machine.received(P, message, 0.0) == []
    replies = machine.tick(20.0)
    replies += machine.received(b"stranger", ReadReadyBatch(0, huge, []), 0.0)
    register(machine, "a")
    read = one_read(machine.received(Q, batch(0, "a"), 0.0))
    reply, (finished,) = finish(machine, read, f"engine {huge} says no")
    assert isinstance(finished, Finish)
    assert len(replies) == 3
    for action in (*replies, reply):
        assert isinstance(action, Reply)
        assert isinstance(action.message, ReadFailed)
        assert len(action.message.error) <= 1000
    assert isinstance(reply.message, ReadFailed)
    assert finished.finished.reason == reply.message.error
    for word in ("engine x", "more characters", "says no", "(requests a)"):
        assert word in reply.message.error
    assert isinstance(replies[1], Reply)
    assert isinstance(replies[1].message, ReadFailed)
    assert "and 4997 more" in replies[1].message.error


def test_a_reason_that_utf8_cannot_carry_can_be_sent(machine: ReceiverMachine) -> None:
    register(machine, "a")
    read = one_read(machine.received(P, batch(0, "a"), 0.0))
    reply, _ = finish(machine, read, "bad file \udcff")
    assert decode(encode(reply.message)) == ReadFailed(0, "bad file \\udcff (requests a)")


def test_an_ended_request_is_remembered_for_as_long_as_was_asked_for() -> None:
    machine = ReceiverMachine(LAYERS, park_timeout=10.0, idle_timeout=1e6, remember=5000.0)
    machine.received(P, META, 0.0)
    register(machine, "a", "b")
    machine.abort("a", 0.0)
    machine.tick(4999.0)
    read = one_read(machine.received(P, batch(0, "a", "b"), 4999.0))
    assert [request.ext_id for request in read.batch.read_reqs] == ["b"]
    finish(machine, read)
    machine.tick(5000.0)
    assert machine.sizes()["ended"] == 0


# ---------------------------------------------------------------------------- greeting again


def test_greeting_again_gives_up_what_was_announced_before(machine: ReceiverMachine) -> None:
    register(machine, "reading", "waiting", "fed", "other")
    finish(machine, one_read(machine.received(P, batch(0, "fed"), 0.0)))
    read = one_read(machine.received(P, batch(0, "reading"), 0.0))
    assert machine.received(P, batch(1, "waiting"), 0.0) == []
    again = MfMeta("session 2", META.layers)
    ack, *actions = machine.received(P, again, 1.0)
    assert ack == Reply(P, MfMetaAck(), None)
    ended = {a.finished.ext_id: a.finished for a in actions if isinstance(a, Finish)}
    assert ended.keys() == {"waiting", "fed"}
    assert {finished.outcome for finished in ended.values()} == {Outcome.FAILED}
    assert "greeted again" in ended["fed"].reason
    # The new one is served while the read of the old one is still to end; that gets no reply.
    assert one_read(machine.received(P, batch(0, "other"), 1.0)).session == "session 2"
    (finish_,) = machine.read_finished(read.batch_id, None, 2.0)
    assert isinstance(finish_, Finish)
    assert finish_.finished.ext_id == "reading"
    assert finish_.finished.outcome is Outcome.FAILED


def test_greeting_again_with_nothing_announced_only_changes_the_session(
    machine: ReceiverMachine,
) -> None:
    register(machine, "a")
    machine.peer_lost(Q, "gone", 0.0)
    again = MfMeta("session 2", META.layers)
    assert machine.received(P, again, 0.0) == [
        Reply(P, MfMetaAck(), None),
        ForgetSession("session"),
    ]
    assert machine.received(P, again, 0.0) == [Reply(P, MfMetaAck(), None)]
    assert one_read(machine.received(P, batch(0, "a"), 0.0)).session == "session 2"


def test_a_session_that_is_still_read_from_is_not_forgotten(machine: ReceiverMachine) -> None:
    register(machine, "a", "b")
    first = one_read(machine.received(P, batch(0, "a"), 0.0))
    second = one_read(machine.received(Q, batch(0, "b"), 0.0))
    machine.peer_lost(P, "gone", 1.0)
    machine.peer_lost(Q, "gone", 1.0)
    forget = ForgetSession("session")
    assert forget not in machine.read_finished(first.batch_id, None, 2.0)
    assert forget in machine.read_finished(second.batch_id, None, 2.0)


def test_what_was_acknowledged_without_reading_is_not_missed_later(
    machine: ReceiverMachine,
) -> None:
    """Aborted first and registered afterwards, a request must not be done with layers missing."""
    machine.abort("a", 0.0)
    (reply,) = machine.received(P, batch(0, "a"), 0.0)
    assert isinstance(reply, Reply)
    machine.replied(reply.batch_id or 0, True, 0.0)
    (finish,) = register(machine, "a")
    assert isinstance(finish, Finish)
    assert finish.finished.outcome is Outcome.FAILED
    assert "acknowledged without reading" in finish.finished.reason
    # Its last layer changes nothing any more.
    (reply,) = machine.received(P, batch(3, "a", done=("a",)), 0.0)
    assert isinstance(reply, Reply)
    assert machine.replied(reply.batch_id or 0, True, 0.0) == []


def test_an_id_that_was_only_aborted_may_still_be_registered(machine: ReceiverMachine) -> None:
    machine.abort("a", 0.0)
    assert register(machine, "a") == []
    one_read(machine.received(P, batch(0, "a"), 0.0))
