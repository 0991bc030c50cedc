"""What a run will do: requests, steps, block ids, who reads how much, and how it must end.

Pure, and the same in every process: each works it out from the options and the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rd2h.cli.demo.messages import Verdict
from rd2h.cli.demo.options import DemoOptions, Fault, OptionError
from rd2h.cli.demo.shape import CacheShape
from rd2h.topology import TpMapping, owned_range

__all__ = ["BlockIds", "Piece", "Plan", "Request", "Step", "check_memory", "memory_bytes"]

BlockIds = NDArray[np.int64]

_LONGEST_RUN = 6
_PROCESS_BYTES = 80 << 20
"""What Python, NumPy and ZMQ take in each process, roughly."""

_PLAN_BYTES = 100
"""What a plan takes for each block, at the peak of making it, roughly."""

_SLOW_LEAST = 0.02
_SLOW_COMPUTING = 1e9
"""Bytes per second that Prefill computes at least, unless the machine is very busy."""

_SPARE = 16
"""One in so many of Decode's blocks is nobody's."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        index: Its number; part of its contents.
        ext_id: Its external id.
        engine: The Decode engine that it goes to.
        wave: Requests of a later wave start when those of the earlier are computed.
        verdict: How it must end.
    """

    index: int
    ext_id: str
    engine: int
    wave: int
    verdict: Verdict


@dataclass(frozen=True)
class Piece:
    """The blocks of one request that one step completes; ``last`` if they are its last."""

    request: Request
    start: int
    count: int
    last: bool

    @property
    def positions(self) -> BlockIds:
        """Places in the prompt, in blocks."""
        return np.arange(self.start, self.start + self.count)


@dataclass(frozen=True)
class Step:
    """One Prefill step: a chunk of every request of a wave."""

    wave: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class BlockTable:
    """Block ids of every request, shape ``[blocks of the prompt]`` each, and of the pools.

    Attributes:
        main: By request index.
        indexer: By request index; a group of its own, with ids of its own.
        pool_blocks: Blocks in each pool; block 0 is never handed out, as in vLLM.
    """

    main: dict[int, BlockIds]
    indexer: dict[int, BlockIds]
    pool_blocks: int


class Plan:
    """Everything that follows from the options.

    Attributes:
        options: The options.
        shape: The caches' shape.
        mapping: Who feeds whom.
        requests: All requests, by index.
        steps: All Prefill steps, in order.
        prefill: Prefill's block ids, the same on all its ranks.
        decode: Each Decode engine's, the same on all its ranks.
    """

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.shape = CacheShape.from_options(options)
        self.mapping = TpMapping(options.prefill_tp, options.decode_tp)
        self.requests = tuple(self._request(index) for index in range(options.requests))
        self.steps = tuple(self._steps())
        rng = np.random.default_rng(options.seed)
        self.prefill = self._prefill_table(rng)
        self.decode = tuple(
            self._decode_table(rng, self.requests_of(engine))
            for engine in range(options.decode_engines)
        )

    def requests_of(self, engine: int) -> list[Request]:
        """The requests that go to one Decode engine."""
        return [request for request in self.requests if request.engine == engine]

    def prefill_name(self, rank: int) -> str:
        """How people call a Prefill rank."""
        return f"prefill {rank}"

    def decode_name(self, engine: int, rank: int) -> str:
        """How people call a Decode rank; a letter tells engines apart where there are two."""
        letter = chr(ord("A") + engine) if self.options.decode_engines > 1 else ""
        return f"decode {letter}{rank}"

    @property
    def victims(self) -> tuple[str, ...]:
        """The ranks that the fault kills."""
        match self.options.fault:
            case Fault.KILL_PREFILL:
                return (self.prefill_name(0),)
            case Fault.KILL_DECODE:
                return (self.decode_name(1, 0),)
            case _:
                return ()

    def expected_bytes(self, engine: int, rank: int) -> int:
        """Bytes that one Decode rank reads if nothing goes wrong."""
        main = indexed = 0
        for step in self.steps:
            for piece in step.pieces:
                if piece.request.engine == engine:
                    size = self.options.decode_tp
                    main += len(owned_range(piece.start, piece.count, rank, size))
                    indexed += piece.count
        shape = self.shape
        return (
            main * shape.layers * shape.main_block_bytes
            + indexed * shape.indexed_layers * shape.indexed_block_bytes
        )

    @property
    def slow_read_seconds(self) -> float:
        """By how much ``slow-decode`` delays each read: more than all buffers take to compute."""
        shape = self.shape
        blocks = max(sum(piece.count for piece in step.pieces) for step in self.steps)
        size = blocks * (shape.main_block_bytes + shape.indexed_block_bytes)
        return _SLOW_LEAST + self.options.buffers * size / _SLOW_COMPUTING

    # -------------------------------------------------------------------------------- internals

    def _request(self, index: int) -> Request:
        count, fault = self.options.requests, self.options.fault
        engine = index % self.options.decode_engines
        wave, verdict = 0, Verdict.DONE
        if fault is Fault.KILL_PREFILL and index >= count // 2:
            wave, verdict = 1, Verdict.FAILED
        elif fault is Fault.KILL_DECODE and engine == 1:
            verdict = Verdict.LOST
        elif fault is Fault.ABORT and index % 2:
            verdict = Verdict.ABORTED
        return Request(index, f"cmpl-{index}-0", engine, wave, verdict)

    def _steps(self) -> list[Step]:
        options = self.options
        steps = []
        for wave in sorted({request.wave for request in self.requests}):
            requests = [request for request in self.requests if request.wave == wave]
            start = 0
            for computed in range(options.chunk, options.tokens + options.chunk, options.chunk):
                last = computed >= options.tokens
                # A block is announced once it is complete; the prompt's last one as it is.
                end = options.blocks_per_request if last else computed // options.block_size
                if end > start:
                    pieces = tuple(Piece(r, start, end - start, last) for r in requests)
                    steps.append(Step(wave, pieces))
                start = end
        return steps

    def _prefill_table(self, rng: np.random.Generator) -> BlockTable:
        """Prefill allocates step by step, so that requests' blocks lie between one another's."""
        blocks = self.options.blocks_per_request * len(self.requests)
        tables: list[dict[int, BlockIds]] = []
        for _ in range(2):
            pool = _used_pool(blocks, rng)
            table: dict[int, list[BlockIds]] = {r.index: [] for r in self.requests}
            taken = 0
            for step in self.steps:
                for piece in step.pieces:
                    table[piece.request.index].append(pool[taken : taken + piece.count])
                    taken += piece.count
            tables.append({index: np.concatenate(parts) for index, parts in table.items()})
        return BlockTable(tables[0], tables[1], blocks + 1)

    def _decode_table(self, rng: np.random.Generator, requests: list[Request]) -> BlockTable:
        """Decode allocates a request's whole prompt at once; some blocks are nobody's."""
        each = self.options.blocks_per_request
        spare = max(2, each * len(requests) // _SPARE)
        tables: list[dict[int, BlockIds]] = []
        for _ in range(2):
            pool = _used_pool(each * len(requests) + spare, rng)
            tables.append(
                {r.index: pool[at * each : (at + 1) * each] for at, r in enumerate(requests)}
            )
        return BlockTable(tables[0], tables[1], each * len(requests) + spare + 1)


def memory_bytes(options: DemoOptions) -> int:
    """Return how many bytes the whole run takes at its peak, roughly.

    Arithmetic alone: a plan itself may be too large.

    Raises:
        OptionError: as `CacheShape.from_options`.
    """
    shape = CacheShape.from_options(options)
    prefill = options.requests * options.blocks_per_request
    decode = prefill + prefill // _SPARE + 4
    in_decode = (
        shape.layers * shape.main_block_bytes
        + options.decode_tp * shape.indexed_layers * shape.indexed_block_bytes
    )
    in_buffer = shape.main_block_bytes + shape.indexed_block_bytes
    in_plan = _PLAN_BYTES * (options.processes + 1)
    return (
        decode * (in_decode + in_plan)
        + prefill * options.prefill_tp * options.buffers * in_buffer
        + options.processes * _PROCESS_BYTES
    )


def check_memory(options: DemoOptions, available: int) -> None:
    """Refuse a run that would not fit.

    Args:
        options: The run.
        available: Bytes that may be taken.

    Raises:
        OptionError: one line with both values.
    """
    needed = memory_bytes(options)
    if needed > available:
        raise OptionError(
            f"the run needs about {needed / 2**30:.1f} GiB "
            f"({options.requests * options.blocks_per_request} blocks in {options.layers} layers, "
            f"{options.processes} processes) and {available / 2**30:.1f} GiB are available; lower "
            f"--requests, --tokens or --layers, or --prefill-tp and --decode-tp"
        )


def _used_pool(blocks: int, rng: np.random.Generator) -> BlockIds:
    """Return block ids 1 to ``blocks`` as a pool that has been in use hands them out.

    Short runs of neighbours in any order, some of them descending.
    """
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    cuts = np.cumsum(rng.integers(1, _LONGEST_RUN + 1, blocks))
    runs = np.split(ids, cuts[cuts < blocks])
    order = rng.permutation(len(runs))
    backwards = rng.random(len(runs)) < 0.25
    return np.concatenate([runs[at][::-1] if backwards[at] else runs[at] for at in order])
