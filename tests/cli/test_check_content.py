"""What memory holds in a check, where blocks lie, and what the comparison finds."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.cli.check.content import CANARY, PIECE, Bytes, content, digest
from rd2h.cli.check.messages import Run
from rd2h.cli.check.options import Pattern
from rd2h.cli.check.patterns import Plan, plan_run, pool_bytes
from rd2h.cli.check.verify import find_strays, find_wrong

SEED = 0x1234_5678_9ABC_DEF0

runs = st.builds(
    Run, size=st.integers(1, 3000), block=st.integers(1, 700), pattern=st.sampled_from(Pattern)
)


def pulled(plan: Plan, seed: int = SEED) -> Bytes:
    """Decode's memory after a read that did what it should."""
    memory = np.full(plan.extent, CANARY, np.uint8)
    for source, destination, length in zip(
        plan.source.tolist(), plan.destination.tolist(), plan.lengths.tolist(), strict=True
    ):
        memory[destination : destination + length] = content(seed, source, length)
    return memory


def test_the_content_never_changes() -> None:
    # Both ends derive it, each with its own NumPy: these bytes are part of the version.
    assert content(0, 0, 8).tobytes().hex() == "0000000000000000"
    assert content(1, 3, 10).tobytes().hex() == GOLDEN


GOLDEN = "7b39a820e2c15c0289ec"


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 5000), st.integers(0, 500))
def test_any_piece_of_the_content_is_the_same(seed: int, offset: int, length: int) -> None:
    whole = content(seed, 0, 5500)
    assert (content(seed, offset, length) == whole[offset : offset + length]).all()


def test_no_two_words_are_equal() -> None:
    words = content(SEED, 0, 1 << 20).view(np.uint64)
    assert len(np.unique(words)) == len(words)
    assert not np.isin(content(SEED + 1, 0, 1 << 20).view(np.uint64), words).any()


def test_the_digest_is_blake2b_of_the_segments_in_order() -> None:
    memory = content(SEED, 0, 1000)
    offsets, lengths = np.array([500, 0], np.uint64), np.array([7, 13], np.uint64)
    expected = hashlib.blake2b(
        memory[500:507].tobytes() + memory[:13].tobytes(), digest_size=32
    ).digest()
    assert digest(memory, offsets, lengths) == expected


@given(runs, st.integers(0, (1 << 63) - 1))
def test_plans(run: Run, seed: int) -> None:
    plan = plan_run(run, seed)
    assert plan.extent == pool_bytes(run)
    assert int(plan.lengths.sum()) == run.size
    assert len(plan.source) == len(plan.destination) == len(plan.lengths)
    for offsets, first, last in (
        (plan.source, 0, plan.extent),
        # Decode's first and last block are never written: a read that strays is seen there.
        (plan.destination, run.block, plan.extent - run.block),
    ):
        spans = sorted(zip(offsets.tolist(), (offsets + plan.lengths).tolist(), strict=True))
        assert spans[0][0] >= first
        assert spans[-1][1] <= last
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_patterns() -> None:
    plans = {pattern: plan_run(Run(1000, 300, pattern), SEED) for pattern in Pattern}
    contiguous = plans[Pattern.CONTIGUOUS]
    assert contiguous.source.tolist() == [0]
    assert contiguous.destination.tolist() == [300]
    assert contiguous.lengths.tolist() == [1000]
    strided = plans[Pattern.STRIDED]
    assert strided.source.tolist() == [0, 600, 1200, 1800]
    assert strided.destination.tolist() == [300, 900, 1500, 2100]
    assert strided.lengths.tolist() == [300, 300, 300, 100]
    many = Run(100 * 64, 64, Pattern.RANDOM)
    random, again, other = plan_run(many, 1), plan_run(many, 1), plan_run(many, 2)
    assert (random.source == again.source).all()
    assert (random.destination == again.destination).all()
    assert (random.source != other.source).any()
    assert (random.source != random.destination).any()
    assert (np.diff(random.source.astype(np.int64)) < 0).any()  # scattered, not ascending


@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_good_read_is_good(pattern: Pattern) -> None:
    plan = plan_run(Run(5 * PIECE // 2, 3 * PIECE // 2, pattern), SEED)
    memory = pulled(plan)
    assert find_wrong(memory, plan, SEED) is None
    assert find_strays(memory, plan) is None


@given(runs, st.data())
def test_every_wrong_byte_is_found(run: Run, data: st.DataObject) -> None:
    plan = plan_run(run, SEED)
    memory = pulled(plan)
    at = data.draw(st.integers(0, plan.extent - 1))
    inside = any(
        start <= at < start + length
        for start, length in zip(plan.destination.tolist(), plan.lengths.tolist(), strict=True)
    )
    memory[at] ^= np.uint8(data.draw(st.integers(1, 255)))
    wrong, strays = find_wrong(memory, plan, SEED), find_strays(memory, plan)
    assert (wrong is not None) == inside
    assert (strays is not None) != inside
    if strays is not None:
        assert f"1 bytes were written that no segment covers, the first at offset {at:,}" in strays


def test_what_is_wrong_is_described() -> None:
    plan = plan_run(Run(3 * PIECE, 3 * PIECE, Pattern.CONTIGUOUS), SEED)
    memory = pulled(plan)
    at = int(plan.destination[0]) + 2 * PIECE + 5  # not in the first piece that is compared
    should = int(memory[at])
    memory[at] = should ^ 0xFF
    assert find_wrong(memory, plan, SEED) == (
        "1 of 1 segments are wrong; segment 0 (3,145,728 bytes, from offset 0 of prefill's memory "
        "to offset 3,145,728 of decode's) is wrong from its byte 2,097,157: "
        f"{should ^ 0xFF:#04x} instead of {should:#04x}"
    )


def test_blocks_in_each_others_place_are_found() -> None:
    plan = plan_run(Run(600, 300, Pattern.RANDOM), SEED)
    memory = pulled(plan)
    first, second = (slice(int(at), int(at) + 300) for at in plan.destination)
    memory[first], memory[second] = memory[second].copy(), memory[first].copy()
    assert "2 of 2 segments are wrong" in str(find_wrong(memory, plan, SEED))
    # The digest alone would find it, too.
    ours = digest(memory, plan.destination, plan.lengths)
    assert ours != digest(pulled(plan), plan.destination, plan.lengths)
