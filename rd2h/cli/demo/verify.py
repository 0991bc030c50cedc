"""Checks every block of a Decode rank's memory against what Prefill computed for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rd2h.cli.demo.content import UNTOUCHED, BlockContent, Words, block_keys
from rd2h.cli.demo.memory import CacheMemory
from rd2h.cli.demo.plan import BlockIds, Plan
from rd2h.cli.demo.shape import Tensor

__all__ = ["Findings", "Verifier"]

_EXAMPLES = 5


@dataclass
class Findings:
    """What was found; blocks are counted tensor by tensor.

    Attributes:
        blocks: Blocks with contents that were checked.
        bytes: Their bytes.
        guards: Blocks that must be untouched.
        wrong: How many of either are wrong.
        examples: The first few of those, in words.
    """

    blocks: int = 0
    bytes: int = 0
    guards: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    def add_wrong(self, text: str) -> None:
        """Count a wrong block."""
        self.wrong += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(text)


class Verifier:
    """Fills a Decode rank's memory beforehand, and checks it afterwards.

    Main memory is shared by the ranks of an engine: each fills and checks some of its layers.

    Args:
        plan: The run.
        engine: The Decode engine.
        rank: This rank.
        memory: Its memory.
    """

    def __init__(self, plan: Plan, engine: int, rank: int, memory: CacheMemory) -> None:
        self._plan = plan
        self._table = plan.decode[engine]
        self._rank = rank
        self._memory = memory
        self._content = {
            shape.tensor: BlockContent(plan.options.seed, shape.words)
            for shape in (*plan.shape.main, *plan.shape.indexed)
        }

    def clear(self) -> None:
        """Make all of this rank's memory untouched."""
        for _, _, words, _ in self._tensors():
            words.fill(UNTOUCHED)

    def reclaim(self, request: int) -> None:
        """Use a request's blocks for something else: from now on nothing may write there."""
        for _, _, words, ids in self._tensors():
            words[ids[request]] = UNTOUCHED

    def check(self, done: Iterable[int]) -> Findings:
        """Check all of this rank's memory: these requests' contents, and nothing elsewhere."""
        findings = Findings()
        requests = sorted(done)
        for layer, tensor, words, ids in self._tensors():
            for request in requests:
                self._check_content(findings, layer, request, tensor, words, ids[request])
            taken = np.concatenate([np.zeros(0, np.int64), *(ids[r] for r in requests)])
            rest = np.setdiff1d(np.arange(self._table.pool_blocks), taken)
            self._check_guards(findings, layer, tensor, words, rest)
        return findings

    def spoil(self) -> None:
        """Write where nothing may be written, for tests of the demo."""
        layer = self._memory.layers[self._rank]
        layer.main[0][1][0, -1] ^= np.uint64(1)

    def _tensors(self) -> Iterable[tuple[int, Tensor, Words, dict[int, BlockIds]]]:
        """Everything that is this rank's to fill and to check."""
        for index, layer in enumerate(self._memory.layers):
            if index % self._plan.options.decode_tp == self._rank:
                for tensor, words in layer.main:
                    yield index, tensor, words, self._table.main
            for tensor, words in layer.indexed:
                yield index, tensor, words, self._table.indexer

    def _check_content(
        self,
        findings: Findings,
        layer: int,
        request: int,
        tensor: Tensor,
        words: Words,
        ids: BlockIds,
    ) -> None:
        content = self._content[tensor]
        keys = block_keys(self._plan.options.seed, layer, request, np.arange(ids.size), tensor)
        findings.blocks += ids.size
        findings.bytes += ids.size * words.itemsize * words.shape[1]
        for position, (block, key) in enumerate(zip(ids.tolist(), keys, strict=True)):
            if not content.matches(words[block], key):
                findings.add_wrong(
                    f"layer {layer}, request {request}, block {position} of the prompt, "
                    f"{tensor.name.lower()}: {content.describe(words[block])}"
                )

    def _check_guards(
        self, findings: Findings, layer: int, tensor: Tensor, words: Words, ids: BlockIds
    ) -> None:
        findings.guards += ids.size
        touched = (words[ids] != UNTOUCHED).any(axis=1)
        for block in ids[touched].tolist():
            findings.add_wrong(
                f"layer {layer}, {tensor.name.lower()}, block id {block} is no request's, but "
                f"{self._content[tensor].describe(words[block])}"
            )
