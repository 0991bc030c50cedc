"""Which of vLLM's KV-cache groups holds main KV and which the indexer, told by layer names.

Pure; any thread. The order of groups says nothing: a group's role follows from its layers' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from rd2h.connector.options import OptionError
from rd2h.destinations import is_indexer

__all__ = ["BlockIds", "CacheGroups"]


@dataclass(frozen=True)
class BlockIds:
    """One request's block ids, by role, in the order of the prompt.

    Attributes:
        main: Of main KV.
        indexer: Of the indexer: a list of its own, also when both come from one group.
    """

    main: list[int]
    indexer: list[int]

    def extend(self, more: BlockIds) -> None:
        """Append blocks that were allocated later."""
        self.main.extend(more.main)
        self.indexer.extend(more.indexer)


@dataclass(frozen=True)
class CacheGroups:
    """The two roles' places in vLLM's per-group lists of block ids.

    Attributes:
        main: Index of the group of main KV.
        indexer: Index of the indexer's group; the same one if the indexer has none of its own.
        main_block_size: Tokens in a block of main KV.
        indexer_block_size: Tokens in a block of the indexer.
    """

    main: int
    indexer: int
    main_block_size: int
    indexer_block_size: int

    @classmethod
    def from_config(cls, config: KVCacheConfig) -> CacheGroups:
        """Find the roles of the groups.

        Raises:
            OptionError: A layer's cache is of a kind that does not keep the whole prompt, or a
                role has more than one group.
        """
        places: dict[str, set[int]] = {"main": set(), "indexer": set()}
        for index, group in enumerate(config.kv_cache_groups):
            for name in group.layer_names:
                spec = _spec_of(group.kv_cache_spec, name)
                if not isinstance(spec, FullAttentionSpec):
                    raise OptionError(
                        f"layer {name}: its cache is a {type(spec).__name__}; rd2h hands over "
                        f"full attention, MLA and sparse attention only"
                    )
                places["indexer" if is_indexer(name) else "main"].add(index)
        for role, indices in places.items():
            if len(indices) > 1:
                raise OptionError(
                    f"{len(indices)} KV-cache groups hold {role} caches ({sorted(indices)}); rd2h "
                    f"hands over models with one. Try --disable-hybrid-kv-cache-manager"
                )
        if not places["main"]:
            raise OptionError("the model has no attention cache; there is nothing to hand over")
        (main,) = places["main"]
        indexer = next(iter(places["indexer"]), main)
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        return cls(main, indexer, sizes[main], sizes[indexer])

    def split(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """By role, what vLLM lists by group: the block ids of one request."""
        return BlockIds(list(block_ids[self.main]), list(block_ids[self.indexer]))


def _spec_of(spec: KVCacheSpec, layer_name: str) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec
