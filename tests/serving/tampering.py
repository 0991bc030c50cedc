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
from rd2h.engines import TransferEngine, UInt64Array, create_engine
from tests.engines.forwarding import ForwardingEngine
from tests.serving.orders import FOLDER_VARIABLE, Follower, Spoil

__all__ = ["TamperingConnector", "TamperingEngine"]


class TamperingEngine(ForwardingEngine):
    """Hands everything on to a real engine, and follows the test's orders."""

    def __init__(self, engine: TransferEngine, follower: Follower) -> None:
        super().__init__(engine)
        self._follower = follower

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        self._follower.wait()
        super().read(session, local_addrs, remote_addrs, lengths)
        spoil = self._follower.spoil()
        if spoil is not None and _spoil(spoil, local_addrs.tolist(), lengths.tolist()):
            self._follower.spoiled()


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
