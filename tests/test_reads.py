from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rd2h.layout import ADDRESS_LIMIT, LayerLayout, LayoutMismatchError, TensorLayout
from rd2h.reads import PullScope, ReadPlan, ReadPlanError, RequestDestination, plan_reads
from rd2h.topology import TpMapping
from rd2h.wire import ReadReadyBatch, ReadRequest

NAME = "model.layers.2.self_attn.attn"
ALONE = PullScope(tp_rank=0, tp_size=1, main_shared=False)


def layout(
    base: int,
    sizes: tuple[int, ...],
    blocks: int | None,
    *,
    indexer: int = 0,
    scale: int = 0,
) -> LayerLayout:
    """A layer whose tensors lie 2**20 bytes apart; a size of 0 means no such tensor."""
    tensors = [
        TensorLayout(base + (place << 20), size, 1, blocks) if size else None
        for place, size in enumerate((*sizes, indexer, scale))
    ]
    *main, keys, scales = tensors
    return LayerLayout(NAME, tuple(part for part in main if part), keys, scales)


REMOTE = layout(1 << 44, (8, 4), None, indexer=2)
LOCAL = layout(1 << 45, (8, 4), 100, indexer=2)


def announce(
    *requests: ReadRequest, member: int = 0, ratio: int = 1, name: str = NAME
) -> ReadReadyBatch:
    return ReadReadyBatch(
        layer_idx=2,
        layer_name=name,
        read_reqs=list(requests),
        done_ext_ids=[],
        group_member_idx=member,
        tp_ratio=ratio,
    )


def entry(
    ext_id: str, main: list[int], indexer: list[int] | None = None, start: int = 0
) -> ReadRequest:
    return ReadRequest(
        ext_id=ext_id,
        main_block_ids=main,
        indexer_block_ids=main if indexer is None else indexer,
        main_start_block=start,
        indexer_start_block=start,
    )


def known(**blocks: list[int]) -> dict[str, RequestDestination]:
    return {ext_id: RequestDestination(ext_id, ids, ids) for ext_id, ids in blocks.items()}


def segments(plan: ReadPlan) -> list[tuple[int, int, int]]:
    assert plan.local_addrs.dtype == plan.remote_addrs.dtype == plan.lengths.dtype == np.uint64
    assert plan.local_addrs.shape == plan.remote_addrs.shape == plan.lengths.shape
    assert plan.lengths.shape == (plan.segments,)
    found = zip(
        plan.local_addrs.tolist(), plan.remote_addrs.tolist(), plan.lengths.tolist(), strict=True
    )
    rows = sorted(found)
    assert sum(length for _, _, length in rows) == plan.total_bytes
    return rows


# --- the slow, obviously right planner --------------------------------------------------------


