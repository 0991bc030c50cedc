"""Latent attention: a Prefill engine of two ranks hands over to a Decode engine of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.checkpoint import MLA, write_checkpoint
from serving.launcher import Launcher
from serving.servers import VllmOptions, VllmServer, start_all
from tests.serving.orders import SpoilKind
from tests.serving.world import (
    SIZES,
    TOKENS,
    Prompts,
    Reference,
    Site,
    attended,
    decode_server,
    prefill_server,
    proxy_of,
    tokens_of,
)

pytestmark = pytest.mark.slow

BLOCK = 16
"""Tokens in a block; vLLM knows no other for MLA on a CPU, nor chunks, nor a prefix cache."""


@pytest.fixture(scope="module")
def started(launcher: Launcher, folder: Path) -> Iterator[Site]:
    options = VllmOptions(model=write_checkpoint(folder / "mla", MLA), block_size=BLOCK, blocks=257)
    two_ranks = VllmOptions(model=options.model, block_size=BLOCK, tensor_parallel=2)
    single = VllmServer(launcher, options, "mla-single", folder)
    prefill = prefill_server(launcher, two_ranks, "mla-prefill", folder)
    decode = decode_server(launcher, options, "mla-decode", folder, MLA)
    proxy = proxy_of(launcher, prefill, [decode], "mla-proxy", folder)
    with single.client() as client:
        site = Site(decode, {"whole": prefill}, {"whole": proxy}, Reference(client), [single])
        start_all(site.servers)
        with attended(site):
            yield site


@pytest.fixture
def mla(started: Site) -> Iterator[Site]:
    """The site, at rest after a test."""
    yield started
    started.decode.until_idle()


@pytest.mark.parametrize("size", SIZES)
def test_a_handed_over_prompt_gives_the_right_tokens(
    mla: Site, prompts: Prompts, size: int
) -> None:
    prompt = prompts(size)
    with mla.decode.receives(prompt):
        tokens = mla.client().complete(prompt, TOKENS).tokens
    assert tokens == mla.reference.tokens(prompt)


@pytest.mark.parametrize(
    ("size", "kind", "reads"),
    [(17, "zero", 4), (129, "zero", 4), (900, "zero", 4), (900, "zero", 1), (129, "exchange", 4)],
)
def test_a_spoiled_prompt_gives_other_tokens(
    mla: Site, prompts: Prompts, size: int, kind: SpoilKind, reads: int
) -> None:
    prompt, decode = prompts(size), mla.decode
    with decode.receives(prompt), decode.orders.spoil(kind, decode.layer_block_bytes, reads):
        tokens = mla.client().complete(prompt, TOKENS).tokens
    assert tokens != mla.reference.tokens(prompt)


def test_each_prompt_of_a_list_gives_its_own_tokens(mla: Site, prompts: Prompts) -> None:
    several = prompts.of((17, 900, 1, 128))
    with mla.decode.receives(*several):
        answer = mla.client().complete(several, TOKENS)
    assert tokens_of(answer) == mla.reference.all(several)


def test_eight_concurrent_requests_give_the_right_tokens(mla: Site, prompts: Prompts) -> None:
    several = prompts.of((500, 15, 129, 300, 2, 511, 700, 64))
    with mla.decode.receives(*several):
        answers = mla.client().complete_all(several, TOKENS, at_once=8)
    assert [answer.tokens for answer in answers] == mla.reference.all(several)
