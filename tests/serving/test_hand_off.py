"""A prompt that Prefill computes and Decode answers gives the tokens of a single server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serving.client import Answer, Prompt
from tests.serving.orders import SpoilKind
from tests.serving.world import SIZES, TOKENS, Prompts, Site, tokens_of

pytestmark = pytest.mark.slow


def sequences(site: Site, prompt: Prompt | Sequence[Prompt], n: int) -> Answer:
    """Several sequences of each prompt, all greedy."""
    # vLLM refuses that at temperature 0; the best one token of all is the same by another name.
    return site.client().complete(prompt, TOKENS, n=n, temperature=1.0, top_k=1)


@pytest.mark.parametrize("size", SIZES)
def test_a_handed_over_prompt_gives_the_right_tokens(
    llama: Site, prompts: Prompts, size: int
) -> None:
    prompt = prompts(size)
    with llama.decode.receives(prompt):
        tokens = llama.client().complete(prompt, TOKENS).tokens
    assert tokens == llama.reference.tokens(prompt)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_a_prompt_whose_bytes_are_zeroed_gives_other_tokens(
    llama: Site, prompts: Prompts, size: int
) -> None:
    prompt, decode = prompts(size), llama.decode
    with decode.receives(prompt), decode.orders.spoil("zero", decode.layer_block_bytes):
        tokens = llama.client().complete(prompt, TOKENS).tokens
    assert tokens != llama.reference.tokens(prompt)


@pytest.mark.parametrize(("kind", "reads"), [("exchange", 4), ("exchange", 1), ("zero", 1)])
def test_a_prompt_that_is_spoiled_in_part_gives_other_tokens(
    llama: Site, prompts: Prompts, kind: SpoilKind, reads: int
) -> None:
    # A block of every layer, a block of one layer, one whole layer.
    prompt, decode = prompts(900), llama.decode
    with decode.receives(prompt), decode.orders.spoil(kind, decode.layer_block_bytes, reads):
        tokens = llama.client().complete(prompt, TOKENS).tokens
    assert tokens != llama.reference.tokens(prompt)


def test_each_prompt_of_a_list_gives_its_own_tokens(llama: Site, prompts: Prompts) -> None:
    several = prompts.of((17, 900, 1, 128, 250))
    with llama.decode.receives(*several):
        answer = llama.client().complete(several, TOKENS)
    assert tokens_of(answer) == llama.reference.all(several)


@pytest.mark.parametrize("n", [2, 3])
def test_every_sequence_of_several_gives_the_right_tokens(
    llama: Site, prompts: Prompts, n: int
) -> None:
    # Less than a block, so that no sequence can find what another has received.
    prompt = prompts(100)
    with llama.decode.receives(*[prompt] * n):
        answer = sequences(llama, prompt, n)
    assert tokens_of(answer) == [llama.reference.tokens(prompt)] * n


def test_several_sequences_of_each_prompt_of_a_list(llama: Site, prompts: Prompts) -> None:
    first, second = prompts.of((120, 40))
    with llama.decode.receives(first, first, second, second):
        answer = sequences(llama, [first, second], 2)
    right = llama.reference.all([first, second])
    assert tokens_of(answer) == [right[0], right[0], right[1], right[1]]


def test_a_stream_gives_the_right_tokens_one_by_one(llama: Site, prompts: Prompts) -> None:
    prompt = prompts(400)
    with llama.decode.receives(prompt), llama.client().stream(prompt, TOKENS) as chunks:
        parts = [chunk.choice.tokens for chunk in chunks]
    assert tuple(token for part in parts for token in part) == llama.reference.tokens(prompt)
    assert len([part for part in parts if part]) > 1


def test_eight_concurrent_requests_give_the_right_tokens(llama: Site, prompts: Prompts) -> None:
    several = prompts.of((900, 15, 129, 300, 1, 511, 700, 64))
    with llama.decode.receives(*several):
        answers = llama.client().complete_all(several, TOKENS, at_once=8)
    assert [answer.tokens for answer in answers] == llama.reference.all(several)


@pytest.mark.parametrize(("size", "known"), [(900, 600), (640, 640)])
def test_what_decode_has_cached_is_not_read_again(
    llama: Site, prompts: Prompts, size: int, known: int
) -> None:
    # Of a prompt that it has in full, vLLM takes all blocks but the last.
    prompt = prompts(size)
    llama.decode.client.complete(prompt[:known], 1)
    before = llama.prefill_metrics().cached_tokens
    with llama.decode.receives(prompt, cached=512):
        tokens = llama.client().complete(prompt, TOKENS).tokens
    assert tokens == llama.reference.tokens(prompt)
    assert llama.prefill_metrics().cached_tokens == before


def test_what_prefill_has_cached_is_handed_over_all_the_same(llama: Site, prompts: Prompts) -> None:
    prompt = prompts(900)
    llama.prefill_client().complete(prompt[:600], 1)
    before = llama.prefill_metrics().cached_tokens
    with llama.decode.receives(prompt):
        tokens = llama.client().complete(prompt, TOKENS).tokens
    assert tokens == llama.reference.tokens(prompt)
    assert llama.prefill_metrics().cached_tokens == before + 512


def test_what_both_have_cached_is_neither_computed_nor_read(llama: Site, prompts: Prompts) -> None:
    known, further = prompts.of((512, 200))
    with llama.decode.receives(known):
        llama.client().complete(known, TOKENS)
    before = llama.prefill_metrics().cached_tokens
    with llama.decode.receives(known + further, cached=512):
        tokens = llama.client().complete(known + further, TOKENS).tokens
    assert tokens == llama.reference.tokens(known + further)
    assert llama.prefill_metrics().cached_tokens == before + 512