def deal(start: int, count: int, size: int) -> list[int]:
    """Say for each of ``count`` blocks which of ``size`` ranks owns it."""
    order = [(start + place) % size for place in range(size)]
    owners: list[int] = []
    for place, rank in enumerate(order):
        owners += [rank] * (count // size + (1 if place < count % size else 0))
    return owners


def block_moves(
    batch: ReadReadyBatch,
    remote: LayerLayout,
    local: LayerLayout,
    destinations: Mapping[str, RequestDestination],
    scope: PullScope,
) -> Iterator[tuple[TensorLayout, int, TensorLayout, int]]:
    """Yield (remote tensor, its block, local tensor, its block), one at a time."""
    for request in batch.read_reqs:
        destination = destinations[request.ext_id]
        if batch.group_member_idx == 0:
            ids, start = request.main_block_ids, request.main_start_block
            owners = deal(start, len(ids), scope.tp_size)
            for offset, block in enumerate(ids):
                if start + offset < destination.cached_main_blocks:
                    continue
                if not scope.main_shared or owners[offset] == scope.tp_rank:
                    target = int(destination.main_block_ids[start + offset])
                    for theirs, ours in zip(remote.main, local.main, strict=True):
                        yield theirs, block, ours, target
        if local.indexer is not None:
            ids, start = request.indexer_block_ids, request.indexer_start_block
            owners = deal(start, len(ids), batch.tp_ratio)
            for offset, block in enumerate(ids):
                if start + offset < destination.cached_indexer_blocks:
                    continue
                if owners[offset] == batch.group_member_idx:
                    target = int(destination.indexer_block_ids[start + offset])
                    for theirs, ours in zip(remote.indexed, local.indexed, strict=True):
                        yield theirs, block, ours, target


def obvious_segments(
    moves: Iterator[tuple[TensorLayout, int, TensorLayout, int]],
) -> tuple[list[tuple[int, int, int]], int]:
    """Return the merged segments, and how many there were before merging."""
    rows: list[tuple[int, int, int]] = []
    for theirs, block, ours, target in moves:
        size = ours.block_len * ours.block_size_scale
        rows.append((ours.address + target * size, theirs.address + block * size, size))
    merged: list[tuple[int, int, int]] = []
    for here, there, size in sorted(rows):
        if merged:
            last_here, last_there, length = merged[-1]
            if (last_here + length, last_there + length) == (here, there):
                merged[-1] = (last_here, last_there, length + size)
                continue
        merged.append((here, there, size))
    return merged, len(rows)


# --- whole hand-offs, with bytes that really move ---------------------------------------------


@dataclass
class Memory:
    """Bytes by tensor, and how often each was written."""

    tensors: list[TensorLayout]
    data: list[NDArray[np.uint8]] = field(default_factory=list)
    writes: list[NDArray[np.int64]] = field(default_factory=list)

    def fill(self, rng: np.random.Generator | None) -> Memory:
        for tensor in self.tensors:
            self.data.append(
                rng.integers(0, 256, tensor.extent, dtype=np.uint8)
                if rng is not None
                else np.zeros(tensor.extent, np.uint8)
            )
            self.writes.append(np.zeros(tensor.extent, np.int64))
        return self

    def find(self, address: int, length: int) -> tuple[int, slice]:
        for place, tensor in enumerate(self.tensors):
            if tensor.address <= address and address + length <= tensor.end:
                return place, slice(address - tensor.address, address - tensor.address + length)
        raise AssertionError(f"{length} bytes at {address:#x} are not within one tensor")


def perform(plan: ReadPlan, source: Memory, target: Memory) -> None:
    for here, there, length in segments(plan):
        from_tensor, from_bytes = source.find(there, length)
        to_tensor, to_bytes = target.find(here, length)
        assert from_tensor == to_tensor
        target.data[to_tensor][to_bytes] = source.data[from_tensor][from_bytes]
        target.writes[to_tensor][to_bytes] += 1


@dataclass(frozen=True)
class Prompt:
    """One request: block ids on both sides over the whole prompt, and where its steps end."""

    main_source: list[int]
    main_target: list[int]
    main_steps: list[int]
    indexer_source: list[int]
    indexer_target: list[int]
    indexer_steps: list[int]


POOL = 48


@st.composite
def prompts(draw: st.DrawFn, steps: int) -> list[Prompt]:
    count = draw(st.integers(1, 4))
    # Several orders that pools hand out: fresh, used (descending), and any.
    orders = st.one_of(
        st.just(list(range(POOL))),
        st.just(list(range(POOL))[::-1]),
        st.permutations(range(POOL)),
    )
    pools = [iter(draw(orders)) for _ in range(4)]

    def role() -> tuple[int, list[int]]:
        blocks = draw(st.integers(0, POOL // count))
        # The first number is the end of the cached prefix: what is before it is not announced.
        ends = sorted(draw(st.lists(st.integers(0, blocks), min_size=steps, max_size=steps)))
        return blocks, [*ends, blocks]

    found: list[Prompt] = []
    for _ in range(count):
        main_blocks, main_steps = role()
        indexer_blocks, indexer_steps = role()
        found.append(
            Prompt(
                [next(pools[0]) for _ in range(main_blocks)],
                [next(pools[1]) for _ in range(main_blocks)],
                main_steps,
                [next(pools[2]) for _ in range(indexer_blocks)],
                [next(pools[3]) for _ in range(indexer_blocks)],
                indexer_steps,
            )
        )
    return found


@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (16, 2), (4, 4)]
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "rank-local"])
@given(data=st.data())
def test_every_block_moves_exactly_once(
    prefill_tp: int, decode_tp: int, shared: bool, data: st.DataObject
) -> None:
    mapping = TpMapping(prefill_tp, decode_tp)
    steps = data.draw(st.integers(1, 3), "steps")
    requests = data.draw(prompts(steps), "requests")
    indexer = data.draw(st.sampled_from([0, 2]), "indexer bytes")
    scale = data.draw(st.sampled_from([0, 1]), "scale bytes") if indexer else 0
    sizes = data.draw(st.sampled_from([(3,), (4, 1)]), "main bytes")
    decode = layout(1 << 45, sizes, POOL, indexer=indexer, scale=scale)
    own = layout(1 << 44, sizes, POOL, indexer=indexer, scale=scale)
    prefill = LayerLayout.from_wire(NAME, own.to_wire())

    source = Memory(list(own.tensors)).fill(np.random.default_rng(0))
    targets = [Memory(list(decode.tensors)).fill(None) for _ in range(decode_tp)]
    main_count = len(sizes)
    if shared:
        for target in targets:
            target.data[:main_count] = targets[0].data[:main_count]
            target.writes[:main_count] = targets[0].writes[:main_count]

    destinations = {
        str(index): RequestDestination(str(index), prompt.main_target, prompt.indexer_target)
        for index, prompt in enumerate(requests)
    }
    for step in range(steps):
        entries = []
        for index, prompt in enumerate(requests):
            main_from, main_to = prompt.main_steps[step : step + 2]
            indexer_from, indexer_to = prompt.indexer_steps[step : step + 2]
            entries.append(
                ReadRequest(
                    ext_id=str(index),
                    main_block_ids=prompt.main_source[main_from:main_to],
                    indexer_block_ids=prompt.indexer_source[indexer_from:indexer_to],
                    main_start_block=main_from,
                    indexer_start_block=indexer_from,
                )
            )
        for prefill_rank in range(prefill_tp):
            rank = mapping.decode_rank(prefill_rank)
            batch = announce(*entries, member=mapping.member(prefill_rank), ratio=mapping.ratio)
            scope = PullScope(rank, decode_tp, shared)
            plan = plan_reads(batch, prefill, decode, destinations, scope)
            expected, before = obvious_segments(
                block_moves(batch, prefill, decode, destinations, scope)
            )
            assert segments(plan) == expected
            assert plan.segments_before == before
            perform(plan, source, targets[rank])

    for target in targets:
        for place, tensor in enumerate(decode.tensors):
            size = tensor.bytes_per_block
            got = target.data[place].reshape(POOL, size)
            sent = source.data[place].reshape(POOL, size)
            writes = np.zeros((POOL, size), np.int64)
            for prompt in requests:
                from_ids, to_ids, ends = (
                    (prompt.main_source, prompt.main_target, prompt.main_steps)
                    if place < main_count
                    else (prompt.indexer_source, prompt.indexer_target, prompt.indexer_steps)
                )
                pulled = slice(ends[0], None)
                writes[to_ids[pulled]] = 1
                np.testing.assert_array_equal(got[to_ids[pulled]], sent[from_ids[pulled]])
            np.testing.assert_array_equal(target.writes[place].reshape(POOL, size), writes)


