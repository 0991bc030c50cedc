"""What the receiver raises into Decode's worker thread."""

from __future__ import annotations

__all__ = ["PortTakenError", "ReceiverBrokenError", "ReceiverClosedError"]


class PortTakenError(RuntimeError):
    """The receiver cannot listen where it should; the text names the address and the reason."""


class ReceiverBrokenError(RuntimeError):
    """The receiver itself failed; the cause is chained. No request will be reported any more."""


class ReceiverClosedError(RuntimeError):
    """The receiver was used after `close`."""
