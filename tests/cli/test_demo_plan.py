"""What a run will do follows from its options, the same in every process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rd2h.cli.demo.ends import EndBook
from rd2h.cli.demo.memory import decode_memory, prefill_memory
from rd2h.cli.demo.messages import Ended, Verdict
from rd2h.cli.demo.options import DemoOptions, Fault
from rd2h.cli.demo.plan import Plan

SMALL = DemoOptions(
    layers=7, latent=8, rope=4, indexer_dim=4, block_size=4, requests=3, tokens=50, chunk=10
)


def test_each_process_makes_the_same_plan() -> None:
    plans = [Plan(SMALL), Plan(SMALL)]
    for request in plans[0].requests:
        first, second = (plan.decode[0].main[request.index] for plan in plans)
        assert first.tolist() == second.tolist()
    other = Plan(replace(SMALL, seed=1))
    assert other.decode[0].main[0].tolist() != plans[0].decode[0].main[0].tolist()


def test_steps_announce_each_block_once_and_the_partial_one_last() -> None:
    plan = Plan(SMALL)  # 50 tokens in blocks of 4 are 12 whole blocks and one of 2 tokens
    pieces = [(step.pieces[0].start, step.pieces[0].count) for step in plan.steps]
    assert pieces == [(0, 2), (2, 3), (5, 2), (7, 3), (10, 3)]
    assert [step.pieces[0].last for step in plan.steps] == [False] * 4 + [True]
    assert all(len(step.pieces) == 3 for step in plan.steps)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 50, 1000])
def test_any_chunk_covers_the_prompt(chunk: int) -> None:
    plan = Plan(replace(SMALL, chunk=chunk))
    for request in plan.requests:
        pieces = [p for step in plan.steps for p in step.pieces if p.request is request]
        covered = np.concatenate([piece.positions for piece in pieces])
        assert covered.tolist() == list(range(SMALL.blocks_per_request))
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_block_ids_are_scattered_distinct_and_never_0() -> None:
    plan = Plan(replace(SMALL, requests=20))
    for table in (plan.prefill, *plan.decode):
        for ids in (table.main, table.indexer):
            everything = np.concatenate(list(ids.values()))
            assert np.unique(everything).size == everything.size
            assert everything.min() >= 1
            assert everything.max() < table.pool_blocks
            steps = np.diff(everything)
            assert 0.2 < (np.abs(steps) == 1).mean() < 0.95, "some runs are adjacent, not all"
    blocks = 20 * SMALL.blocks_per_request
    assert plan.decode[0].pool_blocks > blocks + 1, "some blocks are nobody's"


def test_decode_ranks_share_what_there_is_to_read() -> None:
    plan = Plan(SMALL)
    shape, blocks = plan.shape, 3 * SMALL.blocks_per_request
    main = blocks * shape.layers * shape.main_block_bytes
    indexer = blocks * shape.indexed_layers * shape.indexed_block_bytes
    assert sum(plan.expected_bytes(0, rank) for rank in range(2)) == main + 2 * indexer


def test_faults_say_how_each_request_must_end() -> None:
    def verdicts(fault: Fault | None) -> list[Verdict]:
        return [r.verdict for r in Plan(replace(SMALL, requests=4, fault=fault)).requests]

    done = Verdict.DONE
    assert verdicts(None) == [done] * 4
    assert verdicts(Fault.SLOW_DECODE) == [done] * 4
    assert verdicts(Fault.KILL_DECODE) == [done, Verdict.LOST] * 2
    assert verdicts(Fault.ABORT) == [done, Verdict.ABORTED] * 2
    assert verdicts(Fault.KILL_PREFILL) == [done] * 2 + [Verdict.FAILED] * 2


def test_kill_decode_runs_two_engines_and_kill_prefill_two_waves() -> None:
    plan = Plan(replace(SMALL, fault=Fault.KILL_DECODE))
    assert [[r.index for r in plan.requests_of(engine)] for engine in range(2)] == [[0, 2], [1]]
    assert plan.victims == ("decode B0",)
    plan = Plan(replace(SMALL, fault=Fault.KILL_PREFILL))
    assert [step.wave for step in plan.steps] == [0] * 5 + [1] * 5
    assert plan.victims == ("prefill 0",)
    assert Plan(SMALL).victims == ()


def test_layers_share_prefills_buffers() -> None:
    memory = prefill_memory(Plan(SMALL))
    addresses = [layer.layout.main[0].address for layer in memory.layers]
    assert len(set(addresses)) == SMALL.buffers
    assert addresses[0] == addresses[3] == addresses[6]
    for layer in memory.layers:
        for tensor in layer.layout.tensors:
            assert any(
                region.address <= tensor.address and tensor.end <= region.address + region.length
                for region in memory.regions
            )


def test_decode_layers_share_nothing() -> None:
    plan = Plan(replace(SMALL, lic8=True, indexer_dim=8, no_indexer_every=2))
    memory = decode_memory(plan, 0, -1)
    ranges = sorted((t.address, t.end) for m in memory.layers for t in m.layout.tensors)
    assert len(ranges) == 7 * 2 + 4 * 2
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert set(memory.layouts) == {plan.shape.name(layer) for layer in range(7)}


# ------------------------------------------------------------------------------ gathering ends


def ended(ext_id: str, verdict: Verdict = Verdict.DONE, reason: str = "") -> Ended:
    return Ended(ext_id, verdict, reason)


def test_a_request_is_done_only_if_every_rank_says_so() -> None:
    plan = Plan(SMALL)
    book = EndBook(plan)
    request = plan.requests[0]
    assert book.record(0, 0, ended("cmpl-0-0")) is None
    assert book.end_of(request) is None
    assert "the end of cmpl-0-0 on decode 1" in list(book.missing())
    assert book.record(0, 1, ended("cmpl-0-0")) is request
    end = book.end_of(request)
    assert end is not None
    assert end.verdict is Verdict.DONE


@pytest.mark.parametrize("worst", [Verdict.FAILED, Verdict.ABORTED])
def test_the_worst_rank_decides(worst: Verdict) -> None:
    plan = Plan(SMALL)
    book = EndBook(plan)
    book.record(0, 0, ended("cmpl-0-0", worst, "because"))
    book.record(0, 1, ended("cmpl-0-0"))
    end = book.end_of(plan.requests[0])
    assert end is not None
    assert (end.verdict, end.reason) == (worst, "because")


def test_what_no_rank_may_report_is_refused() -> None:
    book = EndBook(Plan(SMALL))
    book.record(0, 0, ended("cmpl-0-0"))
    for engine, rank, ext_id in ((0, 0, "cmpl-0-0"), (1, 0, "cmpl-1-0"), (0, 0, "cmpl-9-0")):
        with pytest.raises(ValueError, match="no reason"):
            book.record(engine, rank, ended(ext_id))


def test_the_requests_of_a_dead_engine_are_lost() -> None:
    plan = Plan(replace(SMALL, fault=Fault.KILL_DECODE))
    book = EndBook(plan)
    book.engine_died(1)
    assert book.is_dead(1)
    end = book.end_of(plan.requests[1])
    assert end is not None
    assert end.verdict is Verdict.LOST
    assert not any("cmpl-1-0" in missing for missing in book.missing())