# --- single rules -----------------------------------------------------------------------------


def test_the_golden_batch_of_member_3_of_4() -> None:
    batch = announce(entry("cmpl-dddd-0", [0, 1, 2, 3, 4]), member=3, ratio=4)
    destinations = {"cmpl-dddd-0": RequestDestination("cmpl-dddd-0", [], [9, 8, 7, 6, 5])}
    plan = plan_reads(batch, REMOTE, LOCAL, destinations, PullScope(1, 2, True))
    assert LOCAL.indexer is not None
    assert REMOTE.indexer is not None
    # Five blocks over four members from block 0: the first has two, the last has block 4.
    assert segments(plan) == [(LOCAL.indexer.address + 5 * 2, REMOTE.indexer.address + 4 * 2, 2)]


def test_neighbours_merge_in_every_tensor_and_across_requests() -> None:
    batch = announce(entry("a", [10, 11], [10, 11]), entry("b", [12, 13], [12, 14]))
    plan = plan_reads(batch, REMOTE, LOCAL, known(a=[3, 4], b=[5, 6]), ALONE)
    remote, local = REMOTE.tensors, LOCAL.tensors
    assert segments(plan) == [
        (local[0].address + 24, remote[0].address + 80, 32),
        (local[1].address + 12, remote[1].address + 40, 16),
        (local[2].address + 6, remote[2].address + 20, 6),
        (local[2].address + 12, remote[2].address + 28, 2),
    ]
    assert (plan.segments_before, plan.segments) == (12, 4)


