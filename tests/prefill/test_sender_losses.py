"""Decodes that are silent, gone or broken, as the sender sees them on real sockets."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from rd2h.prefill import LayerSendError, SenderBrokenError
from rd2h.prefill.machine import SenderMachine
from rd2h.wire import ReadDone, ReadFailed
from tests.prefill.meeting import RAISING, is_shut, meet
from tests.transfer.caches import PATIENCE, eventually
from tests.transfer.ranks import PATIENT, Log, Site, ask, batch, make_site, quick


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


class Pause(logging.Handler):
    """Holds the socket thread where it logs that a batch was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def emit(self, _: logging.LogRecord) -> None:
        self.entered.set()
        self.go_on.wait(PATIENCE)

    def __enter__(self) -> Pause:
        logging.getLogger("rd2h.prefill.sender").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        logging.getLogger("rd2h.prefill.sender").removeHandler(self)


@pytest.mark.slow
def test_flood_of_garbage_keeps_the_sender_from_nothing(site: Site) -> None:
    prefill = site.prefill(options=PATIENT)
    flooding, good = RawDecode(site), site.scripted_decode()
    prefill.submit(0, flooding.endpoint, ask("flooded", [1]))
    flooding.greet()
    with Log():
        flooding.connection.sendall(b"\x00\x01\x91" * 1_500_000)
        meet(prefill, good, layer=1)
        prefill.sender.close(1.0)


class RawDecode:
    """A Decode that speaks ZMTP by hand, so that it can break it."""

    def __init__(self, site: Site) -> None:
        self._server = site.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._server.settimeout(PATIENCE)
        self._site = site
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def greet(self) -> None:
        """Accept, shake hands, and answer MfMeta."""
        connection, _ = self._server.accept()
        self.connection = self._site.stack.enter_context(connection)
        self._shake_hands()
        self.say(b"ACK")

    def hang_up_on_everyone(self) -> list[float]:
        """Close every connection once MfMeta has come; the list grows by the time of each."""
        greeted: list[float] = []

        def serve() -> None:
            with suppress(OSError):  # the server's end
                while True:
                    self.connection, _ = self._server.accept()
                    with self.connection:
                        self._shake_hands()
                        greeted.append(time.monotonic())

        thread = threading.Thread(target=serve, daemon=True)
        self._site.stack.callback(thread.join)
        self._site.stack.callback(self._server.shutdown, socket.SHUT_RDWR)
        thread.start()
        return greeted

    def _shake_hands(self) -> None:
        """As a ROUTER, until MfMeta has come."""
        connection = self.connection
        connection.settimeout(PATIENCE)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        connection.sendall(bytes([4, len(ready)]) + ready)
        self.read_until(b"mf_meta")

    def say(self, payload: bytes) -> None:
        self.connection.sendall(b"\x01\x00\x00" + bytes([len(payload)]) + payload)

    def read_until(self, word: bytes) -> None:
        heard = b""
        while word not in heard:
            more = self.connection.recv(65536)
            assert more, "the sender hung up"
            heard += more


def test_peer_that_breaks_zmtp_just_before_a_send_is_lost_like_any_other(site: Site) -> None:
    """Such a connection takes no message any more: sending must not break the sender."""
    prefill, raw, good = site.prefill(options=PATIENT), RawDecode(site), site.scripted_decode()
    peer = meet(prefill, good)
    good.say(peer, ReadDone(0))
    prefill.submit(0, raw.endpoint, ask("x", [1]))
    raw.greet()
    raw.read_until(b"read_ready_batch")
    with Pause() as pause:
        raw.say(b"\x93\xc4\x0bread_failed\x00\xa3bad")
        assert pause.entered.wait(PATIENCE)
        raw.connection.sendall(b"\xff" * 64)  # no ZMTP frame has such flags
        raw.connection.settimeout(PATIENCE)
        while raw.connection.recv(65536):  # until zmq has hung up
            pass
        prefill.submit(1, raw.endpoint, ask("y", [1]))
    prefill.sender.drain()
    assert prefill.sender.stats.failures == 2
    prefill.submit(1, good.endpoint, ask("a", [1]))
    assert good.hear_batch()[0] == peer


@pytest.mark.parametrize("policy", ["contain", "raise"])
def test_silent_decode_beside_a_good_one(site: Site, policy: str) -> None:
    prefill = site.prefill(options=quick(policy, handshake=PATIENCE, answer=0.3))
    silent, good = site.scripted_decode(), site.scripted_decode()
    prefill.submit(0, silent.endpoint, ask("lost", [1]))
    silent.greet()
    silent.hear_batch()
    # The other's layers go on meanwhile.
    peer = meet(prefill, good, layer=1)
    good.say(peer, ReadDone(1))
    prefill.submit(1, good.endpoint, ask("fine", [2]))
    good.hear_batch()
    good.say(peer, ReadDone(1))
    start = time.monotonic()
    if policy == "raise":
        with pytest.raises(LayerSendError, match=r"0\.3 s for the answer to layer\.0") as caught:
            prefill.sender.wait("layer.0")
        assert (caught.value.endpoint, caught.value.ext_ids) == (silent.endpoint, ("lost",))
    else:
        prefill.sender.wait("layer.0")
        # Its request is left out from now on; others are tried again.
        prefill.submit(0, silent.endpoint, ask("lost", [1]), ask("new", [2]), done=["lost"])
        again, _ = silent.greet()
        assert silent.hear_batch() == (again, batch(0, [ask("new", [2])]))
        silent.say(again, ReadDone(0))
    assert time.monotonic() - start < PATIENCE
    prefill.sender.drain()


