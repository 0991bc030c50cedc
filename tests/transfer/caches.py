"""Cache tensors for tests with real sockets, and how such tests wait.

Nothing here sleeps and hopes: whatever must happen is waited for until `PATIENCE` has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.engines import MemoryRegion
from rd2h.layout import LayerLayout, TensorLayout

Bytes: TypeAlias = NDArray[np.uint8]

PATIENCE = 20.0
"""Seconds after which something that must happen has not; no test that passes waits so long."""

ANY_PORT = "tcp://127.0.0.1:0"
UNTOUCHED = 0xEE
"""What Decode's memory holds where nothing was read to."""


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition that another thread makes true is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.001)


def threads() -> list[str]:
    """The threads of rd2h that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rd2h")]


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


# --------------------------------------------------------------------------------------- caches


@dataclass(frozen=True)
class Shape:
    """One layer's cache, in bytes per block.

    ``scale`` kernel blocks make one block, on every tensor.
    """

    main: tuple[int, ...] = (64, 16)
    indexer: int | None = None
    lic8: int | None = None
    blocks: int = 32
    scale: int = 1

    @property
    def tensors(self) -> list[int]:
        return [*self.main, *(size for size in (self.indexer, self.lic8) if size is not None)]


class Cache:
    """The cache tensors of a rank, each of shape ``[blocks, bytes per block]``.

    Args:
        shapes: By layer name.
        fill: What every byte holds; None for bytes that are all different.
        reuse: Layers that lie in another layer's memory, as on a Prefill with few buffers.
        main: Tensors to use for main KV, where Decode ranks share a pool.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        fill: int | None = None,
        reuse: Mapping[str, str] | None = None,
        main: Mapping[str, Sequence[Bytes]] | None = None,
    ) -> None:
        self.tensors: dict[str, list[Bytes]] = {}
        self.layouts: dict[str, LayerLayout] = {}
        rng = np.random.default_rng(len(shapes))
        for name, shape in shapes.items():
            tensors = [np.empty((shape.blocks, size), np.uint8) for size in shape.tensors]
            for tensor in tensors:
                filler = rng.integers(0, UNTOUCHED, tensor.shape) if fill is None else fill
                tensor[:] = filler
            if main is not None:
                tensors[: len(shape.main)] = main[name]
            if reuse and name in reuse:
                tensors = self.tensors[reuse[name]]
            self.tensors[name] = tensors
            self.layouts[name] = self._layout(name, shape, tensors)

    @staticmethod
    def _layout(name: str, shape: Shape, tensors: list[Bytes]) -> LayerLayout:
        layouts = [
            TensorLayout.from_shape(
                tensor.ctypes.data,
                (len(tensor) * shape.scale, tensor.shape[1] // shape.scale),
                1,
                block_size_scale=shape.scale,
            )
            for tensor in tensors
        ]
        count = len(shape.main)
        indexed = [*layouts[count:], None, None]
        return LayerLayout(name, tuple(layouts[:count]), indexed[0], indexed[1])

    @property
    def regions(self) -> list[MemoryRegion]:
        return [
            MemoryRegion(tensor.ctypes.data, tensor.nbytes)
            for tensors in self.tensors.values()
            for tensor in tensors
        ]

    def untouched(self, layers: Iterable[str] | None = None) -> bool:
        """Whether nothing was ever read to these layers."""
        names = self.tensors if layers is None else layers
        return all(bool((t == UNTOUCHED).all()) for name in names for t in self.tensors[name])


TWO_LAYERS = {"layer.0": Shape(), "layer.1": Shape()}
