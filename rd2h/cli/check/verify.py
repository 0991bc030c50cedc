"""Whether a read has done what it should, and nothing else. Pure; any thread may call."""

from __future__ import annotations

import numpy as np

from rd2h.cli.check.content import CANARY, PIECE, Bytes, content
from rd2h.cli.check.patterns import Plan

__all__ = ["find_strays", "find_wrong"]


def find_wrong(found: Bytes, plan: Plan, seed: int) -> str | None:
    """Compare every byte that was read with what the seed says.

    Args:
        found: Decode's memory, at least ``plan.extent`` bytes.
        plan: Where what should be.
        seed: Of the content.

    Returns:
        What is wrong: how many segments, and the first byte of the first; None if all is right.
    """
    wrong, first = 0, ""
    segments = zip(
        plan.source.tolist(), plan.destination.tolist(), plan.lengths.tolist(), strict=True
    )
    for index, (source, destination, length) in enumerate(segments):
        segment = found[destination : destination + length]
        at = _first_difference(segment, seed, source)
        if at is None:
            continue
        wrong += 1
        if not first:
            what = "nothing was written there" if bool((segment == CANARY).all()) else ""
            should = int(content(seed, source + at, 1)[0])
            first = (
                f"segment {index} ({length:,} bytes, from offset {source:,} of prefill's memory "
                f"to offset {destination:,} of decode's) is wrong from its byte {at:,}: "
                + (what or f"{int(segment[at]):#04x} instead of {should:#04x}")
            )
    if not wrong:
        return None
    return f"{wrong:,} of {len(plan.lengths):,} segments are wrong; {first}"


def _first_difference(segment: Bytes, seed: int, source: int) -> int | None:
    for start in range(0, len(segment), PIECE):
        piece = segment[start : start + PIECE]
        differs = piece != content(seed, source + start, len(piece))
        if bool(differs.any()):
            return start + int(differs.argmax())
    return None


def find_strays(found: Bytes, plan: Plan) -> str | None:
    """Look for bytes that changed outside of what should be written.

    Args:
        found: Decode's memory, `CANARY` throughout before the read; ``plan.extent`` bytes.
        plan: Where it may differ from that.

    Returns:
        Where the first such byte is, and how many there are; None if there are none.
    """
    order = np.argsort(plan.destination, kind="stable")
    starts = plan.destination[order].tolist()
    ends = (plan.destination + plan.lengths)[order].tolist()
    strays, first = 0, ""
    for start, end in zip([0, *ends], [*starts, plan.extent], strict=True):
        changed = found[start:end] != CANARY
        count = int(np.count_nonzero(changed))
        if count and not strays:
            at = start + int(changed.argmax())
            first = f"the first at offset {at:,} of decode's memory, now {int(found[at]):#04x}"
        strays += count
    if not strays:
        return None
    return f"{strays:,} bytes were written that no segment covers, {first}"
