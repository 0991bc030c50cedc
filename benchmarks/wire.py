"""Reading and writing one `ReadReadyBatch`, against untyped msgpack, call by call in turn.

Three receivers read the same frame (version 3, entries of five fields, scattered ids, main and
indexer ids apart):

* typed: `rd2h.wire.decode`.
* baseline: `untyped`, what a receiver by hand has to do that does not trust its peer.
* lax: `untyped_lax`, the same without a look at the ids: the least that fills in the defaults. It
  checks less than the others, and a fault in the ids reaches whatever uses them.

Two senders write that frame: `rd2h.wire.encode`, from a message that is there already, and a
`msgspec.msgpack.Encoder`, from a plain tuple that is there already. The tuple is not checked.

In each round every call is timed once, and the next round starts with another one. A call of
`len`, timed in the same way, shows what the clock costs; its median is taken off every time. What
a call returns is freed after the clock has stopped; what it allocates and drops counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import machine, table, verdict
from rd2h.wire import ReadReadyBatch, ReadRequest, decode, encode

BLOCKS = 1 << 17
NAME = "model.layers.0.self_attn.attn"
TAG = b"read_ready_batch"
ENCODER = msgspec.msgpack.Encoder()
WARM_UP = 30

Times = NDArray[np.float64]
Entry = tuple[str, list[int], list[int], int, int]
Batch = tuple[int, str, list[Entry], list[str], int, int]


def untyped(payload: bytes) -> Batch:
    """Read a batch by hand, with each id made an int.

    What it does, in this order:

    1. ``msgspec.msgpack.decode`` without a type: nested lists.
    2. The tag must be that of a batch, the array must have 4 to 7 elements.
    3. Each entry must have 2 to 5 elements. A missing list of indexer ids is a copy of the main
       ids, a missing start is 0.
    4. Both lists of ids are built anew with ``list(map(int, ids))``, the fastest way to write it.
    5. Each entry becomes a plain tuple of five, the batch a plain tuple of six, with the missing
       fields of versions 1 and 2 filled in.

    What it does not do, and `decode` does: refuse an id that is text or negative (``int`` takes
    both) or a fraction (``int`` cuts it), look at the class of any other field, compare
    ``group_member_idx`` with ``tp_ratio``, accept further elements from a newer sender, or say
    where a fault is.
    """
    message = msgspec.msgpack.decode(payload)
    if message[0] != TAG or not 4 <= len(message) <= 7:
        raise ValueError("not a batch")
    entries: list[Entry] = []
    for entry in message[3]:
        size = len(entry)
        if not 2 <= size <= 5:
            raise ValueError(f"an entry of {size} elements")
        main = list(map(int, entry[1]))
        entries.append(
            (
                entry[0],
                main,
                list(map(int, entry[2])) if size > 2 else main.copy(),
                entry[3] if size > 3 else 0,
                entry[4] if size > 4 else 0,
            )
        )
    return _batch(message, entries)


def untyped_lax(payload: bytes) -> Batch:
    """Do what `untyped` does but for step 4: the lists of ids are those that msgspec built."""
    message = msgspec.msgpack.decode(payload)
    if message[0] != TAG or not 4 <= len(message) <= 7:
        raise ValueError("not a batch")
    entries: list[Entry] = []
    for entry in message[3]:
        size = len(entry)
        if not 2 <= size <= 5:
            raise ValueError(f"an entry of {size} elements")
        entries.append(
            (
                entry[0],
                entry[1],
                entry[2] if size > 2 else entry[1].copy(),
                entry[3] if size > 3 else 0,
                entry[4] if size > 4 else 0,
            )
        )
    return _batch(message, entries)


def _batch(message: Sequence[object], entries: list[Entry]) -> Batch:
    """The batch as a plain tuple, with what versions 1 and 2 lack."""
    size = len(message)
    return (  # type: ignore[return-value]  # an untyped receiver knows no better
        message[1],
        message[2],
        entries,
        message[4] if size > 4 else [],
        message[5] if size > 5 else 0,
        message[6] if size > 6 else 1,
    )


def plain(message: ReadReadyBatch) -> Batch:
    """A message as the tuple that a program without types would hold."""
    entries = [
        (r.ext_id, r.main_block_ids, r.indexer_block_ids, r.main_start_block, r.indexer_start_block)
        for r in message.read_reqs
    ]
    return (
        message.layer_idx, message.layer_name, entries, message.done_ext_ids,
        message.group_member_idx, message.tp_ratio,
    )  # fmt: skip


def batch_of(requests: int, blocks: int) -> ReadReadyBatch:
    """A batch of scattered blocks, with other ids for the indexer."""
    random = np.random.default_rng(requests * 10_000 + blocks)
    main, indexer = (
        random.permutation(BLOCKS)[: requests * blocks].reshape(requests, blocks).tolist()
        for _ in range(2)
    )
    entries = [
        ReadRequest(f"cmpl-{i}-0", main[i], indexer[i], i * blocks, i * blocks)
        for i in range(requests)
    ]
    return ReadReadyBatch(0, NAME, entries)


def times_of(requests: int, blocks: int, rounds: int) -> dict[str, Times]:
    """Microseconds of every call, ``rounds`` of each, without what the clock costs."""
    message = batch_of(requests, blocks)
    payload = encode(message)
    form = (TAG, *plain(message))
    # All of them do the same work, or the ratios mean nothing.
    assert decode(payload) == message
    assert untyped(payload) == untyped_lax(payload) == plain(message)
    assert ENCODER.encode(form) == payload
    calls: dict[str, Callable[[], object]] = {
        "decode": partial(decode, payload),
        "baseline": partial(untyped, payload),
        "lax": partial(untyped_lax, payload),
        "encode": partial(encode, message),
        "plain": partial(ENCODER.encode, form),
        "clock": partial(len, payload),
    }
    turns = list(calls.items())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + WARM_UP):
        for name, call in turns:
            start = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - start)
            del result
        turns.append(turns.pop(0))
    arrays = {name: np.asarray(values[WARM_UP:]) * 1e6 for name, values in times.items()}
    clock = float(np.median(arrays.pop("clock")))
    return {name: values - clock for name, values in arrays.items()}


def figures(microseconds: Times) -> str:
    """Median and the middle 80 %, with decimals where they matter."""
    parts = np.percentile(microseconds, [50, 10, 90])
    places = 2 if parts[0] < 10 else 1 if parts[0] < 100 else 0
    middle, low, high = (f"{part:,.{places}f}" for part in parts)
    return f"{middle} ({low} to {high})"


def summary(name: str, ratios: Sequence[float], target: float) -> None:
    """Print worst case and geometric mean against a target."""
    mean = float(np.exp(np.mean(np.log(ratios))))
    print(verdict(f"{name}, worst case", max(ratios), target, at_most=True, unit=" times"))
    print(verdict(f"{name}, geometric mean", mean, target, at_most=True, unit=" times"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Reading and writing a batch, typed and untyped.")
    parser.add_argument("--rounds", type=int, default=3000, help="of a small batch; large: fewer")
    options = parser.parse_args()
    print(f"{machine()}, msgspec {msgspec.__version__}\n")
    rows = []
    pairs = [("decode", "baseline"), ("decode", "lax"), ("encode", "plain")]
    ratios: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for requests in (1, 8, 32):
        for blocks in (1, 64, 1024):
            rounds = max(100, options.rounds // max(1, requests * blocks // 256))
            times = times_of(requests, blocks, rounds)
            for ours, theirs in pairs:
                ratio = float(np.median(times[ours]) / np.median(times[theirs]))
                ratios[ours, theirs].append(ratio)
            against, lax, writing = (f"{found[-1]:.2f}" for found in ratios.values())
            rows.append(
                [str(requests), str(blocks), figures(times["decode"]), figures(times["baseline"]),
                 against, figures(times["lax"]), lax, figures(times["encode"]),
                 figures(times["plain"]), writing]
            )  # fmt: skip
    columns = [
        "requests", "blocks each", "decode, us", "baseline, ids made ints, us", "ratio",
        "lax baseline, ids unseen, us", "ratio to lax", "encode, us", "plain tuple, us", "ratio",
    ]  # fmt: skip
    print(table(columns, rows))
    print("\nMedians (10 % to 90 %); ratios of medians.\n")
    summary("decode against the baseline", ratios["decode", "baseline"], 1.0)
    summary("encode against the plain tuple", ratios["encode", "plain"], 1.2)
    lax_ratios = ratios["decode", "lax"]
    mean = float(np.exp(np.mean(np.log(lax_ratios))))
    print(
        f"decode against the lax baseline, no target: worst case {max(lax_ratios):.2f} times, "
        f"geometric mean {mean:.2f} times"
    )


if __name__ == "__main__":
    main()
