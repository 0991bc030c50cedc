import threading
from collections.abc import Iterator

import pytest

from rd2h.engines import EngineClosedError, EngineError, PeerGoneError, ReadTimeoutError
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from tests.engines.peers import PAGE, MemoryPeer, Reader, in_thread, u64


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def engine(fabric: MemoryFabric) -> MemoryEngine:
    return MemoryEngine(fabric)


@pytest.fixture
def reader(engine: MemoryEngine) -> Iterator[Reader]:
    yield Reader(engine, PAGE)
    engine.close()


@pytest.fixture
def peer(fabric: MemoryFabric) -> MemoryPeer:
    return MemoryPeer(fabric, PAGE, 1)


def read(reader: Reader, peer: MemoryPeer) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))


def test_the_nth_read_fails(engine: MemoryEngine, reader: Reader, peer: MemoryPeer) -> None:
    engine.fail_read(2, ReadTimeoutError("as asked"))
    read(reader, peer)
    with pytest.raises(ReadTimeoutError, match="as asked"):
        read(reader, peer)
    read(reader, peer)
    engine.fail_read()
    with pytest.raises(EngineError, match="by the test"):
        read(reader, peer)
    assert engine.reads == 4


def test_a_held_read_waits(engine: MemoryEngine, reader: Reader, peer: MemoryPeer) -> None:
    held = engine.hold_read()
    thread, raised = in_thread(lambda: read(reader, peer))
    assert held.started.wait(60)
    reader.check()  # nothing has landed
    held.release()
    thread.join(60)
    assert not raised
    reader.check()


def test_others_pass_a_held_read(engine: MemoryEngine, reader: Reader, peer: MemoryPeer) -> None:
    held = engine.hold_read()
    thread, raised = in_thread(lambda: read(reader, peer))
    assert held.started.wait(60)
    reader.read(peer, u64(0), u64(0), u64(PAGE))
    held.release()
    thread.join(60)
    assert not raised


def test_a_session_goes_away_under_a_held_read(
    fabric: MemoryFabric, engine: MemoryEngine, reader: Reader, peer: MemoryPeer
) -> None:
    held = engine.hold_read()
    thread, raised = in_thread(lambda: read(reader, peer))
    assert held.started.wait(60)
    fabric.drop(peer.session)
    fabric.drop(peer.session)
    held.release()
    thread.join(60)
    assert isinstance(raised[0], PeerGoneError)
    reader.check()


def test_close_ends_a_held_read(engine: MemoryEngine, reader: Reader, peer: MemoryPeer) -> None:
    held = engine.hold_read()
    thread, raised = in_thread(lambda: read(reader, peer))
    assert held.started.wait(60)
    closers = [threading.Thread(target=engine.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in [*closers, thread]:
        closer.join(60)
        assert not closer.is_alive()
    assert isinstance(raised[0], EngineClosedError)
    reader.check()


def test_a_closed_engine_leaves_the_fabric(
    fabric: MemoryFabric, reader: Reader, peer: MemoryPeer
) -> None:
    assert fabric.sessions == {peer.session, reader.engine.session}
    peer.close()
    assert fabric.sessions == {reader.engine.session}
    with pytest.raises(PeerGoneError):
        read(reader, peer)


def test_a_dropped_session_stays_away(fabric: MemoryFabric, reader: Reader) -> None:
    fabric.drop(reader.engine.session)
    reader.engine.register([reader.buffer.region])
    assert fabric.sessions == frozenset()


def test_an_engine_that_never_registered_closes(engine: MemoryEngine) -> None:
    engine.close()
    engine.close()
