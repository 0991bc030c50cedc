"""(a) A layer's round trip, from submit until its gate opens, against a bare ZMQ echo.

Prefill and Decode are two processes. The echo is a third one: a blocking DEALER here, a
blocking ROUTER there, the same frame sizes. Both are timed in turn, one exchange each. With
``--grow`` also (e): how the time grows with blocks and requests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
import zmq

from benchmarks.pair import NAME, Pair, Shape, running_pair
from benchmarks.report import machine, spread, table, verdict
from rd2h.prefill import LayerTask
from rd2h.wire import ReadDone, ReadReadyBatch, ReadRequest, encode

SHAPE = Shape((4096, 512), 1024, 8192)


def echo_server(pipe: Connection, reply: bytes) -> None:
    """Body of the echo process: answer every frame with ``reply``, until an empty one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        peer, payload = router.recv_multipart()
        if not payload:
            break
        router.send_multipart([peer, b"", reply])
    router.close(0)
    context.term()


def batch_of(requests: int, blocks: int, seed: int = 1) -> ReadReadyBatch:
    """A batch of scattered blocks of P."""
    ids = np.random.default_rng(seed).permutation(SHAPE.blocks)[: requests * blocks].tolist()
    parts = [ids[i * blocks : (i + 1) * blocks] for i in range(requests)]
    return ReadReadyBatch(
        0, NAME, [ReadRequest(f"cmpl-{i}-{blocks}", part) for i, part in enumerate(parts)]
    )


def register(pair: Pair, batch: ReadReadyBatch) -> None:
    """Give each request of a batch scattered blocks of D."""
    count = sum(len(request.main_block_ids) for request in batch.read_reqs)
    ids = iter(np.random.default_rng(2).permutation(SHAPE.blocks)[:count].tolist())
    lists = {
        request.ext_id: [next(ids) for _ in request.main_block_ids] for request in batch.read_reqs
    }
    pair.register({ext_id: (blocks, blocks) for ext_id, blocks in lists.items()})


def one_layer(pair: Pair, batch: ReadReadyBatch) -> float:
    """Seconds from submitting a layer until its gate is open."""
    start = time.perf_counter()
    pair.sender.submit(LayerTask(NAME, {pair.endpoint: batch}))
    pair.sender.wait(NAME)
    return time.perf_counter() - start


def against_echo(pair: Pair, rounds: int) -> float:
    """Time both in turn; print, and return the ratio of medians."""
    batch = batch_of(1, 1)
    register(pair, batch)
    request, reply = encode(batch), encode(ReadDone(0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo_server, args=(theirs, reply), daemon=True)
    process.start()
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = zmq_context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{ours.recv()}")
    layers: list[float] = []
    echoes: list[float] = []
    for turn in range(rounds + 100):
        layer = one_layer(pair, batch)
        start = time.perf_counter()
        dealer.send(request)
        dealer.recv_multipart()
        echo = time.perf_counter() - start
        if turn >= 100:  # the first ones warm both up
            layers.append(layer)
            echoes.append(echo)
    dealer.send(b"")
    process.join(10)
    dealer.close(0)
    zmq_context.term()
    ratio = float(np.median(layers) / np.median(echoes))
    rows = [["layer, submit to gate", spread(layers)], ["bare echo", spread(echoes)]]
    print(table(["round trip of one block", "median (10 % to 90 %), us"], rows))
    print(verdict("layer against echo", ratio, 2.0, at_most=True, unit=" times"), "(goal: 1.5)")
    return ratio


def growth(pair: Pair, rounds: int) -> None:
    """(e) for the round trip."""
    cases = [(1, blocks) for blocks in (1, 4, 16, 64, 256, 1024)]
    cases += [(requests, 1) for requests in (4, 16, 64)] + [(64, 16)]
    rows = []
    for requests, blocks in cases:
        batch = batch_of(requests, blocks, seed=requests * 10_000 + blocks)
        named = [
            ReadRequest(f"{request.ext_id}-{requests}", request.main_block_ids)
            for request in batch.read_reqs
        ]
        batch = ReadReadyBatch(0, NAME, named)
        register(pair, batch)
        times = [one_layer(pair, batch) for _ in range(rounds + 20)][20:]
        rows.append([str(requests), str(blocks), str(requests * blocks * 3), spread(times)])
    columns = ["requests", "blocks each", "segments", "median (10 % to 90 %), us"]
    print("\n" + table(columns, rows))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--grow", action="store_true", help="also (e): blocks and requests")
    options = parser.parse_args()
    print(machine() + "\n")
    with running_pair(SHAPE) as pair:
        against_echo(pair, options.rounds)
        if options.grow:
            growth(pair, max(20, options.rounds // 10))


if __name__ == "__main__":
    main()
