"""An engine that hands everything on to another one; tests change what they want changed."""

from collections.abc import Sequence

from rd2h.engines import MemoryRegion, TransferEngine, UInt64Array

__all__ = ["ForwardingEngine"]


class ForwardingEngine:
    """Does what another engine does.

    Args:
        engine: The other one.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    @property
    def session(self) -> str:
        return self._engine.session

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._engine.register(regions)

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        self._engine.read(session, local_addrs, remote_addrs, lengths)

    def forget(self, session: str) -> None:
        self._engine.forget(session)

    def close(self) -> None:
        self._engine.close()
