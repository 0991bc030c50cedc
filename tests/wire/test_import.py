"""Importing the wire is cheap: a proxy or a tool that speaks the protocol pays for nothing else."""

import subprocess
import sys

import pytest

PROBE = """
import sys, time
start = time.perf_counter()
import rd2h.wire
elapsed = time.perf_counter() - start
heavy = sorted({"torch", "vllm", "zmq", "numpy", "jsonschema"} & set(sys.modules))
print(elapsed, *heavy)
"""


def probe() -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout.split()


def test_nothing_heavy_is_imported() -> None:
    assert probe()[1:] == []


@pytest.mark.slow
def test_it_takes_less_than_100_ms() -> None:
    # The fastest of several fresh processes: other work on the machine only ever adds.
    assert min(float(probe()[0]) for _ in range(7)) < 0.1
