"""The MemFabric engine on a fake of its library."""

import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rd2h.engines import (
    EngineBinding,
    EngineClosedError,
    EngineError,
    LocalRangeError,
    MemoryRegion,
    NotRegisteredError,
    SessionError,
    TransferEngine,
    create_engine,
)
from rd2h.engines.memfabric import MemFabricEngine, MemFabricError, shared_engine
from tests.engines.memfabric_fake import (
    DECODE,
    HOST,
    START,
    FakeFabric,
    FakeMemFabric,
    FakePeer,
    Hold,
    filled,
    start_error,
)
from tests.engines.peers import PAGE, Buffer, Reader, in_thread, u64


@pytest.fixture
def peer(fabric: FakeFabric) -> FakePeer:
    return FakePeer(fabric, 2 * PAGE, 1)


@pytest.fixture
def engine(library: FakeMemFabric) -> Iterator[MemFabricEngine]:
    assert library.live is None
    engine = shared_engine(DECODE)
    yield engine
    engine.close()


@pytest.fixture
def reader(engine: MemFabricEngine) -> Reader:
    return Reader(engine, 2 * PAGE)


def read(reader: Reader, peer: FakePeer) -> None:
    reader.read_and_check(peer, u64(3), u64(5), u64(PAGE))


# ------------------------------------------------------------------------------- start and end


def test_the_order_of_calls(library: FakeMemFabric, peer: FakePeer) -> None:
    engine = create_engine("memfabric", binding=DECODE)
    assert library.calls == START
    reader = Reader(engine, 2 * PAGE)
    assert engine.session == f"{HOST}:20002"
    read(reader, peer)
    engine.forget(peer.session)
    engine.close()
    assert library.calls[4:] == [
        "batch_register_memory(1)",
        "batch_transfer_sync_read",
        "destroy",
        "unInitialize",
    ]


def test_the_same_binding_is_the_same_engine(
    library: FakeMemFabric, engine: MemFabricEngine
) -> None:
    assert create_engine("memfabric", binding=EngineBinding("Decode", 3, HOST)) is engine
    assert library.calls == START


@pytest.mark.parametrize(
    "other",
    [
        EngineBinding("Prefill", 3, HOST),
        EngineBinding("Decode", 4, HOST),
        EngineBinding("Decode", 3, "127.0.0.2"),
    ],
)
def test_another_binding_is_refused_and_both_are_named(
    library: FakeMemFabric, engine: MemFabricEngine, other: EngineBinding
) -> None:
    text = start_error(other)
    assert f"Decode on device 3 at {HOST}" in text
    assert str(other) in text
    assert str(other) == f"{other.role} on device {other.device_id} at {other.host}"
    assert library.calls == START
    engine.register([])  # it is still open


def test_a_closed_engine_makes_room_for_another_binding(
    library: FakeMemFabric, engine: MemFabricEngine
) -> None:
    engine.close()
    other = shared_engine(EngineBinding("Prefill", 0, HOST))
    engine.close()  # again: it must not end the other
    assert shared_engine(other.binding) is other
    assert library.calls[4:6] == ["destroy", "unInitialize"]
    other.close()


def test_many_threads_ask_while_the_first_one_starts(library: FakeMemFabric) -> None:
    hold = library.hold = Hold()
    engines: list[MemFabricEngine] = []

    def ask() -> None:
        engines.append(shared_engine(DECODE))

    asking = [in_thread(ask)]
    assert hold.started.wait(60)
    asking += [in_thread(ask) for _ in range(7)]
    asking[-1][0].join(0.02)
    hold.go.set()
    for thread, raised in asking:
        thread.join(60)
        assert not thread.is_alive()
        assert not raised
    assert library.calls == START
    assert {id(engine) for engine in engines} == {id(engines[0])}
    engines[0].close()


def test_closing_waits_for_a_read_and_asking_waits_for_closing(
    library: FakeMemFabric, engine: MemFabricEngine, reader: Reader, peer: FakePeer
) -> None:
    hold = library.hold = Hold()
    reading, read_raised = in_thread(lambda: read(reader, peer))
    assert hold.started.wait(60)
    closing, close_raised = in_thread(engine.close)
    while not engine._lifecycle.closing:
        closing.join(0.001)
    others: list[MemFabricEngine] = []
    asking, ask_raised = in_thread(lambda: others.append(shared_engine(DECODE)))
    asking.join(0.05)
    assert closing.is_alive()
    assert asking.is_alive()
    assert "destroy" not in library.calls
    with pytest.raises(EngineClosedError):
        read(reader, peer)
    hold.go.set()
    for thread in (reading, closing, asking):
        thread.join(60)
        assert not thread.is_alive()
    assert not read_raised + close_raised + ask_raised
    assert library.calls[-6:] == ["destroy", "unInitialize", *START]
    assert others[0] is not engine
    others[0].close()


