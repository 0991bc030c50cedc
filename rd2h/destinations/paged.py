"""vLLM's own paged cache as the destination: every rank has its own main KV and pulls all of it."""

from __future__ import annotations

from collections.abc import Mapping

from rd2h.destinations.destination import Destination, regions_of
from rd2h.destinations.tensors import CacheTensors, cache_layouts

__all__ = ["paged_destination"]


def paged_destination(kv_caches: Mapping[str, CacheTensors], num_blocks: int) -> Destination:
    """Read into the cache tensors that the engine's worker has registered.

    A model whose KV heads are split over TP ranks needs equal TP sizes here: a rank's blocks hold
    only its own heads. They then have other bytes than Prefill's, which is found and refused, with
    the reason, before anything is read (:func:`rd2h.layout.check_compatible`). A replicated cache
    (MLA) has the same blocks on every rank, whatever the sizes.

    Args:
        kv_caches: Layer name to tensors, as registered.
        num_blocks: Blocks that the engine's scheduler hands out ids of.

    Raises:
        LayoutError: The tensors cannot be read into block by block; the message names the layer.
    """
    layers = cache_layouts(kv_caches, num_blocks)
    return Destination(layers, regions_of(layers.values()), main_shared=False)
