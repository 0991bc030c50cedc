"""What a P and a D have counted of their hand-offs: the connector's figures on ``/metrics``."""

import time
from dataclasses import dataclass

from serving.client import Client
from serving.metrics import Metrics

__all__ = ["Transfer", "transferred"]

# Engines export what they have counted with their next step or within a second or so.
_SECONDS = 10.0
_PAUSE = 0.1


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Sums over all ranks since the engines started.

    Attributes:
        requests_received: Prompts that arrived on D, counted on each rank.
        requests_failed: Prompts that could not be received.
        external_tokens: Prompt tokens that D took from P.
        computed_tokens: Prompt tokens that D computed itself.
        bytes_read: Bytes that D read.
        segments_planned: Reads before neighbours were merged.
        segments_read: Reads after.
        read_seconds: Seconds that D's threads spent planning and reading.
        layers_announced: Layers that P announced.
        gate_wait_seconds: Seconds that P waited for memory that D still read.
    """

    requests_received: int
    requests_failed: int
    external_tokens: int
    computed_tokens: int
    bytes_read: int
    segments_planned: int
    segments_read: int
    read_seconds: float
    layers_announced: int
    gate_wait_seconds: float

    @classmethod
    def of(cls, prefill: Metrics, decode: Metrics) -> "Transfer":
        """The figures of two readings."""

        def count(metrics: Metrics, name: str) -> float:
            return metrics.value(f"vllm:rd2h_{name}_total")

        return cls(
            requests_received=int(count(decode, "requests_received")),
            requests_failed=int(count(decode, "requests_failed")),
            external_tokens=decode.external_tokens,
            computed_tokens=decode.computed_tokens,
            bytes_read=int(count(decode, "bytes_read")),
            segments_planned=int(count(decode, "segments_planned")),
            segments_read=int(count(decode, "segments_read")),
            read_seconds=count(decode, "read_seconds"),
            layers_announced=int(count(prefill, "layers_announced")),
            gate_wait_seconds=count(prefill, "gate_wait_seconds"),
        )

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each figure, for people."""
        rate = self.bytes_read / self.read_seconds / 1e9 if self.read_seconds else 0.0
        return [
            ("prompts", f"{self.requests_received} received on D, {self.requests_failed} failed"),
            (
                "prompt tokens on D",
                f"{self.external_tokens:,} from P, {self.computed_tokens:,} computed",
            ),
            ("layers", f"{self.layers_announced:,} announced by P"),
            ("bytes", f"{self.bytes_read:,} read by D"),
            ("reads", f"{self.segments_planned:,} before merging, {self.segments_read:,} after"),
            ("in reads", f"{self.read_seconds * 1e3:.1f} ms, {rate:.2f} GB/s"),
            ("P waited at gates", f"{self.gate_wait_seconds * 1e3:.1f} ms"),
        ]


def transferred(prefill: Client, decode: Client, requests: int) -> Transfer:
    """Read the figures when ``requests`` prompts are counted, or will not be any more."""
    deadline = time.monotonic() + _SECONDS
    while True:
        transfer = Transfer.of(prefill.metrics(), decode.metrics())
        done = transfer.requests_received + transfer.requests_failed
        if done >= requests or time.monotonic() > deadline:
            return transfer
        time.sleep(_PAUSE)
