import pytest

from rd2h.destinations import regions_of
from rd2h.engines import MemoryRegion
from rd2h.layout import LayerLayout, LayoutError, TensorLayout


def layer(name: str, *tensors: tuple[int, int]) -> LayerLayout:
    """Tensors of blocks of 8 bytes, by address and number of blocks."""
    return LayerLayout(name, tuple(TensorLayout(a, 8, 1, blocks) for a, blocks in tensors))


def test_every_tensor_once_by_ascending_address() -> None:
    layers = [layer("b", (512, 2), (64, 1)), layer("a", (128, 4))]
    assert regions_of(layers) == (
        MemoryRegion(64, 8),
        MemoryRegion(128, 32),
        MemoryRegion(512, 16),
    )


def test_layers_in_one_buffer_are_registered_once() -> None:
    layers = [layer("a", (64, 4)), layer("b", (64, 4)), layer("c", (72, 2)), layer("d", (88, 9))]
    assert regions_of(layers) == (MemoryRegion(64, 96),)


def test_neighbours_stay_apart() -> None:
    assert regions_of([layer("a", (64, 1), (72, 1))]) == (MemoryRegion(64, 8), MemoryRegion(72, 8))


def test_indexer_and_scale_are_registered_too() -> None:
    main, keys, scale = (TensorLayout(a, 8, 1, 1) for a in (64, 128, 256))
    found = regions_of([LayerLayout("a", (main,), keys, scale)])
    assert [region.address for region in found] == [64, 128, 256]


def test_nothing_needs_nothing() -> None:
    assert regions_of([]) == ()


def test_a_peers_tensor_cannot_be_registered() -> None:
    with pytest.raises(LayoutError, match="number of blocks is unknown"):
        regions_of([LayerLayout("a", (TensorLayout(64, 8),))])
