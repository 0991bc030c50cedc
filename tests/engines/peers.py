"""Both sides of a transfer for tests: a peer to read from, in a process of its own or not.

A peer registers one buffer with a known pattern. Right behind the buffer lies a page that can
never be read. Events travel over pipes; nothing sleeps.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rd2h.engines import MemoryRegion, TransferEngine, UInt64Array, create_engine
from rd2h.engines.memory import MemoryEngine, MemoryFabric

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def pattern(size: int, seed: int) -> NDArray[np.uint8]:
    """Bytes that tell where they come from: no two peers, no two offsets nearby, agree."""
    index = np.arange(size, dtype=np.uint32)
    return ((index * np.uint32(31) + (index >> np.uint32(8)) + np.uint32(seed * 101)) % 251).astype(
        np.uint8
    )


def u64(*values: int) -> UInt64Array:
    return np.array(values, np.uint64)


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Run `work` in a thread that hands its exception over."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


class Buffer:
    """Anonymous memory of whole pages with an unreadable page behind it."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.size + PAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[: self.size]
        self.address = int(self.bytes.ctypes.data)
        self.forbid(self.address + self.size, PAGE)

    def forbid(self, address: int, length: int) -> None:
        """Take away all access. Unlike an unmapped page, no later mapping can land there."""
        if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.address, self.size)


class Peer(Protocol):
    """Something to read from."""

    session: str
    address: int
    size: int
    seed: int

    def kill(self) -> None: ...
    def close(self) -> None: ...


class ProcessPeer:
    """A peer in a process of its own."""

    def __init__(self, engine: str, size: int, seed: int) -> None:
        self.seed = seed
        events, theirs = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engines.peers",
                engine,
                str(size),
                str(seed),
                str(theirs),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self._events = os.fdopen(events)
        self.session, self.address, self.size = self._event()

    def _event(self) -> tuple[str, int, int]:
        line = self._events.readline()
        assert line, "the peer process died"
        session, address, size = json.loads(line)
        return str(session), int(address), int(size)

    def ask(self, command: str) -> None:
        """Send a command and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        self._event()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._events.close()


class MemoryPeer:
    """A peer in this process, on the in-memory engine."""

    def __init__(self, fabric: MemoryFabric, size: int, seed: int) -> None:
        self.seed = seed
        self._buffer = Buffer(size)
        self._buffer.bytes[:] = pattern(self._buffer.size, seed)
        self._engine = MemoryEngine(fabric)
        self._engine.register([self._buffer.region])
        self._fabric = fabric
        self.session, self.address = self._engine.session, self._buffer.address
        self.size = self._buffer.size

    def kill(self) -> None:
        self._fabric.drop(self.session)

    def close(self) -> None:
        self._engine.close()


@dataclass
class Ground:
    """An engine kind: how to make readers and peers of it."""

    name: str
    make_engine: Callable[[], TransferEngine]
    make_peer: Callable[[int, int], Peer]

    @contextmanager
    def reader(self, size: int) -> Iterator["Reader"]:
        engine = self.make_engine()
        try:
            yield Reader(engine, size)
        finally:
            engine.close()

    @contextmanager
    def peer(self, size: int = PAGE, seed: int = 1) -> Iterator[Peer]:
        peer = self.make_peer(size, seed)
        try:
            yield peer
        finally:
            peer.close()


class Reader:
    """D's side: an engine with one registered buffer, and what should be in it."""

    def __init__(self, engine: TransferEngine, size: int) -> None:
        self.engine = engine
        self.buffer = Buffer(size)
        self.buffer.bytes[:] = 255
        self.expected = self.buffer.bytes.copy()
        engine.register([self.buffer.region])

    def read(
        self, peer: Peer, local: UInt64Array, remote: UInt64Array, length: UInt64Array
    ) -> None:
        """Read at offsets into both buffers."""
        self.engine.read(
            peer.session,
            local + np.uint64(self.buffer.address),
            remote + np.uint64(peer.address),
            length,
        )

    def read_and_check(
        self, peer: Peer, local: UInt64Array, remote: UInt64Array, length: UInt64Array
    ) -> None:
        """Read, then compare the whole buffer with what it should hold."""
        self.read(peer, local, remote, length)
        source = pattern(peer.size, peer.seed)
        for to, start, count in zip(local.tolist(), remote.tolist(), length.tolist(), strict=True):
            self.expected[to : to + count] = source[start : start + count]
        self.check()

    def check(self) -> None:
        np.testing.assert_array_equal(self.buffer.bytes, self.expected)


def make_ground(name: str) -> Ground:
    if name == "memory":
        fabric = MemoryFabric()
        return Ground(
            name, lambda: MemoryEngine(fabric), lambda size, seed: MemoryPeer(fabric, size, seed)
        )
    return Ground(
        name, lambda: create_engine(name), lambda size, seed: ProcessPeer(name, size, seed)
    )


def main(engine_name: str, size: int, seed: int, events: int) -> None:
    """Run the peer process: say where the buffer is, then obey commands from standard input."""
    buffer = Buffer(size)
    buffer.bytes[:] = pattern(buffer.size, seed)
    engine = create_engine(engine_name)
    engine.register([buffer.region])
    answer = json.dumps([engine.session, buffer.address, buffer.size]).encode() + b"\n"
    os.write(events, answer)
    for command in sys.stdin:
        match command.split():
            case ["forbid", offset, length]:
                buffer.forbid(buffer.address + int(offset), int(length))
            case ["close"]:
                engine.close()
            case ["exec"]:
                os.set_inheritable(events, True)
                again = "import os, sys; os.write(int(sys.argv[1]), sys.argv[2].encode()); input()"
                os.execv(
                    sys.executable, [sys.executable, "-c", again, str(events), answer.decode()]
                )
            case unknown:
                raise ValueError(unknown)
        os.write(events, answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
