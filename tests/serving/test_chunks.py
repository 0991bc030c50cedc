"""Prompts that Prefill computes in several steps, also where it has to begin anew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.waiting import eventually
from tests.serving.world import SIZES, TOKENS, Prompts, Site, tokens_of

pytestmark = pytest.mark.slow

ROUNDS = 5
"""Attempts to have three prompts computed at a time; one is enough, if no process is stalled."""


def announced(site: Site) -> float:
    """Layers that the Prefill server has announced."""
    # It counts what the step before has announced.
    site.prefill_client("chunks").complete([1], 1)
    return site.prefill_metrics("chunks").value("vllm:rd2h_layers_announced_total")


@pytest.mark.parametrize("size", [size for size in SIZES if size > 100])
def test_a_prompt_in_chunks_that_end_inside_blocks_gives_the_right_tokens(
    llama: Site, prompts: Prompts, size: int
) -> None:
    prompt = prompts(size)
    before = announced(llama)
    with llama.decode.receives(prompt):
        tokens = llama.client("chunks").complete(prompt, TOKENS).tokens
    assert tokens == llama.reference.tokens(prompt)
    # A step announces if it completes a block, or the prompt: ends at 100, 200, ... tokens.
    ends = [*range(100, size, 100), size]
    steps = len({-(-end // 128) if end == size else end // 128 for end in ends} - {0})
    layers = before + steps * llama.decode.shape.layers
    eventually(lambda: announced(llama) >= layers, f"Prefill has announced {layers} layers")
    assert announced(llama) == layers


def test_a_chunk_that_was_spoiled_gives_other_tokens(llama: Site, prompts: Prompts) -> None:
    prompt, decode = prompts(900), llama.decode
    # The first chunk with a whole block, of all four layers.
    spoil = decode.orders.spoil("zero", decode.layer_block_bytes, reads=4)
    with decode.receives(prompt), spoil:
        tokens = llama.client("chunks").complete(prompt, TOKENS).tokens
    assert tokens != llama.reference.tokens(prompt)


def test_chunks_of_several_prompts_in_one_step_give_the_right_tokens(
    llama: Site, prompts: Prompts
) -> None:
    several = prompts.of((900, 450, 330))
    with llama.decode.receives(*several):
        answer = llama.client("chunks").complete(several, TOKENS)
    assert tokens_of(answer) == llama.reference.all(several)


def test_chunks_behind_a_prefix_that_both_have(llama: Site, prompts: Prompts) -> None:
    known, further = prompts.of((384, 500))
    with llama.decode.receives(known):
        llama.client("chunks").complete(known, TOKENS)
    before = llama.prefill_metrics("chunks").cached_tokens
    with llama.decode.receives(known + further, cached=384):
        tokens = llama.client("chunks").complete(known + further, TOKENS).tokens
    assert tokens == llama.reference.tokens(known + further)
    assert llama.prefill_metrics("chunks").cached_tokens == before + 384


def test_prompts_that_prefill_preempts_give_the_right_tokens(llama: Site, prompts: Prompts) -> None:
    # Three fit into Decode's cache. Prefill admits them when each of them would fit, and its
    # cache ends before they do.
    decode, prefill = llama.decode, llama.prefill_client("chunks")
    before = prefill.metrics().preemptions
    for _ in range(ROUNDS):
        several = prompts.of((900, 880, 860))
        with ThreadPoolExecutor(1) as pool, decode.receives(*several):
            with decode.orders.hold():
                answer = pool.submit(llama.client("chunks").complete, several, TOKENS)
                # Prefill does not go on without these reads; meanwhile the others arrive there.
                decode.orders.wait_held()
            tokens = tokens_of(answer.result())
        assert tokens == llama.reference.all(several)
        if prefill.metrics().preemptions > before:
            return
    raise AssertionError(f"nothing was preempted in {ROUNDS} rounds")
