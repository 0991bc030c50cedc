"""The last part of splitmix64: 64-bit words that look random, one to one. Pure; any thread.

NumPy's own generators are not used for what two processes must make alike: their streams may
change from release to release.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK", "STEPS", "mix"]

MASK = (1 << 64) - 1

STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""For each step, by how much a word is shifted, and what it is multiplied with."""


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit words, in place."""
    for shift, factor in STEPS:
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return values
