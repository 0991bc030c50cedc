"""The protocol of a transfer engine: what P and D may ask of the thing that moves the bytes.

An engine owns no thread that calls back into rd2h. `register`, `session` and `close` belong
to the thread that builds the worker; `read` and `forget` may be called from any number of
threads at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MemoryRegion", "TransferEngine", "UInt64Array"]

UInt64Array: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A range of this process's memory that takes part in transfers.

    Attributes:
        address: First byte.
        length: Size in bytes; zero is allowed and registers nothing.
    """

    address: int
    length: int

    def __post_init__(self) -> None:
        if self.address < 0 or self.length < 0 or self.address + self.length >= 2**64:
            raise ValueError(
                f"memory region {self.address:#x} + {self.length} bytes is not inside a "
                "64-bit address space"
            )


class TransferEngine(Protocol):
    """Moves bytes from a peer's registered memory into ours with one-sided reads."""

    @property
    def session(self) -> str:
        """What P publishes in `mf_meta`, so that D can name it in `read`.

        Raises:
            NotRegisteredError: `register` has not been called.
            EngineClosedError: The engine is closed.
        """
        ...

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open memory to transfers: sources on P, destinations on D.

        Later calls add to earlier ones, but a session published before a later call may not
        cover it, and no read may run meanwhile: register everything, then publish or read.
        Registered memory must stay mapped until `close`.

        Args:
            regions: Ranges in bytes; they may touch and overlap.

        Raises:
            EngineError: The engine is closed or refused a region.
        """
        ...

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
    ) -> None:
        """Copy every segment from the peer; return when all bytes have landed.

        A failed read may have written some segments, never anything outside them, and writes
        nothing once it has raised. Any thread may call; reads run in parallel.

        Args:
            session: The peer's `session`.
            local_addrs: Destinations, shape `[n]`; each must be inside registered memory.
            remote_addrs: Sources in the peer's address space, shape `[n]`.
            lengths: Bytes of each segment, shape `[n]`; zeros are skipped, and `n` may be 0.

        Raises:
            SegmentError: The arrays are not 1-D `uint64` of one length.
            LocalRangeError: A destination is not ours to write; found before any byte moves.
            RemoteRangeError: A source is not mapped or not registered in the peer.
            SessionError: The session is malformed or belongs to another kind of engine.
            PeerGoneError: The peer has gone or cannot be reached.
            EnginePermissionError: The system forbids the read.
            ReadTimeoutError: The engine's deadline passed.
            EngineClosedError: The engine is closed, or was closed meanwhile.
        """
        ...

    def forget(self, session: str) -> None:
        """Drop what is cached about a peer that has gone or restarted.

        Idempotent; an unknown or malformed session is ignored. Any thread may call. A read of
        that session that is running may fail.
        """
        ...

    def close(self) -> None:
        """End reads in flight with `EngineClosedError` and give everything back.

        Idempotent; any thread may call. When it returns, no read writes any more, and peers
        can no longer read here. Later calls of other methods raise `EngineClosedError`.
        """
        ...
