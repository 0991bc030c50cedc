"""P's worker: what is announced when, and what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from rd2h.connector.metadata import DecodeEndpoint
from rd2h.connector.prefill_worker import PrefillWorker
from rd2h.destinations import CacheTensors
from rd2h.prefill import DeviceEvent, LayerSendError, LayerTask
from rd2h.wire import ReadReadyBatch
from tests.connector.hosts import (
    BLOCKS,
    Hosts,
    announced,
    beside,
    filled,
    hosts,
    load,
    prefill_step,
    run_step,
)
from tests.transfer.caches import PATIENCE, eventually

NAMES = [f"model.layers.{number}.attn" for number in range(3)]
END = DecodeEndpoint("10.0.0.1", 5000, 1)


@pytest.fixture
def site() -> Iterator[Hosts]:
    with hosts() as made:
        yield made


def caches(names: list[str] = NAMES) -> dict[str, CacheTensors]:
    return {name: filled(BLOCKS, 4) for name in names}


class _Event:
    def synchronize(self) -> None:
        return


@dataclass
class Events:
    """A device that hands out events of its own."""

    recorded: list[DeviceEvent] = field(default_factory=list)

    def enter_thread(self) -> None:
        return

    def record(self) -> DeviceEvent | None:
        self.recorded.append(_Event())
        return self.recorded[-1]


def overheard(worker: PrefillWorker, monkeypatch: pytest.MonkeyPatch) -> list[LayerTask]:
    """What the worker submits from now on; nothing goes out."""
    tasks: list[LayerTask] = []
    monkeypatch.setattr(worker._sender, "submit", tasks.append)
    return tasks


def batch(task: LayerTask) -> ReadReadyBatch:
    (found,) = task.batches.values()
    return found


# --------------------------------------------------------------------------- what is announced


def test_a_layer_is_announced_once_a_step_whichever_hook_speaks(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Events()
    worker = site.prefill(caches(), device=device)
    tasks = overheard(worker, monkeypatch)
    for _ in range(2):
        tasks.clear()
        device.recorded.clear()
        worker.begin(prefill_step(announced("a", END, [1])))
        for name in NAMES:
            worker.written(name)  # on_kv_cache_written
            worker.written(name)  # save_kv_layer
        worker.end()
        worker.written(NAMES[0])  # after the step: nothing to say
        assert [task.layer_name for task in tasks] == NAMES
        # One event for each task, and no other.
        assert [task.event for task in tasks] == device.recorded


def test_the_last_layer_that_is_written_reports_the_end_whatever_the_order(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    step = prefill_step(
        announced("a", END, [1]), announced("b", END, [2], done=False), announced("c", END, [])
    )
    run_step(worker, step, [NAMES[2], NAMES[0], NAMES[1]])
    assert [task.layer_name for task in tasks] == [NAMES[2], NAMES[0], NAMES[1]]
    assert [batch(task).layer_idx for task in tasks] == [2, 0, 1]
    assert [batch(task).done_ext_ids for task in tasks] == [[], [], ["a", "c"]]
    assert [[r.ext_id for r in batch(task).read_reqs] for task in tasks] == [["a", "b"]] * 3


def test_the_end_of_a_step_announces_the_rest_in_the_models_order(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 9, 1)]
    worker = site.prefill(caches(names))
    tasks = overheard(worker, monkeypatch)
    run_step(worker, prefill_step(announced("a", END, [1])), [names[1]])
    assert [task.layer_name for task in tasks] == [names[1], names[2], names[0]]
    assert [batch(task).layer_idx for task in tasks] == [1, 0, 2]
    assert [batch(task).done_ext_ids for task in tasks] == [[], [], ["a"]]
    assert [worker.layer_name(place) for place in range(3)] == [names[2], names[1], names[0]]
    for place in (-1, 3):
        with pytest.raises(IndexError, match=f"layer {place} is outside 0 to 2"):
            worker.layer_name(place)


def test_a_step_that_has_failed_announces_nothing_more(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    worker.begin(prefill_step(announced("a", END, [1])))
    with pytest.raises(RuntimeError, match="out of memory"):  # noqa: PT012
        try:
            worker.written(NAMES[0])
            raise RuntimeError("out of memory")
        finally:
            worker.end()  # as vLLM does
    assert [task.layer_name for task in tasks] == NAMES[:1]
    worker.end()
    assert len(tasks) == 1


def test_a_prompt_without_blocks_is_reported_done_only(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    run_step(worker, prefill_step(announced("a", END, [])), NAMES)
    (task,) = tasks
    assert task.layer_name == NAMES[2]
    assert (batch(task).read_reqs, batch(task).done_ext_ids) == ([], ["a"])


def test_a_step_without_requests_and_layers_without_caches_say_nothing(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    run_step(worker, prefill_step(), NAMES)
    run_step(worker, prefill_step(announced("a", END, [1])), ["model.layers.7.mlp"])
    assert [task.layer_name for task in tasks] == NAMES


def test_layers_without_an_indexer_carry_no_indexer_ids(
    site: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.prefill(caches() | {"model.layers.1.indexer": filled(BLOCKS, 2)})
    tasks = overheard(worker, monkeypatch)
    run_step(worker, prefill_step(announced("a", END, [], [7], start=3, done=False)), NAMES)
    (task,) = tasks
    (request,) = batch(task).read_reqs
    assert task.layer_name == NAMES[1]
    assert (request.main_block_ids, request.indexer_block_ids) == ([], [7])
    assert (request.main_start_block, request.indexer_start_block) == (3, 3)
    tasks.clear()
    run_step(worker, prefill_step(announced("a", END, [5], [7], start=3, done=False)), NAMES)
    requests = [batch(task).read_reqs[0] for task in tasks]
    assert [r.indexer_block_ids for r in requests] == [[], [7], []]
    assert [r.indexer_start_block for r in requests] == [0, 3, 0]


@pytest.mark.parametrize(
    ("ours", "theirs", "rank", "port", "member", "ratio"),
    [
        (1, 1, 0, 5000, 0, 1),
        (2, 2, 1, 5001, 0, 1),
        (4, 2, 1, 5000, 1, 2),
        (4, 2, 2, 5001, 0, 2),
        (4, 1, 3, 5000, 3, 4),
    ],
)
def test_each_rank_tells_the_one_that_it_feeds(
    site: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    ours: int,
    theirs: int,
    rank: int,
    port: int,
    member: int,
    ratio: int,
) -> None:
    worker = site.prefill(caches(), rank=rank, tp=ours)
    tasks = overheard(worker, monkeypatch)
    end = DecodeEndpoint("10.0.0.1", 5000, theirs)
    run_step(worker, prefill_step(announced("a", end, [1])), NAMES)
    for task in tasks:
        assert list(task.batches) == [f"tcp://10.0.0.1:{port}"]
        assert (batch(task).group_member_idx, batch(task).tp_ratio) == (member, ratio)


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("node-7", "tcp://node-7:5000"),
        ("fe80::1", "tcp://[fe80::1]:5000"),
        ("[::1]", "tcp://[::1]:5000"),
    ],
)
def test_an_ipv6_address_is_bracketed(
    site: Hosts, monkeypatch: pytest.MonkeyPatch, host: str, endpoint: str
) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    step = prefill_step(announced("a", DecodeEndpoint(host, 5000, 1), [1]))
    run_step(worker, step, NAMES)
    assert {endpoint for task in tasks for endpoint in task.batches} == {endpoint}


def test_one_batch_for_each_decode(site: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = site.prefill(caches())
    tasks = overheard(worker, monkeypatch)
    other = DecodeEndpoint("10.0.0.2", 5000, 1)
    step = prefill_step(
        announced("a", END, [1]), announced("b", other, [2], done=False), announced("c", END, [3])
    )
    run_step(worker, step, NAMES)
    last = tasks[-1].batches
    assert {e: [r.ext_id for r in b.read_reqs] for e, b in last.items()} == {
        "tcp://10.0.0.1:5000": ["a", "c"],
        "tcp://10.0.0.2:5000": ["b"],
    }
    assert {e: b.done_ext_ids for e, b in last.items()} == {
        "tcp://10.0.0.1:5000": ["a", "c"],
        "tcp://10.0.0.2:5000": [],
    }


# --------------------------------------------------------------------------- what is waited for


def empty() -> dict[str, CacheTensors]:
    return {name: torch.zeros(BLOCKS, 4) for name in NAMES}


def test_a_layers_gate_is_shut_before_the_hook_returns_and_opens_with_the_answer(
    site: Hosts,
) -> None:
    worker, decode = site.prefill(caches(), writes_before_wait=False), site.decode(empty())
    held = decode.engines[0].hold_read()
    decode.begin(load("a", [3]))
    worker.begin(prefill_step(announced("a", decode.endpoint, [1], done=False)))
    worker.wait_for_layer(NAMES[0])
    worker.written(NAMES[0])
    # An engine that waits before it writes begins its next step meanwhile.
    worker.end()
    worker.begin(prefill_step())
    waits = beside(lambda: worker.wait_for_layer(NAMES[0]))
    assert held.started.wait(PATIENCE)
    assert not waits.done()
    held.release()
    waits.result(PATIENCE)


def test_an_engine_that_writes_first_waits_before_the_step(site: Hosts) -> None:
    worker, decode = site.prefill(caches(), writes_before_wait=True), site.decode(empty())
    held = decode.engines[0].hold_read()
    decode.begin(load("a", [3]))
    run_step(worker, prefill_step(announced("a", decode.endpoint, [1], done=False)), NAMES[:0])
    assert held.started.wait(PATIENCE)
    # Steps that write other blocks go on, and their layers wait for nobody.
    run_step(worker, prefill_step(written=[2, 3]), NAMES)
    prepares = beside(lambda: worker.prepare(prefill_step(written=[2, 1])))
    begins = beside(lambda: worker.begin(prefill_step(written=[1])))
    assert not prepares.done()
    assert not begins.done()
    held.release()
    prepares.result(PATIENCE)
    begins.result(PATIENCE)
    assert worker.stats.gate_wait >= 0


def test_layers_that_share_memory_wait_for_one_another(site: Hosts) -> None:
    shared = filled(BLOCKS, 4)
    reused: dict[str, CacheTensors] = {NAMES[0]: shared, NAMES[1]: shared, NAMES[2]: filled(16, 4)}
    worker, decode = site.prefill(reused, writes_before_wait=False), site.decode(empty())
    held = decode.engines[0].hold_read()
    decode.begin(load("a", [3]))
    worker.begin(prefill_step(announced("a", decode.endpoint, [1], done=False)))
    worker.written(NAMES[0])
    assert held.started.wait(PATIENCE)
    worker.wait_for_layer(NAMES[2])
    worker.wait_for_layer("model.layers.9.mlp")  # it has no cache
    waits = beside(lambda: worker.wait_for_layer(NAMES[1]))
    assert not waits.done()
    held.release()
    waits.result(PATIENCE)


def test_a_forgotten_request_may_be_handed_over_anew(site: Hosts) -> None:
    worker = site.prefill(caches(), policy="contain")
    decode = site.decode(empty())
    decode.engines[0].fail_read()
    decode.begin(load("a", [3]))
    run_step(worker, prefill_step(announced("a", decode.endpoint, [1])), NAMES)
    assert decode.wait("a!").failed == {"a!"}
    decode.begin(load("b", [3]))
    run_step(worker, prefill_step(announced("b", decode.endpoint, [1]), finished=["a"]), NAMES)
    assert decode.wait("b!").failed == set()
    run_step(worker, prefill_step(finished=["b"]), NAMES)
    eventually(lambda: not any(worker._sender.sizes().values()), "nothing to be kept")


@pytest.mark.parametrize("host", ["", "no such host!", "300.1.1.1", "::::", "a" * 300, "\ud800"])
def test_a_host_that_is_no_address_loses_its_request_and_nothing_else(
    site: Hosts, host: str
) -> None:
    worker = site.prefill(caches(), policy="contain", times={"handshake_timeout": 0.2})
    decode = site.decode(empty())
    decode.begin(load("a", [3, 4]))
    tell = partial(announced, "a", decode.endpoint)
    run_step(worker, prefill_step(tell([1], done=False)), NAMES)
    bad = announced("bad", DecodeEndpoint(host, 5000, 1), [1])
    run_step(worker, prefill_step(bad), NAMES)
    run_step(worker, prefill_step(tell([2], start=1)), NAMES)
    assert decode.wait("a!").failed == set()


def test_a_dead_decode_raises_in_the_step_and_reports_nothing_as_done(site: Hosts) -> None:
    worker, living, dying = site.prefill(caches()), site.decode(empty()), site.decode(empty())
    living.begin(load("a", [3]))
    dying.engines[0].fail_read()
    dying.begin(load("b", [3]))
    worker.begin(
        prefill_step(announced("a", living.endpoint, [1]), announced("b", dying.endpoint, [1]))
    )
    with pytest.raises(LayerSendError):  # noqa: PT012
        try:
            worker.written(NAMES[0])
            worker.wait_for_slots(NAMES[0])
        finally:
            worker.end()
    dying.wait("b!")
    living.workers[0].sizes()
    assert living.workers[0].ended().all == set()  # two of its layers were never computed


def test_close_ends_everything(site: Hosts) -> None:
    worker = site.prefill(caches())
    worker.close()
    worker.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("rd2h")]
    assert site.fabric.sessions == frozenset()
