"""A run's result for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rd2h.cli.demo.result import RunResult

__all__ = ["as_json", "print_report"]


def as_json(result: RunResult) -> str:
    """The result as JSON: ``ok``, ``totals``, and the ``run`` in detail."""
    document = {"ok": result.ok, "totals": result.totals(), "run": result}
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def print_report(console: Console, result: RunResult) -> None:
    """Print the result: what ran, the figures, and what was checked."""
    if not result.error:
        console.print(_figures(result))
        console.print(_checks(result))
    verdict = Text("PASSED", "bold green") if result.ok else Text("FAILED", "bold red")
    if result.error:
        verdict.append(f": {result.error}", "default")
    console.print(verdict, soft_wrap=True)


def _figures(result: RunResult) -> Table:
    options, totals = result.options, result.totals()
    table = Table(
        title=(
            f"P TP {options.prefill_tp} to D TP {options.decode_tp}, {options.layers} layers, "
            f"{options.requests} x {options.tokens} tokens, {options.engine} engine"
        ),
        title_justify="left",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    seconds = max((rank.seconds for rank in result.prefill), default=0.0)
    for name, value in (
        ("bytes read", f"{totals.bytes:,} in {result.transfer_seconds:.2f} s"),
        ("throughput", f"{totals.bytes_per_second / 1e9:.3g} GB/s, computing included"),
        ("in reads alone", f"{totals.read_bytes_per_second / 1e9:.3g} GB/s in each read thread"),
        ("layers", f"{totals.layers_per_second:.0f} per second ({totals.layers} on each P rank)"),
        (
            "P waited at gates",
            f"{totals.gate_wait_mean:.2f} s on average, {totals.gate_wait_max:.2f} s at most, of "
            f"{seconds:.2f} s",
        ),
        ("reads", f"{totals.reads_before_merging:,} before merging, {totals.reads:,} after"),
        (
            "time",
            f"{result.start_seconds:.1f} s to start, {result.transfer_seconds:.1f} s to "
            f"transfer, {result.verify_seconds:.1f} s to check",
        ),
    ):
        table.add_row(name, value)
    return table


def _checks(result: RunResult) -> Table:
    fault = f", --fault {result.options.fault}" if result.options.fault else ""
    table = Table(title=f"Checked{fault}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in result.checks:
        mark = Text("ok", "green") if check.ok else Text("WRONG", "bold red")
        table.add_row(check.name, mark, Text(check.detail))  # a reason may hold brackets
    return table
