"""Requests that come early, are aborted, or lose whoever feeds them, on real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rd2h.decode import Outcome, ReceiverOptions
from rd2h.wire import ReadDone, ReadFailed
from tests.decode.meeting import greeted
from tests.transfer.caches import PATIENCE, TWO_LAYERS, Cache, eventually
from tests.transfer.ranks import Site, ask, batch, make_site


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


# ------------------------------------------------------------------------------------ parking


def test_early_batch_is_parked_and_others_go_on(site: Site) -> None:
    decode = site.decode()
    cache = Cache(TWO_LAYERS)
    early, other = greeted(site, decode, cache), greeted(site, decode)
    early.say(batch(0, [ask("early", [3])], ["early"]))
    decode.register("same peer", [1])
    decode.register("other peer", [2])
    assert early.ask(batch(1, [ask("same peer", [4])], ["same peer"])) == ReadDone(1)
    assert other.ask(batch(0, [ask("other peer", [4])], ["other peer"])) == ReadDone(0)
    decode.wait_done("same peer", "other peer")
    decode.register("early", [9])
    assert early.hear() == ReadDone(0)
    decode.wait_done("early")
    np.testing.assert_array_equal(
        decode.cache.tensors["layer.0"][0][9], cache.tensors["layer.0"][0][3]
    )


def test_parked_batch_fails_at_its_deadline_and_names_the_request(site: Site) -> None:
    decode = site.decode(options=ReceiverOptions(park_timeout=0.1))
    prefill = greeted(site, decode)
    answer = prefill.ask(batch(1, [ask("never", [3])]))
    assert isinstance(answer, ReadFailed)
    for word in ("layer.1", "never", "0.1 s", "registered"):
        assert word in answer.error
    decode.register("b", [7])
    assert prefill.ask(batch(1, [ask("b", [3])], ["b"])) == ReadDone(1)


def test_aborting_an_unregistered_request_lets_its_parked_batches_through(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    prefill.say(batch(0, [ask("a", [3])]), batch(1, [ask("a", [3])], ["a"]))
    decode.register("b", [7])
    # `b` waits behind nothing, so both batches of `a` have arrived and are parked.
    assert prefill.ask(batch(5, [], ["b"])) == ReadDone(5)
    decode.wait_done("b")
    decode.receiver.abort("a")
    assert [prefill.hear(), prefill.hear()] == [ReadDone(0), ReadDone(1)]
    assert decode.engine.reads == 0
    assert decode.receiver.take_finished() == []


# --------------------------------------------------------------------------- abort, idle, loss


def test_abort_is_reported_only_when_the_read_in_flight_has_ended(site: Site) -> None:
    decode = site.decode()
    prefill, other = greeted(site, decode), greeted(site, decode)
    held = decode.engine.hold_read()
    decode.register("a", [1])
    prefill.say(batch(0, [ask("a", [3])]))
    assert held.started.wait(PATIENCE)
    decode.receiver.abort("a")
    # A later registration has been dealt with, so the abort has been, too.
    decode.register("b", [2])
    assert other.ask(batch(0, [ask("b", [3])], ["b"])) == ReadDone(0)
    decode.wait_done("b")
    assert "a" not in decode.ended
    held.release()
    assert prefill.hear() == ReadDone(0)
    (finished,) = decode.wait("a")
    assert finished.outcome is Outcome.ABORTED
    reads = decode.engine.reads
    assert prefill.ask(batch(1, [ask("a", [3])], ["a"])) == ReadDone(1)
    assert decode.engine.reads == reads
    assert decode.receiver.take_finished() == []


def test_request_registered_twice_is_refused_until_it_was_taken(site: Site) -> None:
    decode = site.decode()
    prefill = greeted(site, decode)
    decode.register("a", [1])
    with pytest.raises(ValueError, match="request a is registered already"):
        decode.register("a", [2])
    assert prefill.ask(batch(0, [ask("a", [3])], ["a"])) == ReadDone(0)
    decode.wait_done("a")
    decode.register("a", [2])


def test_request_that_no_peer_feeds_fails_when_idle(site: Site) -> None:
    decode = site.decode(options=ReceiverOptions(idle_timeout=0.1))
    decode.register("a", [1])
    (finished,) = decode.wait("a")
    assert finished.outcome is Outcome.FAILED
    assert "0.1 s" in finished.reason


def test_peer_that_leaves_fails_its_requests_soon_and_no_others(site: Site) -> None:
    decode = site.decode()
    leaver, other = greeted(site, decode), greeted(site, decode)
    decode.register("a", [1])
    decode.register("b", [2])
    assert leaver.ask(batch(0, [ask("a", [3])])) == ReadDone(0)
    assert other.ask(batch(0, [ask("b", [3])])) == ReadDone(0)
    leaver.socket.close(0)
    (finished,) = decode.wait("a")
    assert finished.outcome is Outcome.FAILED
    assert "closed the connection" in finished.reason
    assert other.ask(batch(1, [ask("b", [3])], ["b"])) == ReadDone(1)
    decode.wait_done("b")


def test_engine_forgets_a_peer_that_has_left(site: Site) -> None:
    class Forgetful:
        def __init__(self) -> None:
            self.forgotten: list[str] = []

        def read(self, *_: object) -> None:
            raise AssertionError

        def forget(self, session: str) -> None:
            self.forgotten.append(session)
            raise RuntimeError("which is only logged")

    engine = Forgetful()
    decode = site.decode(reader=engine)
    leaver = site.scripted_prefill(decode.endpoint)
    leaver.greet("the session", Cache(TWO_LAYERS))
    leaver.socket.close(0)
    eventually(lambda: engine.forgotten == ["the session"], "the session to be forgotten")
    prefill = greeted(site, decode)
    decode.register("a", [1])
    assert prefill.ask(batch(0, [], ["a"])) == ReadDone(0)
