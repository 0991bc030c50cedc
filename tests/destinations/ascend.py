"""vllm-ascend's sparse KV offload on torch's CPU: as strict as the real one, as far as rd2h sees.

Host pool and NPU memory are both CPU tensors. What the real manager broadcasts from TP rank 0 is
taken from the `HostPool` that the ranks are made with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeAlias

import pytest
import torch

from rd2h.destinations.offload_manager import SparseOffloadManager
from rd2h.destinations.tensors import CacheTensors

__all__ = ["Caches", "FakeManager", "HostPool", "Rank", "indexer", "install", "main"]

Caches: TypeAlias = dict[str, CacheTensors]

_PACKAGE = "vllm_ascend.distributed.kv_transfer.sparse_kv_offload"
_MODULE = f"{_PACKAGE}.sparse_kv_offload_manager"
UNTOUCHED = 0x5E


def main(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def indexer(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def memory(*shape: int, dtype: torch.dtype = torch.bfloat16, fill: int = UNTOUCHED) -> torch.Tensor:
    """A tensor every byte of which is ``fill``."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(fill)
    return tensor


@dataclass
class HostPool:
    """The pool of main KV that the TP ranks of one engine share.

    Attributes:
        k: Of each layer, ``[kernel blocks, tokens, 1, latent]``.
        v: Likewise, ``[kernel blocks, tokens, 1, rope]``.
    """

    layers: int
    num_blocks: int
    scale: int = 1
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        kernel_blocks = self.num_blocks * self.scale
        self.k = [memory(kernel_blocks, 4, 1, 16) for _ in range(self.layers)]
        self.v = [memory(kernel_blocks, 4, 1, 4) for _ in range(self.layers)]


class FakeManager:
    """What `SparseKVOffloadManager` shows; it has no attribute before `register_kv_caches`."""

    use_fused_copy_sfa = False

    def __init__(self, pool: HostPool, tp_rank: int) -> None:
        self._pool = pool
        self._tp_rank = tp_rank

    def register_kv_caches(self, kv_caches: Caches) -> None:
        pool = self._pool
        self.offload_layer_names = [name for name in kv_caches if "indexer" not in name]
        for name in self.offload_layer_names:
            # Device K and V (None), host K and V (None but on rank 0), top-k buffers of K and V.
            assert len(kv_caches[name]) == 6, name
        self.layer_name_to_offload_id = {n: i for i, n in enumerate(self.offload_layer_names)}
        self.gvas_k_bases = [tensor.data_ptr() for tensor in pool.k]
        self.gvas_v_bases = [tensor.data_ptr() for tensor in pool.v]
        self.cpu_block_lens = [
            (k.nbytes // pool.num_blocks, v.nbytes // pool.num_blocks)
            for k, v in zip(pool.k, pool.v, strict=True)
        ]
        self.k_caches_cpu = list(pool.k) if self._tp_rank == 0 else []
        self.v_caches_cpu = list(pool.v) if self._tp_rank == 0 else []


class Rank:
    """One rank of a Decode engine with offload: its registered caches, and its manager.

    Args:
        pool: Shared by the ranks.
        tp_rank: This rank.
        indexers: For layers that have one: whether it has a scale too.
    """

    def __init__(self, pool: HostPool, tp_rank: int, indexers: dict[int, bool]) -> None:
        self.kv_caches: Caches = {}
        for layer in range(pool.layers):
            host = (pool.k[layer], pool.v[layer]) if tp_rank == 0 else (None, None)
            buffers = (memory(2, 8, 1, 16), memory(2, 8, 1, 4))
            # None is what vllm-ascend has there; its types say Tensor all the same.
            self.kv_caches[main(layer)] = (None, None, *host, *buffers)  # type: ignore[arg-type]
            if layer in indexers:
                self.kv_caches[indexer(layer)] = indexer_cache(pool.num_blocks, indexers[layer])
        self.manager = FakeManager(pool, tp_rank)
        self.manager.register_kv_caches(self.kv_caches)


def indexer_cache(num_blocks: int, scaled: bool) -> tuple[torch.Tensor, ...]:
    """An indexer of one rank, with its LIC8 scale if it has one."""
    if not scaled:
        return (memory(num_blocks, 4, 1, 8),)
    return (
        memory(num_blocks, 4, 1, 8, dtype=torch.int8),
        memory(num_blocks, 4, 1, 1, dtype=torch.float16),
    )


def install(monkeypatch: pytest.MonkeyPatch, manager: object | None) -> None:
    """Make ``vllm_ascend`` importable, with this manager in it; None for offload that is off."""

    def get_sparse_kv_offload_manager() -> object:
        assert manager is not None, "KV offload manager is not initialized."
        return manager

    module = ModuleType(_MODULE)
    vars(module)["get_sparse_kv_offload_manager"] = get_sparse_kv_offload_manager
    parts = _PACKAGE.split(".")
    for end in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, _MODULE, module)


def _is_a_manager(manager: FakeManager) -> SparseOffloadManager:
    """The type checker's proof that the fake is one."""
    return manager
