"""The NIXL engine: one-sided reads over UCX (shared memory, TCP, RDMA), across machines.

Two agents, made on demand: the one peers read from (made by `session`, on P) and the one that
reads (made by `read`, on D). After a failed read the reading agent is replaced, because that
is the only way to stop a transfer that may still write (see `nixl_agent`); reads of other
peers that are running finish on the old one, and the failed read raises when it is gone.

`_lock` guards both agents and the regions; reads run outside it.
"""

import functools
import threading
from collections.abc import Sequence

from rd2h.engines.errors import NotRegisteredError, SessionError
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.nixl_agent import Agent
from rd2h.engines.nixl_api import load_bindings
from rd2h.engines.nixl_session import NixlSession
from rd2h.engines.protocol import MemoryRegion, UInt64Array
from rd2h.engines.segments import RegionIndex, Segments, check_segments

__all__ = ["NixlEngine"]


class NixlEngine:
    """Reads the memory of another process, on this machine or another one.

    UCX chooses the transports; ``UCX_TLS`` and ``UCX_NET_DEVICES`` limit its choice. What the
    library itself cannot do (NIXL 1.5.1):

    - It parses a peer's metadata in C++ that was not made for hostile input: a session that was
      forged, with a right check, can crash this process. Take sessions from trusted peers only.
    - Over shared memory (CMA) it takes a short copy for a full one: if P unmaps part of its
      registered memory, a read across that edge succeeds with bytes missing. Registered memory
      must stay mapped, as `TransferEngine.register` says; `HostEngine` would notice.
    - Over plain TCP, P's process takes part in reads, and UCX may abort it when D dies, or
      gives a read up, in the middle of one. Shared memory does not have this; RDMA is untried.
    - It cannot cancel a transfer. A read that fails retires the agent that carried it, and raises
      only when the other reads of that agent are over, at most when their deadlines pass.

    Args:
        timeout: Seconds that one read may take.
        workers: UCX workers of the reading agent, about as many as threads that read.

    Raises:
        EngineUnavailableError: NIXL is not installed.
    """

    def __init__(self, *, timeout: float = 30.0, workers: int = 4) -> None:
        if not timeout > 0 or workers < 1:
            raise ValueError(f"timeout {timeout} must be positive, workers {workers} at least 1")
        self._bindings = load_bindings()
        self._timeout = timeout
        self._workers = workers
        self._lifecycle = Lifecycle("nixl")
        self._lock = threading.Lock()
        self._regions: RegionIndex | None = None
        self._source: Agent | None = None
        self._reader: Agent | None = None
        # A session holds kilobytes, and comes with every read.
        self._parse = functools.lru_cache(maxsize=256)(NixlSession.parse)

    @property
    def session(self) -> str:
        """What P publishes; see `TransferEngine.session`. The first call starts UCX."""
        with self._lifecycle.inside(), self._lock:
            if self._regions is None:
                raise NotRegisteredError("the nixl engine has no session before register()")
            if self._source is None:
                self._source = self._make_agent(workers=1)
            return str(self._source.publish())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open memory to transfers; see `TransferEngine.register`."""
        with self._lifecycle.inside(), self._lock:
            known = self._regions.regions if self._regions is not None else ()
            self._regions = RegionIndex([*known, *regions])
            for agent in (self._source, self._reader):
                if agent is not None:
                    agent.register(self._regions)

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
            peer = self._parse(session)
            (self._regions or RegionIndex()).check_local(session, segments)
            peer.regions.check_remote(session, segments)
            if len(segments):
                self._transfer(peer, segments)

    def forget(self, session: str) -> None:
        """Disconnect from a peer; see `TransferEngine.forget`."""
        with self._lifecycle.inside(), self._lock:
            reader = self._reader
        if reader is not None:
            try:
                reader.forget(self._parse(session).agent)
            except SessionError:
                return

    def close(self) -> None:
        """End the engine; see `TransferEngine.close`.

        A read in flight ends at its next look at the transfer, within milliseconds, unless it
        is inside a shared-memory copy, which it finishes.
        """
        if self._lifecycle.close():
            for agent in (self._source, self._reader):
                if agent is not None:
                    agent.retire()

    def _transfer(self, peer: NixlSession, segments: Segments) -> None:
        agent = self._borrow()
        failed = False
        try:
            agent.connect(peer)
            agent.read(peer, segments, timeout=self._timeout, check=self._lifecycle.check)
        except BaseException:
            failed = True
            self._replace(agent)
            raise
        finally:
            agent.leave()
            if failed:
                agent.wait_destroyed()

    def _borrow(self) -> Agent:
        """Return the reading agent, entered."""
        with self._lock:
            if self._reader is None:
                self._reader = self._make_agent(self._workers)
            self._reader.enter()  # under the lock, under which `_replace` retires it
            return self._reader

    def _replace(self, agent: Agent) -> None:
        with self._lock:
            if self._reader is agent:
                self._reader = None
            agent.retire()

    def _make_agent(self, workers: int) -> Agent:
        agent = Agent(self._bindings, workers)
        agent.register(self._regions or RegionIndex())
        return agent
