"""The MemFabric engine: one-sided reads between Ascend NPUs, one engine for a process.

MemFabric binds the whole process to a role, a device and an address, so `shared_engine` keeps
the one engine there is, in this module. Its lock is held while an engine starts, and while one
ends: whoever asks meanwhile waits and gets what came out of it. No threads of its own that call
back into rd2h. Each `read` runs in the calling thread; the library releases the GIL.
"""

import ipaddress
import re
import threading
from collections.abc import Callable, Sequence

from rd2h.engines.binding import EngineBinding
from rd2h.engines.errors import (
    EngineError,
    EngineUnavailableError,
    NotRegisteredError,
    SessionError,
    quote_session,
)
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.memfabric_api import MemFabricError, MemFabricLibrary
from rd2h.engines.protocol import MemoryRegion, UInt64Array
from rd2h.engines.segments import RegionIndex, check_segments

__all__ = ["MemFabricEngine", "MemFabricError", "shared_engine"]

_SESSION = re.compile(r"([0-9.]{7,15}):([1-9][0-9]{0,4})")


class MemFabricEngine:
    """Reads the memory of a peer through MemFabric; made by `shared_engine`.

    What the library cannot do (memfabric-hybrid 1.3.0):

    - It cannot be given a deadline: a read returns when MemFabric gives it up. `close` waits for
      reads in flight for the same reason.
    - Of a failed read it says a code and a text, not whether the peer has gone or a source is
      wrong: both are a `MemFabricError`.
    - It cannot disconnect from one peer: `forget` leaves that to MemFabric, which notices lost
      links itself.
    - A session names an address and a port, not a process: it is the peer's to choose another
      one when it restarts.

    Args:
        binding: Role, device and address of this process.
        enter_thread: Called once on every thread, before its first call into the library.

    Raises:
        EngineUnavailableError: MemFabric is not installed, or does not start on this host.
    """

    def __init__(
        self, binding: EngineBinding, enter_thread: Callable[[], None] | None = None
    ) -> None:
        self.binding = binding
        self._library = MemFabricLibrary(enter_thread)
        self._session = f"{binding.host}:{self._library.start(binding)}"
        self._lifecycle = Lifecycle("memfabric")
        self._lock = threading.Lock()  # of `register`
        self._regions: RegionIndex | None = None

    @property
    def session(self) -> str:
        """What P publishes; see `TransferEngine.session`."""
        self._lifecycle.check()
        if self._regions is None:
            raise NotRegisteredError("the memfabric engine has no session before register()")
        return self._session

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open memory to transfers, all of it in one call.

        Unlike `TransferEngine.register` says, a later call cannot add memory: peers learn of
        it when they connect. It may repeat what is registered, or be empty.

        Raises:
            EngineError: The engine is closed, or memory is registered and this is new.
            MemFabricError: MemFabric refuses the memory; nothing is registered.
        """
        with self._lifecycle.inside(), self._lock:
            known = self._regions or RegionIndex()
            new = [region for region in _disjoint(regions) if not _covers(known, region)]
            if new and known.regions:
                raise EngineError(
                    f"the memfabric engine registers memory once: {len(known.regions)} regions are "
                    f"registered, {len(new)} more (the first {new[0].length} bytes at "
                    f"{new[0].address:#x}) come too late; register every cache in one call"
                )
            if new:
                self._library.register(
                    [region.address for region in new], [region.length for region in new]
                )
            self._regions = RegionIndex([*known.regions, *new])

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        """Copy every segment from the peer, without a deadline; see `TransferEngine.read`.

        Raises:
            MemFabricError: The read failed, whatever the reason.
        """
        with self._lifecycle.inside():
            segments = check_segments(session, local_addrs, remote_addrs, lengths)
            _check_session(session)
            (self._regions or RegionIndex()).check_local(session, segments)
            if len(segments):
                self._library.read(session, segments)

    def forget(self, session: str) -> None:
        """Do nothing: MemFabric keeps its own connections; see `TransferEngine.forget`."""
        del session
        self._lifecycle.check()

    def close(self) -> None:
        """End MemFabric in this process; see `TransferEngine.close`.

        Waits for reads in flight, which MemFabric cannot interrupt. Everyone who was given this
        engine has lost it then, and `shared_engine` may make another one.
        """
        with _process.lock:  # also while it waits: nobody is handed an engine that is closing
            if self._lifecycle.close():
                try:
                    self._library.stop()
                finally:
                    _process.engine = None


class _Process:
    """The one engine of this process, and the lock that is held while it starts or ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: MemFabricEngine | None = None


_process = _Process()


def shared_engine(
    binding: EngineBinding, *, enter_thread: Callable[[], None] | None = None
) -> MemFabricEngine:
    """Start this process's MemFabric engine, or return it if it has this binding.

    Any thread may call. An engine that is being closed is waited for.

    Args:
        binding: Role, device and address.
        enter_thread: Called once on every thread before its first call into the library, this
            one included: it sets the thread's device. That of the first call counts.

    Raises:
        EngineUnavailableError: The process is bound otherwise, MemFabric is not installed, or
            does not start on this host.
    """
    with _process.lock:
        engine = _process.engine
        if engine is not None and engine.binding != binding:
            raise EngineUnavailableError(
                f"this process's memfabric engine is bound as {engine.binding}, so it cannot be "
                f"bound as {binding} too: close the engine first, or use another process"
            )
        if engine is None:
            engine = _process.engine = MemFabricEngine(binding, enter_thread)
        return engine


def _check_session(session: str) -> None:
    """Keep what a peer published from the library unless it is an address and a port.

    Raises:
        SessionError: It is not.
    """
    match = _SESSION.fullmatch(session)
    if match is not None and int(match[2]) < 2**16:
        try:
            ipaddress.IPv4Address(match[1])
            return
        except ValueError:
            pass
    raise SessionError(
        f"{quote_session(session)} is not a memfabric session (numeric IPv4 address:port); both "
        "sides must use the memfabric engine"
    )


def _covers(index: RegionIndex, region: MemoryRegion) -> bool:
    """Whether a region that is not empty lies inside these."""
    return any(
        known.address <= region.address
        and region.address + region.length <= known.address + known.length
        for known in index.regions
    )


def _disjoint(regions: Sequence[MemoryRegion]) -> list[MemoryRegion]:
    """Drop empty regions and join those that overlap, in the order of their addresses.

    Layers that share a buffer name it several times. Regions that only touch stay apart, unlike
    in `RegionIndex`: they may be two allocations, and a driver maps one at a time.
    """
    disjoint: list[MemoryRegion] = []
    for region in sorted(regions, key=lambda region: region.address):
        last = disjoint[-1] if disjoint else None
        if not region.length:
            continue
        if last is not None and region.address < last.address + last.length:
            end = max(last.address + last.length, region.address + region.length)
            disjoint[-1] = MemoryRegion(last.address, end - last.address)
        else:
            disjoint.append(region)
    return disjoint
