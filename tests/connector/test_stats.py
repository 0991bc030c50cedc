import pickle
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)

from rd2h.connector import SfaRemoteD2HConnector
from rd2h.connector.stats import COUNTERS, TransferMetrics, TransferStats, counters_of
from rd2h.decode import ReceiverStats
from rd2h.prefill import SenderStats
from tests.connector.engine import vllm_config

RECEIVED = ReceiverStats(
    batches=4, failed=1, bytes=4096, segments_before=9, segments=3, read_seconds=0.12345
)


def test_every_counter_has_a_place() -> None:
    both = counters_of(SenderStats(), RECEIVED, 2, 1)
    assert set(both.data) == set(COUNTERS)
    assert counters_of(SenderStats()).is_empty()
    assert TransferStats().is_empty()
    assert not counters_of(receiver=RECEIVED).is_empty()


def test_growth_between_two_counts() -> None:
    before = counters_of(SenderStats(layers=3, batches=5))
    after = counters_of(SenderStats(layers=3, batches=9, gate_wait=0.5))
    growth = after.since(before)
    assert growth.data == {"batches_announced": 4, "gate_wait_seconds": 0.5}
    assert after.since(after).is_empty()
    assert after.since(TransferStats()).data == {
        "layers_announced": 3,
        "batches_announced": 9,
        "gate_wait_seconds": 0.5,
    }


def test_ranks_and_intervals_add_up() -> None:
    total = TransferStats({"bytes_read": 5, "read_seconds": 0.25})
    assert total.aggregate(TransferStats({"bytes_read": 7, "batches_read": 1})) is total
    assert total.data == {"bytes_read": 12, "read_seconds": 0.25, "batches_read": 1}
    assert total.aggregate(TransferStats()).data == total.data
    total.reset()
    assert total.is_empty()


def test_vllm_carries_them_between_processes() -> None:
    stats = counters_of(SenderStats(layers=2, gate_wait=0.5), RECEIVED, 3)
    assert pickle.loads(pickle.dumps(stats)) == stats
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert SfaRemoteD2HConnector.build_kv_connector_stats(data) == stats
    assert SfaRemoteD2HConnector.build_kv_connector_stats() == TransferStats()


def test_vllm_logs_their_sums() -> None:
    lines: list[tuple[object, ...]] = []
    logs = KVConnectorLogging(vllm_config().kv_transfer_config)
    for _ in range(2):
        logs.observe(counters_of(receiver=RECEIVED).to_dict())
    log: Callable[[Callable[..., None]], None] = logs.log
    log(lambda *line: lines.append(line))
    ((_, line),) = lines
    for word in ("batches_read=8", "bytes_read=8192", "read_seconds=0.247"):
        assert word in str(line)
    assert "layers" not in str(line)
    log(lambda *line: lines.append(line))
    assert len(lines) == 1  # nothing since


def test_two_engines_counters_in_a_registry() -> None:
    registry = CollectorRegistry()

    class OwnCounter(Counter):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"registry": registry, **options})

    types: Any = {Counter: OwnCounter, Gauge: Gauge, Histogram: Histogram}
    prom = TransferMetrics(
        vllm_config(),
        types,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    prom.observe({"bytes_read": 5, "read_seconds": 0.5, "of a newer worker": 3})
    prom.observe({"bytes_read": 7}, engine_idx=1)
    prom.observe({"bytes_read": 1})
    text = generate_latest(registry).decode()
    assert 'vllm:rd2h_bytes_read_total{engine="0",model_name="m"} 6.0' in text
    assert 'vllm:rd2h_bytes_read_total{engine="1",model_name="m"} 7.0' in text
    assert 'vllm:rd2h_read_seconds_total{engine="0",model_name="m"} 0.5' in text
    for name in COUNTERS:
        assert f"vllm:rd2h_{name}_total" in text


def test_vllm_finds_the_counters_of_the_connector() -> None:
    collectors = set(REGISTRY._names_to_collectors.values())
    try:
        prom = KVConnectorProm(vllm_config(), ["engine"], {0: ["0"]})
        assert isinstance(prom.prom_metrics, TransferMetrics)
        prom.observe({"batches_read": 2})
        assert REGISTRY.get_sample_value("vllm:rd2h_batches_read_total", {"engine": "0"}) == 2
    finally:
        for collector in set(REGISTRY._names_to_collectors.values()) - collectors:
            REGISTRY.unregister(collector)
