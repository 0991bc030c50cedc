"""Several connectors in one: who is asked when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rd2h.connector import Rd2hMultiConnector, SfaRemoteD2HConnector
from tests.connector.engine import kv_config
from tests.connector.siblings import (
    Hooked,
    Idle,
    Plain,
    Provider,
    Reuser,
    Sink,
    config,
    save,
    step,
    worker,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(Plain, "calls", made)
    return made


# ----------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("order", [(Plain, Provider), (Provider, Plain)])
def test_providers_go_first_whatever_the_order(
    calls: list[str], order: tuple[type[Plain], ...]
) -> None:
    multi = worker(*order)
    multi.wait_for_layer_load("a")
    save(multi, "a")
    assert calls == ["provider load a", "plain load a", "provider save a", "plain save a"]


@pytest.mark.parametrize("order", [(Hooked, Plain, Provider), (Provider, Plain, Hooked)])
def test_providers_hear_first_that_a_layer_is_written(
    calls: list[str], order: tuple[type[Plain], ...]
) -> None:
    worker(*order).on_kv_cache_written("a")
    assert calls == ["provider written a", "hooked written a"]  # and Plain cannot be told


def test_others_keep_the_order_of_the_configuration(calls: list[str]) -> None:
    multi = worker(Hooked, Reuser, Plain, Idle, Provider)
    multi.wait_for_layer_load("a")
    assert calls == [f"{name} load a" for name in ("reuser", "provider", "hooked", "plain", "idle")]


def test_rd2h_is_a_provider_on_prefill_only(calls: list[str]) -> None:
    assert worker(Plain, SfaRemoteD2HConnector).supports_layerwise_buffer_reuse
    decode = config(Plain, SfaRemoteD2HConnector, role="kv_consumer")
    multi = Rd2hMultiConnector(decode, KVConnectorRole.WORKER, kv_config(8))
    assert not multi.supports_layerwise_buffer_reuse
    del calls


def test_two_connectors_of_one_class_are_each_asked_once(calls: list[str]) -> None:
    worker(Provider, Plain, Provider, Plain).wait_for_layer_load("a")
    assert calls == ["provider load a"] * 2 + ["plain load a"] * 2


# ------------------------------------------------------------------------ before siblings load


def test_a_step_waits_for_every_layer_before_a_sibling_loads(calls: list[str]) -> None:
    multi = worker(Plain, Provider)
    multi.register_kv_caches({"m.0.attn": torch.empty(0), "m.0.indexer.k": torch.empty(0)})
    multi.bind_connector_metadata(step(2))
    # One wait for each layer of main KV: that is how places are counted.
    assert calls == ["plain bind", "provider bind", "provider reuse 0"]


@pytest.mark.parametrize(("order", "loads"), [((Provider, Plain), False), ((Provider, Sink), True)])
def test_a_step_waits_for_nobody_if_no_sibling_loads_or_it_waits_itself(
    calls: list[str], order: tuple[type[Plain], ...], loads: bool
) -> None:
    multi = worker(*order)
    multi.register_kv_caches({"m.0.attn": torch.empty(0)})
    calls.clear()
    multi.bind_connector_metadata(step(2, loads=loads))
    assert not any("reuse" in call or "load" in call for call in calls)


# ---------------------------------------------------------------------------- a sibling that waits


def test_a_sibling_that_waits_itself_gets_the_waiter_and_nobody_waits_twice(
    calls: list[str],
) -> None:
    multi = worker(Sink, Provider, Reuser)
    multi.wait_for_layer_load("a")
    assert calls == ["sink waiter", "sink load a"]
    calls.clear()
    assert Sink.waiter is not None
    Sink.waiter(3)
    assert calls == ["provider reuse 3", "reuser reuse 3"]


def test_what_is_written_is_told_as_ever_where_a_sibling_waits(calls: list[str]) -> None:
    multi = worker(Sink, Provider)
    calls.clear()
    save(multi, "a")
    assert calls == ["provider save a", "sink save a"]


@pytest.mark.parametrize("answer", [True, None])
def test_a_waiter_is_taken_unless_it_is_refused(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, answer: bool | None
) -> None:
    monkeypatch.setattr(Sink, "answer", answer)
    worker(Provider, Sink).wait_for_layer_load("a")
    assert calls == ["sink waiter", "sink load a"]


def test_a_sibling_that_refuses_the_waiter_is_waited_for(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sink, "answer", False)
    worker(Sink, Provider).wait_for_layer_load("a")
    assert calls == ["sink waiter", "provider load a", "sink load a"]


def test_every_sibling_that_can_gets_the_waiter(calls: list[str]) -> None:
    worker(Sink, Provider, Sink)
    assert calls == ["sink waiter"] * 2


def test_no_waiter_where_there_is_no_provider_or_no_worker(calls: list[str]) -> None:
    worker(Sink, Plain).wait_for_layer_load("a")
    worker(Sink, Provider, role=KVConnectorRole.SCHEDULER)
    assert calls == ["sink load a", "plain load a"]


@pytest.mark.parametrize("call", ["load", "save", "written"])
def test_a_wait_that_fails_on_a_siblings_thread_fails_the_compute_thread_once(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    multi = worker(Sink, Provider)
    monkeypatch.setattr(Provider, "failure", RuntimeError("decode is gone"))
    waiter = Sink.waiter
    assert waiter is not None
    seen: list[Exception] = []

    def wait() -> None:
        try:
            waiter(0)
        except RuntimeError as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert [str(error) for error in seen] == ["decode is gone"]
    calls.clear()
    act: Mapping[str, Callable[[], None]] = {
        "load": lambda: multi.wait_for_layer_load("a"),
        "save": lambda: save(multi, "a"),
        "written": lambda: multi.on_kv_cache_written("a"),
    }
    with pytest.raises(RuntimeError, match="decode is gone"):
        act[call]()
    assert calls == []
    act[call]()
    assert calls


# ------------------------------------------------------------------------------ reuse of buffers


def test_it_offers_what_its_providers_offer(calls: list[str]) -> None:
    multi = worker(Plain, Reuser, Provider)
    assert multi.supports_layerwise_buffer_reuse
    multi.wait_for_layer_send(1)
    multi.wait_for_layer_reuse(2)
    assert calls == ["reuser reuse 1", "provider sent 1", "reuser reuse 2", "provider reuse 2"]


def test_without_a_provider_it_offers_nothing(calls: list[str]) -> None:
    multi = worker(Plain, Idle)
    assert not multi.supports_layerwise_buffer_reuse
    multi.wait_for_layer_send(1)
    multi.wait_for_layer_reuse(2)
    assert calls == []


@pytest.mark.parametrize(("order", "wanted"), [((Plain, Provider), True), ((Plain,), False)])
def test_it_wants_full_blocks_if_one_of_them_does(
    order: tuple[type[Plain], ...], wanted: bool
) -> None:
    assert worker(*order).requires_full_blocks_on_update_after_alloc is wanted
