"""Where Decode's data lands, and what Prefill exposes: an engine's own cache tensors.

The place where torch's tensors become the layouts that the rest of rd2h works with.
"""

from rd2h.destinations.choice import check_prefill_platform, decode_destination
from rd2h.destinations.destination import Destination, regions_of
from rd2h.destinations.offload_manager import NoManagerError, SparseOffloadError
from rd2h.destinations.paged import paged_destination
from rd2h.destinations.sparse_offload import sparse_offload_destination
from rd2h.destinations.tensors import CacheTensors, cache_layouts, is_indexer

__all__ = [
    "CacheTensors",
    "Destination",
    "NoManagerError",
    "SparseOffloadError",
    "cache_layouts",
    "check_prefill_platform",
    "decode_destination",
    "is_indexer",
    "paged_destination",
    "regions_of",
    "sparse_offload_destination",
]
