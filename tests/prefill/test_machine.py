"""The sender's rules one by one, without sockets, threads or time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from rd2h.prefill.actions import Action, Announcement, Close, Connect, Failed, Release, Send
from rd2h.prefill.gates import Hold
from rd2h.prefill.links import State
from rd2h.prefill.machine import SenderMachine
from rd2h.wire import MfMeta, MfMetaAck, ReadDone, ReadFailed, ReadReadyBatch, ReadRequest

META = MfMeta("session", {})
D = "tcp://d:1"


def announcement(
    layer: int = 0, *ext_ids: str, done: tuple[str, ...] = (), endpoint: str = D
) -> Announcement:
    requests = [ReadRequest(ext_id, [1]) for ext_id in ext_ids or ("a",)]
    batch = ReadReadyBatch(layer, f"layer.{layer}", requests, list(done))
    return Announcement(Hold(frozenset([layer]), batch.layer_name, endpoint), batch)


@pytest.fixture
def machine() -> SenderMachine:
    return SenderMachine(META, handshake_timeout=10.0, answer_timeout=20.0)


def ready(machine: SenderMachine, endpoint: str = D, now: float = 0.0) -> int:
    """Bring a link to READY by announcing something that is answered; returns the connection."""
    first = announcement(99, "first", done=("first",), endpoint=endpoint)
    (connect,) = machine.announce(first, now)
    assert isinstance(connect, Connect)
    machine.connected(endpoint, connect.connection)
    machine.received(endpoint, connect.connection, MfMetaAck(), now)
    machine.received(endpoint, connect.connection, ReadDone(99), now)
    assert machine.state_of(endpoint) is State.READY
    return connect.connection


def failures(actions: list[Action]) -> list[Failed]:
    return [action for action in actions if isinstance(action, Failed)]


def test_the_first_announcement_connects_greets_and_then_sends(machine: SenderMachine) -> None:
    first, second = announcement(0), announcement(1)
    assert machine.announce(first, 0.0) == [Connect(D, 1)]
    assert machine.announce(second, 0.0) == []
    assert machine.connected(D, 1) == [Send(D, 1, META)]
    assert machine.announce(announcement(2), 0.0) == []
    sent = machine.received(D, 1, MfMetaAck(), 1.0)
    assert [action.message.layer_idx for action in sent if isinstance(action, Send)
            and isinstance(action.message, ReadReadyBatch)] == [0, 1, 2]  # fmt: skip


def test_a_link_that_greets_does_not_hold_up_another(machine: SenderMachine) -> None:
    ready(machine, "tcp://e:1")
    machine.announce(announcement(0), 0.0)
    other = announcement(0, endpoint="tcp://e:1")
    (send,) = machine.announce(other, 0.0)
    assert send == Send("tcp://e:1", 1, other.batch)


def test_an_answer_releases_the_oldest_batch_of_its_layer(machine: SenderMachine) -> None:
    connection = ready(machine)
    first, second, other = announcement(0, "a"), announcement(0, "b"), announcement(1)
    for item in (first, second, other):
        machine.announce(item, 0.0)
    assert machine.received(D, connection, ReadDone(0), 1.0) == [Release(first.hold)]
    # The failure comes first: whoever waits at the gate must find it when the gate opens.
    assert machine.received(D, connection, ReadFailed(0, "engine"), 1.0) == [
        Failed(("layer.0",), D, ("b",), "engine"),
        Release(second.hold),
    ]
    assert machine.received(D, connection, ReadDone(1), 1.0) == [Release(other.hold)]


@pytest.mark.parametrize("message", [ReadDone(0), ReadFailed(0, "x"), ReadDone(7), MfMetaAck()])
def test_what_answers_nothing_changes_nothing(
    machine: SenderMachine, message: ReadDone | ReadFailed | MfMetaAck
) -> None:
    connection = ready(machine)
    outstanding = announcement(1)
    machine.announce(outstanding, 0.0)
    assert machine.received(D, connection, message, 1.0) == []
    assert machine.received(D, connection, ReadDone(1), 1.0) == [Release(outstanding.hold)]


def test_what_an_earlier_connection_said_changes_nothing(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0, "a"), 0.0)
    machine.lost(D, connection, "cut", 1.0)
    machine.announce(announcement(0, "b"), 1.0)
    machine.connected(D, connection + 1)
    machine.received(D, connection + 1, MfMetaAck(), 1.0)
    assert machine.received(D, connection, ReadDone(0), 2.0) == []
    assert machine.lost(D, connection, "cut", 2.0) == []
    assert machine.connected(D, connection) == []
    assert machine.sizes()["outstanding"] == 1


def test_an_answer_before_the_handshake_is_over_changes_nothing(machine: SenderMachine) -> None:
    machine.announce(announcement(0), 0.0)
    machine.connected(D, 1)
    assert machine.received(D, 1, ReadDone(0), 0.0) == []
    assert machine.state_of(D) is State.GREETING


def test_a_failure_without_words_still_says_something(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0), 0.0)
    (failed,) = failures(machine.received(D, connection, ReadFailed(0), 1.0))
    assert failed.reason == "Decode gave no reason"


def test_a_lost_connection_is_closed_before_its_memory_is_given_free(
    machine: SenderMachine,
) -> None:
    connection = ready(machine)
    first, second = announcement(0), announcement(1)
    machine.announce(first, 0.0)
    machine.announce(second, 0.0)
    actions = machine.lost(D, connection, "cut", 1.0)
    assert actions == [
        Close(D, connection),
        Failed(("layer.0", "layer.1"), D, ("a",), "cut"),
        Release(first.hold),
        Release(second.hold),
    ]
    assert machine.state_of(D) is State.IDLE


def test_lost_requests_are_left_out_until_they_are_forgotten(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0, "a", "b"), 0.0)
    machine.received(D, connection, ReadDone(0), 0.0)
    # Nothing is outstanding, but both had more to come: Decode's part of them is gone.
    assert machine.lost(D, connection, "cut", 1.0) == [
        Close(D, connection),
        Failed((), D, ("a", "b"), "cut"),
    ]
    only_lost = announcement(1, "a", done=("a",))
    assert machine.announce(only_lost, 1.0) == [Release(only_lost.hold)]
    mixed = announcement(1, "a", "c", done=("b", "c"))
    machine.announce(mixed, 1.0)
    machine.connected(D, connection + 1)
    (send,) = machine.received(D, connection + 1, MfMetaAck(), 1.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, ReadReadyBatch)
    assert [request.ext_id for request in send.message.read_reqs] == ["c"]
    assert send.message.done_ext_ids == ["c"]
    for ext_id in ("a", "b", "c"):
        machine.forget(ext_id)
    machine.received(D, connection + 1, ReadDone(1), 1.0)
    assert set(machine.sizes().values()) == {0}


def test_a_request_that_is_handed_over_is_not_lost_with_its_connection(
    machine: SenderMachine,
) -> None:
    connection = ready(machine)
    machine.announce(announcement(0, "a", done=("a",)), 0.0)
    machine.received(D, connection, ReadDone(0), 0.0)
    assert machine.lost(D, connection, "cut", 1.0) == [Close(D, connection)]
    assert machine.sizes()["lost_requests"] == 0


def test_requests_between_their_layers_are_lost_with_those_that_are_on_their_way(
    machine: SenderMachine,
) -> None:
    connection = ready(machine)
    machine.announce(announcement(0, "c", "b"), 0.0)
    machine.received(D, connection, ReadDone(0), 0.0)
    machine.announce(announcement(1, "x", "c"), 0.0)
    (failed,) = failures(machine.lost(D, connection, "cut", 1.0))
    assert failed == Failed(("layer.1",), D, ("x", "c", "b"), "cut")


@pytest.mark.parametrize("how", ["answer", "lost", "deadline", "queued", "refused"])
def test_a_request_that_was_forgotten_is_not_left_out_for_ever(
    machine: SenderMachine, how: str
) -> None:
    """Although its batch, which was on its way, still fails; that must be told."""
    connection = 1 if how in ("queued", "refused") else ready(machine)
    announced = announcement(0, "a", done=("a",))
    machine.announce(announced, 1.0)
    machine.forget("a")
    fail: dict[str, Callable[[], list[Action]]] = {
        "answer": lambda: machine.received(D, connection, ReadFailed(0, "no"), 2.0),
        "lost": lambda: machine.lost(D, connection, "no", 2.0),
        "deadline": lambda: machine.tick(21.0),
        "queued": lambda: machine.tick(11.0),
        "refused": lambda: machine.refused(D, connection, "no"),
    }
    actions = fail[how]()
    assert [failed.ext_ids for failed in failures(actions)] == [("a",)]
    assert Release(announced.hold) in actions
    assert set(machine.sizes().values()) == {0}
    # The next request of that name is one like any other.
    assert not any(isinstance(action, Release) for action in machine.announce(announced, 30.0))


def test_a_message_is_encoded_anew_only_if_something_was_left_out(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0, "a"), 0.0)
    machine.received(D, connection, ReadFailed(0, "no"), 0.0)
    whole = replace(announcement(1, "b"), payload=b"whole")
    assert machine.announce(whole, 1.0) == [Send(D, connection, whole.batch, b"whole")]
    (send,) = machine.announce(replace(announcement(2, "a", "b"), payload=b"with a"), 1.0)
    assert send == Send(D, connection, announcement(2, "b").batch, None)


def test_a_reason_of_any_length_is_cut(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0), 0.0)
    (failed,) = failures(machine.received(D, connection, ReadFailed(0, "é" * 20_000_000), 1.0))
    assert failed.reason == "é" * 500 + "... (19999500 more characters)"
    machine.announce(announcement(0, "b"), 0.0)
    (failed,) = failures(machine.received(D, connection, ReadFailed(0, "x" * 500), 1.0))
    assert failed.reason == "x" * 500


def test_a_connection_lost_while_greeting_is_made_anew_and_nothing_is_lost(
    machine: SenderMachine,
) -> None:
    first, second = announcement(0), announcement(1)
    machine.announce(first, 0.0)
    machine.connected(D, 1)
    assert machine.lost(D, 1, "cut", 1.0) == [Close(D, 1)]
    assert machine.state_of(D) is State.WAITING
    assert machine.announce(second, 1.0) == []
    for late in (machine.connected(D, 1), machine.lost(D, 1, "cut", 1.0)):
        assert late == []
    assert machine.next_deadline() == 1.1
    assert machine.tick(1.09) == []
    assert machine.tick(1.1) == [Connect(D, 2)]
    machine.connected(D, 2)
    assert machine.received(D, 2, MfMetaAck(), 1.2) == [
        Send(D, 2, first.batch),
        Send(D, 2, second.batch),
    ]


def hang_up(machine: SenderMachine, connection: int, now: float) -> float:
    """A Decode that is greeted hangs up; returns what is waited for next."""
    machine.connected(D, connection)
    machine.lost(D, connection, "cut", now)
    due = machine.next_deadline()
    assert due is not None
    return due


def test_the_pause_before_a_new_handshake_grows_until_one_succeeds(machine: SenderMachine) -> None:
    machine.announce(announcement(0), 0.0)
    times = [0.0]
    for connection in range(1, 9):
        times.append(hang_up(machine, connection, times[-1]))
        assert machine.tick(times[-1]) == [Connect(D, connection + 1)]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    machine.connected(D, 9)
    machine.received(D, 9, MfMetaAck(), 9.5)
    machine.lost(D, 9, "cut", 9.6)
    machine.announce(announcement(0, "new"), 10.0)
    assert hang_up(machine, 10, 10.0) == pytest.approx(10.1)


def test_the_deadline_of_the_handshake_counts_over_all_attempts(machine: SenderMachine) -> None:
    first = announcement(0)
    machine.announce(first, 0.0)
    connection, now = 1, 0.0
    while (now := hang_up(machine, connection, now)) < 10.0:
        connection += 1
        assert machine.tick(now) == [Connect(D, connection)]
    assert now == 10.0
    # No connection is left to be closed.
    assert machine.tick(10.0) == [
        Failed(("layer.0",), D, ("a",), "waited 10 s for MfMetaAck"),
        Release(first.hold),
    ]
    assert machine.state_of(D) is State.IDLE


def test_a_connection_that_is_not_made_yet_cannot_be_lost(machine: SenderMachine) -> None:
    machine.announce(announcement(0), 0.0)
    assert machine.lost(D, 1, "refused", 1.0) == []
    assert machine.state_of(D) is State.CONNECTING


def test_an_address_without_sense_fails_at_once(machine: SenderMachine) -> None:
    first = announcement(0)
    machine.announce(first, 0.0)
    assert machine.refused(D, 1, "no such address") == [
        Close(D, 1),
        Failed(("layer.0",), D, ("a",), "no such address"),
        Release(first.hold),
    ]


@pytest.mark.parametrize(("greet", "what"), [(False, "a connection"), (True, "MfMetaAck")])
def test_the_handshake_has_a_deadline(machine: SenderMachine, greet: bool, what: str) -> None:
    machine.announce(announcement(0), 5.0)
    machine.announce(announcement(1), 9.0)
    if greet:
        machine.connected(D, 1)
    assert machine.next_deadline() == 15.0
    assert machine.tick(14.9) == []
    actions = machine.tick(15.0)
    assert actions[0] == Close(D, 1)
    assert {failed.reason for failed in failures(actions)} == {f"waited 10 s for {what}"}
    assert machine.next_deadline() is None
    # The next announcement tries again.
    assert machine.announce(announcement(2, "new"), 20.0) == [Connect(D, 2)]


def test_an_answer_has_a_deadline_from_the_oldest_batch_on(machine: SenderMachine) -> None:
    connection = ready(machine)
    machine.announce(announcement(0), 1.0)
    machine.announce(announcement(1), 2.0)
    machine.announce(announcement(0), 3.0)
    machine.received(D, connection, ReadDone(0), 4.0)
    assert machine.next_deadline() == 22.0
    assert machine.tick(21.9) == []
    actions = machine.tick(22.0)
    assert actions[0] == Close(D, connection)
    (failed,) = failures(actions)
    assert failed.layer_names == ("layer.1", "layer.0")
    assert failed.reason == "waited 20 s for the answer to layer.1"


def test_closing_gives_every_hold_back(machine: SenderMachine) -> None:
    ready(machine)
    sent, queued = announcement(0), announcement(0, endpoint="tcp://e:1")
    machine.announce(sent, 0.0)
    machine.announce(queued, 0.0)
    actions = machine.close()
    assert {action.hold for action in actions if isinstance(action, Release)} == {
        sent.hold,
        queued.hold,
    }
    assert sum(isinstance(action, Close) for action in actions) == 2
