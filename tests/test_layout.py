from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.layout import (
    ADDRESS_LIMIT,
    LayerLayout,
    LayoutError,
    LayoutMismatchError,
    StorageSlots,
    TensorLayout,
    check_compatible,
)
from rd2h.wire import LayerMetadata

NAME = "model.layers.0.self_attn.attn"

# The layers of the golden frame mf_meta.three_layers_indexer_none_scale.
GOLDEN = {
    "model.layers.0.self_attn.attn": LayerMetadata(
        base_addrs=[20615843020800, 20615859798016, 20615876575232],
        block_len=[131072, 16384, 32768],
        block_size_scale=[1, 1, 1],
        tensor_group_idx=[0, 0, 1],
        main_tensor_count=2,
        has_indexer=True,
    ),
    "model.layers.1.self_attn.attn": LayerMetadata(
        base_addrs=[20620137988096, 20620154765312],
        block_len=[131072, 16384],
        block_size_scale=[1, 1],
        tensor_group_idx=[0, 0],
        main_tensor_count=2,
        has_indexer=False,
    ),
    "model.layers.2.self_attn.attn": LayerMetadata(
        base_addrs=[20624432955392, 20624449732608, 20624466509824, 20624483287040],
        block_len=[131072, 16384, 32768, 512],
        block_size_scale=[1, 1, 1, 1],
        tensor_group_idx=[0, 0, 1, 1],
        main_tensor_count=2,
        has_indexer=True,
    ),
}
GOOD = GOLDEN["model.layers.2.self_attn.attn"]


def tensor(
    address: int = 0x1000, length: int = 64, scale: int = 1, blocks: int = 4
) -> TensorLayout:
    return TensorLayout(address, length, scale, blocks)


# --- one tensor -------------------------------------------------------------------------------


def test_a_block_is_all_its_kernel_blocks() -> None:
    layout = TensorLayout(0x1000, 64, 4, 10)
    assert (layout.bytes_per_block, layout.extent, layout.end) == (256, 2560, 0x1000 + 2560)


def test_a_peers_tensor_has_no_end() -> None:
    layout = TensorLayout(0x1000, 64)
    for attribute in ("extent", "end"):
        with pytest.raises(LayoutError, match="number of blocks is unknown"):
            getattr(layout, attribute)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-1, 64, 1, 4), "not a 64-bit address"),
        ((2**64, 64, 1, 4), "not a 64-bit address"),
        ((0, 0, 1, 4), "got 0 and 1"),
        ((0, 64, 0, 4), "got 64 and 0"),
        ((0, 64, 1, 0), "num_blocks must be at least 1, got 0"),
        ((2**64 - 64, 64, 1, None), "past the 64-bit address space"),
        ((2**63, 2**32, 2**31, 1), "past the 64-bit address space"),
        ((0, 2**64 - 1, 2**64 - 1, None), "past the 64-bit address space"),
    ],
)
def test_impossible_tensors_are_refused(
    values: tuple[int, int, int, int | None], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        TensorLayout(*values)


def test_a_tensor_may_end_at_the_limit() -> None:
    layout = TensorLayout(ADDRESS_LIMIT - 64 * 3, 64, 1, 3)
    assert layout.end == ADDRESS_LIMIT
    assert layout.addressable_blocks == 3
    with pytest.raises(LayoutError, match="past the 64-bit"):
        replace(layout, num_blocks=4)


@pytest.mark.parametrize(
    ("shape", "itemsize", "scale", "expected"),
    [
        ((100, 128, 1, 512), 2, 1, (131072, 100)),  # Ascend SFA latent
        ((100, 128, 1, 64), 2, 1, (16384, 100)),  # Ascend SFA rope
        ((400, 32, 1, 64), 2, 4, (4096, 100)),  # four kernel blocks in a block
        ((10, 1, 16, 576), 4, 1, (36864, 10)),  # vLLM MLA on CPU: packed
    ],
)
def test_from_shape(
    shape: tuple[int, ...], itemsize: int, scale: int, expected: tuple[int, int]
) -> None:
    layout = TensorLayout.from_shape(0x1000, shape, itemsize, block_size_scale=scale)
    assert (layout.block_len, layout.num_blocks) == expected
    assert layout.block_size_scale == scale


def test_from_shape_refuses_what_is_not_contiguous() -> None:
    contiguous = TensorLayout.from_shape(0, (5, 1, 3, 2), 1, strides=(6, 99, 2, 1))
    assert contiguous.block_len == 6
    for strides in [(12, 6, 2, 1), (6, 6, 1, 3), (1, 5, 10, 30)]:
        with pytest.raises(LayoutError, match="not contiguous"):
            TensorLayout.from_shape(0, (5, 1, 3, 2), 1, strides=strides)


@pytest.mark.parametrize(("shape", "scale"), [((5, 2), 2), ((5, 2), 0), ((5,), 1), ((0, 2), 1)])
def test_from_shape_refuses_other_nonsense(shape: tuple[int, ...], scale: int) -> None:
    with pytest.raises(LayoutError):
        TensorLayout.from_shape(0x1000, shape, 1, block_size_scale=scale)


# --- a layer, to and from the wire ------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_metadata_goes_both_ways(name: str) -> None:
    layout = LayerLayout.from_wire(name, GOLDEN[name])
    assert layout.to_wire() == GOLDEN[name]
    assert layout.name == name
    assert [part.address for part in layout.tensors] == GOLDEN[name].base_addrs
    assert all(part.num_blocks is None for part in layout.tensors)
    assert len(layout.main) == 2
    assert layout.indexed == layout.tensors[2:]


def test_group_indexes_can_be_given() -> None:
    layout = LayerLayout.from_wire(NAME, GOOD)
    assert layout.to_wire(main_group=3, indexer_group=0).tensor_group_idx == [3, 3, 0, 0]


def test_the_number_of_blocks_stays_at_home() -> None:
    layout = LayerLayout(NAME, (tensor(),), tensor(0x9000))
    back = LayerLayout.from_wire(NAME, layout.to_wire())
    assert back.main == (replace(layout.main[0], num_blocks=None),)
    assert layout.indexer is not None
    assert back.indexer == replace(layout.indexer, num_blocks=None)
    assert back.scale is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"base_addrs": [1, 2, 3, 4, 5], "block_len": [1] * 5, "block_size_scale": [1] * 5},
            "5 tensors of which 2 are main leave 3",
        ),
        (
            {"base_addrs": [], "block_len": [], "block_size_scale": []},
            "main_tensor_count 2 does not fit its 0 tensors",
        ),
        ({"main_tensor_count": 0}, "main_tensor_count 0 does not fit its 4 tensors"),
        ({"main_tensor_count": 5}, "main_tensor_count 5 does not fit its 4 tensors"),
        ({"has_indexer": False}, "has_indexer is False, but 2 tensors follow the 2 main"),
        ({"main_tensor_count": 4}, "has_indexer is True, but 0 tensors follow the 4 main"),
        ({"block_len": [1, 1, 1]}, "4 addresses, but 3 values of block_len"),
        ({"block_size_scale": [1] * 5}, "5 of block_size_scale"),
        ({"block_len": [131072, 0, 32768, 512]}, "main 1 tensor: .* got 0 and 1"),
        ({"block_size_scale": [1, 1, 0, 1]}, "indexer tensor: .* got 32768 and 0"),
        ({"base_addrs": [1, 2, 3, 2**64 - 512]}, "scale tensor: 1 block.* of 512 bytes"),
        ({"block_len": [2**64 - 1] * 4, "block_size_scale": [2**64 - 1] * 4}, "main 0 tensor"),
    ],
)
def test_impossible_metadata_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        LayerLayout.from_wire(NAME, msgspec.structs.replace(GOOD, **changes))
    assert f"layer {NAME}: " in str(caught.value)