@pytest.mark.parametrize("policy", ["contain", "raise"])
def test_decode_that_never_acknowledges_the_handshake(site: Site, policy: str) -> None:
    prefill = site.prefill(options=quick(policy, handshake=0.2, answer=PATIENCE))
    decode = site.scripted_decode()
    prefill.submit(0, decode.endpoint, ask("a", [1]))
    if policy == "raise":
        with pytest.raises(LayerSendError, match=r"waited 0\.2 s for MfMetaAck"):
            prefill.sender.wait("layer.0")
    else:
        prefill.sender.wait("layer.0")
    assert prefill.sender.stats.failures == 1


def test_decode_that_accepts_no_connection_fails_at_the_handshake_deadline(site: Site) -> None:
    prefill = site.prefill(options=quick("raise", handshake=0.2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    prefill.submit(0, closed, ask("a", [1]))
    with pytest.raises(LayerSendError, match=r"waited 0\.2 s for a connection") as caught:
        prefill.sender.wait("layer.0")
    assert caught.value.endpoint == closed
    # It is there after all: the next request reaches it.
    decode = site.scripted_decode(closed)
    prefill.submit(0, closed, ask("b", [1]))
    peer, _ = decode.greet()
    decode.hear_batch()
    decode.say(peer, ReadDone(0))
    prefill.sender.drain()


@pytest.mark.parametrize("address", ["tcp://:bad", "", "x", "tcp://a\ud800:1", "udp://1.2.3.4:5"])
def test_address_that_makes_no_sense_is_one_clear_failure(site: Site, address: str) -> None:
    prefill, decode = site.prefill(options=RAISING), site.scripted_decode()
    for _ in range(2):
        prefill.submit(0, address, ask("a", [1]))
        with pytest.raises(LayerSendError, match="is no address to connect to") as caught:
            prefill.sender.wait("layer.0")
        assert caught.value.endpoint == address
        prefill.sender.forget("a")
    meet(prefill, decode)


@pytest.mark.slow
def test_hundreds_of_decodes_that_are_not_there(site: Site) -> None:
    """More than zmq lets a context have by default; they go by with the deadline."""
    prefill, decode = site.prefill(options=quick("contain", handshake=2.0)), site.scripted_decode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dead = [f"tcp://127.{i // 250}.{i % 250}.1:{port}" for i in range(400)]
    with Log():
        prefill.submit(0, dead, ask("a", [1]))
        peer = meet(prefill, decode, layer=1)
        decode.say(peer, ReadDone(1))
        prefill.sender.drain()
    assert prefill.sender.stats.failures == 400


def test_too_few_descriptors_fail_one_decode_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = site.prefill(options=RAISING), site.scripted_decode()
    peer = meet(prefill, decode)
    decode.say(peer, ReadDone(0))

    def exhausted(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "get_monitor_socket", exhausted)
        prefill.submit(1, "tcp://127.0.0.1:9", ask("b", [1]))
        with pytest.raises(LayerSendError, match=r"no socket can be opened .* Too many open"):
            prefill.sender.drain()
    prefill.submit(1, decode.endpoint, ask("a", [1]))
    assert decode.hear_batch()[0] == peer


def test_fault_of_the_socket_thread_reaches_the_compute_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    meet(prefill, decode)

    def broken(*_: object) -> None:
        raise RuntimeError("which nobody foresaw")

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", broken)
    with Log():
        prefill.submit(1, "tcp://127.0.0.1:9", ask("b", [1]))
        with pytest.raises(SenderBrokenError, match="which nobody foresaw"):
            prefill.sender.drain()  # although its end opens every gate
        with pytest.raises(SenderBrokenError, match="which nobody foresaw"):
            prefill.sender.wait("layer.1")
    prefill.sender.close()
    with pytest.raises(SenderBrokenError):
        prefill.sender.drain()


def test_question_that_the_socket_thread_dies_of_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = site.prefill(options=PATIENT)

    def broken(_: object) -> dict[str, int]:
        raise RuntimeError("which nobody foresaw")

    monkeypatch.setattr(SenderMachine, "sizes", broken)
    with Log(), pytest.raises(SenderBrokenError, match="which nobody foresaw"):
        prefill.sender.sizes(timeout=0.5)


def test_failure_is_known_before_its_gate_opens(site: Site) -> None:
    """Or a wait that the failure ends might return as if all were well."""
    prefill, decode = site.prefill(options=RAISING), site.scripted_decode()
    peer = meet(prefill, decode)
    with Pause() as pause:
        decode.say(peer, ReadFailed(0, "no"))
        assert pause.entered.wait(PATIENCE)
        assert is_shut(prefill, 0)
    with pytest.raises(LayerSendError):
        prefill.sender.drain()


@pytest.mark.parametrize("policy", ["contain", "raise"])
def test_decode_that_restarts_is_greeted_anew_and_stale_answers_count_for_nothing(
    site: Site, policy: str
) -> None:
    prefill = site.prefill(options=PATIENT if policy == "contain" else RAISING)
    decode = site.scripted_decode()
    endpoint = decode.endpoint
    peer = meet(prefill, decode)
    with Log() as log:
        decode.close()
        if policy == "raise":
            with pytest.raises(LayerSendError) as caught:
                prefill.sender.wait("layer.0")
            assert (caught.value.layer_names, caught.value.endpoint) == (("layer.0",), endpoint)
            assert caught.value.reason == "the connection was lost"
        else:
            prefill.sender.wait("layer.0")
    assert any(
        all(word in line for word in ("layer.0", endpoint, "the connection was lost"))
        for line in log.lines
    )
    again = site.scripted_decode(endpoint)
    prefill.submit(0, endpoint, ask("a", [1]), done=["a"])  # lost with the old one
    assert prefill.sender.wait("layer.0") < PATIENCE
    prefill.submit(0, endpoint, ask("b", [2]))
    new, _ = again.greet()
    assert new != peer
    assert again.hear_batch() == (new, batch(0, [ask("b", [2])]))
    again.say(new, ReadDone(1), ReadFailed(3, "of the old one"))
    assert is_shut(prefill, 0)
    again.say(new, ReadDone(0))
    prefill.sender.drain()


@pytest.mark.parametrize("policy", ["contain", "raise"])
def test_decode_that_is_lost_between_layers_loses_its_requests_aloud(
    site: Site, policy: str
) -> None:
    """Nothing is on its way, and no gate is shut; the requests had more to come all the same."""
    prefill = site.prefill(options=PATIENT if policy == "contain" else RAISING)
    decode = site.scripted_decode()
    peer = meet(prefill, decode)
    prefill.submit(1, decode.endpoint, ask("b", [1]), ask("c", [1]), done=["c"])
    decode.hear_batch()
    decode.say(peer, ReadDone(0), ReadDone(1))
    prefill.sender.drain()
    said = f"requests a, b were on their way to {decode.endpoint} when: the connection was lost"
    with Log() as log:
        decode.close()
        eventually(lambda: log.lines == [said], "the loss to be logged")
    if policy == "raise":
        # The log comes first.
        eventually(lambda: bool(prefill.sender._failures), "the loss to be kept")
        with pytest.raises(LayerSendError) as caught:
            prefill.submit(0, [], ask("other", [1]))
        assert str(caught.value) == said
        assert caught.value.layer_names == ()
        assert caught.value.ext_ids == ("a", "b")
    assert prefill.sender.sizes()["lost_requests"] == 2
    prefill.submit(0, decode.endpoint, ask("a", [1]))
    assert prefill.sender.drain() < PATIENCE  # left out
    assert prefill.sender.stats.failures == 0  # no layer was lost


def test_decode_that_gives_a_very_long_reason(site: Site) -> None:
    prefill, decode = site.prefill(options=RAISING), site.scripted_decode()
    peer = meet(prefill, decode)
    with Log() as log:
        decode.say(peer, ReadFailed(0, "long " * 4_000_000))
        with pytest.raises(LayerSendError, match=r"long \.\.\. \(19999500 more") as caught:
            prefill.sender.drain()
    assert len(str(caught.value)) < 1000
    assert log.size < 1000


def test_decode_that_hangs_up_when_greeted_is_not_called_all_the_time(site: Site) -> None:
    prefill, raw = site.prefill(options=quick("contain", handshake=1.0)), RawDecode(site)
    greeted = raw.hang_up_on_everyone()
    prefill.submit(0, raw.endpoint, ask("a", [1]))
    assert 0.5 < prefill.sender.drain() < PATIENCE  # all attempts share one deadline
    assert 2 <= len(greeted) <= 5  # after 0, 0.1, 0.3 and 0.7 seconds
    assert prefill.sender.stats.failures == 1


def test_forget_brings_the_sender_back_to_idle(site: Site) -> None:
    prefill, decode = site.prefill(options=PATIENT), site.scripted_decode()
    peer = meet(prefill, decode)
    prefill.submit(1, decode.endpoint, ask("b", [1]))
    decode.hear_batch()
    decode.say(peer, ReadDone(0), ReadFailed(1, "no"))
    prefill.sender.drain()
    assert prefill.sender.sizes() == {
        "queued": 0,
        "outstanding": 0,
        "open_requests": 1,
        "lost_requests": 1,
    }
    for ext_id in ("a", "b", "never heard of"):
        prefill.sender.forget(ext_id)
    assert set(prefill.sender.sizes().values()) == {0}
    # A lost id may be used again once it was forgotten.
    prefill.submit(1, decode.endpoint, ask("b", [1]))
    assert decode.hear_batch() == (peer, batch(1, [ask("b", [1])]))
