"""What an operator can set about the sender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FailurePolicy", "SenderOptions"]

FailurePolicy = Literal["raise", "contain"]


@dataclass(frozen=True)
class SenderOptions:
    """The sender's policy and deadlines; all times in seconds.

    Attributes:
        failure_policy: What requests that are lost for a Decode rank do to Prefill. ``raise``: the
            compute thread raises LayerSendError at its next call. ``contain``: the requests are
            logged and left out from then on, everything else goes on.
        handshake_timeout: From the first batch for a Decode rank until its MfMetaAck.
        answer_timeout: From sending a batch until its answer. Longer than Decode's
            ``park_timeout``, so that a slow registration is Decode's to report.
        wait_timeout: How long a layer may wait at its gates. Longer than the other two
            together: they open gates, this one only guards against a fault in Prefill itself.
    """

    failure_policy: FailurePolicy = "raise"
    handshake_timeout: float = 30.0
    answer_timeout: float = 120.0
    wait_timeout: float = 180.0

    def __post_init__(self) -> None:
        if self.failure_policy not in ("raise", "contain"):
            raise ValueError(
                f"failure_policy is {self.failure_policy!r}; it is 'raise' or 'contain'"
            )
        for name in ("handshake_timeout", "answer_timeout", "wait_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a time above 0 s")
        if self.wait_timeout < self.handshake_timeout + self.answer_timeout:
            raise ValueError(
                f"wait_timeout {self.wait_timeout:g} s is shorter than handshake_timeout "
                f"{self.handshake_timeout:g} s and answer_timeout {self.answer_timeout:g} s "
                f"together; a layer would give up before its Decode rank may"
            )
