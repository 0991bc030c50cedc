"""Transfer engines: how bytes get from P's memory into D's.

Importing this package imports no engine's library; `create_engine` does.
"""

from collections.abc import Callable

from rd2h.engines.binding import EngineBinding
from rd2h.engines.errors import (
    EngineClosedError,
    EngineError,
    EnginePermissionError,
    EngineUnavailableError,
    LocalRangeError,
    NotRegisteredError,
    PeerGoneError,
    ReadTimeoutError,
    RemoteRangeError,
    SegmentError,
    SessionError,
)
from rd2h.engines.protocol import MemoryRegion, TransferEngine, UInt64Array

__all__ = [
    "EngineBinding",
    "EngineClosedError",
    "EngineError",
    "EnginePermissionError",
    "EngineUnavailableError",
    "LocalRangeError",
    "MemoryRegion",
    "NotRegisteredError",
    "PeerGoneError",
    "ReadTimeoutError",
    "RemoteRangeError",
    "SegmentError",
    "SessionError",
    "TransferEngine",
    "UInt64Array",
    "create_engine",
]


def create_engine(
    name: str,
    *,
    timeout: float = 30.0,
    binding: EngineBinding | None = None,
    enter_thread: Callable[[], None] | None = None,
) -> TransferEngine:
    """Make the engine that a configuration names.

    Args:
        name: ``host``, ``nixl`` or ``memfabric``.
        timeout: Seconds that one read may take, for engines that wait on a network and can be
            given a deadline: ``nixl``.
        binding: Role, device and address of this process: ``memfabric`` needs it, and gives
            everyone who asks with the same one the same engine. The others ignore it.
        enter_thread: Sets the calling thread's device; ``memfabric`` calls it once on every
            thread that it is used on. The others ignore it.

    Raises:
        EngineUnavailableError: No such engine in this version, its library is missing or does
            not start, or the binding is missing or not that of this process.
    """
    match name:
        case "host":
            from rd2h.engines.host import HostEngine

            return HostEngine()
        case "nixl":
            from rd2h.engines.nixl import NixlEngine

            return NixlEngine(timeout=timeout)
        case "memfabric":
            if binding is None:
                raise EngineUnavailableError(
                    "the memfabric engine needs to be told the role, the device and the IPv4 "
                    "address of this process (binding), which only the vLLM connector does; "
                    "choose host or nixl here"
                )
            from rd2h.engines.memfabric import shared_engine

            return shared_engine(binding, enter_thread=enter_thread)
        case _:
            raise EngineUnavailableError(
                f"there is no transfer engine {name!a}; choose host, nixl or memfabric"
            )