def test_descending_ids_of_a_used_pool_merge() -> None:
    ids = list(range(60, 20, -1))
    plan = plan_reads(announce(entry("a", ids)), REMOTE, LOCAL, known(a=ids), ALONE)
    assert (plan.segments_before, plan.segments) == (120, 3)


def test_requests_may_share_source_blocks() -> None:
    batch = announce(entry("a", [10, 11]), entry("b", [10, 11]))
    plan = plan_reads(batch, REMOTE, LOCAL, known(a=[3, 4], b=[8, 9]), ALONE)
    assert (plan.segments_before, plan.segments) == (12, 6)


def test_a_batch_without_entries_reads_nothing() -> None:
    plan = plan_reads(announce(), REMOTE, LOCAL, {}, ALONE)
    assert segments(plan) == []
    assert (plan.segments, plan.segments_before, plan.total_bytes) == (0, 0, 0)


def test_an_entry_without_blocks_needs_no_room() -> None:
    batch = announce(entry("a", [], [], start=7))
    assert plan_reads(batch, REMOTE, LOCAL, known(a=[]), ALONE).segments == 0


def test_a_layer_without_indexer_ignores_indexer_ids() -> None:
    remote, local = (replace(side, indexer=None) for side in (REMOTE, LOCAL))
    batch = announce(entry("a", [1], [2**64 - 1] * 50))
    assert plan_reads(batch, remote, local, known(a=[3]), ALONE).segments == 2


def test_other_members_leave_main_alone() -> None:
    batch = announce(entry("a", [2**64 - 1], []), member=1, ratio=2)
    assert plan_reads(batch, REMOTE, LOCAL, known(a=[3]), ALONE).segments == 0


def test_a_request_may_have_two_entries_that_do_not_overlap() -> None:
    batch = announce(entry("a", [1, 2]), entry("a", [3], start=2))
    plan = plan_reads(batch, REMOTE, LOCAL, known(a=[5, 6, 7]), ALONE)
    assert (plan.segments_before, plan.segments) == (9, 3)


def test_the_caller_may_change_a_plan() -> None:
    batch = announce(entry("a", [1]))
    destinations = known(a=[3])
    plan = plan_reads(batch, REMOTE, LOCAL, destinations, ALONE)
    for column in (plan.local_addrs, plan.remote_addrs, plan.lengths):
        assert column.flags.c_contiguous
        column += np.uint64(1)
    assert destinations["a"].main_block_ids.tolist() == [3]


# --- the ends of the number range -------------------------------------------------------------


def test_the_last_source_block_of_the_address_space() -> None:
    one_byte = TensorLayout(0, 1)
    remote = LayerLayout(NAME, (one_byte,))
    local = LayerLayout(NAME, (TensorLayout(0, 1, 1, 100),))
    last = ADDRESS_LIMIT - 1
    # Wrapping arithmetic would merge `last` with 0, and take `last + 1` for a real block.
    plan = plan_reads(announce(entry("a", [last, 0])), remote, local, known(a=[5, 6]), ALONE)
    assert segments(plan) == [(5, last, 1), (6, 0, 1)]
    with pytest.raises(ReadPlanError, match=f"source block id {last + 1} lies outside"):
        plan_reads(announce(entry("a", [last + 1])), remote, local, known(a=[5]), ALONE)


