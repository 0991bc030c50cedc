import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.engines import LocalRangeError, MemoryRegion, RemoteRangeError, SegmentError
from rd2h.engines.errors import quote_session
from rd2h.engines.segments import RegionIndex, check_segments
from tests.engines.peers import u64

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(regions=ranges, wanted=ranges)
def test_first_outside_agrees_with_a_set_of_bytes(
    regions: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    index = RegionIndex(MemoryRegion(*region) for region in regions)
    bytes_inside = {at for start, length in regions for at in range(start, start + length)}
    wanted = [(start, length) for start, length in wanted if length]
    outside = [
        number
        for number, (start, length) in enumerate(wanted)
        if not bytes_inside.issuperset(range(start, start + length))
    ]
    found = index.first_outside(
        u64(*(start for start, _ in wanted)), u64(*(length for _, length in wanted))
    )
    assert found == (outside[0] if outside else None)


def test_the_top_of_the_address_space() -> None:
    index = RegionIndex([MemoryRegion(2**64 - 10, 9)])
    assert index.first_outside(u64(2**64 - 10), u64(9)) is None
    assert index.first_outside(u64(2**64 - 10), u64(10 - 1)) is None
    assert index.first_outside(u64(2**64 - 11), u64(2)) == 0


@pytest.mark.parametrize(("address", "length"), [(-1, 5), (0, -1), (2**64 - 1, 1), (2**70, 0)])
def test_a_region_outside_64_bits(address: int, length: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        MemoryRegion(address, length)


def test_empty_segments_are_dropped_and_the_others_keep_their_numbers() -> None:
    segments = check_segments("s", u64(1, 2, 3), u64(4, 5, 6), u64(0, 7, 0))
    assert len(segments) == 1
    assert segments.describe(0) == "segment 1 of 3 (7 bytes, remote 0x5 to local 0x2)"


@pytest.mark.parametrize(
    "bad",
    [
        [1],
        np.array([1], np.int64),
        np.array([[1]], np.uint64),
        np.array(1, np.uint64),
        np.array([1], ">u8"),
        None,
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_arrays_of_another_kind(bad: object, position: int) -> None:
    arrays: list[object] = [u64(1), u64(1), u64(1)]
    arrays[position] = bad
    name = ["local_addrs", "remote_addrs", "lengths"][position]
    with pytest.raises(SegmentError, match=name):
        check_segments("s", *arrays)  # type: ignore[arg-type]


def test_wrapping_ranges() -> None:
    with pytest.raises(LocalRangeError, match="segment 1 of 2"):
        check_segments("s", u64(1, 2**64 - 1), u64(1, 1), u64(1, 2))
    with pytest.raises(RemoteRangeError, match="segment 0 of 1"):
        check_segments("s", u64(1), u64(2**63), u64(2**63))


@given(st.text())
def test_a_quoted_session_is_short_and_printable(text: str) -> None:
    for session in (text, text * 50):
        quoted = quote_session(session)
        assert quoted.isascii()
        assert quoted.isprintable()
        assert len(quoted) < 800
