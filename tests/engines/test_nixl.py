import base64
import itertools
import logging
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rd2h.engines import (
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    MemoryRegion,
    PeerGoneError,
    ReadTimeoutError,
    RemoteRangeError,
    SessionError,
)
from rd2h.engines.nixl import NixlEngine
from rd2h.engines.nixl_agent import Agent
from rd2h.engines.nixl_api import NixlBindings, load_bindings
from rd2h.engines.nixl_session import NixlSession
from rd2h.engines.segments import RegionIndex, check_segments
from tests.engines.peers import PAGE, Buffer, ProcessPeer, Reader, in_thread, u64

MIB = 1 << 20


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    peer = ProcessPeer("nixl", MIB, 1)
    yield peer
    peer.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader(NixlEngine(), MIB)
    yield reader
    reader.engine.close()


def signed(text: str) -> str:
    return f"{text}:{zlib.crc32(text.encode()):08x}"


def read_session(reader: Reader, session: str, remote: int) -> None:
    reader.engine.read(session, u64(reader.buffer.address), u64(remote), u64(PAGE))


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._bindings", None)
    with pytest.raises(EngineUnavailableError, match="pip install --no-deps nixl==") as caught:
        NixlEngine()
    assert "\n" not in str(caught.value)


def test_importing_the_library_leaves_logging_alone() -> None:
    load_bindings()
    assert logging.raiseExceptions


def test_a_backend_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NixlEngine()
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    engine.register([])
    with pytest.raises(EngineUnavailableError, match="UCX_TLS"):
        _ = engine.session
    engine.close()


@pytest.mark.parametrize(("timeout", "workers"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_arguments(timeout: float, workers: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        NixlEngine(timeout=timeout, workers=workers)


def test_a_session_survives_its_text() -> None:
    reader = Reader(NixlEngine(), 3 * PAGE)
    text = reader.engine.session
    parsed = NixlSession.parse(text)
    assert str(parsed) == text
    assert parsed.regions.regions == (reader.buffer.region,)
    reader.engine.close()


@pytest.mark.parametrize(
    ("regions", "metadata"),
    [
        ("A", ""),  # no base64
        ("AAAA", ""),  # no pairs
        (base64.b64encode(b"\xff" * 16).decode(), ""),  # past the end of the address space
        ("", "A==="),
    ],
)
def test_well_signed_but_malformed_sessions(regions: str, metadata: str) -> None:
    with pytest.raises(SessionError, match="malformed"):
        NixlSession.parse(signed(f"nixl/1:a:{regions}:{metadata}"))


class FakeAgent:
    """A NIXL agent that answers with what the test has put in; exceptions are raised."""

    def __init__(self, **answers: object) -> None:
        self.answers = {"loadRemoteMD": b"peer", "createXferReq": 1, **answers}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            self.calls.append(name)
            answer = self.answers.get(name)
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class FakeBindings:
    """The bindings around one fake agent; every enum value is its own name."""

    nixlBackendError = type("nixlBackendError", (Exception,), {})  # noqa: N815
    nixlNotFoundError = type("nixlNotFoundError", (Exception,), {})  # noqa: N815
    nixlRemoteDisconnectError = type("nixlRemoteDisconnectError", (Exception,), {})  # noqa: N815

    def __init__(self, agent: FakeAgent) -> None:
        self.nixlAgentConfig = SimpleNamespace
        self.nixlAgent = lambda *_: agent
        self.nixlRegDList = self.nixlXferDList = lambda *args: args

    def __getattr__(self, name: str) -> str:
        return name


def read_fake(native: FakeAgent) -> Agent:
    agent = Agent(cast("NixlBindings", FakeBindings(native)), 1)
    session = NixlSession("peer", RegionIndex(), b"")
    agent.enter()
    try:
        agent.connect(session)
        segments = check_segments("peer", u64(1), u64(2), u64(3))
        agent.read(session, segments, timeout=60, check=lambda: None)
    finally:
        agent.leave()
    return agent


def test_a_transfer_is_polled_until_it_is_done() -> None:
    running = ["NIXL_IN_PROG"] * 8
    native = FakeAgent(postXferReq="NIXL_IN_PROG", getXferStatus=[*running, "NIXL_SUCCESS"])
    agent = read_fake(native)
    assert native.calls.count("getXferStatus") == 9
    assert native.calls[-1] == "releaseXferReq"
    agent.retire()
    agent.retire()
    agent.wait_destroyed()
    agent.forget("peer")
    with pytest.raises(EngineError, match="retired"):
        agent.publish()


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"postXferReq": "NIXL_ERR_NOT_POSTED"}, EngineError, "failed: NIXL_ERR_NOT_POSTED"),
        ({"postXferReq": RuntimeError("odd")}, EngineError, r"failed \(odd, 1 segments"),
        ({"createXferReq": ValueError("odd")}, EngineError, "lines on stderr"),
        ({"postXferReq": FakeBindings.nixlNotFoundError()}, PeerGoneError, "forgotten"),
        ({"postXferReq": FakeBindings.nixlRemoteDisconnectError()}, PeerGoneError, "exited"),
        ({"loadRemoteMD": FakeBindings.nixlBackendError()}, PeerGoneError, "UCX_NET_DEVICES"),
        ({"loadRemoteMD": RuntimeError("odd")}, SessionError, "same NIXL"),
        ({"loadRemoteMD": b"\xff"}, SessionError, "carries the metadata of"),
    ],
)
def test_answers_of_nixl(
    answers: dict[str, object], error: type[EngineError], message: str
) -> None:
    native = FakeAgent(releaseXferReq=RuntimeError("still running"), **answers)
    with pytest.raises(error, match=message) as caught:
        read_fake(native)
    assert type(caught.value) is error


