"""What differs between the versions of vLLM that rd2h runs with, in one place.

The types are those of vLLM 0.32, which the type checker reads; what an older one lacks has a
stand-in that it never asks for. ``docs/compatibility.md`` says what was tried.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

__all__ = ["TransferResults", "hit_source", "required_layout"]

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as TransferResults,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorTransferResults as TransferResults,
        )
    except ImportError:
        # Before 0.30 or so, vLLM asks `get_finished`, and for block ids, instead.
        TransferResults = None


def hit_source() -> CacheHitSource | None:
    """Where vLLM's prefix statistics say that external tokens came from; None before 0.32."""
    if find_spec("vllm.v1.metrics.cache_hit_source") is None:
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.P2P


def required_layout() -> str | None:
    """The name of the layout in which a layer's blocks lie back to back, heads outside tokens.

    NPUs have a layout of their own.
    """
    if current_platform.device_type == "npu":
        return None
    return "HND" if find_spec("vllm.v1.kv_cache_layout") is None else "LBHNC"
