"""What Prefill's memory holds, and how that is recognised. Pure; any thread may call.

The content is a function of the seed and the offset: its 64-bit words are a mix of both
(:mod:`rd2h.cli.mixing`), so that no two words of a memory are equal, and data from any other place
is found. The two ends need not have the same NumPy.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.cli.mixing import MASK, mix
from rd2h.engines import UInt64Array

__all__ = ["CANARY", "PIECE", "Bytes", "content", "digest", "mixed"]

Bytes: TypeAlias = NDArray[np.uint8]

CANARY = 0xA5
"""Every byte of Decode's memory before a read."""

PIECE = 1 << 20
"""Bytes that are made or compared at a time: what a cache holds."""

_WORD = 8


def mixed(seed: int, first: int, count: int) -> UInt64Array:
    """The words ``first`` to ``first + count`` of a seed: all different, little-endian."""
    # The golden ratio keeps the words of neighbouring seeds apart.
    start = (seed * 0x9E3779B97F4A7C15 + first) & MASK
    words = np.arange(count, dtype="<u8")
    words += np.uint64(start)
    return mix(words)


def content(seed: int, offset: int, length: int) -> Bytes:
    """What lies at ``offset`` in a memory of that seed, shape ``[length]``."""
    first = offset // _WORD
    words = mixed(seed, first, -(-(offset + length) // _WORD) - first)
    return words.view(np.uint8)[offset - first * _WORD :][:length]


def digest(memory: Bytes, offsets: UInt64Array, lengths: UInt64Array) -> bytes:
    """BLAKE2b of segments of a memory, one after the other; 32 bytes."""
    state = hashlib.blake2b(digest_size=32)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        state.update(memory[offset : offset + length].data)
    return state.digest()
