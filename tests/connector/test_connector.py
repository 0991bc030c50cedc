"""The connector as vLLM calls it: every method, on each of the four halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from rd2h.connector import Rd2hConnector, SfaRemoteD2HConnector
from rd2h.connector.metadata import DecodeEndpoint, DecodeStep
from rd2h.engines import create_engine
from rd2h.engines.binding import EngineBinding
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from serving.ports import free_ports
from tests.connector.engine import engine, kv_config, tokens, vllm_config
from tests.connector.hosts import CANARY, announced, filled, load, prefill_step
from tests.transfer.caches import eventually, threads

BLOCKS = 16
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFabric]:
    made = MemoryFabric()

    def factory(backend: str, **options: object) -> MemoryEngine:
        # What vLLM on a CPU gets by default.
        assert backend == "host"
        assert options.keys() == {"timeout", "binding", "enter_thread"}
        assert options["binding"] is None
        return MemoryEngine(made)

    monkeypatch.setattr(SfaRemoteD2HConnector, "engine_factory", staticmethod(factory))
    monkeypatch.setattr("rd2h.connector.connector.get_tensor_model_parallel_rank", lambda: 0)
    yield made
    assert threads() == []


def worker(role: str, caches: dict[str, torch.Tensor], port: int) -> SfaRemoteD2HConnector:
    made = SfaRemoteD2HConnector(
        vllm_config(role, port=port), KVConnectorRole.WORKER, kv_config(BLOCKS)
    )
    made.register_kv_caches(caches)
    return made


def save(connector: SfaRemoteD2HConnector, name: str) -> None:
    connector.save_kv_layer(name, torch.empty(0), cast(Any, None))


def run(connector: SfaRemoteD2HConnector, step: KVConnectorMetadata) -> None:
    """What vLLM's model runner does in a step."""
    connector.handle_preemptions(step)
    connector.bind_connector_metadata(step)
    for name in NAMES:
        connector.wait_for_layer_load(name)
        save(connector, name)
    connector.start_load_kv(cast(Any, None))
    connector.wait_for_save()


def test_a_prompt_goes_from_worker_to_worker(fabric: MemoryFabric) -> None:
    source = {name: filled(BLOCKS, 4) for name in NAMES}
    target = {name: torch.full((BLOCKS, 4), CANARY) for name in NAMES}
    port = free_ports()
    prefill, decode = worker("kv_producer", source, 1), worker("kv_consumer", target, port)
    try:
        assert len(fabric.sessions) == 2
        for ext_id, told_by in (("a", "request"), ("b", "block")):
            decode.bind_connector_metadata(DecodeStep((load(ext_id, [9, 3], cached=1),), ()))
            end = DecodeEndpoint("127.0.0.1", port, 1)
            run(prefill, prefill_step(announced(ext_id, end, [1, 2])))
            arrived: set[str] = set()

            def look(told_by: str = told_by, arrived: set[str] = arrived) -> bool:
                if told_by == "request":
                    results = decode.get_transfer_results(set())
                    arrived.update(results.finished_recving or ())
                    assert results.failed_recving == set()
                else:
                    arrived.update(decode.get_finished(set())[1] or ())
                assert decode.get_block_ids_with_load_errors() == set()
                return bool(arrived)

            eventually(look, "the request")
            assert arrived == {f"{ext_id}!"}
            for name in NAMES:
                assert torch.equal(target[name][3], source[name][2])
                assert bool((target[name][9] == CANARY).all())
            run(prefill, prefill_step(finished=[ext_id]))
        stats = decode.get_kv_connector_stats()
        assert stats is not None
        assert stats.data["requests_received"] == 2
        assert stats.data["bytes_read"] == 2 * 2 * 16
        assert decode.get_kv_connector_stats() is None
        stats = prefill.get_kv_connector_stats()
        assert stats is not None
        assert stats.data["layers_announced"] == 4
    finally:
        prefill.shutdown()
        decode.shutdown()


def test_a_failure_is_told_by_request_or_by_block_and_never_both(fabric: MemoryFabric) -> None:
    del fabric
    target = {name: torch.full((BLOCKS, 4), CANARY) for name in NAMES}
    config = vllm_config("kv_consumer", port=free_ports(), extra={"idle_timeout": 0.02})
    decode = SfaRemoteD2HConnector(config, KVConnectorRole.WORKER, kv_config(BLOCKS))
    decode.register_kv_caches(target)
    try:
        decode.bind_connector_metadata(DecodeStep((load("a", [9, 3], cached=1),), ()))
        failed: set[str] = set()

        def by_request() -> bool:
            results = decode.get_transfer_results(set())
            failed.update(results.failed_recving)
            assert results.failed_recving <= (results.finished_recving or set())
            assert decode.get_block_ids_with_load_errors() == set()
            return failed == {"a!"}

        eventually(by_request, "the failure")
        decode.bind_connector_metadata(DecodeStep((load("b", [9, 3], cached=1),), ()))
        finished: set[str] = set()

        def by_block() -> bool:
            sent, received = decode.get_finished(set())
            assert sent is None
            finished.update(received or ())
            blocks = decode.get_block_ids_with_load_errors()
            assert blocks == ({3} if received else set())  # with the end, not of the prefix
            return finished == {"b!"}

        eventually(by_block, "the failure")
        assert decode.get_block_ids_with_load_errors() == set()
        stats = decode.get_kv_connector_stats()
        assert stats is not None
        assert stats.data == {"requests_failed": 2}
    finally:
        decode.shutdown()


