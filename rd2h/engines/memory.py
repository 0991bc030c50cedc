"""The in-memory engine: real copies between buffers of one process, for tests.

Engines that share a `MemoryFabric` reach one another. It obeys the same protocol and passes
the same conformance tests as the real engines, and adds hooks: a read that fails, a read that
waits, a session that goes away. No threads of its own. The fabric's lock guards everything,
copies included, so that a session never goes away in the middle of one.
"""

import ctypes
import re
import threading
from collections.abc import Sequence

from rd2h.engines.errors import (
    EngineClosedError,
    EngineError,
    NotRegisteredError,
    PeerGoneError,
    SessionError,
    quote_session,
)
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.protocol import MemoryRegion, UInt64Array
from rd2h.engines.segments import RegionIndex, check_segments

__all__ = ["HeldRead", "MemoryEngine", "MemoryFabric"]

_SESSION = re.compile(r"memory/1:[0-9]{1,18}")


class MemoryFabric:
    """The place where the memory engines of one test find one another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sessions: dict[str, RegionIndex] = {}
        self._made = 0

    def drop(self, session: str) -> None:
        """Let a session go away, as if its process had been killed. Idempotent."""
        with self._lock:
            self._sessions.pop(session, None)

    @property
    def sessions(self) -> frozenset[str]:
        """The sessions that can be read now."""
        with self._lock:
            return frozenset(self._sessions)

    def _join(self) -> str:
        with self._lock:
            self._made += 1
            session = f"memory/1:{self._made}"
            self._sessions[session] = RegionIndex()
            return session


class HeldRead:
    """A read that waits before its first byte, until the test lets it go.

    Attributes:
        started: Set when the read has arrived and waits.
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self._go = threading.Event()

    def release(self) -> None:
        """Let the read go on. Idempotent; any thread may call."""
        self._go.set()

    def _wait(self) -> None:
        self.started.set()
        self._go.wait()


class MemoryEngine:
    """A transfer engine for tests, without any facility of the operating system.

    Args:
        fabric: Shared by all engines that shall reach one another.
    """

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._lifecycle = Lifecycle("memory")
        self._session: str | None = None
        self._regions = RegionIndex()
        self._reads = 0
        self._failing: dict[int, EngineError] = {}
        self._held: dict[int, HeldRead] = {}

    @property
    def session(self) -> str:
        """What P publishes; see `TransferEngine.session`."""
        self._lifecycle.check()
        if self._session is None:
            raise NotRegisteredError("the memory engine has no session before register()")
        return self._session

    @property
    def reads(self) -> int:
        """How often `read` was called with good arguments, failed reads included."""
        return self._reads

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open memory to transfers; see `TransferEngine.register`."""
        with self._lifecycle.inside(), self._fabric._lock:
            if self._session is None:
                self._session = self._fabric._join()
            self._regions = RegionIndex([*self._regions.regions, *regions])
            if self._session in self._fabric._sessions:
                self._fabric._sessions[self._session] = self._regions

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        """Copy every segment from the peer; see `TransferEngine.read`."""
        with self._lifecycle.inside():
            segments = check_segments(session, local_addrs, remote_addrs, lengths)
            if not _SESSION.fullmatch(session):
                raise SessionError(f"{quote_session(session)} is not a memory session, version 1")
            self._regions.check_local(session, segments)
            self._hooks()
            with self._fabric._lock:
                if not len(segments):
                    return
                source = self._fabric._sessions.get(session)
                if source is None:
                    raise PeerGoneError(f"peer {quote_session(session)} has gone")
                source.check_remote(session, segments)
                for local, remote, length in zip(
                    segments.local.tolist(),
                    segments.remote.tolist(),
                    segments.lengths.tolist(),
                    strict=True,
                ):
                    ctypes.memmove(local, remote, length)

    def forget(self, session: str) -> None:
        """Do nothing: this engine caches nothing about peers."""
        del session
        self._lifecycle.check()

    def close(self) -> None:
        """End the engine and let held reads fail; see `TransferEngine.close`."""
        # The session goes first: `close` also waits for reads of ours that are held.
        if self._session is not None:
            self._fabric.drop(self._session)
        with self._fabric._lock:
            self._lifecycle.begin_close()
            for held in self._held.values():
                held.release()
        self._lifecycle.close()

    def fail_read(self, nth: int = 1, error: EngineError | None = None) -> None:
        """Make a read from now on raise before its first byte.

        Args:
            nth: 1 is the next read.
            error: What it raises; a plain `EngineError` by default.
        """
        with self._fabric._lock:
            self._failing[self._reads + nth] = error or EngineError("failed by the test")

    def hold_read(self, nth: int = 1) -> HeldRead:
        """Make a read from now on wait before its first byte.

        Args:
            nth: 1 is the next read.

        Returns:
            The handle that tells when the read waits, and lets it go. `close` lets it go too,
            to fail with `EngineClosedError`.
        """
        with self._fabric._lock:
            held = self._held[self._reads + nth] = HeldRead()
            return held

    def _hooks(self) -> None:
        """Count this read, and do to it what the test has asked for."""
        with self._fabric._lock:
            self._reads += 1
            held = self._held.get(self._reads)
            failing = self._failing.pop(self._reads, None)
        if held is not None:
            held._wait()
        if self._lifecycle.closing:
            raise EngineClosedError("the memory engine was closed during the read")
        if failing is not None:
            raise failing
