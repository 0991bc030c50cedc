"""The pattern in the blocks: every wrong byte, block or place is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.cli.demo.content import UNTOUCHED, BlockContent, Words, block_keys
from rd2h.cli.demo.options import MAX_BLOCKS, MAX_LAYERS, MAX_REQUESTS
from rd2h.cli.demo.shape import Tensor

WORDS = 64


def key_of(
    layer: int = 0, request: int = 0, position: int = 0, tensor: Tensor = Tensor.LATENT
) -> np.uint64:
    keys = block_keys(7, layer, request, np.array([position]), tensor)
    return np.uint64(keys[0])


def block_of(key: np.uint64) -> Words:
    block = np.empty(WORDS, np.uint64)
    BlockContent(7, WORDS).write(block, key)
    return block


def test_a_block_matches_its_own_key_alone() -> None:
    content, block = BlockContent(7, WORDS), block_of(key_of(3, 2, 1, Tensor.ROPE))
    assert content.matches(block, key_of(3, 2, 1, Tensor.ROPE))
    for other in (key_of(4, 2, 1, Tensor.ROPE), key_of(3, 2, 2, Tensor.ROPE), key_of(3, 2, 1)):
        assert not content.matches(block, other)


def test_no_two_blocks_have_the_same_key() -> None:
    positions = np.arange(50)
    keys = [
        block_keys(0, layer, request, positions, tensor)
        for layer in range(10)
        for request in range(10)
        for tensor in Tensor
    ]
    assert np.unique(np.concatenate(keys)).size == 10 * 10 * 4 * 50


@given(st.integers(0, WORDS * 8 - 1), st.integers(1, 255))
def test_one_wrong_byte_is_found(at: int, change: int) -> None:
    block = block_of(key_of())
    block.view(np.uint8)[at] ^= change
    assert not BlockContent(7, WORDS).matches(block, key_of())


@pytest.mark.parametrize("shift", [1, 8, 17])
def test_bytes_that_moved_within_the_block_are_found(shift: int) -> None:
    block = block_of(key_of())
    moved = np.roll(block.view(np.uint8), shift).view(np.uint64)
    assert not BlockContent(7, WORDS).matches(moved, key_of())


def test_other_seeds_make_other_blocks() -> None:
    keys = block_keys(8, 0, 0, np.array([0]), Tensor.LATENT)
    assert not BlockContent(7, WORDS).matches(block_of(key_of()), keys[0])
    assert not BlockContent(8, WORDS).matches(block_of(key_of()), key_of())


@given(
    st.integers(0, MAX_LAYERS - 1),
    st.integers(0, MAX_REQUESTS - 1),
    st.integers(0, MAX_BLOCKS - 1),
    st.sampled_from(Tensor),
)
def test_a_block_says_whose_it_is(layer: int, request: int, position: int, tensor: Tensor) -> None:
    block = block_of(key_of(layer, request, position, tensor))
    assert BlockContent(7, WORDS).describe(block) == (
        f"it holds the block of layer {layer}, request {request}, block {position} of the prompt, "
        f"{tensor.name.lower()}"
    )


def test_what_else_a_block_may_hold_is_described() -> None:
    content = BlockContent(7, WORDS)
    assert content.describe(np.full(WORDS, UNTOUCHED)) == "nothing was ever written there"
    mixed = block_of(key_of(1))
    mixed[:10] = block_of(key_of(2))[:10]
    assert content.describe(mixed).startswith("it is mixed: 54 of 64 words are of layer 1,")
    assert "no block of this run" in content.describe(np.zeros(WORDS, np.uint64))
