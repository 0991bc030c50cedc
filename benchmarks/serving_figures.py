"""What `benchmarks.serving` measured, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.hand_offs import Nixl, Single
from benchmarks.report import spread, table
from serving.shapes import BENCHMARK

__all__ = ["AT_ONCE", "AT_ONCE_LENGTH", "FEW", "LENGTHS", "MANY", "Figures", "report"]

LENGTHS = (300, 900)
# Of an answer whose first token is what matters, and of one of several at once.
FEW, MANY = 4, 16
AT_ONCE = 8
AT_ONCE_LENGTH = 300


@dataclass(frozen=True)
class Figures:
    """What was measured, by the name of the hand-off.

    Attributes:
        first_token: For each prompt length, seconds to the first token, one a round.
        requests: Requests a second with `AT_ONCE` in flight, one a round.
        at_rest: Cores that its servers use when there is nothing to do.
    """

    first_token: dict[int, dict[str, list[float]]]
    requests: dict[str, list[float]]
    at_rest: dict[str, float]


def report(figures: Figures) -> str:
    """Medians, the middle 80 %, and the ratio to NixlConnector in the same round, as tables."""
    lines = []
    for length, seconds in figures.first_token.items():
        megabytes = length * BENCHMARK.kv_bytes_per_token / 1e6
        lines.append(f"\nFirst token of a prompt of {length} tokens ({megabytes:.0f} MB of KV)\n")
        lines.append(
            table(
                ("", "ms, median (middle 80 %)", "to NixlConnector", "added to one server, ms"),
                [
                    (
                        name,
                        spread(values, 1e-3),
                        _ratio(values, seconds.get(Nixl.name)),
                        _added(values, seconds[Single.name]),
                    )
                    for name, values in seconds.items()
                ],
            )
        )
    lines.append(
        f"\nPrompts of {AT_ONCE_LENGTH} tokens, {MANY} tokens each, {AT_ONCE} requests at once\n"
    )
    lines.append(
        table(
            ("", "requests a second, median", "to NixlConnector", "tokens a second"),
            [
                (
                    name,
                    f"{statistics.median(values):.2f}",
                    _ratio(values, figures.requests.get(Nixl.name)),
                    f"{statistics.median(values) * MANY:.1f}",
                )
                for name, values in figures.requests.items()
            ],
        )
    )
    lines.append("\nAt rest\n")
    lines.append(
        table(("", "cores"), [(name, f"{cores:.2f}") for name, cores in figures.at_rest.items()])
    )
    return "\n".join(lines)


def _ratio(values: Sequence[float], baseline: Sequence[float] | None) -> str:
    if baseline is None:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(values, baseline, strict=True)):.2f}"


def _added(values: Sequence[float], alone: Sequence[float]) -> str:
    return f"{statistics.median(a - b for a, b in zip(values, alone, strict=True)) * 1e3:,.0f}"
