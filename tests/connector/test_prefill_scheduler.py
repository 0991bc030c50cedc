"""P's scheduler half inside vLLM's real scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from rd2h.connector.metadata import AnnouncedRequest, DecodeEndpoint
from tests.connector.engine import (
    BLOCK,
    INDEXER,
    MAIN,
    Engine,
    Step,
    attention,
    engine,
    groups,
    internal,
    prefill_params,
    tokens,
    vllm_config,
)


@pytest.fixture
def prefill() -> Iterator[Engine]:
    with engine("kv_producer") as made:
        yield made


def only(step: Step) -> AnnouncedRequest:
    (request,) = step.prefill.requests
    return request


def until_over(prefill: Engine, most: int = 60) -> list[Step]:
    """Step until nothing is left, and the workers have been told so."""
    steps = []
    while prefill.scheduler.has_requests():
        steps.append(prefill.step())
        assert len(steps) < most
    return steps


# ------------------------------------------------------------------------------------- a prompt


def test_a_prompt_in_one_step(prefill: Engine) -> None:
    a = prefill.add("mine", tokens(10), prefill_params("theirs"))
    step = prefill.schedule()
    (ids,) = prefill.blocks(a)
    assert step.prefill.written == frozenset(ids)
    assert step.prefill.finished == ()
    assert only(step) == AnnouncedRequest(
        ext_id="theirs",
        endpoint=DecodeEndpoint("127.0.0.1", 21000, 1),
        main_block_ids=ids,
        indexer_block_ids=ids,
        main_start=0,
        indexer_start=0,
        done=True,
    )
    assert len(ids) == 3  # the last is partly filled
    assert only(step).main_block_ids is not only(step).indexer_block_ids
    prefill.answer(step)
    step = prefill.step()
    assert step.prefill.written == frozenset()
    assert (step.prefill.requests, step.prefill.finished) == ((), ("theirs",))
    assert prefill.step().prefill.finished == ()  # told once
    assert prefill.idle


def test_chunks_that_end_inside_blocks_announce_what_is_complete() -> None:
    with engine("kv_producer", config=vllm_config(budget=6)) as prefill:
        a = prefill.add("a", tokens(21), prefill_params("a"))
        steps = [prefill.schedule()]
        (ids,) = prefill.blocks(a)
        for _ in range(3):
            prefill.answer(steps[-1])
            steps.append(prefill.schedule())
        (ids,) = prefill.blocks(a)
        # Tokens 6, 12, 18 and 21 of blocks of 4.
        parts = [(only(step).main_start, only(step).main_block_ids) for step in steps]
        assert parts == [(0, ids[:1]), (1, ids[1:3]), (3, ids[3:4]), (4, ids[4:6])]
        assert [only(step).done for step in steps] == [False, False, False, True]
        assert all(
            (only(s).indexer_start, only(s).indexer_block_ids)
            == (only(s).main_start, only(s).main_block_ids)
            for s in steps
        )


def test_a_chunk_that_completes_no_block_announces_nothing() -> None:
    with engine("kv_producer", config=vllm_config(budget=3)) as prefill:
        prefill.add("a", tokens(5), prefill_params("a"))
        step = prefill.step()
        assert step.prefill.requests == ()
        assert len(step.prefill.written) == 1
        assert (only(prefill.step()).main_start, prefill.idle) == (0, False)


def test_nothing_is_announced_while_it_decodes(prefill: Engine) -> None:
    a = prefill.add("a", tokens(10), prefill_params("a"), max_tokens=20)
    assert only(prefill.step()).done
    for _ in range(19):
        step = prefill.step()
        assert step.scheduled == {a: 1}
        assert (step.prefill.requests, step.prefill.finished) == ((), ())
    assert prefill.step().prefill.finished == ("a",)
    assert prefill.idle


@pytest.mark.parametrize("order", [(MAIN, INDEXER), (INDEXER, MAIN)])
def test_main_and_indexer_blocks_of_two_groups(order: tuple[str, str]) -> None:
    with engine("kv_producer", of=groups(*order), config=vllm_config(budget=6)) as prefill:
        a = prefill.add("a", tokens(10), prefill_params("a", remote_cached_tokens=4))
        prefill.step()
        step = prefill.schedule()
        ids = dict(zip(order, prefill.blocks(a), strict=True))
        assert only(step).main_block_ids == ids[MAIN][1:]
        assert only(step).indexer_block_ids == ids[INDEXER][1:]
        assert not set(ids[MAIN]) & set(ids[INDEXER])


def test_groups_with_other_block_sizes_have_other_positions() -> None:
    of = [
        *groups(INDEXER, spec=attention(8)),
        *groups(MAIN, spec=attention(4)),
    ]
    config = vllm_config(budget=12)
    with engine("kv_producer", of=of, block=8, hash_block=4, config=config) as prefill:
        a = prefill.add("a", tokens(22), prefill_params("a"))
        first, second = prefill.step(), prefill.schedule()
        indexer, main = prefill.blocks(a)
        assert (only(first).main_block_ids, only(first).main_start) == (main[:3], 0)
        assert (only(first).indexer_block_ids, only(first).indexer_start) == (indexer[:1], 0)
        assert (only(second).main_block_ids, only(second).main_start) == (main[3:6], 3)
        assert (only(second).indexer_block_ids, only(second).indexer_start) == (indexer[1:3], 1)


# ------------------------------------------------------------------------------- cached prefixes


def test_a_prefix_that_prefill_has_cached_is_sent_all_the_same(prefill: Engine) -> None:
    prefill.add("local", tokens(12))
    until_over(prefill)
    a = prefill.add("a", tokens(14), prefill_params("a"))
    step = prefill.schedule()
    (ids,) = prefill.blocks(a)
    assert step.scheduled == {a: 2}
    assert (only(step).main_block_ids, only(step).main_start) == (ids, 0)
    assert only(step).done


@pytest.mark.parametrize(
    ("cached", "start"), [(0, 0), (4, 1), (8, 2), (12, 3), (13, 3), (14, 3), (10**15, None)]
)
def test_a_prefix_that_decode_has_cached_is_not_sent(
    prefill: Engine, cached: int, start: int | None
) -> None:
    a = prefill.add("a", tokens(14), prefill_params("a", remote_cached_tokens=cached))
    step = prefill.schedule()
    (ids,) = prefill.blocks(a)
    assert only(step).done
    if start is None:
        assert only(step).main_block_ids == []
    else:
        assert (only(step).main_block_ids, only(step).main_start) == (ids[start:], start)


def test_decodes_prefix_in_chunks_is_passed_in_silence() -> None:
    with engine("kv_producer", config=vllm_config(budget=6)) as prefill:
        a = prefill.add("a", tokens(22), prefill_params("a", remote_cached_tokens=16))
        assert [prefill.step().prefill.requests for _ in range(2)] == [(), ()]
        third, fourth = prefill.step(), prefill.schedule()
        (ids,) = prefill.blocks(a)
        assert third.prefill.requests == ()
        assert (only(fourth).main_block_ids, only(fourth).main_start) == (ids[4:], 4)
        assert only(fourth).done


def test_a_request_that_decode_has_but_for_nothing_is_still_reported_done(
    prefill: Engine,
) -> None:
    prefill.add("a", tokens(8), prefill_params("a", remote_cached_tokens=8))
    request = only(prefill.step())
    assert (request.main_block_ids, request.indexer_block_ids, request.done) == ([], [], True)


# ------------------------------------------------------------------------------------- not ours


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote": True}])
def test_requests_that_go_nowhere_are_left_alone(
    prefill: Engine, params: Mapping[str, object] | None
) -> None:
    prefill.add("a", tokens(10), params)
    steps = until_over(prefill)
    assert all(not step.prefill.requests and not step.prefill.finished for step in steps)
    assert prefill.idle


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remote_tp_size": 2}, ["prefill tensor-parallel size 1", "127.0.0.1:21000"]),
        ({"remote_tp_size": 0}, ["$.remote_tp_size"]),
        ({"remote_tp_size": "1"}, ["$.remote_tp_size"]),
        ({"remote_pcp_size": 2}, ["context parallelism"]),
        ({"remote_dcp_size": 2}, ["context parallelism"]),
        ({"remote_port": 65536}, ["$.remote_port"]),
        ({"remote_cached_tokens": -1}, ["$.remote_cached_tokens"]),
        ({"do_remote_prefill": True}, ["$.do_remote_prefill"]),
        ({"remote_host": None}, ["$.remote_host"]),
        ({"batch_kv_transfer_params": {"other": {}}}, ['$.batch_kv_transfer_params["other"]']),
    ],
)
def test_what_cannot_be_handed_over_is_computed_and_said(
    prefill: Engine,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
    words: list[str],
) -> None:
    with caplog.at_level(logging.ERROR, "rd2h"):
        a = prefill.add("a", tokens(10), prefill_params("a", **changes))
        steps = until_over(prefill)
    assert steps[0].scheduled == {a: 10}
    assert all(not step.prefill.requests and not step.prefill.finished for step in steps)
    (record,) = caplog.records
    for word in [a, *words]:
        assert word in record.getMessage()
    assert prefill.idle


@pytest.mark.parametrize(("ours", "theirs", "fits"), [(2, 2, True), (4, 2, True), (3, 2, False)])
def test_tensor_parallel_sizes_must_divide(ours: int, theirs: int, fits: bool) -> None:
    with engine("kv_producer") as prefill:
        object.__setattr__(prefill.connector._setup, "tp_size", ours)
        prefill.add("a", tokens(10), prefill_params("a", remote_tp_size=theirs))
        step = prefill.step()
        assert [request.endpoint.tp_size for request in step.prefill.requests] == [theirs] * fits


def test_the_last_port_of_decodes_group_is_checked() -> None:
    with engine("kv_producer") as prefill:
        object.__setattr__(prefill.connector._setup, "tp_size", 2)
        for ext_id, port in (("fits", 65534), ("not", 65535)):
            params = prefill_params(ext_id, remote_tp_size=2, remote_port=port)
            prefill.add(ext_id, tokens(10), params)
        assert [request.ext_id for request in prefill.step().prefill.requests] == ["fits"]


# --------------------------------------------------------------------------------- prompt lists


def test_each_prompt_of_a_list_finds_its_own_entry(
    prefill: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    entries = {
        "cmpl-x-0": prefill_params("decode-0", remote_port=31000),
        "cmpl-x-1": prefill_params("decode-1", remote_port=32000, remote_cached_tokens=4),
    }
    shared = prefill_params("decode-0", batch_kv_transfer_params=entries)
    with caplog.at_level(logging.ERROR, "rd2h"):
        for place in range(3):
            prefill.add(f"cmpl-x-{place}", tokens(10, place), shared)
        step = prefill.step()
    assert [
        (request.ext_id, request.endpoint.base_port, request.main_start)
        for request in step.prefill.requests
    ] == [("decode-0", 31000, 0), ("decode-1", 32000, 1)]
    (record,) = caplog.records
    assert "cmpl-x-2" in record.getMessage()
    assert "no entry" in record.getMessage()
    assert sorted(prefill.step().prefill.finished) == ["decode-0", "decode-1"]
    assert prefill.idle


def test_an_empty_map_is_no_list(prefill: Engine) -> None:
    prefill.add("a", tokens(10), prefill_params("x", batch_kv_transfer_params={}))
    assert only(prefill.step()).ext_id == "x"


# ---------------------------------------------------------------------------------------- abort


def test_a_request_that_is_aborted_in_the_middle_is_over_once() -> None:
    with engine("kv_producer", config=vllm_config(budget=6)) as prefill:
        free = prefill.free
        a = prefill.add("a", tokens(21), prefill_params("a"))
        prefill.step()
        prefill.step()
        prefill.abort(a)
        assert prefill.free == free  # at once: the gates guard what Decode still reads
        step = prefill.step()
        assert (step.prefill.requests, step.prefill.finished) == ((), ("a",))
        assert prefill.step().prefill.finished == ()
        assert prefill.idle


def test_a_request_that_never_got_blocks_is_unknown(prefill: Engine) -> None:
    a = prefill.add("a", tokens(10), prefill_params("a"))
    prefill.abort(a)
    step = prefill.step()
    assert (step.prefill.requests, step.prefill.finished) == ((), ())


# ------------------------------------------------------------------------------------ preemption


@pytest.mark.parametrize("resumed_as_new", [False, True])
def test_a_preempted_prompt_goes_on_with_its_new_blocks(resumed_as_new: bool) -> None:
    config = vllm_config(budget=12, whole_prompts=False)
    with engine("kv_producer", blocks=10, config=config, resumed_as_new=resumed_as_new) as prefill:
        # One that decodes takes the blocks that the prompt behind it holds.
        first = prefill.add("first", tokens(7, 1), max_tokens=12)
        a = prefill.add("a", tokens(31), prefill_params("a"))
        steps: list[tuple[Step, list[int]]] = []
        preempted = False
        while prefill.status(a) is not None:
            step = prefill.schedule()
            held = prefill.blocks(a)[0] if a in step.scheduled else []
            steps.append((step, held))
            prefill.answer(step)
            preempted |= prefill.status(a) is RequestStatus.PREEMPTED
            assert len(steps) < 60
        assert preempted
        assert prefill.finish_reason(first) == "length"
        sent = [
            (request.main_start + place, block, held)
            for step, held in steps
            for request in step.prefill.requests
            for place, block in enumerate(request.main_block_ids)
        ]
        assert [position for position, _, _ in sent] == list(range(8))
        assert all(held[position] == block for position, block, held in sent)
        # Positions that were announced before it was preempted are not announced again.
        ends = [step for step, _ in steps if any(r.done for r in step.prefill.requests)]
        assert len(ends) == 1
        assert prefill.step().prefill.finished == ("a",)
        assert prefill.idle


def test_a_prompt_that_is_preempted_while_it_decodes_is_not_announced_again() -> None:
    with engine("kv_producer", blocks=8) as prefill:
        prefill.add("a", tokens(8, 1), prefill_params("a"), max_tokens=12)
        prefill.add("b", tokens(8, 2), prefill_params("b"), max_tokens=12)
        step = prefill.step()
        assert [request.done for request in step.prefill.requests] == [True, True]
        rest = until_over(prefill)
        assert any(step.output.preempted_req_ids for step in rest)
        assert all(step.prefill.requests == () for step in rest)
        assert sorted(e for step in rest for e in step.prefill.finished) == ["a", "b"]
        assert prefill.idle


def test_with_asynchronous_scheduling() -> None:
    config = vllm_config(budget=6, asynchronous=True)
    with engine("kv_producer", config=config) as prefill:
        a = prefill.add("a", tokens(14), prefill_params("a"))
        under_way = [prefill.schedule() for _ in range(3)]
        (ids,) = prefill.blocks(a)
        assert [(only(step).main_start, only(step).main_block_ids) for step in under_way] == [
            (0, ids[:1]),
            (1, ids[1:3]),
            (3, ids[3:4]),
        ]
        assert [only(step).done for step in under_way] == [False, False, True]
        fourth = prefill.schedule()
        assert fourth.prefill.requests == ()
        for step in [*under_way, fourth]:
            prefill.answer(step)
        assert prefill.finish_reason(a) == "length"
        assert prefill.step().prefill.finished == ("a",)
        assert prefill.idle


# ------------------------------------------------------------------------------------- property


@dataclass
class Follower:
    """What Decode would know of one request, and what must hold of it."""

    prompt: int
    cached: int
    positions: list[int] = field(default_factory=list)
    done: int = 0

    def hear(self, request: AnnouncedRequest, held: list[int]) -> None:
        assert not self.done
        start, ids = request.main_start, request.main_block_ids
        # The ids are those that the request holds in the step that announces them.
        assert ids == held[start : start + len(ids)]
        assert (request.indexer_start, request.indexer_block_ids) == (start, ids)
        assert ids or request.done
        self.positions += range(start, start + len(ids))
        self.done += request.done

    def check(self) -> None:
        assert self.positions == list(range(self.cached // BLOCK, -(-self.prompt // BLOCK)))
        assert self.done == 1


@settings(max_examples=60)
@given(data=st.data())
def test_every_block_beyond_decodes_prefix_is_announced_once_in_order(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(10, 24), "blocks")
    config = vllm_config(
        budget=data.draw(st.integers(3, 20), "budget"),
        whole_prompts=data.draw(st.booleans(), "whole prompts"),
        asynchronous=data.draw(st.booleans(), "asynchronous"),
    )
    as_new = data.draw(st.booleans(), "resumed as new")
    with engine("kv_producer", blocks=blocks, config=config, resumed_as_new=as_new) as prefill:
        free = prefill.free
        followers: dict[str, Follower] = {}
        ids: dict[str, str] = {}
        aborted: set[str] = set()
        over: list[str] = []
        under_way: list[Step] = []

        def schedule() -> None:
            step = prefill.schedule()
            under_way.append(step)
            internal_ids = {ext_id: request_id for request_id, ext_id in ids.items()}
            for request in step.prefill.requests:
                held = prefill.blocks(internal_ids[request.ext_id])[0]
                followers[request.ext_id].hear(request, held)
            over.extend(step.prefill.finished)

        for number in range(data.draw(st.integers(1, 25), "steps")):
            match data.draw(st.sampled_from(["add", "step", "step", "step", "abort"])):
                case "add":
                    # Longest that fits with what it generates, else it is preempted for ever.
                    prompt = data.draw(st.integers(1, (blocks - 1) * BLOCK - 8), "prompt")
                    cached = data.draw(st.integers(0, prompt // BLOCK), "cached") * BLOCK
                    ext_id = f"r{number}"
                    goes = data.draw(st.booleans(), "goes to decode")
                    params = prefill_params(ext_id, remote_cached_tokens=cached) if goes else None
                    seed = data.draw(st.integers(0, 2), "seed")
                    length = data.draw(st.integers(1, 8), "answer")
                    request_id = prefill.add(
                        ext_id, tokens(prompt, seed), params, max_tokens=length
                    )
                    ids[request_id] = ext_id
                    if goes:
                        followers[ext_id] = Follower(prompt, cached)
                case "abort" if prefill.scheduler.requests:
                    known = sorted(prefill.scheduler.requests)
                    request_id = data.draw(st.sampled_from(known), "aborted")
                    prefill.abort(request_id)
                    aborted.add(ids[request_id])
                case _:
                    schedule()
                    if len(under_way) > data.draw(st.integers(0, 1), "under way") or (
                        not config.scheduler_config.async_scheduling
                    ):
                        prefill.answer(under_way.pop(0))
        for _ in range(600):
            while under_way:
                prefill.answer(under_way.pop(0))
            if not prefill.scheduler.has_requests():
                break
            schedule()
        assert prefill.scheduler.requests == {}
        for ext_id, follower in followers.items():
            if ext_id not in aborted:
                follower.check()
            assert over.count(ext_id) == 1 or (ext_id in aborted and ext_id not in over)
        assert set(over) <= set(followers)
        assert prefill.idle
        assert prefill.free == free


def test_internal_ids_of_one_external_id_differ() -> None:
    assert internal("a") != internal("a")
