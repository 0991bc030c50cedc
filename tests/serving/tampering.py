"""rd2h's connector with a transfer engine that a test can hold, and whose reads it can spoil.

Loaded inside a vLLM server by ``kv_connector_module_path``; without an order it changes nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rd2h.connector import SfaRemoteD2HConnector
from rd2h.engines import MemoryRegion, TransferEngine, UInt64Array, create_engine
from tests.serving.orders import FOLDER_VARIABLE, Follower, Spoil

__all__ = ["TamperingConnector", "TamperingEngine"]


class TamperingEngine:
    """Hands everything on to a real engine, and follows the test's orders."""

    def __init__(self, engine: TransferEngine, follower: Follower) -> None:
        self._engine = engine
        self._follower = follower

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
        self._follower.wait()
        self._engine.read(session, local_addrs, remote_addrs, lengths)
        spoil = self._follower.spoil()
        if spoil is not None and _spoil(spoil, local_addrs.tolist(), lengths.tolist()):
            self._follower.spoiled()

    def forget(self, session: str) -> None:
        self._engine.forget(session)

    def close(self) -> None:
        self._engine.close()


def _spoil(spoil: Spoil, addresses: Sequence[int], lengths: Sequence[int]) -> bool:
    """Spoil what lies there; false if there is not enough of it."""
    if spoil.kind == "zero":
        for address, length in zip(addresses, lengths, strict=True):
            ctypes.memset(address, 0, length)
        return True
    # Neighbours were merged: cut them into blocks again.
    blocks = [
        at
        for address, length in zip(addresses, lengths, strict=True)
        for at in range(address, address + length, spoil.block_bytes)
    ]
    if len(blocks) < 2:
        return False
    ctypes.memmove(blocks[0], blocks[1], spoil.block_bytes)
    return True


# Any: the arguments are those of `create_engine`.
def _create(*args: Any, **kwargs: Any) -> TransferEngine:
    follower = Follower(Path(os.environ[FOLDER_VARIABLE]))
    return TamperingEngine(create_engine(*args, **kwargs), follower)


class TamperingConnector(SfaRemoteD2HConnector):
    """Made by vLLM as any connector is."""

    engine_factory: ClassVar[Callable[..., TransferEngine]] = staticmethod(_create)
