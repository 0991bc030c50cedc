"""From the cache tensors that an engine registers to layouts, layer by layer.

What is registered under a layer's name tells what it is:

* a name with ``indexer`` in it is a layer's indexer; if it has two tensors, the second is the LIC8
  scale. It belongs to the attention layer that shares the part of the name before it;
* anything else is main KV: one packed tensor, or two (K and V apart, or latent and rope). A third
  and a fourth tensor of such a layer are its indexer and scale.

Pure but for the tensors' own properties; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from rd2h.layout import LayerLayout, LayoutError, TensorLayout

__all__ = ["CacheTensors", "cache_layouts", "indexer_parent", "indexer_tensors", "is_indexer"]

CacheTensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""What an engine registers for one layer."""

_MARK = "indexer"


def is_indexer(layer_name: str) -> bool:
    """Whether a layer's cache is an indexer's, by its name."""
    return _MARK in layer_name


def indexer_parent(indexer: str) -> str:
    """What the names of an indexer and of its attention layer begin with."""
    return indexer[: indexer.index(_MARK)]


def cache_layouts(kv_caches: Mapping[str, CacheTensors], num_blocks: int) -> dict[str, LayerLayout]:
    """The layouts of all layers with main KV, in the order in which they were registered.

    Args:
        kv_caches: Layer name to tensors, as the engine's worker registers them. A tensor's first
            dimension counts kernel blocks; one tensor whose first dimension is 2 and whose second
            counts them is K and V apart.
        num_blocks: Blocks that the engine's scheduler hands out ids of.

    Raises:
        LayoutError: A tensor is not paged as blocks that lie back to back, or an indexer's
            attention layer cannot be found. The message names the layer.
    """
    indexers = indexer_tensors(kv_caches, num_blocks)
    layouts: dict[str, LayerLayout] = {}
    owners: dict[str, str] = {}
    for name, registered in kv_caches.items():
        if is_indexer(name):
            continue
        tensors = _paged(name, registered, num_blocks)
        if len(tensors) > 4:
            raise LayoutError(
                f"layer {name}: {len(tensors)} cache tensors; at most two of main KV, an indexer "
                f"and its scale are known"
            )
        main, extra = tensors[:2], tensors[2:]
        for indexer in indexers:
            if name.startswith(indexer_parent(indexer)):
                if extra or indexer in owners:
                    raise LayoutError(
                        f"layer {name}: indexer {indexer} belongs to it, but "
                        f"{'it has one in its own cache' if extra else owners[indexer] + ' has it'}"
                    )
                owners[indexer] = name
                extra = indexers[indexer]
        layouts[name] = LayerLayout(name, tuple(main), *extra)
    if lost := [name for name in indexers if name not in owners]:
        raise LayoutError(
            f"indexer {lost[0]}: no attention layer's name begins with "
            f"{indexer_parent(lost[0])!r}; {len(layouts)} layers are registered"
        )
    return layouts


def indexer_tensors(
    kv_caches: Mapping[str, CacheTensors], num_blocks: int
) -> dict[str, list[TensorLayout]]:
    """The registered caches of indexers alone: by name, the key cache and perhaps its scale.

    Raises:
        LayoutError: A tensor is not paged as it must be, or there are more than two.
    """
    indexers: dict[str, list[TensorLayout]] = {}
    for name, registered in kv_caches.items():
        if not is_indexer(name):
            continue
        indexers[name] = _paged(name, registered, num_blocks)
        if len(indexers[name]) > 2:
            raise LayoutError(
                f"indexer {name}: {len(indexers[name])} cache tensors; it has a key cache and at "
                f"most one scale"
            )
    return indexers


def _paged(name: str, registered: CacheTensors, num_blocks: int) -> list[TensorLayout]:
    tensors = [registered] if isinstance(registered, torch.Tensor) else list(registered)
    if not tensors:
        raise LayoutError(f"layer {name}: no cache tensor is registered")
    try:
        return [layout for tensor in tensors for layout in _layouts(tensor, num_blocks)]
    except LayoutError as error:
        raise LayoutError(f"layer {name}: {error}") from None


def _layouts(tensor: torch.Tensor, num_blocks: int) -> Iterable[TensorLayout]:
    shape = tuple(tensor.shape)
    if shape and shape[0] and shape[0] % num_blocks == 0:
        yield _layout(tensor, shape[0] // num_blocks)
    elif len(shape) > 1 and shape[0] == 2 and shape[1] and shape[1] % num_blocks == 0:
        for half in tensor.unbind(0):
            yield _layout(half, shape[1] // num_blocks)
    else:
        raise LayoutError(
            f"a cache tensor of shape {shape} does not hold {num_blocks} blocks, neither in its "
            f"first dimension nor as K and V in its second"
        )


def _layout(tensor: torch.Tensor, scale: int) -> TensorLayout:
    # A block is moved as bytes, so its inner dimensions may lie in any order, as long as they
    # leave no holes: look at them in the order in which they lie.
    strides = tensor.stride()
    inner = sorted(range(1, tensor.dim()), key=lambda dim: -strides[dim])
    laid_out = tensor.permute(0, *inner)
    return TensorLayout.from_shape(
        tensor.data_ptr(),
        tuple(laid_out.shape),
        tensor.element_size(),
        block_size_scale=scale,
        strides=tuple(laid_out.stride()),
    )
