"""The caches' memory: one mapping, cut into tensors, described as rd2h's layouts.

Decode's main pool is a memory file that its ranks share. It has no name, so nothing is left of
it once the last process is gone, however that ends.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from rd2h.cli.demo.content import Words
from rd2h.cli.demo.plan import Plan
from rd2h.cli.demo.shape import WORD, Tensor, TensorShape
from rd2h.engines import MemoryRegion
from rd2h.layout import LayerLayout, TensorLayout

__all__ = [
    "SEGMENT_NAME",
    "CacheMemory",
    "LayerMemory",
    "create_segment",
    "decode_memory",
    "main_segment_bytes",
    "prefill_memory",
]

SEGMENT_NAME = "rd2h-demo-main-kv"
"""How the memory file is called in ``/proc/<pid>/maps``."""


@dataclass(frozen=True)
class LayerMemory:
    """One layer's tensors, shape ``[blocks, words]`` each, in wire order.

    Attributes:
        main: The main tensors.
        indexed: Indexer and scale; empty for a layer without.
        layout: The same for rd2h.
    """

    main: tuple[tuple[Tensor, Words], ...]
    indexed: tuple[tuple[Tensor, Words], ...]
    layout: LayerLayout


@dataclass(frozen=True)
class CacheMemory:
    """All layers of one rank, by layer index, and the regions that hold them."""

    layers: tuple[LayerMemory, ...]
    regions: tuple[MemoryRegion, ...]

    @property
    def layouts(self) -> dict[str, LayerLayout]:
        """By layer name."""
        return {layer.layout.name: layer.layout for layer in self.layers}


class _Arena:
    """A mapping that is handed out from its start.

    Args:
        size: In bytes.
        fd: Of a memory file; -1 for memory of this process alone.
    """

    def __init__(self, size: int, fd: int = -1) -> None:
        # The arrays keep the mapping; it goes with the process.
        self._words = np.frombuffer(mmap.mmap(fd, max(size, WORD)), np.uint64)
        self._taken = 0
        self.region = MemoryRegion(int(self._words.ctypes.data), size)

    def take(self, shape: TensorShape, blocks: int) -> tuple[Tensor, Words]:
        """Hand out one tensor."""
        first = self._taken
        self._taken += blocks * shape.words
        return shape.tensor, self._words[first : self._taken].reshape(blocks, shape.words)


def main_segment_bytes(plan: Plan, engine: int) -> int:
    """Bytes of one Decode engine's main pool."""
    shape = plan.shape
    return plan.decode[engine].pool_blocks * shape.layers * shape.main_block_bytes


def create_segment(size: int) -> int:
    """Make the shared memory for one Decode engine's main pool; return its descriptor."""
    fd = os.memfd_create(SEGMENT_NAME)
    os.ftruncate(fd, size)
    return fd


def prefill_memory(plan: Plan) -> CacheMemory:
    """Make one Prefill rank's memory: a few buffers, each used by several layers."""
    shape, blocks = plan.shape, plan.prefill.pool_blocks
    size = blocks * (shape.main_block_bytes + shape.indexed_block_bytes)
    arenas = [_Arena(size) for _ in range(plan.options.buffers)]
    buffers = [
        (
            tuple(arena.take(tensor, blocks) for tensor in shape.main),
            tuple(arena.take(tensor, blocks) for tensor in shape.indexed),
        )
        for arena in arenas
    ]
    layers = []
    for layer in range(shape.layers):
        main, indexed = buffers[layer % len(buffers)]
        used = indexed if shape.indexed_of(layer) else ()
        layers.append(_layer(shape.name(layer), main, used))
    return CacheMemory(tuple(layers), tuple(arena.region for arena in arenas))


def decode_memory(plan: Plan, engine: int, fd: int) -> CacheMemory:
    """Map one Decode rank's memory: the shared main pool, and an indexer of its own."""
    shape, blocks = plan.shape, plan.decode[engine].pool_blocks
    shared = _Arena(main_segment_bytes(plan, engine), fd)
    local = _Arena(blocks * shape.indexed_layers * shape.indexed_block_bytes)
    layers = tuple(
        _layer(
            shape.name(layer),
            tuple(shared.take(tensor, blocks) for tensor in shape.main),
            tuple(local.take(tensor, blocks) for tensor in shape.indexed_of(layer)),
        )
        for layer in range(shape.layers)
    )
    regions = tuple(arena.region for arena in (shared, local) if arena.region.length)
    return CacheMemory(layers, regions)


def _layer(
    name: str, main: tuple[tuple[Tensor, Words], ...], indexed: tuple[tuple[Tensor, Words], ...]
) -> LayerMemory:
    layouts = {
        tensor: TensorLayout.from_shape(int(words.ctypes.data), words.shape, WORD)
        for tensor, words in (*main, *indexed)
    }
    return LayerMemory(
        main,
        indexed,
        LayerLayout(
            name,
            tuple(layouts[tensor] for tensor, _ in main),
            layouts.get(Tensor.INDEXER),
            layouts.get(Tensor.SCALE),
        ),
    )