uint64 = st.integers(0, 2**64 - 1)


@given(
    st.integers(0, 6).flatmap(
        lambda count: st.builds(
            LayerMetadata,
            base_addrs=st.lists(uint64, min_size=count, max_size=count),
            block_len=st.lists(uint64, min_size=count, max_size=count),
            block_size_scale=st.lists(uint64, min_size=count, max_size=count),
            tensor_group_idx=st.lists(uint64, min_size=count, max_size=count),
            main_tensor_count=st.integers(0, 6) | uint64,
            has_indexer=st.booleans(),
        )
    )
)
def test_any_metadata_gives_a_layout_or_a_layout_error(metadata: LayerMetadata) -> None:
    try:
        layout = LayerLayout.from_wire(NAME, metadata)
    except LayoutError as error:
        refused = str(error)
    else:
        groups = metadata.tensor_group_idx
        again = msgspec.structs.replace(layout.to_wire(), tensor_group_idx=groups)
        assert again == metadata
        return
    assert f"layer {NAME}: " in refused


def test_a_layer_has_main_tensors_and_no_lone_scale() -> None:
    with pytest.raises(LayoutError, match=f"layer {NAME}: no main KV tensor"):
        LayerLayout(NAME, ())
    with pytest.raises(LayoutError, match=f"layer {NAME}: a scale tensor without an indexer"):
        LayerLayout(NAME, (tensor(),), None, tensor())


# --- prefill against decode -------------------------------------------------------------------

DECODE = LayerLayout(
    NAME, (tensor(0, 512), tensor(0x10000, 64)), tensor(0x20000, 128, 2), tensor(0x30000, 8)
)


