"""What the sender raises into Prefill's compute thread."""

from __future__ import annotations

__all__ = ["LayerSendError", "SenderBrokenError", "SenderClosedError"]


class LayerSendError(RuntimeError):
    """A layer could not be handed over, and the failure policy is to raise.

    Attributes:
        layer_name: The layer.
        endpoint: The Decode rank that should have read it.
        ext_ids: The requests that are lost with it.
        reason: Why: Decode's own words, or what was waited for.
    """

    def __init__(
        self, layer_name: str, endpoint: str, ext_ids: tuple[str, ...], reason: str
    ) -> None:
        super().__init__(layer_name, endpoint, ext_ids, reason)
        self.layer_name = layer_name
        self.endpoint = endpoint
        self.ext_ids = ext_ids
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"layer {self.layer_name} could not be handed over to {self.endpoint}: {self.reason} "
            f"(requests {', '.join(self.ext_ids) or 'none'})"
        )


class SenderBrokenError(RuntimeError):
    """The sender itself failed, and no policy contains that; the cause is chained."""


class SenderClosedError(RuntimeError):
    """The sender was used after `close`."""
