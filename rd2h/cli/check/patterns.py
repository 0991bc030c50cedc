"""Where the blocks of a read lie on both ends. Pure; both ends derive the same.

Each memory is cut into slots of one block. There are more slots than blocks, so that there is
always memory that a read must leave alone; the first and the last slot of Decode's are among it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rd2h.cli.check.content import mixed
from rd2h.cli.check.messages import Run
from rd2h.cli.check.options import Pattern
from rd2h.engines import UInt64Array

__all__ = ["Plan", "plan_run", "pool_bytes"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The segments of one read, as offsets into both memories, in the order of the content.

    Attributes:
        run: What was asked for.
        source: Offsets in Prefill's memory, ``[n]``.
        destination: Offsets in Decode's memory, ``[n]``.
        lengths: Bytes, ``[n]``.
        extent: Bytes of either memory that are in play.
    """

    run: Run
    source: UInt64Array
    destination: UInt64Array
    lengths: UInt64Array
    extent: int


def _blocks(run: Run) -> int:
    return -(-run.size // run.block)


def pool_bytes(run: Run) -> int:
    """How much memory a run needs on either end, in bytes."""
    return _slots(run) * run.block


def plan_run(run: Run, seed: int) -> Plan:
    """Lay a read out.

    ``contiguous`` is one segment, a block further on in Decode's memory than in Prefill's.
    ``strided`` takes every second block to every second block. ``random`` takes scattered blocks
    to other scattered ones. The last block may be partial.

    Args:
        run: Its size, block and pattern.
        seed: Of the check; decides what ``random`` is.
    """
    blocks, slots = _blocks(run), _slots(run)
    if run.pattern is Pattern.CONTIGUOUS:
        source, destination = _indices(0), _indices(1)
        lengths = np.array([run.size], np.uint64)
    else:
        lengths = np.full(blocks, run.block, np.uint64)
        lengths[-1] = run.size - (blocks - 1) * run.block
        if run.pattern is Pattern.STRIDED:
            source = _indices(*range(0, 2 * blocks, 2))
            destination = source + np.uint64(1)
        else:
            source = _shuffled(seed, 1, slots)[:blocks]
            destination = _shuffled(seed, 2, slots - 2)[:blocks] + np.uint64(1)
    block = np.uint64(run.block)
    return Plan(run, source * block, destination * block, lengths, slots * run.block)


def _slots(run: Run) -> int:
    blocks = _blocks(run)
    return blocks + 2 if run.pattern is Pattern.CONTIGUOUS else 2 * blocks + 1


def _indices(*values: int) -> UInt64Array:
    return np.array(values, np.uint64)


def _shuffled(seed: int, which: int, count: int) -> UInt64Array:
    """The numbers below ``count`` in an order that any NumPy makes the same."""
    keys = mixed(seed + (which << 40), 0, count)
    return np.argsort(keys, kind="stable").astype(np.uint64)