def test_equal_block_bytes_are_compatible() -> None:
    check_compatible(DECODE, DECODE)
    other = replace(DECODE, main=(TensorLayout(0x77, 128, 4), TensorLayout(0x99, 32, 2)))
    check_compatible(other, DECODE)
    check_compatible(DECODE, other)


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        (replace(DECODE, name="other"), ["layer other of prefill", "same model"]),
        (
            replace(DECODE, main=DECODE.main[:1]),
            ["number of main KV tensors", "prefill 1", "decode 2", "attention backend"],
        ),
        (
            replace(DECODE, main=(DECODE.main[0], tensor(0, 72))),
            [
                "main 1 tensor",
                "prefill 72",
                "decode 64",
                "--block-size",
                "--kv-cache-dtype",
                "--tensor-parallel-size",
            ],
        ),
        (
            replace(DECODE, indexer=None, scale=None),
            ["indexer tensor: prefill no, decode yes", "quantisation"],
        ),
        (replace(DECODE, scale=None), ["scale tensor: prefill no, decode yes"]),
        (
            replace(DECODE, indexer=tensor(0, 129, 2)),
            ["indexer tensor", "prefill 258 (2 x 129)", "decode 256 (2 x 128)"],
        ),
        (replace(DECODE, scale=tensor(0, 9)), ["scale tensor", "prefill 9", "decode 8"]),
    ],
)
def test_a_mismatch_names_layer_tensor_values_and_remedy(
    prefill: LayerLayout, words: list[str]
) -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        check_compatible(prefill, DECODE)
    for word in [f"layer {NAME}", *words]:
        assert word in str(caught.value)
    with pytest.raises(LayoutMismatchError):
        check_compatible(DECODE, prefill)


# --- storage slots ----------------------------------------------------------------------------


def layer(name: str, *ranges: tuple[int, int]) -> LayerLayout:
    """A layer of byte ranges; the last of several is its indexer."""
    parts = tuple(TensorLayout(start, 1, 1, end - start) for start, end in ranges)
    return LayerLayout(name, parts[:-1], parts[-1]) if len(parts) > 1 else LayerLayout(name, parts)


def test_layers_on_one_buffer_share_a_slot_and_main_is_apart_from_indexer() -> None:
    slots = StorageSlots.from_layouts(
        [
            layer("a", (100, 200), (500, 600)),
            layer("b", (300, 400), (500, 600)),
            layer("c", (100, 200), (700, 800)),
        ]
    )
    assert slots.slots_of("a") == {0, 2}
    assert slots.slots_of("b") == {1, 2}
    assert slots.slots_of("c") == {0, 3}
    assert [slots.layers_of(slot) for slot in range(len(slots))] == [
        {"a", "c"},
        {"b"},
        {"a", "b"},
        {"c"},
    ]


def test_partial_overlap_joins_and_touching_does_not() -> None:
    slots = StorageSlots.from_layouts(
        [layer("a", (0, 10)), layer("b", (10, 20)), layer("c", (19, 30)), layer("d", (30, 31))]
    )
    assert len(slots) == 3
    assert slots.slots_of("b") == slots.slots_of("c") == {1}


def test_a_long_range_joins_what_lies_within() -> None:
    slots = StorageSlots.from_layouts(
        [layer("a", (0, 100)), layer("b", (1, 2)), layer("c", (50, 60)), layer("d", (99, 110))]
    )
    assert len(slots) == 1


def test_no_layers_no_slots() -> None:
    assert len(StorageSlots.from_layouts([])) == 0


def test_slots_refuse_unknown_things() -> None:
    slots = StorageSlots.from_layouts([layer("a", (0, 10))])
    with pytest.raises(LayoutError, match="layer b has no registered cache"):
        slots.slots_of("b")
    for slot in (-1, 1):
        with pytest.raises(LayoutError, match=f"storage slot {slot} is outside 0 to 0"):
            slots.layers_of(slot)
    with pytest.raises(LayoutError, match="layer a is given twice"):
        StorageSlots.from_layouts([layer("a", (0, 10)), layer("a", (20, 30))])
    peer = LayerLayout.from_wire(NAME, GOOD)
    with pytest.raises(LayoutError, match=f"layer {NAME}: main 0 tensor: number of blocks"):
        StorageSlots.from_layouts([peer])


ranges = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.lists(st.lists(ranges, min_size=1, max_size=3), max_size=10))
def test_slots_are_the_components_of_overlap(layers: list[list[tuple[int, int]]]) -> None:
    slots = StorageSlots.from_layouts(
        layer(str(index), *parts) for index, parts in enumerate(layers)
    )
    every = [(part, str(index)) for index, parts in enumerate(layers) for part in parts]
    # The obvious way: give each range a colour, and repaint until nothing changes.
    colour = list(range(len(every)))
    changed = True
    while changed:
        changed = False
        for one, two in combinations(range(len(every)), 2):
            (a, b), (c, d) = every[one][0], every[two][0]
            if a < d and c < b and colour[one] != colour[two]:
                colour[one] = colour[two] = min(colour[one], colour[two])
                changed = True
    assert len(slots) == len(set(colour))
    painted = {
        shade: {name for (_, name), own in zip(every, colour, strict=True) if own == shade}
        for shade in colour
    }
    found = [slots.layers_of(slot) for slot in range(len(slots))]
    assert sorted(map(sorted, found)) == sorted(map(sorted, painted.values()))
    for slot, names in enumerate(found):
        assert all(slot in slots.slots_of(name) for name in names)
