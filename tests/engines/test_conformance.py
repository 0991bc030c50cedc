"""What every transfer engine does, between two real processes where it is meant for that."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rd2h.engines import (
    EngineClosedError,
    EngineError,
    LocalRangeError,
    MemoryRegion,
    NotRegisteredError,
    PeerGoneError,
    RemoteRangeError,
    SegmentError,
    SessionError,
)
from tests.engines.peers import PAGE, Ground, Peer, Reader, in_thread, make_ground, pattern, u64

MIB = 1 << 20


@pytest.fixture(
    params=[
        "memory",
        pytest.param("host", marks=pytest.mark.slow),
        pytest.param("nixl", marks=pytest.mark.slow),
    ]
)
def ground(request: pytest.FixtureRequest) -> Ground:
    return make_ground(request.param)


@pytest.fixture
def peer(ground: Ground) -> Iterator[Peer]:
    with ground.peer(MIB) as peer:
        yield peer


@pytest.fixture
def reader(ground: Ground) -> Iterator[Reader]:
    with ground.reader(MIB) as reader:
        yield reader


def test_one_segment(peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))


def test_unaligned_segments_touch_no_neighbouring_byte(peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(1, 4093, 9001), u64(77, 8191, 3), u64(1, 7, 4099))


def test_thousands_of_scattered_segments_in_any_order(peer: Peer, reader: Reader) -> None:
    rng = np.random.default_rng(7)
    count, slot = 5000, MIB // 5000
    local = rng.permutation(count).astype(np.uint64) * np.uint64(slot)
    remote = rng.permutation(count).astype(np.uint64) * np.uint64(slot)
    length = rng.integers(0, slot, count, dtype=np.uint64)  # some are empty
    reader.read_and_check(peer, local, remote, length)


def test_the_last_byte_of_both_buffers(peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(MIB - 1), u64(MIB - 1), u64(1))


def test_64_mib_in_one_segment(ground: Ground) -> None:
    with ground.peer(64 * MIB) as peer, ground.reader(64 * MIB) as reader:
        reader.read_and_check(peer, u64(0), u64(0), u64(64 * MIB))


def test_no_segments_and_empty_segments_move_nothing(peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(), u64(), u64())
    reader.engine.read(peer.session, u64(1, 2**64 - 1), u64(0, 2**64 - 1), u64(0, 0))
    reader.check()


@pytest.mark.parametrize("start", [MIB, MIB - 10, 2**40])
def test_a_source_outside_the_peers_memory(peer: Peer, reader: Reader, start: int) -> None:
    first = u64(0, 2 * PAGE)
    with pytest.raises(RemoteRangeError, match=r"segment 1 of 2 \(100 bytes, remote 0x"):
        reader.read(peer, first, u64(0, start), u64(PAGE, 100))
    # The good segment and the part before the bad page may have landed, nothing else.
    changed = np.flatnonzero(reader.buffer.bytes != reader.expected)
    assert set(changed.tolist()) <= {*range(PAGE), *range(2 * PAGE, 2 * PAGE + 100)}
    reader.expected = reader.buffer.bytes.copy()
    reader.read_and_check(peer, u64(5), u64(6), u64(7))


@pytest.mark.parametrize("start", [-1, MIB - 10, MIB, 2**40])
def test_a_destination_outside_the_registered_memory(
    peer: Peer, reader: Reader, start: int
) -> None:
    local = u64(reader.buffer.address, reader.buffer.address + start)
    with pytest.raises(LocalRangeError, match=r"segment 1 of 2 \(100 bytes"):
        reader.engine.read(peer.session, local, u64(peer.address, peer.address), u64(9, 100))
    reader.check()


def test_ranges_that_pass_the_end_of_the_address_space(peer: Peer, reader: Reader) -> None:
    here, there = u64(reader.buffer.address), u64(peer.address)
    with pytest.raises(LocalRangeError, match="end of the address space"):
        reader.engine.read(peer.session, u64(2**64 - 5), there, u64(6))
    with pytest.raises(RemoteRangeError, match="end of the address space"):
        reader.engine.read(peer.session, here, u64(2**64 - 5), u64(6))
    with pytest.raises(LocalRangeError):
        reader.engine.read(peer.session, here, there, u64(2**64 - 1))
    reader.check()


def test_arrays_that_are_no_segments(peer: Peer, reader: Reader) -> None:
    with pytest.raises(SegmentError, match="lengths has 2"):
        reader.engine.read(peer.session, u64(1), u64(1), u64(1, 2))
    with pytest.raises(SegmentError, match="int64"):
        reader.engine.read(peer.session, np.array([1]), u64(1), u64(1))


def test_read_before_register(ground: Ground, peer: Peer) -> None:
    engine = ground.make_engine()
    with pytest.raises(NotRegisteredError, match="register"):
        _ = engine.session
    with pytest.raises(LocalRangeError):
        engine.read(peer.session, u64(peer.address), u64(peer.address), u64(1))
    engine.close()


def test_regions_that_touch_are_one(ground: Ground, peer: Peer) -> None:
    with ground.reader(2 * PAGE) as reader:
        split = ground.make_engine()
        start = reader.buffer.address
        split.register([MemoryRegion(start + PAGE, PAGE), MemoryRegion(start, 0)])
        split.register([MemoryRegion(start, PAGE + 8)])
        split.read(peer.session, u64(start), u64(peer.address), u64(2 * PAGE))
        split.close()
        reader.expected[:] = 0
        reader.read_and_check(peer, u64(0), u64(0), u64(2 * PAGE))


def test_memory_registered_after_a_read(ground: Ground, peer: Peer) -> None:
    with ground.reader(PAGE) as reader, ground.reader(PAGE) as other:
        reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
        assert reader.engine.session
        reader.engine.register([other.buffer.region])
        address = u64(other.buffer.address)
        reader.engine.read(peer.session, address, u64(peer.address), u64(PAGE))
        np.testing.assert_array_equal(other.buffer.bytes, reader.buffer.bytes)
        # A region that joins an earlier one takes its place.
        reader.engine.register([MemoryRegion(reader.buffer.address, PAGE + 8)])
        reader.read_and_check(peer, u64(0), u64(9), u64(PAGE))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cut=st.integers(0, 400), junk=st.text(max_size=30), keep_rest=st.booleans())
@example(cut=0, junk="", keep_rest=False)
@example(cut=400, junk="\n", keep_rest=True)
def test_garbage_sessions(peer: Peer, reader: Reader, cut: int, junk: str, keep_rest: bool) -> None:
    session = peer.session[:cut] + junk + (peer.session[cut + len(junk) :] if keep_rest else "")
    if session == peer.session:
        return
    try:
        reader.engine.read(session, u64(reader.buffer.address), u64(peer.address), u64(PAGE))
    except (SessionError, PeerGoneError) as error:
        assert len(str(error)) < 1000
        assert "\n" not in str(error)
    else:
        pytest.fail("an altered session was read")
    reader.engine.forget(session)
    reader.check()


def test_sessions_differ_and_are_stable(ground: Ground) -> None:
    with ground.reader(PAGE) as one, ground.reader(PAGE) as two:
        assert one.engine.session == one.engine.session
        assert one.engine.session != two.engine.session


def test_a_peer_that_was_killed_before_the_first_read(peer: Peer, reader: Reader) -> None:
    peer.kill()
    with pytest.raises(PeerGoneError):
        reader.read(peer, u64(0), u64(0), u64(PAGE))
    reader.check()


def test_a_peer_that_is_killed_between_reads(peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    peer.kill()
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            reader.read(peer, u64(0), u64(0), u64(PAGE))
    reader.check()


def test_a_peer_that_is_killed_during_reads(ground: Ground) -> None:
    with ground.peer(8 * MIB) as peer, ground.reader(8 * MIB) as reader:
        first = threading.Event()

        def read_until_it_fails() -> None:
            while True:
                reader.read(peer, u64(0), u64(0), u64(8 * MIB))
                first.set()

        thread, raised = in_thread(read_until_it_fails)
        assert first.wait(60)
        peer.kill()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(raised[0], PeerGoneError)


def test_a_peer_that_restarts(ground: Ground, peer: Peer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    peer.kill()
    with ground.peer(MIB, seed=2) as again:
        assert again.session != peer.session
        with pytest.raises(PeerGoneError):
            reader.read(peer, u64(0), u64(0), u64(PAGE))
        reader.engine.forget(peer.session)
        reader.read_and_check(again, u64(0), u64(0), u64(PAGE))
        with pytest.raises(PeerGoneError):
            reader.read(peer, u64(0), u64(0), u64(PAGE))
        reader.read_and_check(again, u64(9), u64(3), u64(PAGE))


def test_two_peers_in_parallel(ground: Ground, peer: Peer) -> None:
    with ground.peer(MIB, seed=2) as other, ground.reader(2 * MIB) as reader:
        offsets = np.arange(0, MIB, PAGE, dtype=np.uint64)
        lengths = np.full_like(offsets, PAGE)

        def read_often(source: Peer, to: int) -> None:
            for turn in range(10):
                local = np.roll(offsets, turn) + np.uint64(to)
                reader.read(source, local, np.roll(offsets, turn), lengths)

        threads = [
            in_thread(lambda: read_often(peer, 0)),
            in_thread(lambda: read_often(other, MIB)),
            in_thread(lambda: read_often(peer, 0)),
        ]
        for thread, raised in threads:
            thread.join(60)
            assert not thread.is_alive()
            assert not raised
        reader.expected[:MIB] = pattern(MIB, peer.seed)
        reader.expected[MIB:] = pattern(MIB, other.seed)
        reader.check()


def test_a_dead_peer_does_not_disturb_another(ground: Ground, peer: Peer) -> None:
    with ground.peer(MIB, seed=2) as dead, ground.reader(2 * MIB) as reader:
        reader.read_and_check(dead, u64(MIB), u64(0), u64(MIB))
        dead.kill()
        stop = threading.Event()

        def read_on() -> None:
            while not stop.is_set():
                reader.read(peer, u64(0), u64(0), u64(MIB))

        thread, raised = in_thread(read_on)
        for _ in range(5):
            with pytest.raises(PeerGoneError):
                reader.read(dead, u64(MIB), u64(0), u64(MIB))
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not raised
        reader.read_and_check(peer, u64(0), u64(0), u64(MIB))


def test_forget_is_idempotent_and_a_later_read_works(peer: Peer, reader: Reader) -> None:
    reader.engine.forget(peer.session)
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    reader.engine.forget(peer.session)
    reader.engine.forget(peer.session)
    reader.engine.forget("no session at all")
    reader.read_and_check(peer, u64(1), u64(2), u64(PAGE))


def test_use_after_close(ground: Ground, peer: Peer) -> None:
    with ground.reader(PAGE) as reader:
        reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
        engine = reader.engine
        engine.close()
        engine.close()
        with pytest.raises(EngineClosedError):
            reader.read(peer, u64(0), u64(0), u64(PAGE))
        with pytest.raises(EngineClosedError):
            engine.read(peer.session, u64(), u64(), u64())
        with pytest.raises(EngineClosedError):
            engine.register([])
        with pytest.raises(EngineClosedError):
            engine.forget(peer.session)
        with pytest.raises(EngineClosedError):
            _ = engine.session


def test_close_during_reads_ends_them(ground: Ground) -> None:
    with ground.peer(8 * MIB) as peer, ground.reader(8 * MIB) as reader:
        first = threading.Event()

        def read_until_it_fails() -> None:
            while True:
                reader.read(peer, u64(0), u64(0), u64(8 * MIB))
                first.set()

        thread, raised = in_thread(read_until_it_fails)
        assert first.wait(60)
        reader.engine.close()
        reader.buffer.bytes[:] = 3  # nothing may land after close
        reader.expected[:] = 3
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(raised[0], EngineClosedError)
        reader.check()


def test_errors_share_one_base() -> None:
    for error in (SessionError, PeerGoneError, LocalRangeError, RemoteRangeError, SegmentError):
        assert issubclass(error, EngineError)
