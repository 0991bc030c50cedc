"""The contents of blocks: a pattern that tells where each block belongs.

A block is ``table XOR key``, word by word. The table is the same for all blocks of a run and
differs from word to word, so that bytes that moved within a block are found. The key is a
64-bit mix of (layer, request, position, tensor), which is a bijection: no two blocks have the
same key, so no word of a block is right in any other block's place, and from a wrong block one
can read back whose it is. Both are one pass of NumPy over a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.cli.demo.options import MAX_BLOCKS, MAX_LAYERS, MAX_REQUESTS
from rd2h.cli.demo.shape import Tensor
from rd2h.cli.mixing import MASK, STEPS, mix

__all__ = ["UNTOUCHED", "BlockContent", "Origin", "Words", "block_keys"]

Words: TypeAlias = NDArray[np.uint64]

UNTOUCHED = np.uint64(0xA55A_0FF0_C33C_9669)
"""Every word of Decode's memory that nothing was read into."""

# Where each part of an origin lies in the number that is mixed.
_TENSOR_BITS = 2
_POSITION_SHIFT = _TENSOR_BITS
_REQUEST_SHIFT = _POSITION_SHIFT + MAX_BLOCKS.bit_length() - 1
_LAYER_SHIFT = _REQUEST_SHIFT + MAX_REQUESTS.bit_length() - 1


@dataclass(frozen=True)
class Origin:
    """Where a block belongs: its request's index, and its place in that prompt, in blocks."""

    layer: int
    request: int
    position: int
    tensor: Tensor

    def __str__(self) -> str:
        return (
            f"layer {self.layer}, request {self.request}, block {self.position} of the prompt, "
            f"{self.tensor.name.lower()}"
        )


def block_keys(
    seed: int, layer: int, request: int, positions: NDArray[np.int64], tensor: Tensor
) -> Words:
    """Return the keys of one request's blocks of one tensor, shape ``[positions]``."""
    packed = positions.astype(np.uint64) << np.uint64(_POSITION_SHIFT)
    packed |= np.uint64(layer << _LAYER_SHIFT | request << _REQUEST_SHIFT | int(tensor))
    return mix(packed ^ np.uint64(_mix_one(seed)))


class BlockContent:
    """Makes and recognises the blocks of one tensor size. For one thread.

    Args:
        seed: Of the run.
        words: 64-bit words of one block.
    """

    def __init__(self, seed: int, words: int) -> None:
        self._seed_mix = _mix_one(seed)
        self._table = mix(np.arange(1, words + 1, dtype=np.uint64) + np.uint64(self._seed_mix >> 1))
        self._scratch = np.empty(words, np.uint64)

    def write(self, block: Words, key: np.uint64) -> None:
        """Fill a block, shape ``[words]``."""
        np.bitwise_xor(self._table, key, out=block)

    def matches(self, block: Words, key: np.uint64) -> bool:
        """Whether every word of a block is what `write` would make it."""
        np.bitwise_xor(block, self._table, out=self._scratch)
        return bool((self._scratch == key).all())

    def describe(self, block: Words) -> str:
        """Say what a block holds, for a message about one that is wrong."""
        if bool((block == UNTOUCHED).all()):
            return "nothing was ever written there"
        keys, counts = np.unique(block ^ self._table, return_counts=True)
        if keys.size == 1:
            return f"it holds the block of {self._origin(int(keys[0]))}"
        most = int(counts.argmax())
        return (
            f"it is mixed: {int(counts[most])} of {block.size} words are of "
            f"{self._origin(int(keys[most]))}"
        )

    def _origin(self, key: int) -> Origin | str:
        packed = _unmix_one(key) ^ self._seed_mix
        layer = packed >> _LAYER_SHIFT
        if layer >= MAX_LAYERS:
            return "no block of this run"
        return Origin(
            layer,
            packed >> _REQUEST_SHIFT & (MAX_REQUESTS - 1),
            packed >> _POSITION_SHIFT & (MAX_BLOCKS - 1),
            Tensor(packed & 3),
        )


def _mix_one(value: int) -> int:
    for shift, factor in STEPS:
        value = (value ^ value >> shift) * factor & MASK
    return value


def _unmix_one(value: int) -> int:
    """The inverse of `_mix_one`."""
    for shift, factor in reversed(STEPS):
        value = value * pow(factor, -1, 1 << 64) & MASK
        shifted = value
        while shifted := shifted >> shift:
            value ^= shifted
    return value
