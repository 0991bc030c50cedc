"""Requests end once, for the right reason, and not while their blocks are being written."""

from __future__ import annotations

import time

import pytest

from rd2h.decode.requests import Finished, Outcome, RequestBook
from rd2h.reads import RequestDestination


@pytest.fixture
def book() -> RequestBook:
    return RequestBook(idle_timeout=100.0, memory=600.0, most_remembered=3)


def register(book: RequestBook, *ext_ids: str, now: float = 0.0) -> None:
    for ext_id in ext_ids:
        book.register(RequestDestination(ext_id, [1], []), now)


def test_a_request_is_done_when_every_contributor_is(book: RequestBook) -> None:
    register(book, "a")
    for member in range(4):
        assert book.take_finished() == []
        book.feed(["a"], b"p%d" % member, member, 4, 1.0)
        book.member_done(["a"], member, 1.0)
    assert book.take_finished() == [Finished("a", Outcome.DONE)]
    assert book.take_finished() == []


def test_a_contributor_that_repeats_itself_counts_once(book: RequestBook) -> None:
    register(book, "a")
    book.feed(["a"], b"p", 0, 2, 1.0)
    book.member_done(["a"], 0, 1.0)
    book.member_done(["a"], 0, 1.0)
    assert book.take_finished() == []


@pytest.mark.parametrize("end", ["done", "failed", "aborted"])
def test_a_request_does_not_end_while_its_blocks_are_being_written(
    book: RequestBook, end: str
) -> None:
    register(book, "a")
    book.feed(["a"], b"p", 0, 1, 1.0)
    held = book.hold(["a", "unknown"])
    assert held == ("a",)
    match end:
        case "done":
            book.member_done(["a"], 0, 1.0)
        case "failed":
            book.fail(["a"], "engine", 1.0)
        case _:
            book.abort("a", 1.0)
    assert book.take_finished() == []
    book.let_go(held, 2.0)
    (finished,) = book.take_finished()
    assert finished.outcome.value == end


def test_the_first_reason_stays(book: RequestBook) -> None:
    register(book, "a")
    held = book.hold(["a"])
    book.fail(["a"], "first", 1.0)
    book.fail(["a"], "second", 1.0)
    book.let_go(held, 1.0)
    assert book.take_finished() == [Finished("a", Outcome.FAILED, "first")]


def test_contributors_must_agree_how_many_they_are(book: RequestBook) -> None:
    register(book, "a")
    book.feed(["a"], b"p", 0, 2, 1.0)
    book.feed(["a"], b"q", 1, 4, 1.0)
    (finished,) = book.take_finished()
    assert "says that 2 ranks feed this Decode rank, another that 4" in finished.reason


def test_a_lost_peer_fails_what_it_has_not_finished_and_nothing_else(book: RequestBook) -> None:
    register(book, "fed", "finished", "other")
    book.feed(["fed", "finished"], b"p", 0, 2, 1.0)
    book.feed(["other"], b"q", 1, 2, 1.0)
    book.member_done(["finished"], 0, 1.0)
    book.peer_lost(b"p", "gone", 2.0)
    assert book.take_finished() == [Finished("fed", Outcome.FAILED, "gone")]
    assert book.live("finished") is not None
    assert book.live("other") is not None


def test_a_request_that_hears_nothing_fails_in_time(book: RequestBook) -> None:
    register(book, "a")
    register(book, "b", now=50.0)
    assert book.next_deadline() == 100.0
    book.feed(["a"], b"p", 0, 2, 60.0)
    book.fail_idle(100.0)
    assert book.take_finished() == []
    assert book.next_deadline() == 150.0
    book.fail_idle(150.0)
    (finished,) = book.take_finished()
    assert finished.ext_id == "b"
    assert finished.reason == (
        "waited 100 s for a batch from Prefill (0 contributors done, no contributor is known)"
    )
    book.fail_idle(160.0)
    (finished,) = book.take_finished()
    assert finished.reason.endswith("(0 contributors done, of 2)")
    assert book.next_deadline() is None


def test_a_long_read_is_not_idleness(book: RequestBook) -> None:
    register(book, "a")
    held = book.hold(["a"])
    book.fail_idle(500.0)
    assert book.take_finished() == []
    assert book.next_deadline() == 600.0
    book.let_go(held, 550.0)
    book.fail_idle(600.0)
    assert book.take_finished() == []
    assert book.next_deadline() == 650.0


def test_an_ended_request_is_remembered_for_a_while(book: RequestBook) -> None:
    register(book, "a")
    book.abort("a", 0.0)
    assert not book.is_unknown("a")
    assert book.live("a") is None
    book.fail_idle(599.0)
    assert not book.is_unknown("a")
    book.fail_idle(600.0)
    assert book.is_unknown("a")


def test_a_request_may_be_aborted_before_it_is_registered(book: RequestBook) -> None:
    book.abort("a", 0.0)
    assert not book.is_unknown("a")
    assert book.take_finished() == []


def test_only_so_many_ended_requests_are_remembered(book: RequestBook) -> None:
    for ext_id in "abcde":
        book.abort(ext_id, 0.0)
    assert book.sizes() == {"requests": 0, "ended": 3}
    assert book.is_unknown("a")
    assert not book.is_unknown("e")


def test_many_ended_requests_cost_nothing_at_a_tick() -> None:
    book = RequestBook(idle_timeout=100.0, memory=14400.0)
    for index in range(100_000):
        book.abort(str(index), 0.0)
    start = time.process_time()
    for _ in range(1000):
        book.fail_idle(1.0)
    assert time.process_time() - start < 0.2  # 0.5 s and more when the ids were copied
    assert book.sizes()["ended"] == 100_000


def test_an_id_may_be_used_again_after_its_request_has_ended(book: RequestBook) -> None:
    register(book, "a")
    with pytest.raises(ValueError, match="request a is registered already") as caught:
        book.register(RequestDestination("a", [1, 2, 3], [4]), 0.0)
    assert "with 1 main and 0 indexer blocks, and now again with 3 main and 1" in str(caught.value)
    with pytest.raises(ValueError, match=r"and now again with 1 main .* blocks, the same ones"):
        register(book, "a")
    book.abort("a", 0.0)
    register(book, "a")
    assert book.live("a") is not None


def test_what_is_said_of_an_unknown_request_changes_nothing(book: RequestBook) -> None:
    book.feed(["x"], b"p", 0, 1, 0.0)
    book.member_done(["x"], 0, 0.0)
    book.fail(["x"], "why", 0.0)
    assert book.take_finished() == []
    assert book.sizes() == {"requests": 0, "ended": 0}
