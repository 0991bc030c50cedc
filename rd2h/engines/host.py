"""The host engine: `process_vm_readv`, within one machine, no dependency.

No threads of its own. Each `read` runs wholly in the calling thread; the system call releases
the GIL, so reads run in parallel. `close` waits for calls in the kernel (at most 2 GiB each).

Each system call reads the peer's cookie first and the segments after it. The kernel looks the
process up once per call, so a right cookie proves that every byte of that call came from the
address space that published the session, whatever happens to the pid in the middle.
"""

import ctypes
import errno
import os
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rd2h.engines.errors import (
    EngineError,
    EnginePermissionError,
    EngineUnavailableError,
    LocalRangeError,
    NotRegisteredError,
    PeerGoneError,
    RemoteRangeError,
    SessionError,
)
from rd2h.engines.host_session import COOKIE_BYTES, HostSession, Machine, start_time
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.protocol import MemoryRegion, UInt64Array
from rd2h.engines.segments import RegionIndex, Segments, check_segments

__all__ = ["HostEngine"]

_IOV_MAX = 1024
_BATCH = _IOV_MAX - 1  # the first vector of each call is the cookie
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class HostEngine:
    """Reads the memory of another process of this machine.

    Raises:
        EngineUnavailableError: This is not Linux, or ``/proc`` is not mounted.
    """

    def __init__(self) -> None:
        self._here = Machine.current()
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._process_vm_readv = self._libc.process_vm_readv
        except AttributeError as error:
            raise EngineUnavailableError(
                "the host engine needs a C library with process_vm_readv (Linux 3.2, glibc 2.15)"
            ) from error
        vectors = (ctypes.c_void_p, ctypes.c_ulong)
        self._process_vm_readv.argtypes = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
        self._process_vm_readv.restype = ctypes.c_ssize_t
        self._lifecycle = Lifecycle("host")
        self._lock = threading.Lock()  # of the three below
        self._regions = RegionIndex()
        self._session: str | None = None
        # Sessions whose process was looked up once; from then on the cookie proves each read.
        # Adding and discarding are single operations of a set, so it needs no lock.
        self._met: set[str] = set()
        self._cookie = ctypes.create_string_buffer(secrets.token_bytes(COOKIE_BYTES), COOKIE_BYTES)

    @property
    def session(self) -> str:
        """What P publishes; see `TransferEngine.session`."""
        self._lifecycle.check()
        if self._session is None:
            raise NotRegisteredError("the host engine has no session before register()")
        return self._session

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open memory to transfers; see `TransferEngine.register`.

        Also lets any process of the same user read this one where Yama would restrict that to
        ancestors (``kernel.yama.ptrace_scope`` 1).
        """
        with self._lifecycle.inside(), self._lock:
            # Fails with EINVAL on a kernel without Yama, where it is not needed.
            self._libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
            pid = os.getpid()
            address = ctypes.addressof(self._cookie)
            self._session = str(
                HostSession(self._here, pid, start_time(pid), address, self._cookie.raw)
            )
            self._regions = RegionIndex([*self._regions.regions, *regions])

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
            peer = HostSession.parse(session)
            self._regions.check_local(session, segments)
            if not len(segments):
                return
            if session not in self._met:
                peer.check_machine(self._here)
                peer.check_process()
                self._met.add(session)
            self._pull(peer, segments)

    def forget(self, session: str) -> None:
        """Drop what is known about a peer; see `TransferEngine.forget`."""
        self._lifecycle.check()
        self._met.discard(session)

    def close(self) -> None:
        """End the engine; see `TransferEngine.close`."""
        if self._lifecycle.close():
            # A peer that still holds our session finds the wrong cookie and is refused.
            ctypes.memset(self._cookie, 0, COOKIE_BYTES)

    def _pull(self, peer: HostSession, segments: Segments) -> None:
        """Read all segments, in calls of up to `_BATCH`, going on after short counts."""
        total = len(segments)
        call = _Call(self._process_vm_readv, peer, min(total, _BATCH))
        at = skip = 0  # the next segment, and how much of it is there already
        while at < total:
            self._lifecycle.check()
            batch = slice(at, min(at + _BATCH, total))
            wanted = call.fill(segments, batch, skip)
            copied = call()
            if copied == wanted:
                at, skip = batch.stop, 0
                continue
            # A short count: 0x7ffff000 bytes are the most one call moves, and it stops early
            # at a page it cannot use. Go on from exactly there; a bad page then shows as zero.
            ends = np.cumsum(segments.lengths[batch])
            reached = np.uint64(skip + copied)
            done = int(np.searchsorted(ends, reached, side="right"))
            skip = int(reached - (ends[done - 1] if done else np.uint64(0)))
            at += done
            if not copied:
                self._explain(peer, segments, at, skip)

    def _explain(self, peer: HostSession, segments: Segments, at: int, skip: int) -> None:
        """Raise for the page that stopped segment `at`: is it theirs or ours?"""
        local, remote = int(segments.local[at]) + skip, int(segments.remote[at]) + skip
        name = f"read from {peer.name}: {segments.describe(at)} stopped"
        here = np.zeros(1, np.uint8)
        probe = _Call(self._process_vm_readv, peer, 1)
        probe.fill(_one_byte(here.ctypes.data, remote), slice(0, 1), 0)
        if not probe():
            raise RemoteRangeError(
                f"{name} at remote address {remote:#x}, which the peer has not mapped as "
                "ordinary memory; did it free the cache, or is it device memory?"
            )
        raise LocalRangeError(
            f"{name} at local address {local:#x}, which is registered but no longer mapped "
            "writable in this process; registered memory must outlive the engine"
        )


def _one_byte(local: int, remote: int) -> Segments:
    """A single segment of one byte."""
    addresses = np.array([[local], [remote]], np.uint64)
    return Segments(addresses[0], addresses[1], np.ones(1, np.uint64), np.zeros(1, np.intp), 1)


class _Call:
    """`process_vm_readv` on one peer with the cookie in front; one instance for one thread."""

    def __init__(self, function: Callable[..., int], peer: HostSession, most: int) -> None:
        """``most``: how many segments `fill` will give it at a time."""
        self.peer = peer
        self._function = function
        self._found = np.zeros(COOKIE_BYTES, np.uint8)
        # Both sides' iovecs: [local or remote, cookie and segments, address and bytes].
        self._vectors = np.empty((2, most + 1, 2), np.uint64)
        self._vectors[0, 0] = self._found.ctypes.data, COOKIE_BYTES
        self._vectors[1, 0] = peer.cookie_address, COOKIE_BYTES
        self._local = self._vectors.ctypes.data
        self._remote = self._local + self._vectors[0].nbytes
        self._count = 1

    def fill(self, segments: Segments, batch: slice, skip: int) -> int:
        """Take a batch of segments, without the first ``skip`` bytes; return its bytes."""
        self._count = 1 + batch.stop - batch.start
        rows = self._vectors[:, 1 : self._count]
        rows[0, :, 0] = segments.local[batch]
        rows[1, :, 0] = segments.remote[batch]
        rows[:, :, 1] = segments.lengths[batch]
        if skip:
            rows[:, 0, 0] += np.uint64(skip)
            rows[:, 0, 1] -= np.uint64(skip)
        return int(rows[0, :, 1].sum())

    def __call__(self) -> int:
        """Read what it was filled with; return the bytes copied.

        Raises:
            EngineError: The peer has gone or refuses, or the system failed.
        """
        copied = -1
        while copied < 0:
            copied = self._function(
                self.peer.pid, self._local, self._count, self._remote, self._count, 0
            )
            code = ctypes.get_errno()
            if copied < 0 and code != errno.EINTR:
                raise self._error(code)
        if copied < COOKIE_BYTES or self._found.tobytes() != self.peer.cookie:
            raise self._replaced()
        return copied - COOKIE_BYTES

    def _replaced(self) -> EngineError:
        return PeerGoneError(
            f"peer {self.peer.name} closed its engine, or its process was replaced: the cookie at "
            f"{self.peer.cookie_address:#x} is not there; wait for its new session"
        )

    def _error(self, code: int) -> EngineError:
        try:
            self.peer.check_process()
        except PeerGoneError as error:
            return error
        reason = f"{errno.errorcode.get(code, code)}, {os.strerror(code)}"
        match code:
            case errno.ESRCH:
                return PeerGoneError(f"peer {self.peer.name} has exited ({reason})")
            case errno.EFAULT:  # nothing at all was read, not even the cookie
                return self._replaced()
            case errno.EPERM:
                return EnginePermissionError(
                    f"may not read the memory of peer {self.peer.name} ({reason}): run both as the "
                    "same user, set sysctl kernel.yama.ptrace_scope to 0 or 1, or give this "
                    "process CAP_SYS_PTRACE (containers: --cap-add=SYS_PTRACE)"
                )
            case errno.ENOSYS:
                return EngineUnavailableError(
                    f"cannot read peer {self.peer.name}: this kernel or its seccomp profile has no "
                    f"process_vm_readv ({reason}); allow it (containers: --cap-add=SYS_PTRACE) "
                    "or use the nixl engine"
                )
            case errno.EINVAL:
                return SessionError(f"the kernel refused the read from {self.peer.name} ({reason})")
            case errno.ENOMEM:
                return EngineError(
                    f"the kernel has no memory for the read from {self.peer.name} ({reason}); free "
                    "some memory on this host"
                )
            case _:
                return EngineError(f"read from {self.peer.name} failed: {reason}")
