import pytest
import torch

from rd2h.destinations import CacheTensors, cache_layouts
from rd2h.destinations.tensors import indexer_tensors
from rd2h.layout import LayoutError

BLOCKS = 8
ATTN = "model.layers.0.self_attn.attn"
INDEXER = "model.layers.0.self_attn.indexer.k_cache"


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def sizes(registered: CacheTensors) -> list[tuple[int, int, int, int | None]]:
    """Offset, kernel-block bytes, scale and blocks of each main tensor."""
    (layout,) = cache_layouts({ATTN: registered}, BLOCKS).values()
    first = registered if isinstance(registered, torch.Tensor) else registered[0]
    return [
        (t.address - first.data_ptr(), t.block_len, t.block_size_scale, t.num_blocks)
        for t in layout.main
    ]


def test_one_packed_tensor() -> None:
    assert sizes(zeros(8, 1, 4, 10)) == [(0, 80, 1, 8)]


def test_keys_and_values_apart_are_two_tensors() -> None:
    assert sizes(zeros(2, 8, 4, 10)) == [(0, 80, 1, 8), (640, 80, 1, 8)]


def test_kernel_blocks_are_grouped() -> None:
    assert sizes(zeros(32, 4)) == [(0, 8, 4, 8)]
    assert sizes(zeros(2, 16, 4)) == [(0, 8, 2, 8), (128, 8, 2, 8)]


def test_inner_dimensions_may_lie_in_any_order() -> None:
    assert sizes(zeros(8, 3, 4, 5).permute(0, 2, 1, 3)) == [(0, 120, 1, 8)]
    assert sizes(zeros(8, 5, 4, 3).permute(0, 3, 2, 1)) == [(0, 120, 1, 8)]
    assert sizes(zeros(2, 8, 3, 4).transpose(2, 3)) == [(0, 24, 1, 8), (192, 24, 1, 8)]
    assert sizes(zeros(8, 1, 4).permute(0, 2, 1)) == [(0, 8, 1, 8)]


@pytest.mark.parametrize(
    "tensor",
    [
        zeros(8, 4, 10)[:, :2],  # holes inside a block
        zeros(16, 4)[::2],  # between blocks
        zeros(4, 8).t(),  # blocks are not outermost
        zeros(1, 4).expand(8, 4),  # one block in eight places
    ],
)
def test_tensors_whose_blocks_do_not_lie_back_to_back_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=f"layer {ATTN}: .*contiguous"):
        cache_layouts({ATTN: tensor}, BLOCKS)


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (3, 8, 4), (0, 4), (2, 0, 4), (4,), ()])
def test_tensors_that_do_not_hold_the_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=f"layer {ATTN}: .*does not hold 8 blocks"):
        cache_layouts({ATTN: zeros(*shape)}, BLOCKS)


def test_a_tuple_is_main_then_indexer_then_scale() -> None:
    tensors = [zeros(8, 5), zeros(8, 2), zeros(8, 3), zeros(8, 1)]
    for count in range(1, 5):
        (layout,) = cache_layouts({ATTN: tensors[:count]}, BLOCKS).values()
        assert len(layout.main) == min(count, 2)
        assert [t.address for t in layout.tensors] == [t.data_ptr() for t in tensors[:count]]
        assert (layout.indexer is not None, layout.scale is not None) == (count > 2, count > 3)


@pytest.mark.parametrize(
    ("registered", "words"),
    [
        ([zeros(8, 1)] * 5, "5 cache tensors"),
        ([], "no cache tensor"),
        ([zeros(2, 8, 1), zeros(2, 8, 1), zeros(8, 1)], "5 cache tensors"),
    ],
)
def test_other_numbers_of_tensors_are_refused(registered: list[torch.Tensor], words: str) -> None:
    with pytest.raises(LayoutError, match=f"layer {ATTN}: {words}"):
        cache_layouts({ATTN: registered}, BLOCKS)


def test_an_indexer_joins_the_layer_whose_name_it_shares_whatever_the_order() -> None:
    keys, scale = zeros(8, 3), zeros(16, 2)
    other = "model.layers.10.self_attn.attn"
    for order in ([INDEXER, ATTN, other], [other, ATTN, INDEXER]):
        tensors: dict[str, CacheTensors] = {ATTN: zeros(8, 5), other: zeros(8, 5)}
        tensors[INDEXER] = (keys, scale)
        layouts = cache_layouts({name: tensors[name] for name in order}, BLOCKS)
        assert list(layouts) == [name for name in order if name != INDEXER]
        assert layouts[other].indexer is None
        indexer, lic8 = layouts[ATTN].indexer, layouts[ATTN].scale
        assert indexer is not None
        assert lic8 is not None
        assert (indexer.address, indexer.block_len) == (keys.data_ptr(), 6)
        assert (lic8.address, lic8.bytes_per_block) == (scale.data_ptr(), 8)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({INDEXER: [zeros(8, 1)] * 3}, f"indexer {INDEXER}: 3 cache tensors"),
        ({INDEXER: zeros(7, 1)}, f"layer {INDEXER}: .*does not hold 8 blocks"),
        (
            {"model.layers.1.self_attn.indexer.k_cache": zeros(8, 1)},
            "no attention layer's name begins with 'model.layers.1.self_attn.'",
        ),
        (
            {INDEXER: zeros(8, 1), "model.layers.0.self_attn.indexer.v_cache": zeros(8, 1)},
            f"{ATTN}: indexer .*v_cache belongs to it, but",
        ),
        (
            {INDEXER: zeros(8, 1), "model.layers.0.self_attn.more": zeros(8, 1)},
            f"layer model.layers.0.self_attn.more: .* {ATTN} has it",
        ),
    ],
)
def test_indexers_that_fit_no_layer_are_refused(extra: dict[str, CacheTensors], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        cache_layouts({ATTN: zeros(8, 5), **extra}, BLOCKS)


def test_a_layer_has_one_indexer_only() -> None:
    own = [zeros(8, 5), zeros(8, 2), zeros(8, 3)]
    with pytest.raises(LayoutError, match="it has one in its own cache"):
        cache_layouts({ATTN: own, INDEXER: zeros(8, 1)}, BLOCKS)


def test_indexers_alone() -> None:
    found = indexer_tensors({ATTN: zeros(8, 5), INDEXER: zeros(8, 3)}, BLOCKS)
    assert [len(tensors) for tensors in found.values()] == [1]
    assert list(found) == [INDEXER]
