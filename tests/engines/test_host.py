import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.engines import (
    EngineError,
    EnginePermissionError,
    EngineUnavailableError,
    LocalRangeError,
    PeerGoneError,
    RemoteRangeError,
    SessionError,
)
from rd2h.engines.host import HostEngine
from tests.engines.peers import PAGE, Buffer, ProcessPeer, Reader, pattern, u64

MIB = 1 << 20


class Kernel:
    """`process_vm_readv` within this process, moving at most so many bytes in each call."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.calls = 0

    def __call__(
        self, pid: int, local: int, local_count: int, remote: int, remote_count: int, flags: int
    ) -> int:
        assert (pid, flags, local_count) == (os.getpid(), 0, remote_count)
        assert local_count <= 1024
        limit = self.limits[self.calls % len(self.limits)] + 16  # the cookie comes on top
        self.calls += 1
        moved = 0
        for (to, length), (start, _) in zip(
            _vectors(local, local_count), _vectors(remote, remote_count), strict=True
        ):
            count = min(length, limit - moved)
            ctypes.memmove(to, start, count)
            moved += count
        return moved


def _vectors(address: int, count: int) -> list[tuple[int, int]]:
    flat = list((ctypes.c_uint64 * (2 * count)).from_address(address))
    return list(zip(flat[::2], flat[1::2], strict=True))


class Failing:
    """A kernel that fails with the given error numbers in turn, then with the last for ever."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __call__(self, *_: int) -> int:
        ctypes.set_errno(self.codes.pop(0) if len(self.codes) > 1 else self.codes[0])
        return -1


@pytest.fixture
def own() -> Iterator[tuple[Reader, Buffer]]:
    """An engine that reads from a buffer of its own process."""
    source = Buffer(16 * PAGE)
    source.bytes[:] = pattern(source.size, 1)
    reader = Reader(HostEngine(), 16 * PAGE)
    yield reader, source
    reader.engine.close()


def read_own(reader: Reader, source: Buffer, length: int = PAGE) -> None:
    reader.engine.read(
        reader.engine.session, u64(reader.buffer.address), u64(source.address), u64(length)
    )


