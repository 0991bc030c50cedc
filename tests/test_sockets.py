"""The pieces that both socket threads stand on."""

from __future__ import annotations

import logging
import select

import pytest
import zmq

from rd2h.sockets import LimitedLog, Wakeup, drain_monitor, new_socket, payload_of


def test_a_wakeup_is_seen_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    try:
        assert select.select([wakeup], [], [], 0) == ([], [], [])
        wakeup.set()
        wakeup.set()
        assert select.select([wakeup], [], [], 0) == ([wakeup], [], [])
        wakeup.clear()
        wakeup.clear()
        assert select.select([wakeup], [], [], 0) == ([], [], [])
    finally:
        wakeup.close()


@pytest.mark.parametrize(
    ("frames", "payload"),
    [
        ([b"ACK"], b"ACK"),
        ([b"", b"ACK"], b"ACK"),
        ([b"", b"", b"ACK", b""], b"ACK"),
        ([b""], None),
        ([], None),
    ],
)
def test_empty_frames_are_dropped(frames: list[bytes], payload: bytes | None) -> None:
    assert payload_of(frames) == payload


def test_a_message_has_one_frame() -> None:
    with pytest.raises(ValueError, match="2 frames that are not empty"):
        payload_of([b"a", b"", b"b"])


def test_a_flood_is_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("flood"), interval=10.0, burst=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            log.warning(5.0, "garbage from %s", "p")
        log.warning(16.0, "garbage from %s", "q")
    assert [record.getMessage() for record in caplog.records] == [
        "garbage from p",
        "garbage from p",
        "98 more such messages",
        "garbage from q",
    ]


def test_a_connection_that_breaks_is_seen_by_the_monitor() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = new_socket(context, zmq.ROUTER, "tcp://127.0.0.1:0")
    router.bind("tcp://127.0.0.1:0")
    monitor: zmq.Socket[bytes] = router.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = new_socket(context, zmq.DEALER, address)
    try:
        dealer.connect(address)
        dealer.send(b"hello")
        assert router.poll(10_000)
        assert list(drain_monitor(monitor)) == []
        dealer.close(0)
        assert monitor.poll(10_000)
        (event,) = drain_monitor(monitor)
        assert event.event == zmq.EVENT_DISCONNECTED
    finally:
        router.disable_monitor()
        for socket in (monitor, dealer, router):
            socket.close(0)
        context.term()


def test_an_ipv6_address_turns_ipv6_on() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with new_socket(context, zmq.DEALER, "tcp://[::1]:1") as socket:
            assert socket.getsockopt(zmq.IPV6) == 1
        with new_socket(context, zmq.DEALER, "tcp://127.0.0.1:1") as socket:
            assert socket.getsockopt(zmq.IPV6) == 0
    finally:
        context.term()
