"""(c) Processor time of an idle sender and an idle receiver, connected to each other."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.pair import NAME, Shape, running_pair
from benchmarks.report import machine, table, verdict
from rd2h.prefill import LayerTask
from rd2h.wire import ReadReadyBatch, ReadRequest


def cpu_of(pid: int) -> float:
    """Processor seconds that another process has used, from the kernel's own count."""
    # schedstat counts nanoseconds; stat's clock ticks are too coarse for what idles.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print(machine() + "\n")
    with running_pair(Shape((4096,), None, 16)) as pair:
        # One exchange, so that both ends are connected and have nothing left to do.
        pair.register({"a": ([1], [])})
        batch = ReadReadyBatch(0, NAME, [ReadRequest("a", [1], [])])
        pair.sender.submit(LayerTask(NAME, {pair.endpoint: batch}))
        pair.sender.drain()
        before = (cpu_of(os.getpid()), cpu_of(pair.decode_pid))
        time.sleep(options.seconds)
        after = (cpu_of(os.getpid()), cpu_of(pair.decode_pid))
    shares = [(b - a) / options.seconds * 100 for a, b in zip(before, after, strict=True)]
    rows = [["sender", f"{shares[0]:.3f}"], ["receiver", f"{shares[1]:.3f}"]]
    print(table([f"idle over {options.seconds:g} s", "% of a core"], rows))
    print(verdict("the busier of both", max(shares), 0.5, at_most=True, unit=" %"))


if __name__ == "__main__":
    main()