def use_kernel(reader: Reader, kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.engine, "_process_vm_readv", kernel)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    limits=st.lists(st.integers(1, 90), min_size=1, max_size=5),
)
def test_goes_on_from_any_short_count(lengths: list[int], limits: list[int]) -> None:
    source, reader = Buffer(PAGE), Reader(HostEngine(), PAGE)
    source.bytes[:] = pattern(PAGE, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_kernel(reader, Kernel(limits), monkeypatch)
        count = len(lengths)
        local = np.arange(count, dtype=np.uint64) * np.uint64(64)
        remote = local[::-1].copy()
        reader.engine.read(
            reader.engine.session,
            local + np.uint64(reader.buffer.address),
            remote + np.uint64(source.address),
            np.array(lengths, np.uint64),
        )
    for to, start, length in zip(local.tolist(), remote.tolist(), lengths, strict=True):
        reader.expected[to : to + length] = source.bytes[start : start + length]
    reader.check()
    reader.engine.close()


def test_many_segments_go_in_few_calls(
    own: tuple[Reader, Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, source = own
    kernel = Kernel([2**40])
    use_kernel(reader, kernel, monkeypatch)
    at = np.arange(3000, dtype=np.uint64) * np.uint64(8)
    reader.engine.read(
        reader.engine.session,
        at + np.uint64(reader.buffer.address),
        at + np.uint64(source.address),
        np.full_like(at, 8),
    )
    assert kernel.calls == 3
    np.testing.assert_array_equal(reader.buffer.bytes[:24000], source.bytes[:24000])


def test_a_read_interrupted_by_a_signal_is_tried_again(
    own: tuple[Reader, Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, source = own
    use_kernel(reader, Failing(errno.EINTR, errno.EINTR, errno.ESRCH), monkeypatch)
    with pytest.raises(PeerGoneError, match="ESRCH"):
        read_own(reader, source)


@pytest.mark.parametrize(
    ("code", "error", "hint"),
    [
        (errno.EPERM, EnginePermissionError, "kernel.yama.ptrace_scope.*--cap-add=SYS_PTRACE"),
        (errno.ESRCH, PeerGoneError, "has exited"),
        (errno.EFAULT, PeerGoneError, "cookie"),
        (errno.ENOMEM, EngineError, "free some memory"),
        (errno.EINVAL, SessionError, "EINVAL"),
        (errno.ENOSYS, EngineUnavailableError, "seccomp"),
        (errno.EIO, EngineError, "EIO"),
    ],
)
def test_errors_of_the_kernel(
    own: tuple[Reader, Buffer],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[EngineError],
    hint: str,
) -> None:
    reader, source = own
    use_kernel(reader, Failing(code), monkeypatch)
    with pytest.raises(error, match=hint) as caught:
        read_own(reader, source)
    assert type(caught.value) is error
    assert "host/1:" in str(caught.value)


def test_a_wrong_cookie_is_not_the_peer(
    own: tuple[Reader, Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, source = own
    use_kernel(reader, lambda *_: 16 + PAGE, monkeypatch)
    with pytest.raises(PeerGoneError, match="replaced"):
        read_own(reader, source)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (1, "00000000-0000-0000-0000-000000000000", "another machine.*use nixl"),
        (2, "1", "another PID namespace.*--pid=host"),
        (3, str(2**22 + 5), "has exited: no process"),
        (4, "1", "now belongs to a process started at tick"),
    ],
)
def test_another_process_is_refused_and_never_read(
    own: tuple[Reader, Buffer],
    monkeypatch: pytest.MonkeyPatch,
    field: int,
    value: str,
    message: str,
) -> None:
    reader, source = own
    parts = reader.engine.session.split(":")
    parts[field] = value
    use_kernel(reader, None, monkeypatch)  # calling it would be a TypeError
    with pytest.raises(PeerGoneError, match=message):
        reader.engine.read(":".join(parts), u64(reader.buffer.address), u64(source.address), u64(1))


@pytest.mark.parametrize("pid", ["0", "2147483648", "9999999999", "-1", "٣"])
def test_a_pid_that_cannot_be_one(own: tuple[Reader, Buffer], pid: str) -> None:
    reader, source = own
    parts = reader.engine.session.split(":")
    parts[3] = pid
    with pytest.raises(SessionError):
        reader.engine.read(":".join(parts), u64(reader.buffer.address), u64(source.address), u64(1))


def test_start_time_of_a_process_with_a_hostile_name(own: tuple[Reader, Buffer]) -> None:
    reader, source = own
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    assert threading.current_thread() is threading.main_thread()
    try:
        comm.write_text(") R 1 (x) 7")
        read_own(reader, source)
    finally:
        comm.write_text(before)


def test_our_own_memory_that_is_no_longer_writable(own: tuple[Reader, Buffer]) -> None:
    reader, source = own
    reader.buffer.forbid(reader.buffer.address + 2 * PAGE, PAGE)
    bad = f"{reader.buffer.address + 2 * PAGE:#x}"
    with pytest.raises(LocalRangeError, match=f"segment 0 of 1.*local address {bad}"):
        read_own(reader, source, 5 * PAGE)
    np.testing.assert_array_equal(reader.buffer.bytes[: 2 * PAGE], source.bytes[: 2 * PAGE])


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError("no /proc")

    monkeypatch.setattr(Path, "read_text", missing)
    with pytest.raises(EngineUnavailableError, match="/proc"):
        HostEngine()


def test_without_the_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(EngineUnavailableError, match="Linux"):
        HostEngine()


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    peer = ProcessPeer("host", MIB, 1)
    yield peer
    peer.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader(HostEngine(), MIB)
    yield reader
    reader.engine.close()


@pytest.mark.slow
def test_the_faulting_segment_and_address_are_named(peer: ProcessPeer, reader: Reader) -> None:
    peer.ask(f"forbid {40 * PAGE} {PAGE}")
    at = np.arange(2000, dtype=np.uint64) * np.uint64(100)
    bad = 40 * PAGE // 100  # the segment that runs into the page
    address = f"{peer.address + 40 * PAGE:#x}"
    with pytest.raises(RemoteRangeError, match=f"segment {bad} of 2000.*remote address {address}"):
        reader.read(peer, at, at, np.full_like(at, 100))
    source = pattern(peer.size, peer.seed)
    np.testing.assert_array_equal(reader.buffer.bytes[: bad * 100], source[: bad * 100])
    assert (reader.buffer.bytes[(bad + 1) * 100 :] == 255).all()


@pytest.mark.slow
def test_more_than_the_kernel_moves_in_one_call(peer: ProcessPeer, reader: Reader) -> None:
    count = 0x7FFFF000 // MIB + 100  # all into one destination, so it costs no memory
    zeros = np.zeros(count, np.uint64)
    reader.read(peer, zeros, zeros, np.full(count, MIB, np.uint64))
    reader.read_and_check(peer, u64(0), u64(0), u64(MIB))


@pytest.mark.slow
def test_a_zombie_has_gone(peer: ProcessPeer, reader: Reader) -> None:
    peer.process.kill()
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PeerGoneError):
        reader.read(peer, u64(0), u64(0), u64(PAGE))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["close", "exec"])
def test_a_peer_that_closed_or_became_another_program(
    peer: ProcessPeer, reader: Reader, command: str
) -> None:
    reader.read_and_check(peer, u64(0), u64(0), u64(PAGE))
    peer.ask(command)
    with pytest.raises(PeerGoneError, match="wait for its new session"):
        reader.read(peer, u64(0), u64(0), u64(PAGE))