def test_memory_that_cannot_be_registered() -> None:
    native = FakeAgent(registerMem=FakeBindings.nixlBackendError("no pages"))
    agent = Agent(cast("NixlBindings", FakeBindings(native)), 1)
    with pytest.raises(EngineError, match=r"cannot register 1 regions.*no pages.*ulimit -l"):
        agent.register(RegionIndex([MemoryRegion(1, 2)]))


@pytest.mark.slow
def test_metadata_that_nixl_refuses(peer: ProcessPeer, reader: Reader) -> None:
    version, agent, regions, _, _ = peer.session.split(":")
    whole = NixlSession.parse(peer.session).metadata
    for junk in (b"", b"junk", b"nixlSerDes|", whole[:-20]):
        text = f"{version}:{agent}:{regions}:{base64.b64encode(junk).decode()}"
        with pytest.raises(SessionError, match="cannot use the metadata"):
            read_session(reader, signed(text), peer.address)
        reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))


@pytest.mark.slow
def test_metadata_of_another_agent(peer: ProcessPeer, reader: Reader) -> None:
    version, _, regions, metadata, _ = peer.session.split(":")
    with pytest.raises(SessionError, match="session 'nixl/1:other' carries the metadata of"):
        read_session(reader, signed(f"{version}:other:{regions}:{metadata}"), peer.address)
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))


@pytest.mark.slow
def test_a_peer_that_registers_more_and_publishes_again(reader: Reader) -> None:
    source, more = Reader(NixlEngine(), PAGE), Buffer(PAGE)  # one process can be both sides
    more.bytes[:] = 7
    read_session(reader, source.engine.session, source.buffer.address)
    source.engine.register([more.region])
    read_session(reader, source.engine.session, more.address)
    assert (reader.buffer.bytes[:PAGE] == 7).all()
    source.engine.close()


@pytest.mark.slow
def test_a_registered_source_that_is_no_longer_mapped(peer: ProcessPeer, reader: Reader) -> None:
    peer.ask(f"forbid {8 * PAGE} {PAGE}")
    with pytest.raises(PeerGoneError, match="unmapped memory"):
        reader.read(peer, u64(0, PAGE), u64(7 * PAGE, 8 * PAGE), u64(PAGE, PAGE))
    assert (reader.buffer.bytes[2 * PAGE :] == 255).all()
    reader.expected = reader.buffer.bytes.copy()
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))  # the peer itself still works


