"""Whole exchanges between engines of unequal tensor parallelism, compared byte by byte.

Every Prefill rank holds bytes of its own, so that each byte on Decode says who supplied it. The
rules are written down here a second time, block by block: who pulls which block of a chunk, and
from whom.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from rd2h.decode import ReceiverOptions
from rd2h.prefill import LayerTask, SenderOptions
from rd2h.reads import PullScope
from rd2h.wire import ReadReadyBatch, ReadRequest
from tests.engines.peers import in_thread
from tests.transfer.caches import PATIENCE, UNTOUCHED, Bytes, Cache, Shape
from tests.transfer.ranks import Decode, Prefill, Site

BLOCKS = 64
INDEXED = Shape(main=(48, 16), indexer=12, lic8=4, blocks=BLOCKS)
PLAIN = Shape(main=(48, 16), blocks=BLOCKS)
SHAPES = {"layer.0": INDEXED, "layer.1": PLAIN, "layer.2": INDEXED, "layer.3": INDEXED}
REUSE = {"layer.2": "layer.0", "layer.3": "layer.0"}  # so that gates keep bytes from being lost
LAST = 3


@dataclass(frozen=True)
class Request:
    """A prompt: ``chunks`` are positions, those before the first are cached on Decode."""

    ext_id: str
    number: int
    length: int
    chunks: tuple[range, ...]
    sources: tuple[tuple[int, ...], tuple[int, ...]]  # block of each position: main, indexer
    destinations: tuple[tuple[int, ...], tuple[int, ...]]


def make_requests() -> list[Request]:
    orders = [np.random.default_rng(seed).permutation(BLOCKS).tolist() for seed in range(4)]
    spans: list[tuple[int, tuple[range, ...]]] = [
        (17, (range(4, 9), range(9, 17))),  # a cached prefix of four blocks, two chunks
        (13, (range(1), range(1, 13))),
        (5, (range(5),)),
        (3, ()),  # cached whole
    ]
    requests, at = [], 0
    for number, (length, chunks) in enumerate(spans):
        first, second, third, fourth = (tuple(order[at : at + length]) for order in orders)
        at += length
        requests.append(
            Request(f"r{number}", number, length, chunks, (first, second), (third, fourth))
        )
    return requests


def content(rank: int, layer: int, request: int, position: int, tensor: int, size: int) -> Bytes:
    """What a Prefill rank computes for a block."""
    rng = np.random.default_rng([rank, layer, request, position, tensor])
    return rng.integers(0, UNTOUCHED, size, dtype=np.uint8)


def owners(start: int, count: int, size: int) -> list[int]:
    """Which of ``size`` pulls each of ``count`` blocks: rotated, the first take the remainder."""
    order = [(start + place) % size for place in range(size)]
    shares = [count // size + (place < count % size) for place in range(size)]
    return [rank for rank, share in zip(order, shares, strict=True) for _ in range(share)]


def compute(
    prefill: Prefill, rank: int, ratio: int, endpoint: str, requests: Sequence[Request]
) -> None:
    """Compute and announce every chunk, as the compute thread of a Prefill rank does."""
    for step in range(2):
        active = [r for r in requests if step < len(r.chunks)]
        for layer, name in enumerate(SHAPES):
            prefill.sender.wait(name)
            for tensor in prefill.cache.tensors[name]:
                tensor[:] = 255  # whoever still reads the layer before gets this
            for request in active:
                for position in request.chunks[step]:
                    for index, tensor in enumerate(prefill.cache.tensors[name]):
                        at = request.sources[index >= 2][position]
                        tensor[at] = content(
                            rank, layer, request.number, position, index, tensor.shape[1]
                        )
            entries = [
                ReadRequest(
                    request.ext_id,
                    [request.sources[0][position] for position in request.chunks[step]],
                    [request.sources[1][position] for position in request.chunks[step]]
                    if SHAPES[name].indexer
                    else [],
                    request.chunks[step].start,
                    request.chunks[step].start,
                )
                for request in active
            ]
            done = [
                r.ext_id for r in requests if layer == LAST and step == max(len(r.chunks) - 1, 0)
            ]
            announced = ReadReadyBatch(layer, name, entries, done, rank % ratio, ratio)
            prefill.sender.submit(LayerTask(name, {endpoint: announced}))
    prefill.sender.drain()


def expected(
    decode_rank: int | None, decodes: int, ratio: int, requests: Sequence[Request]
) -> dict[str, list[Bytes]]:
    """What a Decode rank's memory must hold in the end.

    ``decode_rank`` None is the pool of main KV that all ranks share.
    """
    memory = {
        name: [np.full((BLOCKS, size), UNTOUCHED, np.uint8) for size in shape.tensors]
        for name, shape in SHAPES.items()
    }
    for layer, name in enumerate(SHAPES):
        for request in requests:
            for chunk in request.chunks:
                mains = owners(chunk.start, len(chunk), decodes)
                members = owners(chunk.start, len(chunk), ratio)
                for offset, position in enumerate(chunk):
                    main_rank = mains[offset] if decode_rank is None else decode_rank
                    for index, tensor in enumerate(memory[name]):
                        if index < 2:
                            at, rank = request.destinations[0][position], main_rank * ratio
                        elif decode_rank is None:
                            continue
                        else:
                            at = request.destinations[1][position]
                            rank = decode_rank * ratio + members[offset]
                        tensor[at] = content(
                            rank, layer, request.number, position, index, tensor.shape[1]
                        )
    return memory


@pytest.mark.slow
@pytest.mark.parametrize("main_shared", [True, False], ids=["shared", "rank-local"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (4, 1), (4, 2), (16, 2)])
def test_every_byte(site: Site, prefill_tp: int, decode_tp: int, main_shared: bool) -> None:
    ratio = prefill_tp // decode_tp
    requests = make_requests()
    shared = Cache(SHAPES, UNTOUCHED)
    pool = {name: tensors[:2] for name, tensors in shared.tensors.items()} if main_shared else None
    # Decode's kernel blocks are half of a block; Prefill's are a block.
    finer = {name: Shape(s.main, s.indexer, s.lic8, s.blocks, 2) for name, s in SHAPES.items()}
    decodes: list[Decode] = []
    for rank in range(decode_tp):
        cache = Cache(finer, UNTOUCHED, main=pool)
        scope = PullScope(rank, decode_tp, main_shared)
        decodes.append(site.decode(cache=cache, scope=scope, options=ReceiverOptions(2)))
    work: list[tuple[threading.Thread, list[BaseException]]] = []
    for rank in range(prefill_tp):
        prefill = site.prefill(cache=Cache(SHAPES, reuse=REUSE), options=SenderOptions())
        endpoint = decodes[rank // ratio].endpoint
        work.append(in_thread(partial(compute, prefill, rank, ratio, endpoint, requests)))
    for decode in decodes:  # some of it comes too early
        for request in requests:
            decode.register(request.ext_id, *request.destinations)
    for thread, raised in work:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert not raised
    for decode in decodes:
        decode.wait_done(*(request.ext_id for request in requests))
    for rank, decode in enumerate(decodes):
        want = expected(rank, decode_tp, ratio, requests)
        if main_shared:
            for name, tensors in expected(None, decode_tp, ratio, requests).items():
                want[name][:2] = tensors[:2]
        for name, tensors in decode.cache.tensors.items():
            for index, tensor in enumerate(tensors):
                np.testing.assert_array_equal(tensor, want[name][index], f"{name}, {index}")