def test_an_end_that_fails_leaves_no_engine_behind(
    library: FakeMemFabric, engine: MemFabricEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = library.live
    assert native is not None
    monkeypatch.setattr(native, "unInitialize", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    monkeypatch.undo()
    native.unInitialize()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", library)
    other = shared_engine(DECODE)
    assert other is not engine
    other.close()


# ------------------------------------------------------------------------------- registration


def test_no_session_before_registration(engine: MemFabricEngine) -> None:
    with pytest.raises(NotRegisteredError, match=r"before register\(\)"):
        _ = engine.session
    engine.register([])
    assert engine.session == f"{HOST}:20001"


def test_what_overlaps_is_registered_once_and_what_touches_apart(
    fabric: FakeFabric, engine: MemFabricEngine
) -> None:
    buffer = Buffer(8 * PAGE)
    at = [buffer.address + page * PAGE for page in range(8)]
    engine.register(
        [
            MemoryRegion(at[5], PAGE),
            MemoryRegion(at[0], PAGE),
            MemoryRegion(at[1], 2 * PAGE),  # touches
            MemoryRegion(at[1], 2 * PAGE),
            MemoryRegion(at[2], 2 * PAGE),
            MemoryRegion(at[2], PAGE),
            MemoryRegion(at[7], 0),
        ]
    )
    assert fabric.ends[engine.session] == [
        MemoryRegion(at[0], PAGE),
        MemoryRegion(at[1], 3 * PAGE),
        MemoryRegion(at[5], PAGE),
    ]


def test_registering_again_is_for_known_memory_only(
    library: FakeMemFabric, engine: MemFabricEngine, reader: Reader, peer: FakePeer
) -> None:
    region, other = reader.buffer.region, Buffer(PAGE)
    engine.register([])
    engine.register([region])
    engine.register([MemoryRegion(region.address + 1, region.length - 1)])
    for new in (other.region, MemoryRegion(region.address, region.length + 1)):
        with pytest.raises(EngineError, match=r"registers memory once: 1 regions.*in one call"):
            engine.register([region, new])
    assert library.calls.count("batch_register_memory(1)") == 1
    with pytest.raises(LocalRangeError):
        engine.read(peer.session, u64(other.address), u64(peer.address), u64(1))
    read(reader, peer)


def test_two_threads_that_register_at_once(library: FakeMemFabric, engine: MemFabricEngine) -> None:
    hold = library.hold = Hold()
    first, second = Buffer(PAGE), Buffer(PAGE)
    one, one_raised = in_thread(lambda: engine.register([first.region]))
    assert hold.started.wait(60)
    two, two_raised = in_thread(lambda: engine.register([second.region]))
    two.join(0.02)
    hold.go.set()
    for thread in (one, two):
        thread.join(60)
        assert not thread.is_alive()
    assert not one_raised
    assert len(two_raised) == 1
    assert "registers memory once" in str(two_raised[0])


def test_memory_that_is_refused(library: FakeMemFabric, engine: MemFabricEngine) -> None:
    library.answer("batch_register_memory", -2001, "no memory")
    region = Buffer(PAGE).region
    with pytest.raises(MemFabricError, match=r"1 regions, 4096 bytes.*returned -2001 \(no memory"):
        engine.register([region])
    with pytest.raises(NotRegisteredError):
        _ = engine.session
    with pytest.raises(LocalRangeError):
        engine.read(f"{HOST}:1", u64(region.address), u64(1), u64(1))
    library.answer("batch_register_memory", 0)
    engine.register([region])
    assert engine.session


# -------------------------------------------------------------------------------------- reads


def test_a_read_that_fails_says_the_code_and_the_reason(
    library: FakeMemFabric, reader: Reader, peer: FakePeer
) -> None:
    library.answer("batch_transfer_sync_read", -2004, "timed\nout" + "!" * 5000)
    with pytest.raises(MemFabricError) as caught:
        reader.read(peer, u64(0, 8), u64(8, 16), u64(8, 24))
    assert caught.value.code == -2004
    assert caught.value.reason.startswith("timed\nout!!")
    text = str(caught.value)
    assert f"read from '{peer.session}' failed (2 segments, 32 bytes" in text
    assert f"remote {peer.address + 8:#x} to local {reader.buffer.address:#x}" in text
    assert "returned -2004 (timed out!" in text
    assert "\n" not in text
    assert len(text) < 1000
    library.answer("batch_transfer_sync_read", 0)
    read(reader, peer)


def test_an_error_text_is_never_that_of_an_earlier_call(
    library: FakeMemFabric, reader: Reader, peer: FakePeer
) -> None:
    library.answer("batch_transfer_sync_read", -1, "the first")
    with pytest.raises(MemFabricError, match="the first"):
        reader.read(peer, u64(0), u64(0), u64(1))
    library.fail("from elsewhere")
    library.answer("batch_transfer_sync_read", -1)
    with pytest.raises(MemFabricError, match="gives no reason"):
        reader.read(peer, u64(0), u64(0), u64(1))


def test_a_peer_that_has_gone(reader: Reader, peer: FakePeer) -> None:
    peer.kill()
    with pytest.raises(MemFabricError, match=r"link down.*check that the peer is alive"):
        reader.read(peer, u64(0), u64(0), u64(PAGE))
    reader.check()


def test_a_source_that_is_not_registered(reader: Reader, peer: FakePeer) -> None:
    with pytest.raises(MemFabricError, match="remote address is not registered"):
        reader.read(peer, u64(0), u64(2 * PAGE - 1), u64(2))
    reader.check()


@pytest.mark.parametrize(
    "session",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:020",
        "127.0.0.1:65536",
        "127.0.0.1:99999999999",
        "256.0.0.1:5",
        "127.0.0.01:5",
        "1.2.3:5",
        "localhost:5",
        "[::1]:5",
        "127.0.0.1:5\n",
        "127.0.0.1:\u0665",
        "host/1:5",
        "x" * 100_000,
    ],
)
def test_sessions_of_another_kind(library: FakeMemFabric, reader: Reader, session: str) -> None:
    before = list(library.calls)
    with pytest.raises(SessionError, match="is not a memfabric session") as caught:
        reader.engine.read(session, u64(reader.buffer.address), u64(1), u64(1))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    reader.engine.forget(session)
    assert library.calls == before


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 16), junk=st.text(max_size=20), keep_rest=st.booleans())
@example(cut=14, junk="", keep_rest=False)
def test_garbage_sessions(
    reader: Reader, peer: FakePeer, cut: int, junk: str, keep_rest: bool
) -> None:
    session = peer.session[:cut] + junk + (peer.session[cut + len(junk) :] if keep_rest else "")
    if session != peer.session and session != reader.engine.session:
        with pytest.raises((SessionError, MemFabricError)):
            reader.engine.read(session, u64(reader.buffer.address), u64(peer.address), u64(1))
        reader.check()


def test_a_bad_destination_moves_nothing_at_all(
    library: FakeMemFabric, reader: Reader, peer: FakePeer
) -> None:
    before = list(library.calls)
    with pytest.raises(LocalRangeError):
        reader.read(peer, u64(0, 2 * PAGE), u64(0, 0), u64(PAGE, 1))
    assert filled(reader.buffer) == 0
    assert library.calls == before


def test_reads_run_side_by_side(library: FakeMemFabric, reader: Reader, peer: FakePeer) -> None:
    hold = library.hold = Hold()
    thread, raised = in_thread(lambda: reader.read(peer, u64(0), u64(0), u64(PAGE)))
    assert hold.started.wait(60)
    library.hold = None
    reader.read(peer, u64(PAGE), u64(PAGE), u64(PAGE))
    assert thread.is_alive()
    hold.go.set()
    thread.join(60)
    assert not raised
    reader.read_and_check(peer, u64(0), u64(0), u64(2 * PAGE))


# ------------------------------------------------------------------------------------- threads


@pytest.fixture
def strict(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMemFabric]:
    """A library that refuses threads which have not set their device."""
    library = FakeMemFabric(fabric, needs_device=True)
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", library)
    yield library
    assert library.live is None


def on_threads(count: int, work: Callable[[], None]) -> None:
    threads = [in_thread(work) for _ in range(count)]
    for thread, raised in threads:
        thread.join(60)
        assert not thread.is_alive()
        assert not raised


def test_every_thread_sets_its_device_once_and_first(strict: FakeMemFabric, peer: FakePeer) -> None:
    made: list[TransferEngine] = []
    on_threads(
        1,
        lambda: made.append(
            create_engine("memfabric", binding=DECODE, enter_thread=strict.set_device)
        ),
    )
    assert strict.calls == ["set_device", *START]
    reader = Reader(made[0], PAGE)  # this thread registers
    assert strict.calls[5:] == ["set_device", "batch_register_memory(1)"]

    def read_twice() -> None:
        for _ in range(2):
            reader.read(peer, u64(0), u64(0), u64(PAGE))

    on_threads(4, read_twice)
    assert strict.calls.count("batch_transfer_sync_read") == 8
    assert strict.calls.count("set_device") == 6
    on_threads(1, made[0].close)
    assert strict.calls[-3:] == ["set_device", "destroy", "unInitialize"]


def test_a_device_that_could_not_be_set_is_tried_again(
    strict: FakeMemFabric, peer: FakePeer
) -> None:
    broken = [True]

    def enter() -> None:
        if broken:
            raise RuntimeError("device is busy")
        strict.set_device()

    with pytest.raises(RuntimeError, match="device is busy"):
        shared_engine(DECODE, enter_thread=enter)
    assert strict.live is None
    broken.clear()
    engine = shared_engine(DECODE, enter_thread=enter)
    reader = Reader(engine, 2 * PAGE)

    def try_twice() -> None:
        broken.append(True)
        with pytest.raises(RuntimeError, match="device is busy"):
            read(reader, peer)
        broken.clear()
        read(reader, peer)

    on_threads(1, try_twice)
    engine.close()
