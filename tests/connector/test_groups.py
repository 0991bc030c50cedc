import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from rd2h.connector.groups import BlockIds, CacheGroups
from rd2h.connector.options import OptionError
from tests.connector.engine import INDEXER, MAIN, attention, groups, kv_config, latent

OTHER = "model.layers.1.self_attn.attn"


def of(*found: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(8, [], list(found))


def test_one_group_serves_both_roles_with_lists_of_their_own() -> None:
    found = CacheGroups.from_config(kv_config(8))
    assert found == CacheGroups(0, 0, 4, 4)
    ids = found.split(([1, 2],))
    assert ids == BlockIds([1, 2], [1, 2])
    ids.main.append(3)
    assert ids.indexer == [1, 2]


def test_roles_follow_names_whatever_the_order() -> None:
    main = KVCacheGroupSpec([MAIN, OTHER], latent(8))
    indexer = KVCacheGroupSpec([INDEXER], latent(4))
    for order, expected in (
        ([main, indexer], CacheGroups(0, 1, 8, 4)),
        ([indexer, main], CacheGroups(1, 0, 8, 4)),
    ):
        assert CacheGroups.from_config(of(*order)) == expected
    ids = CacheGroups.from_config(of(indexer, main)).split(([1, 2], [7]))
    assert ids == BlockIds(main=[7], indexer=[1, 2])
    ids.extend(BlockIds([8], [3, 4]))
    assert ids == BlockIds(main=[7, 8], indexer=[1, 2, 3, 4])


def test_main_and_indexer_in_one_group_of_mixed_specs() -> None:
    specs = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={MAIN: latent(16), INDEXER: latent(16)}
    )
    found = CacheGroups.from_config(of(KVCacheGroupSpec([MAIN, INDEXER], specs)))
    assert found == CacheGroups(0, 0, 16, 16)


def test_caches_that_do_not_keep_the_whole_prompt_are_refused() -> None:
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
    )
    state = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float32,))
    mixed = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={MAIN: attention(), OTHER: window})
    for group, word in (
        (KVCacheGroupSpec([OTHER], window), "SlidingWindowSpec"),
        (KVCacheGroupSpec([OTHER], state), "MambaSpec"),
        (KVCacheGroupSpec([MAIN, OTHER], mixed), "SlidingWindowSpec"),
    ):
        with pytest.raises(OptionError, match=f"layer {OTHER}: its cache is a {word}"):
            CacheGroups.from_config(of(*groups(MAIN), group))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((MAIN, OTHER), r"2 KV-cache groups hold main caches \(\[0, 1\]\)"),
        ((MAIN, INDEXER, "model.layers.1.indexer"), r"2 KV-cache groups hold indexer"),
        ((INDEXER,), "no attention cache"),
        ((), "no attention cache"),
    ],
)
def test_each_role_has_one_group(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        CacheGroups.from_config(of(*groups(*names)))
