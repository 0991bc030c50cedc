import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.topology import MAX_PORT, TopologyError, TpMapping, base_port, owned_range, rank_port


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "ranks"),
    [
        (1, 1, [(0, 0)]),
        (2, 2, [(0, 0), (1, 0)]),
        (2, 1, [(0, 0), (0, 1)]),
        (4, 2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (16, 2, [(0, member) for member in range(8)] + [(1, member) for member in range(8)]),
    ],
)
def test_each_prefill_rank_has_one_decode_rank_and_one_member_index(
    prefill_tp: int, decode_tp: int, ranks: list[tuple[int, int]]
) -> None:
    mapping = TpMapping(prefill_tp, decode_tp)
    assert mapping.ratio == prefill_tp // decode_tp
    assert [
        (mapping.decode_rank(rank), mapping.member(rank)) for rank in range(prefill_tp)
    ] == ranks
    for decode_rank in range(decode_tp):
        contributors = mapping.prefill_ranks(decode_rank)
        assert [ranks[rank] for rank in contributors] == [
            (decode_rank, member) for member in range(mapping.ratio)
        ]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "words"),
    [
        (3, 2, ["3", "2", "--tensor-parallel-size"]),
        (1, 2, ["1", "2", "--tensor-parallel-size"]),
        (0, 1, ["0", "1", "--tensor-parallel-size"]),
        (4, 0, ["4", "0", "--tensor-parallel-size"]),
        (-2, -1, ["-2", "-1", "--tensor-parallel-size"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(prefill_tp: int, decode_tp: int, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        TpMapping(prefill_tp, decode_tp)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    mapping = TpMapping(4, 4)
    for method in (mapping.decode_rank, mapping.member, mapping.prefill_ranks):
        with pytest.raises(TopologyError, match=f"rank {rank} is outside a group of size 4"):
            method(rank)


@pytest.mark.parametrize(
    ("start", "count", "size", "expected"),
    [
        (0, 5, 4, [[0, 1], [2], [3], [4]]),
        (0, 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (1, 5, 4, [[4], [0, 1], [2], [3]]),
        (7, 2, 4, [[1], [], [], [0]]),
        (6, 1, 4, [[], [], [0], []]),
        (9, 3, 1, [[0, 1, 2]]),
        (3, 0, 2, [[], []]),
    ],
)
def test_the_split_starts_at_the_rotated_rank(
    start: int, count: int, size: int, expected: list[list[int]]
) -> None:
    assert [list(owned_range(start, count, rank, size)) for rank in range(size)] == expected


@given(
    start=st.integers(0, 2**64 - 1),
    count=st.integers(0, 300),
    size=st.integers(1, 32),
)
def test_the_split_is_complete_disjoint_and_even(start: int, count: int, size: int) -> None:
    parts = [owned_range(start, count, rank, size) for rank in range(size)]
    assert sorted(offset for part in parts for offset in part) == list(range(count))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    rotated = [parts[(start + place) % size] for place in range(size)]
    assert [len(part) for part in rotated] == sorted(lengths, reverse=True)
    assert [offset for part in rotated for offset in part] == list(range(count))


@given(blocks=st.integers(1, 60), size=st.integers(1, 8))
def test_a_prompt_in_single_block_chunks_is_spread_evenly(blocks: int, size: int) -> None:
    owned = [
        sum(len(owned_range(start, 1, rank, size)) for start in range(blocks))
        for rank in range(size)
    ]
    assert max(owned) - min(owned) <= 1


@pytest.mark.parametrize(
    ("start", "count", "rank", "size"),
    [(-1, 1, 0, 1), (0, -1, 0, 1), (0, 1, 1, 1), (0, 1, -1, 2), (0, 1, 0, 0)],
)
def test_a_split_of_nonsense_is_refused(start: int, count: int, rank: int, size: int) -> None:
    with pytest.raises(TopologyError):
        owned_range(start, count, rank, size)


def test_ports_follow_the_global_data_parallel_rank() -> None:
    ports = [
        rank_port(base_port(30000, dp_rank, 4), tp_rank, 4)
        for dp_rank in range(3)
        for tp_rank in range(4)
    ]
    assert ports == list(range(30000, 30012))


def test_the_last_port_may_be_the_highest() -> None:
    assert base_port(MAX_PORT - 7, 1, 4) == MAX_PORT - 3
    assert rank_port(MAX_PORT - 3, 3, 4) == MAX_PORT


@pytest.mark.parametrize(("kv_port", "dp_rank"), [(65529, 1), (0, 0), (-4, 2)])
def test_ports_outside_the_range_are_named(kv_port: int, dp_rank: int) -> None:
    with pytest.raises(TopologyError, match="outside 1 to 65535; set kv_port") as caught:
        base_port(kv_port, dp_rank, 4)
    highest = kv_port + dp_rank * 4 + 3
    allowed = MAX_PORT + 1 - (dp_rank + 1) * 4
    for value in (kv_port, dp_rank, highest, allowed):
        assert str(value) in str(caught.value)
    base_port(allowed, dp_rank, 4)


@pytest.mark.parametrize(("dp_rank", "tp_size"), [(-1, 2), (0, 0)])
def test_a_port_needs_a_real_rank_and_size(dp_rank: int, tp_size: int) -> None:
    with pytest.raises(TopologyError, match=f"got {dp_rank} and {tp_size}"):
        base_port(30000, dp_rank, tp_size)


@pytest.mark.parametrize("base", [0, MAX_PORT - 2])
def test_every_rank_refuses_a_bad_base_alike(base: int) -> None:
    for tp_rank in range(4):
        with pytest.raises(TopologyError, match=f"ports {base} to {base + 3}"):
            rank_port(base, tp_rank, 4)


def test_a_rank_outside_the_group_has_no_port() -> None:
    with pytest.raises(TopologyError, match="tensor-parallel rank 4 is outside"):
        rank_port(30000, 4, 4)
