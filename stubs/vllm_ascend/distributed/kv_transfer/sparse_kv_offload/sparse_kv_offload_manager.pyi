"""What rd2h reads of vllm-ascend 0.30.0rc2's module of this name."""

from torch import Tensor

class SparseKVOffloadManager:
    """The host pool of main KV that the TP ranks of one engine share."""

    # Not there before its `register_kv_caches` has run.
    offload_layer_names: list[str]
    layer_name_to_offload_id: dict[str, int]
    gvas_k_bases: list[int]
    gvas_v_bases: list[int]
    cpu_block_lens: list[tuple[int, int]]
    # Empty on other ranks than TP rank 0, unless an operator needs views there.
    k_caches_cpu: list[Tensor]
    v_caches_cpu: list[Tensor]

def get_sparse_kv_offload_manager() -> SparseKVOffloadManager | None:
    """Return this process's manager; fails an assertion if there is none, but for `python -O`."""
