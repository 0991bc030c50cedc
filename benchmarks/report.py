"""Figures: the machine, medians and spread, and a plain table."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

__all__ = ["machine", "spread", "table", "verdict"]


def machine() -> str:
    """One line about where the figures were taken."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, load {load}; "
        f"Python {platform.python_version()}, NumPy {np.__version__}, "
        f"libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}"
    )


def spread(seconds: Sequence[float], unit: float = 1e-6) -> str:
    """Median and the middle 80 % of some times, in ``unit`` (microseconds by default)."""
    low, middle, high = np.percentile(np.asarray(seconds) / unit, [10, 50, 90])
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, so that it can go into the docs as it is."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def verdict(name: str, value: float, target: float, *, at_most: bool, unit: str = "") -> str:
    """One line: the figure, the target, and whether it was met."""
    met = value <= target if at_most else value >= target
    bound = "at most" if at_most else "at least"
    return (
        f"{name}: {value:.2f}{unit}, target {bound} {target:g}{unit}: {'met' if met else 'MISSED'}"
    )
