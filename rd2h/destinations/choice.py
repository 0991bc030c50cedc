"""Which destination an engine has, and which engines may not have one: told by the platform.

The thread that registers the caches.
"""

from __future__ import annotations

from collections.abc import Mapping

from rd2h.destinations.destination import Destination
from rd2h.destinations.offload_manager import (
    OFFLOAD_OPTION,
    NoManagerError,
    SparseOffloadError,
    find_manager,
)
from rd2h.destinations.paged import paged_destination
from rd2h.destinations.sparse_offload import sparse_offload_destination
from rd2h.destinations.tensors import CacheTensors

__all__ = ["check_prefill_platform", "decode_destination"]

_NPU = "npu"


def decode_destination(
    platform: str, kv_caches: Mapping[str, CacheTensors], num_blocks: int, tp_rank: int
) -> Destination:
    """Where Decode reads to: on an NPU the host pool of sparse KV offload, else the paged cache.

    Whether offload is on is told by vllm-ascend's manager, not by its option: it is there, in the
    worker's process, exactly if the option is set, whatever the option is called.

    Args:
        platform: vLLM's ``current_platform.device_type``.
        kv_caches: Layer name to tensors, as the engine's worker registers them.
        num_blocks: Blocks that the engine's scheduler hands out ids of.
        tp_rank: This rank of the tensor-parallel group.

    Raises:
        SparseOffloadError: Sparse KV offload is off on an NPU, or not as rd2h needs it.
        LayoutError: The tensors cannot be read into block by block.
    """
    if platform != _NPU:
        return paged_destination(kv_caches, num_blocks)
    try:
        return sparse_offload_destination(kv_caches, num_blocks, tp_rank)
    except NoManagerError as error:
        raise NoManagerError(
            f"Decode keeps main KV in vllm-ascend's host pool, but {error}; set {OFFLOAD_OPTION} "
            f"on the Decode engine"
        ) from error


def check_prefill_platform(platform: str) -> None:
    """Refuse a Prefill engine on an NPU with sparse KV offload: its main KV is not in its cache.

    Args:
        platform: vLLM's ``current_platform.device_type``.

    Raises:
        SparseOffloadError: Sparse KV offload is on.
    """
    if platform != _NPU:
        return
    try:
        find_manager()
    except NoManagerError:
        return
    raise SparseOffloadError(
        f"Prefill sends main KV from its own cache, but sparse KV offload is on in this engine; "
        f"leave out {OFFLOAD_OPTION} on the Prefill engine"
    )
