"""Transfer engines: how bytes get from P's memory into D's.

Importing this package imports no engine's library; `create_engine` does.
"""

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


def create_engine(name: str, *, timeout: float = 30.0) -> TransferEngine:
    """Make the engine that a configuration names.

    Args:
        name: ``host`` or ``nixl``.
        timeout: Seconds that one read may take, for engines that wait on a network.

    Raises:
        EngineUnavailableError: No such engine in this version, or its library is missing.
    """
    match name:
        case "host":
            from rd2h.engines.host import HostEngine

            return HostEngine()
        case "nixl":
            from rd2h.engines.nixl import NixlEngine

            return NixlEngine(timeout=timeout)
        case "memfabric":
            raise EngineUnavailableError(
                "the memfabric engine is not available in this version of rd2h; choose host "
                "(one machine) or nixl"
            )
        case _:
            raise EngineUnavailableError(
                f"there is no transfer engine {name!a}; choose host or nixl"
            )