@given(
    address=st.integers(0, ADDRESS_LIMIT - 64),
    size=st.integers(1, 64),
    over=st.integers(0, 5),
    data=st.data(),
)
def test_source_ids_are_checked_to_the_byte(
    address: int, size: int, over: int, data: st.DataObject
) -> None:
    remote = LayerLayout(NAME, (TensorLayout(address, size),))
    local = LayerLayout(NAME, (TensorLayout(1 << 20, size, 1, 4),))
    fits = (ADDRESS_LIMIT - address) // size
    good = data.draw(st.integers(0, fits - 1))
    plan = plan_reads(announce(entry("a", [good])), remote, local, known(a=[3]), ALONE)
    assert segments(plan) == [((1 << 20) + 3 * size, address + good * size, size)]
    bad = min(fits + over, 2**64 - 1)
    with pytest.raises(ReadPlanError, match="lies outside the address space"):
        plan_reads(announce(entry("a", [bad])), remote, local, known(a=[3]), ALONE)


def test_merged_lengths_do_not_overflow() -> None:
    side = LayerLayout(NAME, (TensorLayout(0, 2**58, 1, 63),))
    ids = list(range(63))
    plan = plan_reads(announce(entry("a", ids)), side, side, known(a=ids), ALONE)
    assert segments(plan) == [(0, 0, 63 * 2**58)]


def test_total_bytes_may_pass_64_bits() -> None:
    huge = TensorLayout(0, 2**58, 1, 63)
    side = LayerLayout(NAME, (huge, huge, huge))
    ids = list(range(63))
    plan = plan_reads(announce(entry("a", ids)), side, side, known(a=ids), ALONE)
    assert plan.total_bytes == 3 * 63 * 2**58 > 2**64


# --- what is refused --------------------------------------------------------------------------

GOOD = known(a=[3, 4, 5], b=[6, 7, 8])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (announce(entry("x", [1])), ["request x has no destination", "2 requests"]),
        (announce(entry("x", [], [])), ["request x has no destination"]),
        (
            announce(entry("a", [1, 2], start=2)),
            ["main blocks of request a", "announced 2 blocks from position 2", "the 3 dest"],
        ),
        (
            announce(entry("a", [1], [1], start=2**64 - 1)),
            [f"announced 1 blocks from position {2**64 - 1}"],
        ),
        (
            announce(entry("a", [1], [1, 2, 3, 4])),
            ["indexer blocks of request a", "announced 4 blocks from position 0", "the 3 dest"],
        ),
        (
            announce(entry("a", [1, 2]), entry("b", [1, 2**64 - 1, 3])),
            ["main blocks of request b", f"source block id {2**64 - 1}"],
        ),
        (
            announce(entry("a", [1], [2, 2**63])),
            ["indexer blocks of request a", f"source block id {2**63}"],
        ),
        (
            announce(entry("b", [1]), entry("a", [-1])),
            ["main blocks of request a", "no 64-bit number"],
        ),
        (announce(entry("a", [2**64])), ["main blocks of request a", "no 64-bit number"]),
        (
            announce(entry("b", [1]), entry("a", [1, 2]), entry("a", [3], start=1)),
            ["main: destination block id 4 would be written twice", "request a and for request a"],
        ),
        (announce(name="other"), ["layer other", NAME]),
        (announce(member=1), ["member 1 of 1"]),
        (announce(member=0, ratio=0), ["member 0 of 0"]),
    ],
)
def test_a_bad_batch_names_layer_request_and_values(
    batch: ReadReadyBatch, words: list[str]
) -> None:
    with pytest.raises(ReadPlanError) as caught:
        plan_reads(batch, REMOTE, LOCAL, GOOD, ALONE)
    for word in [batch.layer_name, *words]:
        assert word in str(caught.value)


def test_a_destination_outside_the_tensor_is_refused() -> None:
    destinations = known(a=[3, 4], b=[99, 100])
    batch = announce(entry("a", [1, 2]), entry("b", [3, 4]))
    with pytest.raises(
        ReadPlanError, match=r"request b: destination block id 100 is outside .* of 100 blocks"
    ):
        plan_reads(batch, REMOTE, LOCAL, destinations, ALONE)
    # The smallest of the tensors that one list of ids indexes decides.
    smaller = replace(LOCAL, main=(LOCAL.main[0], replace(LOCAL.main[1], num_blocks=4)))
    with pytest.raises(ReadPlanError, match=r"request a: destination block id 4 .* of 4 blocks"):
        plan_reads(announce(entry("a", [1, 2])), REMOTE, smaller, destinations, ALONE)


