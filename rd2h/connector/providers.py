"""What a connector beside others may have, as `Rd2hMultiConnector` asks for it.

None of it is part of vLLM's own contract; the names are vllm-ascend's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["CompletionProvider", "SendWait", "SlotReleaseSink", "WrittenHook"]


@runtime_checkable
class CompletionProvider(Protocol):
    """A connector that knows when a layer's memory may be overwritten."""

    @property
    def supports_layerwise_buffer_reuse(self) -> bool:
        """Whether it does in this engine; an attribute is as good."""
        ...

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        """Block until the memory that a layer is about to overwrite may be.

        Args:
            layer_idx: The layer's place in the model, of those with a cache.
        """
        ...


@runtime_checkable
class SlotReleaseSink(Protocol):
    """A connector that loads layer by layer, and can wait for somebody else's memory itself."""

    def set_external_slot_release_waiter(self, waiter: Callable[[int], None]) -> bool:
        """Take a function to call before each layer is loaded, with the layer's place.

        Returns:
            Whether it will be called; False if this connector does not load layer by layer.
        """
        ...


@runtime_checkable
class WrittenHook(Protocol):
    """A connector with the earlier hook, which engines of vllm-ascend call before attention."""

    def on_kv_cache_written(self, layer_name: str) -> None:
        """A layer's KV is written."""
        ...


@runtime_checkable
class SendWait(Protocol):
    """A provider that tells what is sent from what may be overwritten."""

    def wait_for_layer_send(self, layer_idx: int) -> None:
        """Block until what was written of a layer is sent."""
        ...
