"""Posting rendezvous, to real HTTP servers and to places where there is none."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from rd2h.connector.rendezvous import Metaservers, check_url
from rd2h.wire.rendezvous import Advertisement
from tests.connector.metaserver import Metaserver, metaserver, unused_url
from tests.transfer.caches import PATIENCE, eventually, threads


def advertisement(ext_id: str) -> Advertisement:
    return Advertisement(
        request_id=ext_id,
        remote_engine_id="d",
        remote_host="127.0.0.1",
        remote_port=20000,
        remote_tp_size=1,
        remote_pcp_size=1,
        remote_dcp_size=1,
        remote_cached_tokens=0,
    )


@pytest.fixture
def posts() -> Iterator[Metaservers]:
    made = Metaservers(PATIENCE, jitter=lambda: 0.1)
    yield made
    made.close()
    assert threads() == []


@pytest.fixture
def proxy() -> Iterator[Metaserver]:
    with metaserver() as server:
        yield server


def nothing_left(posts: Metaservers) -> None:
    eventually(lambda: posts.pending == 0, "every post to end")


def test_delivered_once(posts: Metaservers, proxy: Metaserver) -> None:
    posts.post(proxy.url, advertisement("a"))
    proxy.wait_for("a")
    nothing_left(posts)
    assert proxy.bodies == [advertisement("a").to_params()]


@pytest.mark.parametrize("status", [302, 404, 500, 503])
def test_any_answer_counts_as_delivered(
    posts: Metaservers, proxy: Metaserver, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.status = status
    with caplog.at_level(logging.WARNING, "rd2h"):
        posts.post(proxy.url, advertisement("a"))
        proxy.wait_for("a")
        nothing_left(posts)
    posts.post(proxy.url, advertisement("b"))
    proxy.wait_for("a", "b")
    told = [record.getMessage() for record in caplog.records if "request a" in record.getMessage()]
    assert [str(status) in line for line in told] == ([True] if status >= 400 else [])


def test_posted_again_until_somebody_listens(
    posts: Metaservers, caplog: pytest.LogCaptureFixture
) -> None:
    url, port = unused_url()
    with caplog.at_level(logging.WARNING, "rd2h"):
        posts.post(url, advertisement("a"))
        eventually(lambda: len(caplog.records) >= 2, "two attempts")
        assert posts.pending == 1
        with metaserver(port) as server:
            server.wait_for("a")
            nothing_left(posts)
    assert all(url in record.getMessage() for record in caplog.records)


def test_pauses_grow_up_to_a_limit_and_are_spread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rd2h.connector.rendezvous._LONGEST_PAUSE", 0.05)
    monkeypatch.setattr("rd2h.connector.rendezvous._FIRST_PAUSE", 0.005)
    factors = iter([1.0] * 5 + [0.5] * 10_000)
    posts = Metaservers(PATIENCE, jitter=lambda: next(factors))
    try:
        with caplog.at_level(logging.WARNING, "rd2h"):
            posts.post(unused_url()[0], advertisement("a"))
            eventually(lambda: len(caplog.records) >= 6, "attempts")
        pauses = [record.args[3] for record in caplog.records[:6]]  # type: ignore[index]
        assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05, 0.025])
    finally:
        posts.close()


def test_a_connection_that_breaks_is_tried_again(posts: Metaservers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        posts.post(f"http://127.0.0.1:{port}/", advertisement("a"))
        for _ in range(2):
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()
        posts.cancel("a")
        nothing_left(posts)


def test_cancelled_in_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    posts = Metaservers(PATIENCE, jitter=lambda: 1000.0)
    try:
        with caplog.at_level(logging.WARNING, "rd2h"):
            posts.post(unused_url()[0], advertisement("a"))
            eventually(lambda: caplog.records, "an attempt")
        posts.cancel("a")
        nothing_left(posts)
        assert len(caplog.records) == 1
    finally:
        posts.close()


def test_cancelled_while_the_answer_is_awaited(posts: Metaservers, proxy: Metaserver) -> None:
    proxy.answering.clear()
    posts.post(proxy.url, advertisement("a"))
    proxy.wait_for("a")
    assert posts.pending == 1
    posts.cancel("a")
    nothing_left(posts)
    # And others go on.
    proxy.answering.set()
    posts.post(proxy.url, advertisement("b"))
    proxy.wait_for("a", "b")


def test_an_answer_that_takes_long_is_awaited_and_nothing_is_posted_twice(
    proxy: Metaserver,
) -> None:
    # There are metaservers that answer when Prefill has; their patience is the request's.
    timeout = 0.1
    posts = Metaservers(timeout)
    try:
        proxy.answering.clear()
        posts.post(proxy.url, advertisement("a"))
        proxy.wait_for("a")
        time.sleep(5 * timeout)
        assert (posts.pending, proxy.ids) == (1, ["a"])
        proxy.answering.set()
        nothing_left(posts)
        assert proxy.ids == ["a"]
    finally:
        posts.close()


def test_cancelling_the_unknown_and_the_delivered_does_nothing(
    posts: Metaservers, proxy: Metaserver
) -> None:
    posts.cancel("never")
    posts.post(proxy.url, advertisement("a"))
    proxy.wait_for("a")
    nothing_left(posts)
    posts.cancel("a")
    posts.post(proxy.url, advertisement("b"))
    proxy.wait_for("a", "b")


def test_an_id_that_is_posted_again_replaces_its_post(
    posts: Metaservers, proxy: Metaserver
) -> None:
    proxy.answering.clear()
    posts.post(proxy.url, advertisement("a"))
    proxy.wait_for("a")
    posts.post(proxy.url, advertisement("a"))
    proxy.wait_for("a", "a")
    assert posts.pending == 1
    posts.cancel("a")
    nothing_left(posts)


def test_a_slow_metaserver_keeps_no_other_waiting(posts: Metaservers, proxy: Metaserver) -> None:
    with metaserver() as slow:
        slow.answering.clear()
        for number in range(20):
            posts.post(slow.url, advertisement(f"slow-{number}"))
        posts.post(proxy.url, advertisement("a"))
        proxy.wait_for("a")
        eventually(lambda: posts.pending == 20, "the slow ones alone to be left")
        slow.wait_for(*(f"slow-{number}" for number in range(20)))


def test_many_at_once(posts: Metaservers, proxy: Metaserver) -> None:
    ids = [f"r{number}" for number in range(200)]
    for ext_id in ids:
        posts.post(proxy.url, advertisement(ext_id))
    proxy.wait_for(*ids)
    nothing_left(posts)


def test_posting_never_waits(posts: Metaservers) -> None:
    with metaserver() as slow:
        slow.answering.clear()
        start = time.monotonic()
        posts.post(slow.url, advertisement("a"))
        posts.cancel("a")
        assert time.monotonic() - start < PATIENCE / 2


def test_close_gives_up_posts_and_ends_the_thread(proxy: Metaserver) -> None:
    posts = Metaservers(PATIENCE, jitter=lambda: 1000.0)
    proxy.answering.clear()
    posts.post(proxy.url, advertisement("hangs"))
    posts.post(unused_url()[0], advertisement("pauses"))
    proxy.wait_for("hangs")
    posts.close(PATIENCE)
    assert threads() == []
    # What comes later is not wanted any more, and hurts nobody.
    posts.post(proxy.url, advertisement("late"))
    posts.cancel("late")
    posts.close()
    assert proxy.ids == ["hangs"]


def test_a_url_that_only_a_post_finds_bad_ends_its_post_with_a_log(
    posts: Metaservers, caplog: pytest.LogCaptureFixture, proxy: Metaserver
) -> None:
    with caplog.at_level(logging.ERROR, "rd2h"):
        posts.post("http://\u2603.com/", advertisement("a"))
        eventually(lambda: caplog.records, "a log")
    assert "request a " in caplog.records[0].getMessage()
    nothing_left(posts)
    posts.post(proxy.url, advertisement("b"))
    proxy.wait_for("b")


@pytest.mark.parametrize(
    "url", ["http://h/", "https://h:65535/a?b=c", "HTTP://[::1]:80", "http://u:p@h/"]
)
def test_urls_that_can_be_posted_to(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h",
        "h:80",
        "ftp://h",
        "http://",
        "http://h:65536",
        "http://h:x",
        "http://[::1",
        "http://\0",
    ],
)
def test_urls_that_cannot_be_posted_to(url: str) -> None:
    with pytest.raises(ValueError, match="metaserver") as caught:
        check_url(url)
    assert repr(url) in str(caught.value)
