"""vllm-ascend's sparse KV offload as the destination: main KV in a host pool that ranks share.

The pool belongs to vllm-ascend's manager (:mod:`rd2h.destinations.offload_manager`). It has one K
and one V tensor for each layer, at global virtual addresses that every TP rank can write to; each
rank pulls its own part of the blocks (``docs/architecture.md``). The indexer and its LIC8 scale
are the rank's own: the registered caches with ``indexer`` in their name, in NPU memory.

What is registered under a main layer's name is not looked at: with offload on it is what
vllm-ascend computes with, and parts of it are None.

**What the transfer engine registers**: on every rank, the whole pool and the rank's own indexers.
A rank may write any part of the pool, since which part is its own changes with each batch, and an
engine refuses a destination that was not registered with it.

Pure but for the manager and the tensors' own properties; the thread that registers the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from rd2h.destinations.destination import Destination, regions_of
from rd2h.destinations.offload_manager import (
    SparseOffloadError,
    SparseOffloadManager,
    registered_manager,
)
from rd2h.destinations.tensors import CacheTensors, indexer_parent, indexer_tensors, is_indexer
from rd2h.layout import LayerLayout, TensorLayout
from rd2h.texts import listed

__all__ = ["sparse_offload_destination"]


def sparse_offload_destination(
    kv_caches: Mapping[str, CacheTensors], num_blocks: int, tp_rank: int
) -> Destination:
    """Read main KV into the manager's pool, and indexers into the registered caches.

    Args:
        kv_caches: Layer name to tensors, as the engine's worker registers them.
        num_blocks: Blocks that the engine's scheduler hands out ids of.
        tp_rank: This rank of the tensor-parallel group.

    Raises:
        NoManagerError: Sparse KV offload is off.
        SparseOffloadError: The manager has no caches yet, or it contradicts itself or what is
            registered.
        LayoutError: An indexer's tensors cannot be read into block by block.
    """
    manager = registered_manager()
    pool = _pool(manager, num_blocks, tp_rank)
    mains = [name for name in kv_caches if not is_indexer(name)]
    if odd := sorted(set(mains) ^ set(pool)):
        raise SparseOffloadError(
            f"{len(mains)} attention layers are registered and {len(pool)} are in vllm-ascend's "
            f"host pool, but {listed(odd)} only in one of them; rd2h hands over models whose main "
            f"KV is in the pool as a whole"
        )
    indexers = indexer_tensors(kv_caches, num_blocks)
    owners = _owners(pool, indexers)
    layers = {
        name: LayerLayout(name, pool[name], *(indexers[owners[name]] if name in owners else ()))
        for name in manager.offload_layer_names
    }
    return Destination(layers, regions_of(layers.values()), main_shared=True)


def _owners(pool: Mapping[str, object], indexers: Mapping[str, object]) -> dict[str, str]:
    """Each main layer's indexer: the one whose name is the same up to ``indexer``."""
    owners: dict[str, str] = {}
    for indexer in indexers:
        parent = indexer_parent(indexer)
        mains = [name for name in pool if name.startswith(parent)]
        if len(mains) != 1:
            raise SparseOffloadError(
                f"indexer {indexer}: {len(mains)} of the {len(pool)} layers in vllm-ascend's host "
                f"pool have names that begin with {parent!r}; it belongs to exactly one"
            )
        if mains[0] in owners:
            raise SparseOffloadError(
                f"layer {mains[0]}: both {owners[mains[0]]} and {indexer} are its indexer by name"
            )
        owners[mains[0]] = indexer
    return owners


