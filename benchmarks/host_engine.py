"""(d) Bytes through the whole stack, against bare ``process_vm_readv`` over the same segments.

A layer of 8 requests with 128 scattered blocks each goes from Prefill (this process) to Decode
(another one). The baseline runs in a third process, which reads the same segments into memory
of its own with nothing but the system call, 1,024 segments at a time. Both in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from benchmarks.pair import IoVec, Shape, make_layer, running_pair
from benchmarks.report import machine, spread, table, verdict
from benchmarks.round_trip import one_layer
from rd2h.layout import LayerLayout
from rd2h.reads import PullScope, RequestDestination, plan_reads
from rd2h.wire import ReadReadyBatch, ReadRequest

REQUESTS, BLOCKS = 8, 128
SHAPE = Shape((65536, 8192), 16384, 2 * REQUESTS * BLOCKS)


def vectors(addrs: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> ctypes.Array[IoVec]:
    """Segments as the system call wants them."""
    packed = np.stack([addrs, lengths], axis=1)
    array = (IoVec * len(lengths))()
    ctypes.memmove(array, packed.ctypes.data, packed.nbytes)
    return array


def bare(
    pipe: Connection,
    pid: int,
    prefill: LayerLayout,
    batch: ReadReadyBatch,
    requests: dict[str, tuple[list[int], list[int]]],
) -> None:
    """Body of the baseline's process: on each request, read everything once and tell the time."""
    layer, _memory = make_layer(SHAPE)
    destinations = {i: RequestDestination(i, *lists) for i, lists in requests.items()}
    plan = plan_reads(batch, prefill, layer, destinations, PullScope(0, 1, main_shared=False))
    libc = ctypes.CDLL(None, use_errno=True)
    calls = [
        (vectors(plan.local_addrs[i : i + 1024], plan.lengths[i : i + 1024]),
         vectors(plan.remote_addrs[i : i + 1024], plan.lengths[i : i + 1024]))
        for i in range(0, plan.segments, 1024)
    ]  # fmt: skip
    pipe.send(plan.total_bytes)
    while pipe.recv():
        start = time.perf_counter()
        moved = sum(
            libc.process_vm_readv(pid, local, len(local), remote, len(remote), 0)
            for local, remote in calls
        )
        pipe.send((time.perf_counter() - start, moved))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    print(machine() + "\n")
    random = np.random.default_rng(3)
    ids = [f"cmpl-{i}-0" for i in range(REQUESTS)]
    source = random.permutation(SHAPE.blocks)[: REQUESTS * BLOCKS].reshape(REQUESTS, BLOCKS)
    target = random.permutation(SHAPE.blocks)[: REQUESTS * BLOCKS].reshape(REQUESTS, BLOCKS)
    requests = {i: (row.tolist(), row.tolist()) for i, row in zip(ids, target, strict=True)}
    reads = [ReadRequest(i, row.tolist()) for i, row in zip(ids, source, strict=True)]
    with running_pair(SHAPE) as pair:
        batch = ReadReadyBatch(0, pair.prefill.name, reads)
        pair.register(requests)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), pair.prefill, batch, requests)
        process = context.Process(target=bare, args=arguments, daemon=True)
        process.start()
        total = ours.recv()
        stack: list[float] = []
        calls: list[float] = []
        for turn in range(options.rounds + 5):
            layer = one_layer(pair, batch)
            ours.send(True)
            seconds, moved = ours.recv()
            assert moved == total, "the baseline did not read everything"
            if turn >= 5:
                stack.append(layer)
                calls.append(seconds)
        ours.send(False)
        process.join(10)
    rates = [total / float(np.median(times)) / 1e9 for times in (stack, calls)]
    rows = [
        ["whole stack, submit to gate", spread(stack), f"{rates[0]:.2f}"],
        ["bare process_vm_readv", spread(calls), f"{rates[1]:.2f}"],
    ]
    print(table([f"{total / 1e6:.0f} MB in one layer", "median (10 % to 90 %), us", "GB/s"], rows))
    share = rates[0] / rates[1] * 100
    print(verdict("stack against bare calls", share, 85.0, at_most=False, unit=" %"))


if __name__ == "__main__":
    main()
