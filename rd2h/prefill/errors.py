"""What the sender raises into Prefill's compute thread."""

from __future__ import annotations

from rd2h.texts import listed

__all__ = ["LayerSendError", "SenderBrokenError", "SenderClosedError"]


class LayerSendError(RuntimeError):
    """Requests are lost for a Decode rank, and the failure policy is to raise.

    Attributes:
        layer_names: The layers that could not be handed over, oldest first. None if the Decode
            rank was lost when all layers so far were answered, but more were to come.
        endpoint: The Decode rank that should have read them.
        ext_ids: The requests that are lost there.
        reason: Why: Decode's own words, or what was waited for.
    """

    def __init__(
        self,
        layer_names: tuple[str, ...],
        endpoint: str,
        ext_ids: tuple[str, ...],
        reason: str,
    ) -> None:
        super().__init__(layer_names, endpoint, ext_ids, reason)
        self.layer_names = layer_names
        self.endpoint = endpoint
        self.ext_ids = ext_ids
        self.reason = reason

    def __str__(self) -> str:
        if not self.layer_names:
            return (
                f"requests {listed(self.ext_ids)} were on their way to {self.endpoint} when: "
                f"{self.reason}"
            )
        return (
            f"layer {listed(self.layer_names)} could not be handed over to {self.endpoint}: "
            f"{self.reason} (requests {listed(self.ext_ids)})"
        )


class SenderBrokenError(RuntimeError):
    """The sender itself failed, and no policy contains that; the cause is chained."""


class SenderClosedError(RuntimeError):
    """The sender was used after `close`."""
