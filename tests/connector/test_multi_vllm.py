"""Several connectors in one: what vLLM's scheduler gives them, and what it asks the class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput

from rd2h.connector import OptionError, Rd2hMultiConnector, SfaRemoteD2HConnector
from rd2h.connector.metadata import PrefillStep
from rd2h.connector.multi import MultiStep
from rd2h.connector.plugin import register
from rd2h.connector.stats import TransferStats
from tests.connector.engine import (
    BLOCK,
    INDEXER,
    MAIN,
    engine,
    groups,
    kv_config,
    prefill_params,
    tokens,
    vllm_config,
)
from tests.connector.siblings import Hooked, Plain, Provider, children, config, worker


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(Plain, "calls", made)
    return made


# ------------------------------------------------------------------------------------- scheduler


class Cache(Hooked):
    """A sibling that has the first block of every prompt."""

    hits: ClassVar[int] = BLOCK


class Loader(Provider):
    """A provider that loads: it needs nobody to keep it from its own memory."""

    hits: ClassVar[int] = BLOCK


@pytest.mark.parametrize("order", [(Provider, Cache), (Cache, Provider)])
def test_full_blocks_come_to_all_and_only_the_chosen_one_loads(
    calls: list[str], order: tuple[type[Plain], ...]
) -> None:
    with engine("kv_producer", config=config(*order)) as made:
        made.add("a", tokens(3 * BLOCK))
        made.schedule()
    assert sorted(call for call in calls if "alloc" in call) == [
        f"cache alloc 3 {BLOCK}",
        "provider alloc 3 0",
    ]


@pytest.mark.parametrize("order", [(SfaRemoteD2HConnector, Cache), (Cache, SfaRemoteD2HConnector)])
def test_prefill_hands_over_also_what_a_sibling_has_loaded(
    calls: list[str], order: tuple[type[KVConnectorBase_V1], ...]
) -> None:
    with engine("kv_producer", config=config(*order)) as made:
        request_id = made.add("a", tokens(3 * BLOCK - 1), prefill_params("a"))
        step = made.schedule()
        assert step.scheduled == {request_id: 2 * BLOCK - 1}, "the sibling has not loaded"
        both = step.output.kv_connector_metadata
        assert isinstance(both, MultiKVConnectorMetadata)
        (handed,) = [one for one in both.metadata if isinstance(one, PrefillStep)]
        (request,) = handed.requests
        assert (request.main_start, request.done) == (0, True)
        assert request.main_block_ids == made.blocks(request_id)[0]
        assert len(request.main_block_ids) == 3
    assert any("alloc" in call for call in calls)


@pytest.mark.parametrize(("chosen", "loads"), [(Cache, True), (Loader, False), (Plain, False)])
def test_workers_are_told_when_a_sibling_has_got_blocks_to_load_into(
    calls: list[str], chosen: type[KVConnectorBase_V1], loads: bool
) -> None:
    with engine("kv_producer", config=config(chosen, SfaRemoteD2HConnector)) as made:
        made.add("a", tokens(3 * BLOCK))
        told = [made.step().output.kv_connector_metadata for _ in range(2)]
    assert all(isinstance(one, MultiStep) for one in told)
    assert [isinstance(one, MultiStep) and one.sibling_loads for one in told] == [loads, False]
    del calls


def test_workers_get_all_that_vllm_tells_several_connectors(calls: list[str]) -> None:
    multi = worker(Hooked, Provider, role=KVConnectorRole.SCHEDULER)
    multi._extra_async_saves = {"a": 1}
    made = multi.build_connector_meta(SchedulerOutput.make_empty())
    assert (len(made.metadata), made.extra_async_saves) == (2, {"a": 1})
    assert multi.build_connector_meta(SchedulerOutput.make_empty()).extra_async_saves is None
    del calls


def test_failures_of_decode_reach_vllm_by_request(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = config(Plain, SfaRemoteD2HConnector, role="kv_consumer")
    multi = Rd2hMultiConnector(decode, KVConnectorRole.WORKER, kv_config(8))
    ended = KVConnectorTransferResults(set(), {"a", "b"}, {"b"})
    monkeypatch.setattr(SfaRemoteD2HConnector, "get_transfer_results", lambda *_: ended)
    assert multi.get_transfer_results(set()) == ended
    assert calls == []


# --------------------------------------------------------------------------------- what vLLM asks


def test_the_names_are_registered_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("Rd2hMultiConnector")
    assert found is Rd2hMultiConnector


def test_it_is_made_by_vllm_under_its_own_name(calls: list[str]) -> None:
    made = KVConnectorFactory.create_connector(
        config(Hooked, Provider), KVConnectorRole.WORKER, kv_config(8)
    )
    assert isinstance(made, Rd2hMultiConnector)
    assert [type(one) for one in made.sub_connectors] == [Hooked, Provider]
    del calls


def test_a_connector_without_hybrid_support_works_with_one_group(calls: list[str]) -> None:
    given = config(Plain, Provider)
    assert not given.scheduler_config.disable_hybrid_kv_cache_manager, "vLLM knows by itself"
    multi = Rd2hMultiConnector(given, KVConnectorRole.SCHEDULER, kv_config(8))
    (plain, _) = multi.sub_connectors
    assert plain._vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    assert not given.scheduler_config.disable_hybrid_kv_cache_manager, "somebody else's was changed"
    del calls


def test_a_connector_without_hybrid_support_is_refused_with_several_groups() -> None:
    two = kv_config(8, groups(MAIN, INDEXER))
    with pytest.raises(OptionError, match=r"2 KV-cache groups.*--disable-hybrid-kv-cache-manager"):
        worker(Plain, Provider, cache=two)
    worker(Hooked, Provider, cache=two)


@pytest.mark.parametrize("extra", [{}, {"connectors": []}])
def test_no_list_of_connectors_is_refused(extra: dict[str, object]) -> None:
    given = vllm_config(connector="Rd2hMultiConnector", extra=extra)
    with pytest.raises(OptionError, match='needs "connectors" in kv_connector_extra_config'):
        Rd2hMultiConnector(given, KVConnectorRole.WORKER, kv_config(8))


def test_it_wants_the_layout_and_the_graphs_that_rd2h_wants() -> None:
    given = config(Plain, SfaRemoteD2HConnector)
    transfer = given.kv_transfer_config
    assert isinstance(transfer, KVTransferConfig)
    alone = SfaRemoteD2HConnector.get_required_kvcache_layout(given)
    assert alone is not None
    assert Rd2hMultiConnector.get_required_kvcache_layout(given) == alone
    extra = transfer.kv_connector_extra_config
    assert Rd2hMultiConnector.requires_piecewise_for_cudagraph(extra)
    assert not Rd2hMultiConnector.requires_piecewise_for_cudagraph({"connectors": children(Plain)})


def test_statistics_are_rebuilt_though_no_name_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in the API server's process: plain data, and rd2h known by its module only.
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    data = {"SfaRemoteD2HConnector": {"bytes_read": 3}}
    stats = Rd2hMultiConnector.build_kv_connector_stats(data)
    again = Rd2hMultiConnector.build_kv_connector_stats(data)
    assert isinstance(stats, MultiKVConnectorStats)
    assert again is not None
    assert isinstance(stats["SfaRemoteD2HConnector"], TransferStats)
    summed = stats.aggregate(again)
    assert isinstance(summed, MultiKVConnectorStats)
    assert summed.reduce() == {"SfaRemoteD2HConnector": {"bytes_read": 6}}


def test_statistics_are_left_alone_where_they_are_statistics() -> None:
    mine = TransferStats({"bytes_read": 3})
    stats = Rd2hMultiConnector.build_kv_connector_stats({"SfaRemoteD2HConnector": mine})
    assert isinstance(stats, MultiKVConnectorStats)
    assert stats["SfaRemoteD2HConnector"] is mine
    empty = Rd2hMultiConnector.build_kv_connector_stats()
    assert empty is not None
    assert empty.is_empty()


@pytest.fixture
def registry() -> Iterator[None]:
    known = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - known:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("registry")
def test_its_counters_are_those_of_its_connectors() -> None:
    # Any: vLLM's type says that all values are of one kind.
    kinds: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = Rd2hMultiConnector.build_prom_metrics(
        config(Plain, SfaRemoteD2HConnector),
        kinds,
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe({"SfaRemoteD2HConnector": {"bytes_read": 7}}, 0)
    assert REGISTRY.get_sample_value("vllm:rd2h_bytes_read_total", {"engine": "0"}) == 7
