"""What every destination says: layouts, memory to register, and whether main KV is shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rd2h.engines import MemoryRegion
from rd2h.layout import LayerLayout

__all__ = ["Destination", "regions_of"]


@dataclass(frozen=True)
class Destination:
    """Memory of one Decode rank, ready to be read into.

    Attributes:
        layers: This rank's cache layouts, by layer name.
        regions: What the transfer engine has to register.
        main_shared: Whether the ranks of the tensor-parallel group share one pool of main KV, so
            that each pulls a disjoint part of it (``docs/architecture.md``).
    """

    layers: Mapping[str, LayerLayout]
    regions: tuple[MemoryRegion, ...]
    main_shared: bool


def regions_of(layouts: Iterable[LayerLayout]) -> tuple[MemoryRegion, ...]:
    """The memory of all tensors, each range once, by ascending address.

    Ranges that overlap become one: with layerwise reuse many layers lie in one buffer, and an
    engine need not register that more than once. Ranges that only touch stay apart, since they
    may be allocations of their own.

    Raises:
        LayoutError: A tensor's number of blocks is unknown.
    """
    ranges = sorted(
        {(tensor.address, tensor.end) for layout in layouts for tensor in layout.tensors}
    )
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(MemoryRegion(start, end - start) for start, end in merged)
