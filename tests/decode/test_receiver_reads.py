"""The read threads: engines that misbehave, peers that are slow, and the end of it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

import rd2h.sockets
from rd2h.decode import Finished, Outcome, ReceiverClosedError, ReceiverOptions
from rd2h.wire import ReadDone, ReadFailed
from tests.decode.meeting import greeted
from tests.transfer.caches import PATIENCE, TWO_LAYERS, Cache, eventually
from tests.transfer.ranks import Decode, Log, Site, ask, batch, make_site


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


class Scripted:
    """An engine that does what a test says, and counts."""

    def __init__(
        self,
        read: Callable[[], object] = lambda: None,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self.reads = 0
        self._read = read
        self._forget = forget

    def read(self, *_: object) -> None:
        self.reads += 1
        self._read()

    def forget(self, _: str) -> None:
        self._forget()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failed(decode: Decode, answer: object) -> str:
    """The reason of a failed batch of request ``a``, which both sides hear alike."""
    assert isinstance(answer, ReadFailed)
    assert decode.wait("a") == [Finished("a", Outcome.FAILED, answer.error)]
    return answer.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit("exit"), "layer layer.0: exit (requests a)"),
        (KeyboardInterrupt(), "layer layer.0: KeyboardInterrupt (requests a)"),
        (UnspeakableError(), "layer layer.0: UnspeakableError (requests a)"),
        (RuntimeError("bad file \udcff"), "layer layer.0: bad file \\udcff (requests a)"),
    ],
)
def test_whatever_an_engine_raises_fails_its_batch_only(
    site: Site, error: BaseException, reason: str
) -> None:
    errors = [error]

    def fail() -> None:
        if errors:
            raise errors.pop()

    decode = site.decode(reader=Scripted(fail), options=ReceiverOptions(read_threads=1))
    prefill = greeted(site, decode)
    decode.register("a", [1])
    with Log() as log:
        assert failed(decode, prefill.ask(batch(0, [ask("a", [3])]))) == reason
    assert any("Traceback" in line for line in log.lines)
    decode.register("b", [1])
    assert prefill.ask(batch(0, [ask("b", [3])], ["b"])) == ReadDone(0)
    decode.wait_done("b")


def test_an_engine_that_says_too_much_is_cut_short(site: Site) -> None:
    def fail() -> None:
        raise RuntimeError("x" * 10_000_000)

    decode = site.decode(reader=Scripted(fail))
    prefill = greeted(site, decode)
    decode.register("a", [1])
    with Log() as log:
        reason = failed(decode, prefill.ask(batch(0, [ask("a", [3])])))
    assert len(reason) <= 1000
    assert "more characters" in reason
    assert log.size < 10_000


def test_failed_reads_do_not_fill_the_log(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    with Log("rd2h.decode.pool") as log:
        for index in range(30):
            decode.engine.fail_read()
            decode.register(f"r{index}", [1])
            assert isinstance(prefill.ask(batch(0, [ask(f"r{index}", [3])])), ReadFailed)
    assert len(log.lines) == 5


def test_eight_slow_peers_hold_up_nobody(site: Site) -> None:
    """A Decode rank at a ratio of 16:2 has eight contributors."""
    decode = site.decode()
    peers = [greeted(site, decode) for _ in range(9)]
    held = []
    for index, peer in enumerate(peers[:8]):
        held.append(decode.engine.hold_read())
        decode.register(f"slow{index}", [index])
        peer.say(batch(0, [ask(f"slow{index}", [3])]))
        assert held[-1].started.wait(PATIENCE)
    decode.register("fast", [20])
    assert peers[8].ask(batch(0, [ask("fast", [3])], ["fast"])) == ReadDone(0)
    for read in held:
        read.release()
    for peer in peers[:8]:
        assert peer.hear() == ReadDone(0)


def test_an_engine_that_is_slow_to_forget_holds_up_no_other_peer(site: Site) -> None:
    begun, go = threading.Event(), threading.Event()

    def forget() -> None:
        begun.set()
        assert go.wait(PATIENCE)

    decode = site.decode(reader=Scripted(forget=forget))
    leaver, other = greeted(site, decode), greeted(site, decode)
    leaver.socket.close(0)
    assert begun.wait(PATIENCE)
    decode.register("a", [1])
    assert other.ask(batch(0, [ask("a", [3])], ["a"])) == ReadDone(0)
    assert not go.is_set()
    go.set()


def test_a_peer_that_comes_back_is_read_from_once_it_was_forgotten(site: Site) -> None:
    """It has the session that the engine is just forgetting."""
    begun, go, over = threading.Event(), threading.Event(), threading.Event()

    def forget() -> None:
        begun.set()
        assert go.wait(PATIENCE)
        over.set()

    def read() -> None:
        assert over.is_set()

    decode, cache = site.decode(reader=Scripted(read, forget)), Cache(TWO_LAYERS)
    leaver, again = (site.scripted_prefill(decode.endpoint) for _ in range(2))
    leaver.greet("the session", cache)
    leaver.socket.close(0)
    assert begun.wait(PATIENCE)
    again.greet("the session", cache)
    decode.register("a", [1])
    again.say(batch(0, [ask("a", [3])], ["a"]))
    eventually(lambda: decode.receiver.sizes()["active"] == 1, "the batch to be given to a thread")
    go.set()
    assert again.hear() == ReadDone(0)
    decode.wait_done("a")


# -------------------------------------------------------------------------------- frozen in a read


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_read_as_long_as_the_heartbeat_timeout_counts_only_if_the_peer_is_still_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """As when this process was frozen in it, and hears of the loss only after the read's end."""
    decode = site.decode()
    prefill = greeted(site, decode)
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_TIMEOUT", 0.5)
    monkeypatch.setattr(rd2h.sockets, "HEARTBEAT_INTERVAL", 0.3)
    held = decode.engine.hold_read()
    decode.register("a", [1])
    prefill.say(batch(0, [ask("a", [3])], ["a"]))
    assert held.started.wait(PATIENCE)
    time.sleep(0.3)
    held.release()
    eventually(lambda: decode.receiver.stats.batches == 1, "the read to end")
    if leaves:
        prefill.socket.close(0)
        (finished,) = decode.wait("a")
        assert finished.outcome is Outcome.FAILED
        assert "closed the connection" in finished.reason
    else:
        assert prefill.hear() == ReadDone(0)
        decode.wait_done("a")


