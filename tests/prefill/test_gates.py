"""Gates shut and open, and whoever waits is told in time and by name."""

from __future__ import annotations

import logging
import threading

import pytest

from rd2h.prefill.gates import Gates, Hold, WaitTimeoutError


def hold(*slots: int, layer: str = "layer.0", endpoint: str = "tcp://d:1") -> Hold:
    return Hold(frozenset(slots), layer, endpoint)


def test_an_open_gate_is_not_waited_for() -> None:
    gates = Gates()
    gates.hold(hold(1))
    assert gates.wait(frozenset([0]), 0.0, "layer.1") == 0.0


def test_a_gate_opens_with_its_last_hold() -> None:
    gates = Gates()
    first, second = hold(0), hold(0, 1)
    gates.hold(first)
    gates.hold(second)
    gates.release(first)
    with pytest.raises(WaitTimeoutError):
        gates.wait(frozenset([0]), 0.0, "layer.0")
    gates.release(second)
    assert gates.wait(None, 0.0, "draining") == 0.0
    assert gates.holders() == set()


def test_releasing_twice_changes_nothing() -> None:
    gates = Gates()
    first, second = hold(0), hold(0)
    gates.hold(first)
    gates.hold(second)
    gates.release(first)
    gates.release(first)
    assert gates.holders(frozenset([0])) == {second}


def test_a_deadline_says_who_did_not_answer() -> None:
    gates = Gates()
    for index in range(6):
        gates.hold(hold(0, layer=f"layer.{index}", endpoint="tcp://d:1"))
    with pytest.raises(WaitTimeoutError) as caught:
        gates.wait(frozenset([0]), 0.0, "layer layer.6")
    assert str(caught.value).startswith(
        "layer layer.6 waited 0 s for Decode to answer layer.0 at tcp://d:1, layer.1 at"
    )
    assert "and 2 more" in str(caught.value)


def test_a_waiting_thread_is_woken_by_the_release() -> None:
    gates = Gates()
    held = hold(0)
    gates.hold(held)
    waited: list[float] = []
    thread = threading.Thread(target=lambda: waited.append(gates.wait(frozenset([0]), 30.0, "l")))
    thread.start()
    gates.release(held)
    thread.join(10.0)
    assert len(waited) == 1


def test_blocks_are_waited_for_only_while_a_batch_announces_one_of_them() -> None:
    gates = Gates()
    first = Hold(frozenset([0]), "layer.0", "tcp://d:1", [[3, 4], [9]])
    second = Hold(frozenset([0, 1]), "layer.1", "tcp://d:2", [[4, 5]])
    gates.hold(first)
    gates.hold(second)
    for free in ((), (1, 2), (6,)):
        assert gates.wait_blocks(frozenset(free), 0.0, "a step") == 0.0
    for taken, holder in ((3, "layer.0 at tcp://d:1"), (9, "layer.0 at"), (5, "layer.1 at")):
        with pytest.raises(WaitTimeoutError, match=f"a step waited 0 s .* {holder}"):
            gates.wait_blocks(frozenset([taken, 1]), 0.0, "a step")
    gates.release(first)
    assert gates.wait_blocks(frozenset([3, 9]), 0.0, "a step") == 0.0
    with pytest.raises(WaitTimeoutError):
        gates.wait_blocks(frozenset([4]), 0.0, "a step")


def test_who_waits_for_blocks_is_woken_while_others_keep_the_slot_shut() -> None:
    gates = Gates()
    first = Hold(frozenset([0]), "layer.0", "tcp://d:1", [[1]])
    second = Hold(frozenset([0]), "layer.0", "tcp://d:2", [[2]])
    gates.hold(first)
    gates.hold(second)
    waited: list[float] = []
    thread = threading.Thread(
        target=lambda: waited.append(gates.wait_blocks(frozenset([1]), 30.0, "a step"))
    )
    thread.start()
    gates.release(first)
    thread.join(10.0)
    assert len(waited) == 1
    assert gates.holders() == {second}


def test_a_long_wait_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 0.0, 6.0, 12.0, 100.0])
    gates = Gates(clock=lambda: next(times), progress_interval=5.0)
    gates.hold(hold(0))

    def at_once(timeout: float | None = None) -> bool:
        """Time passes at every look at the clock, not here."""
        return timeout is None

    gates._changed.wait = at_once  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeoutError):
        gates.wait(frozenset([0]), 60.0, "layer layer.3")
    assert [record.getMessage() for record in caplog.records] == [
        "layer layer.3 has waited 6.0 s for Decode to answer layer.0 at tcp://d:1",
        "layer layer.3 has waited 12.0 s for Decode to answer layer.0 at tcp://d:1",
    ]


def test_a_fault_ends_every_wait_now_and_later() -> None:
    gates = Gates()
    gates.hold(hold(0))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            gates.wait(frozenset([0]), 30.0, "l")
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    gates.fail(RuntimeError("first"))
    gates.fail(RuntimeError("second"))
    thread.join(10.0)
    assert [str(error) for error in raised] == ["first"]
    with pytest.raises(RuntimeError, match="first"):
        gates.wait(frozenset([7]), 0.0, "l")
