"""vllm-ascend's manager of sparse KV offload, as far as rd2h depends on it.

The only place that imports ``vllm_ascend``, and the one to change when it renames something: the
module and its function in `find_manager`, the attributes in
`SparseOffloadManager`. The names are those of vllm-ascend 0.30.0rc2.

No threads; for the thread that registers the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

__all__ = [
    "OFFLOAD_OPTION",
    "NoManagerError",
    "SparseOffloadError",
    "SparseOffloadManager",
    "find_manager",
    "registered_manager",
]

OFFLOAD_OPTION = '"sparse_kv_offload_config": {"enabled": true} in --additional-config'
"""How an operator turns sparse KV offload on, in vllm-ascend's words."""


class SparseOffloadError(ValueError):
    """vllm-ascend's sparse KV offload is not as rd2h needs it; says what to change."""


class NoManagerError(SparseOffloadError):
    """Sparse KV offload is off in this process, or vllm-ascend does not have it."""


class SparseOffloadManager(Protocol):
    """A pool of main KV in host memory, which the TP ranks of one engine share.

    What vllm-ascend's ``SparseKVOffloadManager`` has once its own ``register_kv_caches`` has run;
    vllm-ascend runs it before that of the connector.

    Attributes:
        offload_layer_names: The layers whose main KV is in the pool; every rank's are the same.
        layer_name_to_offload_id: The layer-to-pool index: for each of these names, its place in
            all of the lists below.
        gvas_k_bases: Global virtual address of block 0 of K, which every rank can write to.
        gvas_v_bases: Likewise of V.
        cpu_block_lens: Bytes of one block (of the engine's, all its kernel blocks) of K and of V.
        k_caches_cpu: The pool's own tensors, ``[kernel blocks, ...]``, on TP rank 0. Empty on
            other ranks, unless an operator of vllm-ascend needs views there.
        v_caches_cpu: Likewise of V.
    """

    @property
    def offload_layer_names(self) -> Sequence[str]: ...  # noqa: D102 (all are described above)
    @property
    def layer_name_to_offload_id(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def gvas_k_bases(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def gvas_v_bases(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def cpu_block_lens(self) -> Sequence[Sequence[int]]: ...  # noqa: D102
    @property
    def k_caches_cpu(self) -> Sequence[torch.Tensor]: ...  # noqa: D102
    @property
    def v_caches_cpu(self) -> Sequence[torch.Tensor]: ...  # noqa: D102


_ATTRIBUTES = (
    "offload_layer_names",
    "layer_name_to_offload_id",
    "gvas_k_bases",
    "gvas_v_bases",
    "cpu_block_lens",
    "k_caches_cpu",
    "v_caches_cpu",
)


def find_manager() -> SparseOffloadManager:
    """This process's manager, in whatever state it is.

    Raises:
        NoManagerError: There is none.
    """
    try:
        from vllm_ascend.distributed.kv_transfer.sparse_kv_offload import sparse_kv_offload_manager
    except ImportError as error:
        raise NoManagerError(
            f"this vllm-ascend has no sparse KV offload ({' '.join(str(error).split())})"
        ) from error
    try:
        manager = sparse_kv_offload_manager.get_sparse_kv_offload_manager()
    except AssertionError:  # how vllm-ascend says that there is none
        manager = None
    if manager is None:
        raise NoManagerError("sparse KV offload is off in this engine")
    return manager


def registered_manager() -> SparseOffloadManager:
    """This process's manager, with its pool.

    Raises:
        NoManagerError: There is none.
        SparseOffloadError: It has no pool yet, lacks an attribute, or wants of a connector more
            than rd2h does.
    """
    manager = find_manager()
    missing = [name for name in _ATTRIBUTES if not hasattr(manager, name)]
    if "offload_layer_names" in missing:
        raise SparseOffloadError(
            "vllm-ascend's SparseKVOffloadManager has no caches yet; its register_kv_caches must "
            "run before that of the KV connector: use a vllm-ascend that does (0.30.0rc2)"
        )
    if missing:
        raise SparseOffloadError(
            f"vllm-ascend's SparseKVOffloadManager has no {', '.join(missing)}; rd2h knows the one "
            f"of vllm-ascend 0.30.0rc2: use that version, or an rd2h that knows yours"
        )
    # An option of later versions, hence no part of what is asked of every manager.
    if getattr(manager, "use_fused_copy_sfa", False):
        raise SparseOffloadError(
            "sparse KV offload runs with fused_op_type fused_copy_sfa, for which a KV connector "
            "also has to fill vllm-ascend's top-k buffers; rd2h does not: set "
            '"fused_op_type": "none" in "sparse_kv_offload_config" in --additional-config'
        )
    return manager
