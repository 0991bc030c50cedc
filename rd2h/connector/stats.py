"""What vLLM logs and exports of the hand-off: counters of each interval, summed over ranks.

A worker makes a `TransferStats` of what has grown since the last one; vLLM adds them up over ranks
and steps, logs their sums, and hands them to `TransferMetrics` in the API server's process.
"""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from rd2h.decode import ReceiverStats
from rd2h.prefill import SenderStats

__all__ = ["TransferMetrics", "TransferStats", "counters_of"]

# Name of each counter, and what it counts. Seconds are floats, everything else whole numbers.
COUNTERS = {
    "layers_announced": "Layers that Prefill has announced.",
    "batches_announced": "Batches that Prefill has announced, one for each layer and Decode rank.",
    "layers_lost": "Layers that were lost for a Decode rank.",
    "gate_wait_seconds": "Seconds in which Prefill waited for memory that Decode still read.",
    "batches_read": "Batches of which Decode has read something.",
    "batches_failed": "Batches that Decode could not read.",
    "bytes_read": "Bytes that Decode has read.",
    "segments_planned": "Reads before neighbours were merged.",
    "segments_read": "Reads after neighbours were merged.",
    "read_seconds": "Seconds that Decode's threads have spent planning and reading.",
    "requests_received": "Requests whose prompt has arrived on a Decode rank.",
    "requests_failed": "Requests whose prompt could not be received on a Decode rank.",
}


class TransferStats(KVConnectorStats):
    """Growth of the counters in one interval; vLLM carries its `data` between processes."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or a later interval's growth to this one."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, as vLLM logs them; times with three decimals."""
        return {name: round(self.data[name], 3) for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())

    def since(self, before: TransferStats) -> TransferStats:
        """What has grown since ``before``, of two counts since the start."""
        growth = {name: value - before.data.get(name, 0) for name, value in self.data.items()}
        return TransferStats({name: value for name, value in growth.items() if value})


def counters_of(
    sender: SenderStats | None = None,
    receiver: ReceiverStats | None = None,
    requests_received: int = 0,
    requests_failed: int = 0,
) -> TransferStats:
    """The counters of one rank since its start."""
    data: dict[str, int | float] = {}
    if sender is not None:
        data |= {
            "layers_announced": sender.layers,
            "batches_announced": sender.batches,
            "layers_lost": sender.failures,
            "gate_wait_seconds": sender.gate_wait,
        }
    if receiver is not None:
        data |= {
            "batches_read": receiver.batches,
            "batches_failed": receiver.failed,
            "bytes_read": receiver.bytes,
            "segments_planned": receiver.segments_before,
            "segments_read": receiver.segments,
            "read_seconds": receiver.read_seconds,
            "requests_received": requests_received,
            "requests_failed": requests_failed,
        }
    return TransferStats(data)


class TransferMetrics(KVConnectorPromMetrics):
    """Counters ``vllm:rd2h_<name>`` on the engine's ``/metrics``, one for each engine.

    Arguments are vLLM's own.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:rd2h_{name}", documentation=documentation, labelnames=labelnames
            )
            # vLLM's type for the class is any of the three kinds; this one counts.
            self._counters[name] = {
                engine: cast(Counter, counter.labels(*values))
                for engine, values in per_engine_labelvalues.items()
            }

    # Any: vLLM's signature; what is in there is `TransferStats.data`.
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's growth."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