# ---------------------------------------------------------------------------------------- closing


@pytest.mark.slow
def test_no_read_begins_once_close_was_called(site: Site) -> None:
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(PATIENCE)

    engine = Scripted(hold)
    decode = site.decode(reader=engine, options=ReceiverOptions(read_threads=1))
    peers = [greeted(site, decode) for _ in range(4)]
    for index, peer in enumerate(peers):
        decode.register(f"r{index}", [1])
        peer.say(batch(0, [ask(f"r{index}", [3])], [f"r{index}"]))
    assert begun.wait(PATIENCE)
    eventually(lambda: decode.receiver.sizes()["active"] == 4, "all to wait for the one thread")
    threading.Timer(0.3, go.set).start()
    start = time.monotonic()
    decode.receiver.close()
    assert time.monotonic() - start < 3.0
    assert engine.reads == 1
    # Everybody was answered, and what has ended can still be taken, once.
    answers = [peer.hear() for peer in peers]
    assert sum(answer == ReadDone(0) for answer in answers) == 1
    for answer in answers:
        assert answer == ReadDone(0) or "shutting down" in getattr(answer, "error", "")
    outcomes = [finished.outcome for finished in decode.receiver.take_finished()]
    assert sorted(outcome.value for outcome in outcomes) == ["done", "failed", "failed", "failed"]
    with pytest.raises(ReceiverClosedError):
        decode.receiver.take_finished()


@pytest.mark.slow
def test_close_keeps_to_its_time_and_begins_no_read_afterwards(site: Site) -> None:
    go = threading.Event()
    engine = Scripted(lambda: go.wait(PATIENCE))
    decode = site.decode(reader=engine, options=ReceiverOptions(read_threads=1))
    peers = [greeted(site, decode) for _ in range(3)]
    for index, peer in enumerate(peers):
        decode.register(f"r{index}", [1])
        peer.say(batch(0, [ask(f"r{index}", [3])]))
    eventually(lambda: decode.receiver.sizes()["active"] == 3, "all to wait for the one thread")
    eventually(lambda: engine.reads == 1, "the first read to begin")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="rd2h-read-0 did not end within 1 s"):
        decode.receiver.close(1.0)
    assert time.monotonic() - start < 2.0
    go.set()
    decode.receiver.close()
    assert engine.reads == 1
