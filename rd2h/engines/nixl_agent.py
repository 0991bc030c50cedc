"""One NIXL agent with its registrations and peers, and the reads that use it.

Reads from any thread run inside NIXL, which locks for itself (`NIXL_THREAD_SYNC_RW`) and
releases the GIL; its progress thread belongs to it. `_lock` guards the table of peers only.

NIXL cannot cancel a transfer: "released" or "invalidated", it still writes when the peer wakes
up. Only the end of the agent ends its writes. So an agent can be *retired*: no new reads, and
the last one out destroys it. The engine then goes on with a new one.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable

import numpy as np

from rd2h.engines.errors import (
    EngineError,
    EngineUnavailableError,
    PeerGoneError,
    ReadTimeoutError,
    SessionError,
    quote_session,
)
from rd2h.engines.nixl_api import NixlAgent, NixlBindings
from rd2h.engines.nixl_session import NixlSession
from rd2h.engines.protocol import MemoryRegion, UInt64Array
from rd2h.engines.segments import RegionIndex, Segments

__all__ = ["Agent"]

# With 0 NIXL's progress thread spins on a core; any other value lets it sleep until an event.
_PROGRESS_MICROSECONDS = 1000
_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class Agent:
    """A NIXL agent with the UCX backend.

    Args:
        bindings: The library.
        workers: UCX workers; reads from different threads spread over them.

    Raises:
        EngineUnavailableError: NIXL or UCX does not start.
    """

    def __init__(self, bindings: NixlBindings, workers: int) -> None:
        self._bindings = bindings
        self.name = f"rd2h-{uuid.uuid4().hex}"
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        config.pthrDelay = _PROGRESS_MICROSECONDS
        try:
            self._native: NixlAgent | None = bindings.nixlAgent(self.name, config)
            self._native.createBackend("UCX", {"num_workers": str(workers)})
        except Exception as error:  # the bindings raise a class per status
            raise EngineUnavailableError(
                f"NIXL does not start its UCX backend here ({error}); see its lines on stderr, "
                "and check UCX_TLS and UCX_NET_DEVICES if they are set"
            ) from error
        self._registered: RegionIndex = RegionIndex()
        self._lock = threading.Lock()
        self._peers: dict[str, bytes] = {}  # agent name: its metadata
        self._users = 0
        self._retired = False
        self._destroyed = threading.Event()

    def register(self, wanted: RegionIndex) -> None:
        """Make `wanted` the registered regions; no read may run.

        Raises:
            EngineError: NIXL refuses a region.
        """
        old, new = set(self._registered.regions), set(wanted.regions)
        try:
            if old - new:
                self._alive().deregisterMem(self._descriptors(old - new))
            if new - old:
                self._alive().registerMem(self._descriptors(new - old))
        except Exception as error:
            raise EngineError(
                f"NIXL cannot register {len(new - old)} regions of host memory ({error}); are "
                "they mapped, and does `ulimit -l` allow to pin them for RDMA?"
            ) from error
        self._registered = wanted

    def publish(self) -> NixlSession:
        """Return the session by which peers read the registered regions."""
        return NixlSession(self.name, self._registered, self._alive().getLocalMD())

    def forget(self, agent: str) -> None:
        """Disconnect from a peer; idempotent. Its running reads fail."""
        with self._lock:
            if agent in self._peers and self._native is not None:
                del self._peers[agent]
                self._native.invalidateRemoteMD(agent)

    def enter(self) -> None:
        """Count a read in; the caller sees to it that the agent is not retired."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count a read out; the last one out of a retired agent destroys it."""
        with self._lock:
            self._users -= 1
            self._destroy_if_unused()

    def retire(self) -> None:
        """Let no new reads in, and destroy the agent once none is left. Idempotent."""
        with self._lock:
            self._retired = True
            self._destroy_if_unused()

    def wait_destroyed(self) -> None:
        """Wait until a retired agent is no more, and with it the last byte it could write."""
        self._destroyed.wait()

    def connect(self, session: NixlSession) -> None:
        """Add a peer, once for each state of its registrations; call between `enter` and `leave`.

        After an error the agent must be retired: NIXL keeps half a peer, which no call removes
        and which makes it refuse the same peer's good metadata later.

        Raises:
            SessionError: NIXL does not understand the peer's metadata.
            PeerGoneError: The peer cannot be reached.
        """
        name = quote_session(f"nixl/1:{session.agent}")
        with self._lock:
            if self._peers.get(session.agent) == session.metadata:
                return
            try:
                found = self._alive().loadRemoteMD(session.metadata).decode(errors="replace")
            except self._bindings.nixlBackendError as error:
                raise PeerGoneError(
                    f"peer {name} has exited or cannot be reached ({error}); if it runs, do both "
                    "hosts share a network that UCX may use (UCX_NET_DEVICES, UCX_TLS)?"
                ) from error
            except Exception as error:
                raise SessionError(
                    f"NIXL cannot use the metadata of {name} ({error}); do both sides run the "
                    "same NIXL, with UCX?"
                ) from error
            if found != session.agent:
                raise SessionError(f"session {name} carries the metadata of {found!a}")
            self._peers[session.agent] = session.metadata

    def read(
        self,
        session: NixlSession,
        segments: Segments,
        *,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        """Read all segments from a connected peer; call between `enter` and `leave`.

        After any error bytes may still land, until the agent has been retired and is destroyed.

        Args:
            session: The peer.
            segments: Inside the registered regions of both sides.
            timeout: Seconds until the deadline.
            check: Called while waiting; may raise to give up.

        Raises:
            EngineError: What `TransferEngine.read` says.
        """
        name = quote_session(f"nixl/1:{session.agent}")
        deadline = time.monotonic() + timeout
        bindings = self._bindings
        request: int | None = None
        try:
            request = self._alive().createXferReq(
                bindings.NIXL_READ,
                bindings.nixlXferDList(bindings.DRAM_SEG, _rows(segments.local, segments)),
                bindings.nixlXferDList(bindings.DRAM_SEG, _rows(segments.remote, segments)),
                session.agent,
            )
            status = self._alive().postXferReq(request)
            pause = _FIRST_PAUSE
            while status == bindings.NIXL_IN_PROG:
                check()
                if time.monotonic() >= deadline:
                    raise ReadTimeoutError(
                        f"read from {name}: {len(segments)} segments, "
                        f"{int(segments.lengths.sum())} bytes, did not finish in {timeout:g} s; "
                        "is the peer stopped, or the network between? A slow link needs a "
                        "longer timeout"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                status = self._alive().getXferStatus(request)
            if status != bindings.NIXL_SUCCESS:
                raise EngineError(f"read from {name} failed: {status}")
        except (bindings.nixlRemoteDisconnectError, bindings.nixlNotFoundError) as error:
            raise PeerGoneError(
                f"peer {name} has exited, was forgotten during the read, or unmapped memory that "
                f"it had registered ({error}, {len(segments)} segments, the first: "
                f"{segments.describe(0)}); wait for its new session"
            ) from error
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"read from {name} failed ({error}, {len(segments)} segments, the first: "
                f"{segments.describe(0)}); see NIXL's lines on stderr"
            ) from error
        finally:
            if request is not None:
                # NIXL may refuse to release a request that runs; the agent's end frees it.
                with contextlib.suppress(Exception):
                    self._alive().releaseXferReq(request)

    def _descriptors(self, regions: Iterable[MemoryRegion]) -> object:
        descs = [(region.address, region.length, 0, "") for region in regions]
        return self._bindings.nixlRegDList(self._bindings.DRAM_SEG, descs)

    def _alive(self) -> NixlAgent:
        """Return the native agent, for one call only.

        Nobody may keep it: a local variable in the traceback of an error that is still being
        handled would keep the agent, and its writes, alive.
        """
        if self._native is None:
            raise EngineError(f"NIXL agent {self.name} is retired")
        return self._native

    def _destroy_if_unused(self) -> None:
        if self._retired and not self._users:
            self._native = None  # the last reference: its destructor ends UCX
            self._destroyed.set()


def _rows(addrs: UInt64Array, segments: Segments) -> UInt64Array:
    """Build NIXL's descriptors: `[n, 3]` of address, bytes, device."""
    return np.stack((addrs, segments.lengths, np.zeros_like(addrs)), axis=1)
