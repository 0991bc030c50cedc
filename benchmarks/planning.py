"""(b) Planning and validating one batch of 8 requests with 128 scattered blocks each.

Two main tensors and an indexer. With ``--grow`` also (e): from 1 to 1,024 blocks and from 1 to
64 requests.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.report import machine, spread, table, verdict
from rd2h.layout import LayerLayout, TensorLayout
from rd2h.reads import PullScope, RequestDestination, plan_reads
from rd2h.wire import ReadReadyBatch, ReadRequest, decode, encode

BLOCKS = 1 << 17
NAME = "model.layers.0.self_attn.attn"


def layer(known: bool) -> LayerLayout:
    """A DeepSeek-V3.2-shaped layer: latent 512 and rope 64 in bf16, indexer 128, 128 tokens."""
    sizes = [128 * 512 * 2, 128 * 64 * 2, 128 * 128 * 2]
    tensors = [
        TensorLayout((i + 1) << 44, size, 1, BLOCKS if known else None)
        for i, size in enumerate(sizes)
    ]
    return LayerLayout(NAME, tuple(tensors[:2]), tensors[2])


def times_of(requests: int, blocks: int, rounds: int) -> list[float]:
    """Seconds to plan a batch, as it came from the wire, ``rounds`` times."""
    random = np.random.default_rng(requests * 10_000 + blocks)
    source = random.permutation(BLOCKS)[: requests * blocks].reshape(requests, blocks)
    target = random.permutation(BLOCKS)[: requests * blocks].reshape(requests, blocks)
    ids = [f"cmpl-{i}-0" for i in range(requests)]
    batch = decode(
        encode(
            ReadReadyBatch(
                0, NAME, [ReadRequest(i, row.tolist()) for i, row in zip(ids, source, strict=True)]
            )
        )
    )
    assert isinstance(batch, ReadReadyBatch)
    destinations = {
        i: RequestDestination(i, row.tolist(), row.tolist())
        for i, row in zip(ids, target, strict=True)
    }
    remote, local, scope = layer(False), layer(True), PullScope(0, 1, main_shared=False)
    times = []
    for _ in range(rounds + 20):
        start = time.perf_counter()
        plan = plan_reads(batch, remote, local, destinations, scope)
        times.append(time.perf_counter() - start)
        assert plan.segments_before == requests * blocks * 3
    return times[20:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--grow", action="store_true", help="also (e): blocks and requests")
    options = parser.parse_args()
    print(machine() + "\n")
    times = times_of(8, 128, options.rounds)
    print(f"8 requests of 128 scattered blocks, 3,072 segments: {spread(times)} us")
    median = float(np.median(times)) * 1e3
    print(verdict("planning and validation", median, 0.5, at_most=True, unit=" ms"))
    if options.grow:
        cases = [(8, blocks) for blocks in (1, 16, 128, 1024)]
        cases += [(requests, 128) for requests in (1, 4, 16, 64)]
        rows = [
            [str(requests), str(blocks), str(requests * blocks * 3),
             spread(times_of(requests, blocks, max(20, options.rounds // 10)))]
            for requests, blocks in cases
        ]  # fmt: skip
        columns = ["requests", "blocks each", "segments", "median (10 % to 90 %), us"]
        print("\n" + table(columns, rows))


if __name__ == "__main__":
    main()
