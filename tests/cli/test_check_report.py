"""What both ends of a check print."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from rd2h.cli.check.failures import Failure, Side, Step
from rd2h.cli.check.options import EngineName, MemoryName, Pattern, PrefillOptions
from rd2h.cli.check.report import PrefillLines, as_json, print_result, print_step
from rd2h.cli.check.result import CheckResult, ReadFigures, StepDone
from rd2h.cli.check.service import Outcome

FAILURE = Failure(
    Side.DECODE, Step.FIRST_READ, "not [bold]allowed[/bold]", ["ptrace rights: [1]", "place: here"]
)
READS = [
    ReadFigures(4096, Pattern.CONTIGUOUS, 1, [0.004, 0.001, 0.002]),
    ReadFigures(64 << 20, Pattern.RANDOM, 4096, [0.064]),
]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100, highlight=False)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def result(reads: list[ReadFigures], failure: Failure | None = None) -> CheckResult:
    return CheckResult(
        "p port 1", MemoryName.HOST, 16 << 10, EngineName.NIXL, reads=reads, failure=failure
    )


def test_figures() -> None:
    assert READS[0].median == 0.002
    assert READS[0].fastest == 0.001
    assert READS[0].bytes_per_second == pytest.approx(2_048_000)
    assert ReadFigures(1, Pattern.RANDOM, 1, [0.0]).bytes_per_second == 0


def test_a_good_result(console: Console) -> None:
    print_result(console, result(READS))
    lines = printed(console)
    assert lines[0] == "nixl engine, host memory, blocks of 16K, 3 rounds"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["4K", "contiguous", "1", "2.000", "1.000", "0.00205", "ok"],
        ["64M", "random", "4,096", "64.000", "64.000", "1.05", "ok"],
    ]
    assert lines[-1] == "PASSED"


def test_a_failure_is_one_block(console: Console) -> None:
    print_result(console, result(READS[:1], FAILURE))
    assert printed(console)[-5:] == [
        "first read failed on decode",
        "  seen     not [bold]allowed[/bold]",
        "  look at  ptrace rights: [1]",
        "           place: here",
        "FAILED",
    ]


def test_nobody_at_the_other_end_controls_this_terminal(console: Console) -> None:
    evil = Failure(Side.PREFILL, Step.READ, "a\x1b[2Jb\nc", ["\x07"])
    print_result(console, result([], evil))
    print_step(console, StepDone(Step.HANDSHAKE, "rd2h \x1b[2J there"))
    assert printed(console) == [
        "read failed on prefill",
        "  seen     a\\x1b[2Jb\\nc",
        "  look at  \\x07",
        "FAILED",
        "ok  handshake        rd2h \\x1b[2J there",
    ]


def test_nothing_read_is_no_success(console: Console) -> None:
    assert not result([]).ok
    print_result(console, result([]))
    assert printed(console) == ["FAILED"]


def test_json() -> None:
    for one in (result(READS), result(READS, FAILURE)):
        document = msgspec.json.decode(as_json(one))
        assert document["ok"] == one.ok
        assert msgspec.convert(document["check"], CheckResult) == one


def test_steps(console: Console) -> None:
    print_step(console, StepDone(Step.CONNECT, "prefill at [::1] port 7"))
    print_step(console, StepDone(Step.COMPARE_REST, "x" * 100))
    assert printed(console) == [
        "ok  connect          prefill at [::1] port 7",
        f"ok  compare the rest {'x' * 100}",
    ]


def test_the_lines_of_prefill(console: Console) -> None:
    lines = PrefillLines(console, PrefillOptions("10.0.0.1"))
    lines.listening(1234)
    lines.begun("10.0.0.2", EngineName.HOST)
    lines.ended(Outcome("10.0.0.2", None))
    lines.ended(Outcome("[red]", FAILURE))
    lines.verdict(0, 0)
    lines.verdict(2, 0)
    lines.verdict(2, 1)
    lines.broken(FAILURE)
    block = [
        "first read failed on decode",
        "  seen     not [bold]allowed[/bold]",
        "  look at  ptrace rights: [1]",
        "           place: here",
    ]
    assert printed(console) == [
        "listening on 10.0.0.1 port 1234; engine auto, up to 1G of host memory for a check; Ctrl-C "
        "ends it",
        "10.0.0.2: check begins, engine host",
        "10.0.0.2: check passed",
        *block,
        "[red]: check failed",
        "no check was made",
        "PASSED",
        "FAILED: 1 of 3",
        *block,
        "FAILED",
    ]
