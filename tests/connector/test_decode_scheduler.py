"""D's scheduler half inside vLLM's real scheduler, with a metaserver over real HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from rd2h.connector.decode_scheduler import DecodeScheduler
from rd2h.connector.metadata import Loading
from tests.connector.engine import (
    BLOCK,
    INDEXER,
    MAIN,
    Engine,
    Step,
    decode_params,
    engine,
    groups,
    tokens,
    vllm_config,
)
from tests.connector.metaserver import Metaserver, metaserver
from tests.transfer.caches import eventually

NOBODY = "http://127.0.0.1:1/v1/metaserver"
WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture
def proxy() -> Iterator[Metaserver]:
    with metaserver() as server:
        yield server


@pytest.fixture
def decode() -> Iterator[Engine]:
    with engine("kv_consumer") as made:
        yield made


def settled(decode: Engine) -> None:
    """Wait for the posts, which another thread carries out, and check that nothing is kept."""
    eventually(lambda: decode.idle, f"idle, but {decode.half.sizes()}")


def cached_prefix(decode: Engine, length: int) -> str:
    """Compute a prompt here, so that its blocks are in the prefix cache; it goes on decoding."""
    request_id = decode.add("local", tokens(length), max_tokens=100)
    decode.step()
    assert decode.status(request_id) is RequestStatus.RUNNING
    return request_id


# ------------------------------------------------------------------------------------ hand-off


def test_a_handed_over_prompt_from_rendezvous_to_the_first_token(
    decode: Engine, proxy: Metaserver
) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    step = decode.schedule()
    assert step.scheduled == {}
    assert decode.status(a) is WAITING
    (load,) = step.decode.loads
    assert (load.request_id, load.ext_id) == (a, "a")
    assert (load.main_block_ids,) == decode.blocks(a)
    assert load.indexer_block_ids == load.main_block_ids
    assert load.indexer_block_ids is not load.main_block_ids
    assert len(load.main_block_ids) == 3
    assert (load.cached_main_blocks, load.cached_indexer_blocks) == (0, 0)
    assert step.decode.aborted == ()
    decode.answer(step)
    proxy.wait_for("a")
    (body,) = proxy.bodies
    assert body == {
        "request_id": "a",
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": decode.scheduler.vllm_config.kv_transfer_config.engine_id,  # type: ignore[union-attr]
        "remote_host": "127.0.0.1",
        "remote_port": 20000,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }
    step = decode.step()
    assert (step.decode.loads, step.decode.aborted) == ((), ())  # told once
    decode.step(arrived=[a])
    step = decode.step()
    assert step.scheduled == {a: 1}  # the last token of the prompt, to sample from
    assert decode.finish_reason(a) == "length"
    assert proxy.ids == ["a"]
    settled(decode)
    decode.step()
    assert decode.free == free


def test_external_tokens_are_asynchronous_and_asking_has_no_effect(
    decode: Engine, proxy: Metaserver
) -> None:
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    request = decode.scheduler.requests[a]
    for _ in range(2):
        assert decode.connector.get_num_new_matched_tokens(request, 0) == (10, True)
    assert decode.connector.get_num_new_matched_tokens(request, 8) == (2, True)
    assert decode.connector.get_num_new_matched_tokens(request, 10) == (0, False)
    assert request.kv_transfer_params == decode_params(proxy.url)
    assert decode.idle
    decode.step()
    assert request.kv_transfer_params == {**decode_params(proxy.url), "do_remote_prefill": False}
    assert decode.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_block_ids_of_the_prompt_only(decode: Engine, proxy: Metaserver) -> None:
    request_id = decode.add("a", tokens(8), decode_params(proxy.url))
    request = decode.scheduler.requests[request_id]
    manager = decode.scheduler.kv_cache_manager
    # vLLM may have allocated beyond the prompt, for speculation.
    blocks = manager.allocate_slots(request, 8, num_lookahead_tokens=8)
    assert blocks is not None
    decode.connector.update_state_after_alloc(request, manager.get_blocks(request_id), 8)
    half = decode.half
    assert isinstance(half, DecodeScheduler)
    (load,) = half.step().loads
    (ids,) = decode.blocks(request_id)
    assert len(ids) == 4
    assert load.main_block_ids == ids[:2]
    assert load.indexer_block_ids == ids[:2]


def test_a_prompt_of_whole_blocks(decode: Engine, proxy: Metaserver) -> None:
    a = decode.add("a", tokens(8), decode_params(proxy.url))
    (load,) = decode.step().decode.loads
    assert len(load.main_block_ids) == 2
    decode.step(arrived=[a])
    assert decode.step().scheduled == {a: 1}


@pytest.mark.parametrize("order", [(MAIN, INDEXER), (INDEXER, MAIN)])
def test_main_and_indexer_blocks_of_two_groups(order: tuple[str, str], proxy: Metaserver) -> None:
    with engine("kv_consumer", of=groups(*order)) as decode:
        a = decode.add("a", tokens(10), decode_params(proxy.url))
        (load,) = decode.step().decode.loads
        ids = dict(zip(order, decode.blocks(a), strict=True))
        assert (load.main_block_ids, load.indexer_block_ids) == (ids[MAIN], ids[INDEXER])
        assert not set(ids[MAIN]) & set(ids[INDEXER])
        decode.step(arrived=[a], failed=[a])
        assert decode.finish_reason(a) == "error"


# -------------------------------------------------------------------------------- cached prefix


def test_the_cached_prefix_is_advertised_and_never_written(
    decode: Engine, proxy: Metaserver
) -> None:
    local = cached_prefix(decode, 8)
    a = decode.add("a", tokens(12), decode_params(proxy.url))
    (load,) = decode.step().decode.loads
    proxy.wait_for("a")
    assert proxy.bodies[0]["remote_cached_tokens"] == 8
    assert (load.cached_main_blocks, load.cached_indexer_blocks) == (2, 2)
    assert len(load.main_block_ids) == 3
    assert load.main_block_ids[:2] == decode.blocks(local)[0][:2]  # shared with one that runs
    assert load.main_block_ids[2] not in decode.blocks(local)[0]
    decode.step(arrived=[a])
    assert decode.step().scheduled[a] == 1
    assert decode.finish_reason(a) == "length"


def test_a_prompt_that_is_all_but_cached_is_still_handed_over(
    decode: Engine, proxy: Metaserver
) -> None:
    cached_prefix(decode, 16)
    one = decode.add("one", tokens(13), decode_params(proxy.url))
    # vLLM never takes the whole of a prompt from its cache.
    whole = decode.add("whole", tokens(12), decode_params(proxy.url))
    loads = {load.request_id: load for load in decode.step().decode.loads}
    proxy.wait_for("one", "whole")
    cached = {body["request_id"]: body["remote_cached_tokens"] for body in proxy.bodies}
    assert cached == {"one": 12, "whole": 8}
    assert (loads[one].cached_main_blocks, len(loads[one].main_block_ids)) == (3, 4)
    assert (loads[whole].cached_main_blocks, len(loads[whole].main_block_ids)) == (2, 3)
    decode.step(arrived=[one, whole])
    step = decode.step()
    assert (step.scheduled[one], step.scheduled[whole]) == (1, 1)


def test_a_hit_that_ends_inside_a_block_counts_in_whole_blocks(
    decode: Engine, proxy: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_prefix(decode, 8)
    found = decode.scheduler._get_local_prefix_cache_hit

    def with_tail(request: object) -> tuple[object, int, object, object]:
        blocks, hit, boundary, diverged = found(request)  # type: ignore[arg-type]
        return blocks, hit - 1, boundary, diverged  # its last block is a partial tail

    monkeypatch.setattr(decode.scheduler, "_get_local_prefix_cache_hit", with_tail)
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    (load,) = decode.step().decode.loads
    proxy.wait_for("a")
    # The tail may be shared, so it is none of the request's own blocks.
    assert proxy.bodies[0]["remote_cached_tokens"] == BLOCK
    assert (load.cached_main_blocks, len(load.main_block_ids)) == (1, 3)
    assert decode.status(a) is WAITING


def test_a_request_that_may_not_use_caches_is_computed_here(
    decode: Engine, proxy: Metaserver
) -> None:
    a = decode.add("a", tokens(10), decode_params(proxy.url), whole=True)
    step = decode.step()
    assert (step.scheduled, step.decode.loads) == ({a: 10}, ())
    assert decode.finish_reason(a) == "length"
    assert proxy.bodies == []
    assert decode.idle


# ------------------------------------------------------------------------------------- computed


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_prefill": True}, "metaserver"),
        ({"do_remote_prefill": True, "metaserver": 7}, "$.metaserver"),
        ({"do_remote_prefill": "yes", "metaserver": "http://h"}, "$.do_remote_prefill"),
        ({"do_remote_prefill": True, "metaserver": "h:80/path"}, "no http URL"),
        ({"do_remote_prefill": True, "metaserver": "ftp://h/"}, "no http URL"),
        ({"do_remote_prefill": True, "metaserver": "http:///path"}, "no http URL"),
        ({"do_remote_prefill": True, "metaserver": "http://[::1/"}, "no URL"),
        ({"do_remote_prefill": True, "metaserver": "http://h:99999/"}, "no URL"),
        ({"do_remote_prefill": True, "metaserver": "http://h:0/"}, "no http URL"),
        ({"do_remote_prefill": True, "metaserver": "http://\u2603.com/"}, "no URL"),
        ({"do_remote_prefill": True, "metaserver": "http://xn--/"}, "no URL"),
    ],
)
def test_malformed_parameters_mean_computing_here(
    decode: Engine, caplog: pytest.LogCaptureFixture, params: dict[str, object], reason: str
) -> None:
    with caplog.at_level(logging.ERROR, "rd2h"):
        a = decode.add("a", tokens(10), params)
        step = decode.step()
    assert (step.scheduled, step.decode.loads) == ({a: 10}, ())
    (record,) = caplog.records
    assert a in record.getMessage()
    assert reason in record.getMessage()
    assert decode.idle


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"other": 1}])
def test_requests_that_do_not_ask_are_left_alone(
    decode: Engine, params: dict[str, object] | None
) -> None:
    a = decode.add("a", tokens(10), params)
    step = decode.step()
    assert (step.scheduled, step.decode.loads) == ({a: 10}, ())
    assert decode.idle


def test_a_second_request_with_the_same_external_id_is_computed_here(
    decode: Engine, proxy: Metaserver, caplog: pytest.LogCaptureFixture
) -> None:
    first = decode.add("a", tokens(10), decode_params(proxy.url))
    second = decode.add("a", tokens(10, 1), decode_params(proxy.url))
    with caplog.at_level(logging.WARNING, "rd2h"):
        step = decode.step()
    assert [load.request_id for load in step.decode.loads] == [first]
    assert step.scheduled == {second: 10}
    proxy.wait_for("a")
    assert [second in record.getMessage() for record in caplog.records] == [True]
    # Its end does not touch the one that waits.
    assert decode.finish_reason(second) == "length"
    assert decode.step().decode.aborted == ()
    assert decode.half.sizes()["loading"] == 1
    decode.step(arrived=[first])
    decode.step()
    assert decode.finish_reason(first) == "length"
    # Now the id is free again.
    decode.add("a", tokens(10, 2), decode_params(proxy.url))
    assert len(decode.step().decode.loads) == 1
    proxy.wait_for("a", "a")


# ---------------------------------------------------------------------------------------- abort


def test_blocks_of_an_aborted_request_are_kept_until_the_workers_report(
    decode: Engine, proxy: Metaserver
) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    decode.step()
    assert decode.free == free - 3
    decode.abort(a)
    assert decode.free == free - 3
    assert decode.scheduler.has_requests()
    step = decode.schedule()
    assert step.decode.aborted == ("a",)
    decode.answer(step)
    assert decode.step().decode.aborted == ()  # told once
    assert decode.free == free - 3
    decode.step(arrived=[a])
    assert decode.free == free
    assert decode.status(a) is None
    settled(decode)


def test_the_connector_itself_keeps_the_blocks_of_what_the_workers_have(
    decode: Engine, proxy: Metaserver
) -> None:
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    request = decode.scheduler.requests[a]
    decode.step()
    ids = decode.blocks(a)
    assert decode.connector.request_finished_all_groups(request, ids) == (True, None)
    assert decode.connector.request_finished(request, ids[0]) == (True, None)
    decode.step(arrived=[a])
    assert decode.connector.request_finished_all_groups(request, ids) == (False, None)


def test_abort_after_the_workers_have_reported_and_before_it_was_scheduled(
    decode: Engine, proxy: Metaserver
) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    decode.step()
    decode.step(arrived=[a])
    assert decode.status(a) is WAITING
    decode.abort(a)
    assert decode.free == free
    assert decode.status(a) is None
    assert decode.step().decode.aborted == ()
    settled(decode)


def test_abort_while_a_step_that_reports_it_is_under_way(decode: Engine, proxy: Metaserver) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    decode.step()
    step = decode.schedule()
    decode.abort(a)
    decode.answer(step, arrived=[a])
    assert decode.free == free
    # Its workers know of no such request any more, and the id may be in use again.
    again = decode.add("a", tokens(10), decode_params(proxy.url))
    step = decode.step()
    assert step.decode.aborted == ()
    assert [load.request_id for load in step.decode.loads] == [again]


def test_abort_before_it_had_blocks(decode: Engine, proxy: Metaserver) -> None:
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    decode.abort(a)
    step = decode.step()
    assert (step.decode.loads, step.decode.aborted) == ((), ())
    assert decode.idle
    assert proxy.bodies == []


def test_abort_while_it_decodes(decode: Engine, proxy: Metaserver) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url), max_tokens=10)
    decode.step()
    decode.step(arrived=[a])
    decode.step()
    assert decode.status(a) is RequestStatus.RUNNING
    decode.abort(a)
    assert decode.free == free
    assert decode.step().decode.aborted == ()


def test_an_aborted_request_is_not_posted_any_more(decode: Engine) -> None:
    with metaserver() as proxy:
        proxy.answering.clear()
        a = decode.add("a", tokens(10), decode_params(proxy.url))
        decode.step()
        proxy.wait_for("a")
        assert decode.half.sizes()["posts"] == 1
        decode.abort(a)
        eventually(lambda: decode.half.sizes()["posts"] == 0, "the post to be cancelled")


def test_the_end_of_a_transfer_ends_its_post(decode: Engine) -> None:
    with metaserver() as proxy:
        proxy.answering.clear()
        a = decode.add("a", tokens(10), decode_params(proxy.url))
        decode.step()
        proxy.wait_for("a")
        decode.step(arrived=[a])
        settled(decode)


# ------------------------------------------------------------------------------------- failures


def test_a_failed_request_ends_with_an_error_and_its_blocks_come_back(
    decode: Engine, proxy: Metaserver
) -> None:
    free = decode.free
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    b = decode.add("b", tokens(10, 1), decode_params(proxy.url))
    decode.step()
    decode.step(arrived=[a], failed=[a])
    assert decode.finish_reason(a) == "error"
    assert decode.status(a) is None
    assert decode.status(b) is WAITING
    assert decode.free == free - 3
    assert decode.step().decode.aborted == ()
    decode.step(arrived=[b])
    decode.step()
    assert decode.finish_reason(b) == "length"
    settled(decode)


def test_the_id_of_a_failed_request_can_be_used_at_once(decode: Engine, proxy: Metaserver) -> None:
    a = decode.add("a", tokens(10), decode_params(proxy.url))
    decode.step()
    decode.step(arrived=[a], failed=[a])
    again = decode.add("a", tokens(10), decode_params(proxy.url))
    step = decode.step()
    assert [load.request_id for load in step.decode.loads] == [again]
    assert step.decode.aborted == ()


@pytest.mark.parametrize("told_by", ["request", "block"])
def test_a_failed_request_is_computed_here_if_the_policy_says_so(
    proxy: Metaserver, told_by: str
) -> None:
    config = vllm_config("kv_consumer", policy="recompute")
    with engine("kv_consumer", config=config) as decode:
        cached_prefix(decode, 8)
        a = decode.add("a", tokens(14), decode_params(proxy.url))
        (load,) = decode.step().decode.loads
        proxy.wait_for("a")
        if told_by == "request":
            decode.step(arrived=[a], failed=[a])
        else:
            lost = load.main_block_ids[load.cached_main_blocks :]
            decode.answer(decode.schedule(), arrived=[a], failed_blocks=lost)
        assert decode.finish_reason(a) is None
        step = decode.step()
        assert step.scheduled[a] == 6  # all but the cached prefix
        assert step.decode.loads == ()
        assert decode.finish_reason(a) == "length"
        proxy.wait_for("a")
        settled(decode)


def test_a_preempted_request_is_computed_here(proxy: Metaserver) -> None:
    with engine("kv_consumer", blocks=8) as decode:
        a = decode.add("a", tokens(8), decode_params(proxy.url), max_tokens=12)
        b = decode.add("b", tokens(8, 1), decode_params(proxy.url), max_tokens=12)
        decode.step()
        proxy.wait_for("a", "b")
        decode.step(arrived=[a, b])
        for _ in range(40):
            assert decode.step().decode.loads == ()
        assert decode.finish_reason(a) == decode.finish_reason(b) == "length"
        assert decode.scheduler.requests == {}
        assert decode.free == 7
        proxy.wait_for("a", "b")
        settled(decode)


def test_with_asynchronous_scheduling(proxy: Metaserver) -> None:
    config = vllm_config("kv_consumer", asynchronous=True)
    with engine("kv_consumer", config=config) as decode:
        free = decode.free
        a = decode.add("a", tokens(10), decode_params(proxy.url), max_tokens=3)
        b = decode.add("b", tokens(10, 1), decode_params(proxy.url), max_tokens=3)
        under_way = [decode.schedule(), decode.schedule()]
        assert [load.ext_id for load in under_way[0].decode.loads] == ["a", "b"]
        assert under_way[1].decode.loads == ()
        decode.answer(under_way[0])
        decode.abort(b)
        third = decode.schedule()
        assert third.decode.aborted == ("b",)
        decode.answer(under_way[1], arrived=[a])
        fourth = decode.schedule()
        assert fourth.scheduled == {a: 1}
        decode.answer(third, arrived=[b])
        fifth = decode.schedule()
        decode.answer(fourth)
        decode.answer(fifth)
        while decode.finish_reason(a) is None:
            decode.step()
        assert decode.scheduler.requests == {}
        settled(decode)
        decode.step()
        assert decode.free == free


# ------------------------------------------------------------------------------------- property


@settings(max_examples=50)
@given(data=st.data())
def test_every_block_comes_back_however_requests_end(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(10, 24), "blocks")
    config = vllm_config(
        "kv_consumer",
        policy=data.draw(st.sampled_from(["fail", "recompute"]), "policy"),
        asynchronous=data.draw(st.booleans(), "asynchronous"),
    )
    with engine("kv_consumer", blocks=blocks, config=config) as decode:
        free = decode.free
        loading: dict[str, Loading] = {}  # what the workers do, by external id
        asked: dict[str, int] = {}
        ended: list[str] = []
        under_way: list[Step] = []

        def schedule() -> None:
            step = decode.schedule()
            under_way.append(step)
            # They are those that the workers have, or have ended meanwhile.
            mine = [ext_id for ext_id in step.decode.aborted if ext_id in loading]
            ended.extend(loading.pop(ext_id).request_id for ext_id in mine)
            for load in step.decode.loads:
                assert load.ext_id not in loading
                loading[load.ext_id] = load
                asked[load.request_id] = asked.get(load.request_id, 0) + 1
                own = load.main_block_ids[load.cached_main_blocks :]
                assert own
                # What is written is nobody else's.
                for other in loading.values():
                    if other is not load:
                        assert not set(own) & set(other.main_block_ids)
                assert load.main_block_ids == decode.blocks(load.request_id)[0]

        def answer() -> None:
            failed: list[str] = []
            for ext_id in list(loading):
                how = data.draw(st.sampled_from(["waits", "arrived", "failed"]), ext_id)
                if how != "waits":
                    where = ended if how == "arrived" else failed
                    where.append(loading.pop(ext_id).request_id)
            decode.answer(under_way.pop(0), arrived=[*ended, *failed], failed=failed)
            ended.clear()

        for _ in range(data.draw(st.integers(1, 20), "steps")):
            match data.draw(st.sampled_from(["add", "step", "step", "abort"])):
                case "add":
                    prompt = data.draw(st.integers(1, (blocks - 1) * BLOCK - 8), "prompt")
                    decode.add(
                        # Clients repeat ids, of requests that are over and of those that are not.
                        data.draw(st.sampled_from("abcd"), "id"),
                        tokens(prompt, data.draw(st.integers(0, 2), "seed")),
                        decode_params(NOBODY) if data.draw(st.booleans(), "asks") else None,
                        max_tokens=data.draw(st.integers(1, 8), "answer"),
                    )
                case "abort" if decode.scheduler.requests:
                    known = sorted(decode.scheduler.requests)
                    decode.abort(data.draw(st.sampled_from(known), "aborted"))
                case _:
                    schedule()
                    if not (
                        config.scheduler_config.async_scheduling
                        and len(under_way) < 2
                        and data.draw(st.booleans(), "one more under way")
                    ):
                        answer()
        for _ in range(400):
            while under_way:
                answer()
            if not decode.scheduler.has_requests():
                break
            schedule()
        assert decode.scheduler.requests == {}
        assert decode.free == free
        assert all(times == 1 for times in asked.values())
        assert not loading
        settled(decode)