def test_two_requests_must_not_write_one_block() -> None:
    destinations = known(a=[3, 50, 5], b=[20, 10, 50])
    batch = announce(entry("a", [1, 2, 3], []), entry("b", [4, 5, 6], []))
    with pytest.raises(ReadPlanError, match=r"id 50 would .* request a and for request b"):
        plan_reads(batch, REMOTE, LOCAL, destinations, ALONE)
    # Their cached prefixes may share blocks: those are not written.
    prefix = known(a=[50, 3, 4], b=[50, 8, 9])
    batch = announce(entry("a", [1, 2], start=1), entry("b", [4, 5], start=1))
    assert plan_reads(batch, REMOTE, LOCAL, prefix, ALONE).segments_before == 12


def test_the_whole_announcement_is_checked_whoever_pulls() -> None:
    batch = announce(entry("a", [1, 2, 3, 4]))
    for rank in range(4):
        with pytest.raises(ReadPlanError, match="announced 4 blocks from position 0"):
            plan_reads(batch, REMOTE, LOCAL, GOOD, PullScope(rank, 4, True))


def test_layouts_are_compared_before_planning() -> None:
    other = replace(REMOTE, main=REMOTE.main[:1])
    with pytest.raises(LayoutMismatchError, match=f"layer {NAME}"):
        plan_reads(announce(), other, LOCAL, {}, ALONE)


def test_the_local_layout_must_be_our_own() -> None:
    with pytest.raises(ReadPlanError, match="does not know its numbers of blocks"):
        plan_reads(announce(), LOCAL, REMOTE, {}, ALONE)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_scope_is_a_rank_of_its_group(rank: int, size: int) -> None:
    with pytest.raises(ReadPlanError, match=f"rank {rank} .* size {size}"):
        PullScope(rank, size, True)


# --- destinations -----------------------------------------------------------------------------


def test_a_destination_is_read_only_int64() -> None:
    destination = RequestDestination("a", (1, 2**63 - 1), [])
    assert destination.ext_id == "a"
    assert destination.main_block_ids.tolist() == [1, 2**63 - 1]
    assert destination.indexer_block_ids.shape == (0,)
    for ids in (destination.main_block_ids, destination.indexer_block_ids):
        assert ids.dtype == np.int64
        assert not ids.flags.writeable
    assert repr(destination) == "RequestDestination('a', 2 main, 0 indexer blocks)"


@pytest.mark.parametrize("bad", [-1, 2**63, 2**64, 1.5, None])
def test_a_destination_refuses_what_is_no_block_id(bad: object) -> None:
    # Converted from a message, as a caller without a type checker might.
    ids = msgspec.convert([0, bad], list)
    with pytest.raises(ReadPlanError, match=r"request a: .*main destination block id"):
        RequestDestination("a", ids, [])
    with pytest.raises(ReadPlanError, match=r"request a: .*indexer destination block id"):
        RequestDestination("a", [], ids)


# --- blocks that hold the cached prefix already -----------------------------------------------


def cached(ids: list[int], main: int, indexer: int | None = None) -> dict[str, RequestDestination]:
    """A request with some blocks of its prefix in the cache."""
    destination = RequestDestination(
        "a",
        ids,
        ids,
        cached_main_blocks=main,
        cached_indexer_blocks=main if indexer is None else indexer,
    )
    return {"a": destination}


ONE_TENSOR = (layout(1 << 44, (8,), None), layout(1 << 45, (8,), 100))