@pytest.mark.slow
def test_ranges_are_checked_without_asking_the_peer(peer: ProcessPeer, reader: Reader) -> None:
    peer.kill()
    with pytest.raises(RemoteRangeError, match="the 1 regions that the peer registered"):
        reader.read(peer, u64(0), u64(MIB), u64(1))


@pytest.mark.slow
def test_a_peer_that_closed(peer: ProcessPeer, reader: Reader) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    peer.ask("close")
    with pytest.raises(PeerGoneError):
        reader.read(peer, u64(0), u64(0), u64(PAGE))
    reader.check()


@pytest.mark.slow
def test_reads_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    peer, reader = ProcessPeer("nixl", 8 * MIB, 1), Reader(NixlEngine(), 8 * MIB)
    at = np.arange(0, MIB, 128, dtype=np.uint64)
    reader.read_and_check(peer, at, at[::-1].copy(), np.full_like(at, 100))
    reader.read_and_check(peer, u64(0), u64(0), u64(8 * MIB))
    reader.engine.close()
    peer.close()


@pytest.mark.slow
def test_nothing_lands_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # where the peer has a part in a read
    before = threads_of_this_process()
    peer, reader = ProcessPeer("nixl", 4 * MIB, 1), Reader(NixlEngine(timeout=0.2), 4 * MIB)
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    assert threads_of_this_process() != before
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(ReadTimeoutError, match=r"1 segments, 4194304 bytes.*0\.2 s") as caught:
        reader.read(peer, u64(0), u64(0), u64(4 * MIB))
    # The agent that could still write is gone, although the error is still being handled.
    assert threads_of_this_process() == before
    assert caught.tb is not None
    reader.check()
    peer.close()
    reader.engine.close()


@pytest.mark.slow
def test_a_stopped_peer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    stopped, peer = ProcessPeer("nixl", MIB, 1), ProcessPeer("nixl", MIB, 2)
    reader = Reader(NixlEngine(timeout=1), 2 * MIB)
    reader.read_and_check(stopped, u64(0), u64(0), u64(PAGE))
    os.kill(stopped.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED | os.WNOWAIT)
    timed_out = threading.Event()

    def read_the_stopped() -> None:
        try:
            reader.read(stopped, u64(0), u64(0), u64(MIB))
        finally:
            timed_out.set()

    thread, raised = in_thread(read_the_stopped)
    reads = 0
    while not timed_out.is_set() or not reads:
        reader.read(peer, u64(MIB), u64(0), u64(MIB))
        reads += 1
    thread.join(60)
    assert isinstance(raised[0], ReadTimeoutError)
    reader.read_and_check(peer, u64(MIB), u64(0), u64(MIB))
    for one in (stopped, peer):
        one.close()
    reader.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "forget", "kill"])
def test_a_read_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    peer, reader = ProcessPeer("nixl", MIB, 1), Reader(NixlEngine(timeout=60), MIB)
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
    posted = threading.Event()
    lifecycle = reader.engine._lifecycle  # type: ignore[attr-defined]
    check, calls = lifecycle.check, itertools.count()

    def note() -> None:
        if next(calls):  # the first call is the door, the others look while the read waits
            posted.set()
        check()

    monkeypatch.setattr(lifecycle, "check", note)
    thread, raised = in_thread(lambda: reader.read(peer, u64(0), u64(0), u64(MIB)))
    assert posted.wait(60)
    match end:
        case "close":
            reader.engine.close()
        case "forget":
            reader.engine.forget(peer.session)
        case _:
            peer.kill()
    thread.join(50)
    assert not thread.is_alive()
    error: type[EngineError] = EngineClosedError if end == "close" else PeerGoneError
    assert type(raised[0]) is error
    reader.check()
    peer.close()
    reader.engine.close()
