"""What is shown while a run goes on, what is printed after it, and when it has passed."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from rd2h.cli.demo.checks import run_checks
from rd2h.cli.demo.messages import DecodeStats, Verdict, Verified
from rd2h.cli.demo.options import DemoOptions, Fault
from rd2h.cli.demo.plan import Plan
from rd2h.cli.demo.progress import Bar, Bars, Lines, LogLimit, Progress, Silent
from rd2h.cli.demo.report import as_json, print_report
from rd2h.cli.demo.result import DecodeResult, PrefillResult, RequestResult, RunResult

STATS = DecodeStats(1, 100, 4, 2, 0.5)
FOUND = Verified(4, 100, 6, 0, [], STATS)


def result_of(options: DemoOptions) -> RunResult:
    """A run as good as its options allow."""
    return RunResult(
        options,
        transfer_seconds=2.0,
        requests=[
            RequestResult(r.ext_id, r.verdict, r.verdict, "") for r in Plan(options).requests
        ],
        prefill=[PrefillResult(f"prefill {rank}", 8, 8, 1, 0.5, 2.0, 1) for rank in range(2)],
        decode=[DecodeResult("decode 0", 1, 100, 100, 4, 2, 0.5, 1)],
    )


def judge(
    options: DemoOptions,
    result: RunResult | None = None,
    verified: Verified = FOUND,
    deaths: dict[str, int] | None = None,
    leftovers: list[str] | None = None,
) -> RunResult:
    result = result or result_of(options)
    return run_checks(Plan(options), result, [verified], deaths or {}, leftovers or [])


def wrong_checks(result: RunResult) -> list[str]:
    return [check.name for check in result.checks if not check.ok]


def test_a_good_run_passes() -> None:
    result = judge(DemoOptions())
    assert result.ok
    assert {check.name for check in result.checks} == {
        "every byte",
        "requests",
        "read once",
        "back at idle",
    }


def test_nothing_checked_is_no_pass() -> None:
    assert not RunResult(DemoOptions()).ok
    assert wrong_checks(judge(DemoOptions(), verified=Verified(0, 0, 0, 0, [], STATS))) == [
        "every byte"
    ]


def test_each_thing_that_may_be_wrong_fails_the_run() -> None:
    options = DemoOptions()
    wrong = judge(options, verified=Verified(4, 100, 6, 1, ["block 3 is off"], STATS))
    assert wrong_checks(wrong) == ["every byte"]
    assert "block 3 is off" in wrong.checks[0].detail

    assert wrong_checks(judge(options, leftovers=["a thread"])) == ["back at idle"]

    good = result_of(options)
    lost = RequestResult("cmpl-0-0", Verdict.FAILED, Verdict.DONE, "the wire was cut")
    result = judge(options, msgspec.structs.replace(good, requests=[lost, *good.requests[1:]]))
    assert wrong_checks(result) == ["requests"]
    assert "cmpl-0-0 is failed, not done (the wire was cut)" in result.checks[1].detail

    twice = DecodeResult("decode 0", 1, 200, 100, 4, 2, 0.5, 1)
    result = judge(options, msgspec.structs.replace(good, decode=[twice]))
    assert wrong_checks(result) == ["read once"]


@pytest.mark.parametrize(
    ("fault", "deaths"),
    [
        (Fault.KILL_DECODE, {"decode B0": -9, "decode B1": -9}),
        (Fault.KILL_PREFILL, {"prefill 0": -9}),
        (Fault.SLOW_DECODE, {}),
        (Fault.ABORT, {}),
    ],
)
def test_a_fault_that_went_as_it_must_passes(fault: Fault, deaths: dict[str, int]) -> None:
    assert judge(DemoOptions(fault=fault), deaths=deaths).ok


def test_a_fault_that_did_not_happen_fails_the_run() -> None:
    options = DemoOptions(fault=Fault.KILL_PREFILL)
    assert wrong_checks(judge(options)) == ["the kill"]
    assert wrong_checks(judge(options, deaths={"prefill 0": -11})) == ["the kill"]
    late = msgspec.structs.replace(result_of(options), notice_seconds=60.0)
    assert wrong_checks(judge(options, late, deaths={"prefill 0": -9})) == ["decode"]

    options = DemoOptions(fault=Fault.SLOW_DECODE)
    idle = [PrefillResult("prefill 0", 8, 8, 0, 0.0, 2.0, 1)]
    quick = msgspec.structs.replace(result_of(options), prefill=idle)
    assert wrong_checks(judge(options, quick)) == ["gates"]

    options = DemoOptions(fault=Fault.KILL_DECODE)
    unhurt = msgspec.structs.replace(result_of(options), prefill=idle)
    assert wrong_checks(judge(options, unhurt, deaths={"decode B0": -9})) == ["prefill"]


def test_totals() -> None:
    totals = judge(DemoOptions()).totals()
    assert (totals.bytes, totals.bytes_per_second, totals.read_bytes_per_second) == (100, 50, 200)
    assert (totals.layers, totals.layers_per_second) == (8, 4)
    assert (totals.gate_wait_mean, totals.gate_wait_max) == (0.5, 0.5)
    assert (totals.reads_before_merging, totals.reads) == (4, 2)
    assert RunResult(DemoOptions()).totals().bytes_per_second == 0


def test_json_is_for_programs() -> None:
    document = json.loads(as_json(judge(DemoOptions(fault=Fault.ABORT))))
    assert document["ok"] is True
    assert document["totals"]["bytes"] == 100
    assert document["run"]["options"]["fault"] == "abort"
    assert msgspec.convert(document["run"], RunResult).requests[1].verdict is Verdict.ABORTED


def printed(result: RunResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(console, result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_every_figure() -> None:
    text = printed(judge(DemoOptions()))
    for part in (
        "P TP 4 to D TP 2, 61 layers, 8 x 2048 tokens, host engine",
        "100 in 2.00 s",
        "4 before merging, 2 after",
        "0.50 s on average, 0.50 s at most, of 2.00 s",
        "4 per second (8 on each P rank)",
        "8 done",
        "PASSED",
    ):
        assert part in text


def test_a_failed_run_says_so() -> None:
    text = printed(judge(DemoOptions(), leftovers=["a [bold] thread"]))
    assert "WRONG" in text
    assert "a [bold] thread" in text
    assert text.endswith("FAILED\n")
    assert printed(RunResult(DemoOptions(), error="it [broke]")) == "FAILED: it [broke]\n"


# ------------------------------------------------------------------------------------ progress

BARS = [Bar("prefill 0", 10, "layers"), Bar("decode 0", 2_000_000, "bytes")]


def go_through(progress: Progress) -> None:
    progress.start(BARS)
    for step in range(1, 11):
        progress.update("prefill 0", step)
        progress.update("decode 0", 200_000 * step)
    progress.log("something [happened]")
    progress.phase("checking")
    progress.close()
    progress.close()


def test_lines_tell_each_quarter_once() -> None:
    console = Console(file=io.StringIO(), width=100)
    go_through(Lines(console))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        " 30 % read, 0.60 of 2.00 MB",
        " 50 % read, 1.00 of 2.00 MB",
        " 80 % read, 1.60 of 2.00 MB",
        "100 % read, 2.00 of 2.00 MB",
        "something [happened]",
        "checking",
    ]


def test_bars_show_each_rank() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    go_through(Bars(console))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("prefill 0", "10 of 10 layers", "2.00 of 2.00 MB", "something [happened]"):
        assert part in text


def test_silent_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    go_through(Silent())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("everything", "shown"), [(False, 5), (True, 9)])
def test_only_the_first_log_lines_are_shown(everything: bool, shown: int) -> None:
    console = Console(file=io.StringIO(), width=100)
    limit = LogLimit(Lines(console), everything)
    for number in range(9):
        limit(f"line {number}")
    limit.close()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == shown
    if not everything:
        assert lines[-1] == "5 more lines were logged; --verbose shows them"