@pytest.mark.parametrize("role", ROLES)
def test_worker_calls_for_the_other_half_do_nothing(role: str, fabric: MemoryFabric) -> None:
    del fabric
    caches = {name: filled(BLOCKS, 4) for name in NAMES}
    connector = worker(role, caches, free_ports())
    try:
        step = DecodeStep((), ()) if role == "kv_consumer" else prefill_step()
        other = prefill_step() if role == "kv_consumer" else DecodeStep((), ())
        for metadata in (step, other):
            run(connector, metadata)
            results = connector.get_transfer_results({"x"})
            assert not results.finished_recving
            assert not results.finished_sending
            assert results.failed_recving == set()
            assert connector.get_finished({"x"}) == (None, None)
            assert connector.get_block_ids_with_load_errors() == set()
            connector.clear_connector_metadata()
        assert connector.get_kv_connector_stats() is None
        assert connector.supports_layerwise_buffer_reuse is (role == "kv_producer")
        connector.wait_for_layer_send(1)
        connector.wait_for_layer_reuse(0)
        if role == "kv_producer":
            with pytest.raises(IndexError):
                connector.wait_for_layer_send(2)
        assert connector.get_finished_count() is None
        assert connector.build_connector_worker_meta() is None
        assert connector.get_handshake_metadata() is None
    finally:
        connector.shutdown()
        connector.shutdown()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_scheduler_calls_for_the_other_half_do_nothing(role: Any) -> None:
    with engine(role) as made:
        connector = made.connector
        # Both kinds of parameters, each on the other's engine.
        params: dict[str, object] = (
            {"do_remote_prefill": True, "metaserver": "http://h"}
            if role == "kv_producer"
            else {"do_remote_decode": True}
        )
        request_id = made.add("a", tokens(10), params, max_tokens=2)
        request = made.scheduler.requests[request_id]
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        made.step()
        connector.update_connector_output(KVConnectorOutput())
        connector.update_connector_output(KVConnectorOutput(finished_recving={"unknown"}))
        assert made.idle
        assert connector.request_finished(request, [1]) == (False, None)
        assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
        assert connector.get_loaded_kv_cache_group_ids(request) == (0,)
        assert connector.requires_kv_delivery is False
        assert connector.requires_full_blocks_on_update_after_alloc is (role == "kv_producer")
        assert connector.get_kv_connector_stats() is None
        assert list(connector.take_events()) == []
        # Worker calls on a scheduler's connector.
        connector.wait_for_layer_load(NAMES[0])
        save(connector, NAMES[0])
        connector.wait_for_save()
        assert connector.get_finished(set()) == (None, None)
        connector.shutdown()


def test_class_methods() -> None:
    config = vllm_config()
    assert SfaRemoteD2HConnector.get_required_kvcache_layout(config) == "LBHNC"
    assert SfaRemoteD2HConnector.requires_piecewise_for_cudagraph({}) is True
    assert issubclass(Rd2hConnector, SfaRemoteD2HConnector)
    assert SfaRemoteD2HConnector.engine_factory is create_engine


@pytest.mark.parametrize(
    ("wanted", "platform", "backend"),
    [
        ("auto", "cpu", "host"),
        ("auto", "cuda", "nixl"),
        ("auto", "npu", "memfabric"),
        ("nixl", "cpu", "nixl"),
        ("memfabric", "cpu", "memfabric"),
    ],
)
def test_the_engine_follows_option_and_platform(
    monkeypatch: pytest.MonkeyPatch, wanted: str, platform: str, backend: str
) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    class Stop(Exception):  # noqa: N818
        pass

    def factory(name: str, **options: object) -> MemoryEngine:
        asked.append((name, options))
        raise Stop

    class Platform:
        device_type = platform

    class Device:
        def enter_thread(self) -> None:
            return

    monkeypatch.setattr(SfaRemoteD2HConnector, "engine_factory", staticmethod(factory))
    monkeypatch.setattr("rd2h.connector.connector.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("rd2h.connector.connector.current_platform", Platform)
    monkeypatch.setattr("rd2h.connector.connector.device_for", lambda *_: Device())
    config = vllm_config(extra={"transfer_backend": wanted, "read_timeout": 7})
    connector = SfaRemoteD2HConnector(config, KVConnectorRole.WORKER, kv_config(BLOCKS))
    with pytest.raises(Stop):
        connector.register_kv_caches({NAMES[0]: torch.zeros(BLOCKS, 4)})
    ((name, options),) = asked
    assert (name, options["timeout"]) == (backend, 7)
    binding = EngineBinding("Prefill", 0, "127.0.0.1") if backend == "memfabric" else None
    assert options["binding"] == binding
