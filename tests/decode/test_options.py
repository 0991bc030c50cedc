"""What an operator may set."""

from __future__ import annotations

import pytest

from rd2h.decode import ReceiverOptions


def test_ended_requests_are_remembered_for_hours_and_peers_have_threads_to_spare() -> None:
    options = ReceiverOptions()
    assert options.remember >= 3600.0
    assert options.read_threads >= 16  # eight contributors at 16:2, and some that hang


@pytest.mark.parametrize("name", ["park_timeout", "idle_timeout", "remember"])
def test_a_time_is_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it is a time above 0 s"):
        ReceiverOptions(**{name: 0})


def test_there_is_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="read_threads is 0"):
        ReceiverOptions(read_threads=0)