def _pool(
    manager: SparseOffloadManager, num_blocks: int, tp_rank: int
) -> dict[str, tuple[TensorLayout, TensorLayout]]:
    """K and V of every layer, checked against whatever else the manager says of them."""
    names = manager.offload_layer_names
    lists: dict[str, Sequence[object]] = {
        "gvas_k_bases": manager.gvas_k_bases,
        "gvas_v_bases": manager.gvas_v_bases,
        "cpu_block_lens": manager.cpu_block_lens,
    }
    # They are rank 0's; views of them on other ranks must be of the same memory.
    has_tensors = tp_rank == 0 or bool(manager.k_caches_cpu or manager.v_caches_cpu)
    if has_tensors:
        lists |= {"k_caches_cpu": manager.k_caches_cpu, "v_caches_cpu": manager.v_caches_cpu}
    for what, values in lists.items():
        if len(values) != len(names):
            raise SparseOffloadError(
                f"vllm-ascend's host pool has {len(names)} layers (offload_layer_names), but "
                f"{len(values)} entries in {what} on rank {tp_rank}; use a vllm-ascend that rd2h "
                f"knows (0.30.0rc2)"
            )
    index = manager.layer_name_to_offload_id
    if set(index) != set(names) or sorted(index.values()) != list(range(len(names))):
        raise SparseOffloadError(
            f"vllm-ascend's host pool has {len(names)} layers (offload_layer_names), but "
            f"layer_name_to_offload_id does not give each of them a place of its own: "
            f"{listed([f'{name} at {place}' for name, place in index.items()])}"
        )
    pool: dict[str, tuple[TensorLayout, TensorLayout]] = {}
    for name in names:
        place = index[name]
        lengths = manager.cpu_block_lens[place]
        if len(lengths) != 2:
            raise SparseOffloadError(
                f"layer {name}: cpu_block_lens is {lengths}; it has the bytes of a block of K and "
                f"of V"
            )
        sides = []
        for role, bases, tensors, length in (
            ("k", manager.gvas_k_bases, manager.k_caches_cpu, lengths[0]),
            ("v", manager.gvas_v_bases, manager.v_caches_cpu, lengths[1]),
        ):
            what = f"layer {name}: vllm-ascend's {role} pool"
            base = _positive(f"{what}: its address in gvas_{role}_bases", bases[place])
            length = _positive(f"{what}: its block in cpu_block_lens", length)
            if has_tensors:
                _check_tensor(what, tensors[place], base, length, num_blocks)
            sides.append(TensorLayout(base, length, num_blocks=num_blocks))
        pool[name] = (sides[0], sides[1])
    _check_apart(pool)
    return pool


def _check_tensor(
    what: str, tensor: torch.Tensor, base: int, block_len: int, num_blocks: int
) -> None:
    """Hold the numbers, which every rank has, to the memory, which rank 0 has."""
    if not tensor.is_contiguous():
        raise SparseOffloadError(
            f"{what}: its tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is "
            f"not contiguous"
        )
    if tensor.data_ptr() != base:
        raise SparseOffloadError(
            f"{what}: its tensor is at {tensor.data_ptr():#x}, its global virtual address is "
            f"{base:#x}; rd2h knows pools in which the two are one"
        )
    held = tensor.numel() * tensor.element_size()
    if held < num_blocks * block_len:
        raise SparseOffloadError(
            f"{what}: its {held} bytes hold {held // block_len} blocks of {block_len} bytes, but "
            f"the engine hands out ids of {num_blocks} blocks"
        )
    kernel_block = held // tensor.shape[0]
    if block_len % kernel_block:
        raise SparseOffloadError(
            f"{what}: a block has {block_len} bytes by cpu_block_lens, which are not whole kernel "
            f"blocks of {kernel_block} bytes in its tensor of shape {tuple(tensor.shape)}"
        )


def _check_apart(pool: Mapping[str, Sequence[TensorLayout]]) -> None:
    """No byte of the pool may belong to two tensors: both would be written."""
    ranges = sorted(
        (tensor.address, tensor.end, f"{role} of layer {name}")
        for name, tensors in pool.items()
        for role, tensor in zip("kv", tensors, strict=True)
    )
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise SparseOffloadError(
                f"vllm-ascend's host pool: {first} ends at {end:#x}, but {second} begins at "
                f"{start:#x}"
            )


def _positive(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SparseOffloadError(f"{what} is {value!r}; it is a positive number of bytes")
    return value
