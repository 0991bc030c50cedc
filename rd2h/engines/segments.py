"""Arguments of a read, checked: segment arrays, and the regions they must lie in.

Pure NumPy, no state: any thread may use it. Every engine checks through here, so that a bad
call fails the same way on all of them and before the first byte moves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rd2h.engines.errors import LocalRangeError, RemoteRangeError, SegmentError, quote_session
from rd2h.engines.protocol import MemoryRegion, UInt64Array

__all__ = ["RegionIndex", "Segments", "check_segments"]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The non-empty segments of one read.

    Attributes:
        local: Destinations, `[n]`.
        remote: Sources, `[n]`.
        lengths: Bytes, `[n]`, all positive.
        numbers: Position of each segment in the caller's arrays, `[n]`, for messages.
        total: Segments in the caller's arrays, the empty ones included.
    """

    local: UInt64Array
    remote: UInt64Array
    lengths: UInt64Array
    numbers: NDArray[np.intp]
    total: int

    def __len__(self) -> int:
        return len(self.lengths)

    def describe(self, at: int) -> str:
        """Name segment `at` the way every message does."""
        return (
            f"segment {self.numbers[at]} of {self.total} ({self.lengths[at]} bytes, remote "
            f"{int(self.remote[at]):#x} to local {int(self.local[at]):#x})"
        )


def check_segments(
    session: str, local_addrs: UInt64Array, remote_addrs: UInt64Array, lengths: UInt64Array
) -> Segments:
    """Check the arrays of a read and drop its empty segments.

    Args:
        session: The peer's session, for messages.
        local_addrs: Destinations, `[n]`.
        remote_addrs: Sources, `[n]`.
        lengths: Bytes, `[n]`.

    Raises:
        SegmentError: An array is not a 1-D `uint64` array, or the lengths differ.
        LocalRangeError: A destination wraps around the end of the address space.
        RemoteRangeError: A source does.
    """
    arrays = {"local_addrs": local_addrs, "remote_addrs": remote_addrs, "lengths": lengths}
    for name, array in arrays.items():
        _check_array(name, array)
    if not len(local_addrs) == len(remote_addrs) == len(lengths):
        raise SegmentError(
            "the arrays of a read must be equally long: "
            + ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        )
    numbers = np.flatnonzero(lengths)
    if len(numbers) < len(lengths):
        local_addrs, remote_addrs = local_addrs[numbers], remote_addrs[numbers]
        lengths = lengths[numbers]
    segments = Segments(local_addrs, remote_addrs, lengths, numbers, len(arrays["lengths"]))
    for side, addrs, error in (
        ("local", segments.local, LocalRangeError),
        ("remote", segments.remote, RemoteRangeError),
    ):
        wrapped = addrs + segments.lengths < addrs
        if wrapped.any():
            raise error(
                f"read from {quote_session(session)}: the {side} range of "
                f"{segments.describe(int(wrapped.argmax()))} passes the end of the address space"
            )
    return segments


def _check_array(name: str, array: object) -> None:
    """Hold a caller to the types: a list or an `int64` array fails here, not in the kernel."""
    if not isinstance(array, np.ndarray):
        raise SegmentError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.dtype != np.uint64 or array.ndim != 1:
        raise SegmentError(
            f"{name} must be a 1-D array of uint64, not {array.dtype} of shape {array.shape}"
        )


class RegionIndex:
    """A set of memory regions with a vectorised "is this inside?".

    Regions that touch or overlap are joined: neighbouring tensors often share one allocation,
    and a planner that merges reads may merge across them. Immutable.
    """

    def __init__(self, regions: Iterable[MemoryRegion] = ()) -> None:
        joined: list[list[int]] = []
        for region in sorted(regions, key=lambda region: region.address):
            if not region.length:
                continue
            end = region.address + region.length
            if joined and region.address <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([region.address, end])
        self.regions = tuple(MemoryRegion(start, end - start) for start, end in joined)
        self._starts = np.array([start for start, _ in joined], np.uint64)
        self._ends = np.array([end for _, end in joined], np.uint64)

    def first_outside(self, addrs: UInt64Array, lengths: UInt64Array) -> int | None:
        """Return the position of the first range outside every region, or None.

        Args:
            addrs: First bytes, `[n]`; `addrs + lengths` must not wrap.
            lengths: Bytes, `[n]`.
        """
        if not self.regions:
            return 0 if len(addrs) else None
        at = np.searchsorted(self._starts, addrs, side="right")
        # `at` 0 means "before the first region"; the -1 it becomes is masked by the comparison.
        outside = (at == 0) | (addrs + lengths > self._ends[at - 1])
        return int(outside.argmax()) if outside.any() else None

    def check_local(self, session: str, segments: Segments) -> None:
        """Raise `LocalRangeError` for the first destination outside these regions."""
        at = self.first_outside(segments.local, segments.lengths)
        if at is not None:
            raise LocalRangeError(
                f"read from {quote_session(session)}: the destination of {segments.describe(at)} "
                f"is not inside the {len(self.regions)} regions registered with this engine; "
                "register the whole destination cache before reading"
            )

    def check_remote(self, session: str, segments: Segments) -> None:
        """Raise `RemoteRangeError` for the first source outside these regions of the peer."""
        at = self.first_outside(segments.remote, segments.lengths)
        if at is not None:
            raise RemoteRangeError(
                f"read from {quote_session(session)}: the source of {segments.describe(at)} is "
                f"not inside the {len(self.regions)} regions that the peer registered; the "
                "layer metadata and the session come from different states of the peer"
            )
