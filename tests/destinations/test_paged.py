import torch

from rd2h.destinations import CacheTensors, paged_destination
from rd2h.engines import MemoryRegion


def test_vllms_own_cache_is_registered_whole_and_each_ranks_own() -> None:
    one, two = torch.zeros(2, 8, 4), torch.zeros(8, 4)
    caches: dict[str, CacheTensors] = {"l.0.attn": one, "l.1.attn": two}
    destination = paged_destination(caches, 8)
    assert list(destination.layers) == ["l.0.attn", "l.1.attn"]
    assert not destination.main_shared
    assert set(destination.regions) == {
        MemoryRegion(one.data_ptr(), 128),
        MemoryRegion(one.data_ptr() + 128, 128),
        MemoryRegion(two.data_ptr(), 128),
    }