def targets(plan: ReadPlan) -> dict[int, int]:
    """Destination to source block, of layouts with one tensor of 8 bytes a block."""
    return {
        (here - (1 << 45)) // 8 + block: (there - (1 << 44)) // 8 + block
        for here, there, length in segments(plan)
        for block in range(length // 8)
    }


@pytest.mark.parametrize(
    ("start", "announced", "held", "moved"),
    [
        (0, [1, 2, 3], 0, {20: 1, 30: 2, 40: 3}),
        (0, [1, 2, 3], 1, {30: 2, 40: 3}),  # a peer that knows nothing of the prefix
        (1, [2, 3], 1, {30: 2, 40: 3}),  # one that does
        (1, [2, 3], 2, {40: 3}),
        (2, [3], 1, {40: 3}),  # all of it lies beyond
        (0, [1, 2, 3], 3, {}),
        (0, [1, 2], 3, {}),
        (1, [2], 9, {}),
    ],
)
def test_blocks_of_the_cached_prefix_are_passed_over(
    start: int, announced: list[int], held: int, moved: dict[int, int]
) -> None:
    batch = announce(entry("a", announced, [], start=start))
    plan = plan_reads(batch, *ONE_TENSOR, cached([20, 30, 40], held), ALONE)
    assert targets(plan) == moved


def test_main_and_indexer_have_prefixes_of_their_own() -> None:
    batch = announce(entry("a", [1, 2, 3], [4, 5, 6]))
    for main, indexer in ((1, 2), (2, 1), (0, 3), (3, 0)):
        plan = plan_reads(batch, REMOTE, LOCAL, cached([20, 30, 40], main, indexer), ALONE)
        # Two tensors of main KV, with 12 bytes a block together, and 2 bytes of the indexer.
        assert plan.total_bytes == (3 - main) * 12 + (3 - indexer) * 2


def test_which_rank_pulls_a_block_hangs_on_what_was_announced_not_on_the_prefix() -> None:
    batch = announce(entry("a", [1, 2, 3, 4, 5], [], start=1))
    ids = [10, 20, 30, 40, 50, 60]
    found: list[dict[int, int]] = []
    for held in (0, 3):
        shares = [
            targets(plan_reads(batch, *ONE_TENSOR, cached(ids, held), PullScope(rank, 2, True)))
            for rank in range(2)
        ]
        found += shares
    # Rank 1 is first at position 1, and takes three of five.
    assert found[:2] == [{50: 4, 60: 5}, {20: 1, 30: 2, 40: 3}]
    assert found[2:] == [{50: 4, 60: 5}, {40: 3}]


def test_a_block_of_the_prefix_may_be_shared_with_another_request() -> None:
    both = known(b=[20, 50]) | cached([20, 30], 1)
    batch = announce(entry("a", [1, 2], []), entry("b", [3, 4], []))
    assert targets(plan_reads(batch, *ONE_TENSOR, both, ALONE)) == {30: 2, 20: 3, 50: 4}


def test_a_source_of_the_prefix_is_not_looked_at() -> None:
    batch = announce(entry("a", [2**64 - 1, 2], []))
    assert targets(plan_reads(batch, *ONE_TENSOR, cached([20, 30], 1), ALONE)) == {30: 2}


@pytest.mark.parametrize("counts", [(-1, 0), (0, -1)])
def test_a_count_of_cached_blocks_is_not_negative(counts: tuple[int, int]) -> None:
    with pytest.raises(ReadPlanError, match=r"request a: .* are said to be cached"):
        RequestDestination(
            "a", [1], [1], cached_main_blocks=counts[0], cached_indexer_blocks=counts[1]
        )


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_prefixes_as_the_slow_planner_passes_them_over(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4), "ranks")
    ratio = data.draw(st.integers(1, 3), "members")
    requests = data.draw(prompts(1), "requests")
    destinations, entries = {}, []
    for index, prompt in enumerate(requests):
        destinations[str(index)] = RequestDestination(
            str(index),
            prompt.main_target,
            prompt.indexer_target,
            cached_main_blocks=data.draw(st.integers(0, POOL), "main cached"),
            cached_indexer_blocks=data.draw(st.integers(0, POOL), "indexer cached"),
        )
        main, indexer = prompt.main_steps[0], prompt.indexer_steps[0]
        entries.append(
            ReadRequest(
                str(index),
                prompt.main_source[main:],
                prompt.indexer_source[indexer:],
                main,
                indexer,
            )
        )
    shared = data.draw(st.booleans(), "shared")
    for rank in range(size):
        for member in range(ratio):
            batch = announce(*entries, member=member, ratio=ratio)
            scope = PullScope(rank, size, shared)
            plan = plan_reads(batch, REMOTE, LOCAL, destinations, scope)
            expected, before = obvious_segments(
                block_moves(batch, REMOTE, LOCAL, destinations, scope)
            )
            assert segments(plan) == expected
            assert plan.segments_before == before
