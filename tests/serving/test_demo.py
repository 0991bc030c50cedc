"""The demo compares, says so, and cleans up."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from serving.demo import Options, Result, lengths, report, run
from serving.launcher import Launcher, group_members
from serving.transfer import Transfer

TRANSFER = Transfer(
    requests_received=2,
    requests_failed=0,
    external_tokens=340,
    computed_tokens=0,
    bytes_read=1_000_000,
    segments_planned=40,
    segments_read=10,
    read_seconds=0.002,
    layers_announced=8,
    gate_wait_seconds=0.001,
)
RESULT = Result([40, 300], [(1, 2), (3, 4)], [(1, 2), (3, 4)], TRANSFER)


def printed(result: Result) -> str:
    console = Console(file=io.StringIO(), width=100)
    report(console, result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_same_answers_pass() -> None:
    assert RESULT.error == ""
    text = printed(RESULT)
    assert "PASSED" in text
    assert text.count("same") == 2
    assert "1,000,000 read by D" in text
    assert "2.0 ms, 0.50 GB/s" in text


def test_another_answer_fails() -> None:
    wrong = replace(RESULT, handed=[(1, 2), (3, 5)])
    assert wrong.error == "1 of 2 answers differ"
    text = printed(wrong)
    assert "FAILED: 1 of 2 answers differ" in text
    assert text.count("DIFFERENT") == 1


def test_right_answers_that_did_not_come_from_prefill_fail() -> None:
    alone = replace(RESULT, transfer=replace(TRANSFER, requests_received=1))
    assert alone.error == "D counted 1 received prompts on 1 ranks, not 2"
    assert replace(RESULT, transfer=replace(TRANSFER, requests_received=4), ranks=2).error == ""


def test_prompts_of_many_lengths() -> None:
    assert lengths(1) == [40]
    assert lengths(3) == [40, 470, 900]


@pytest.mark.slow
def test_a_run(launcher: Launcher, tmp_path: Path) -> None:
    said: list[str] = []
    result = run(launcher, Options(requests=3), tmp_path, tmp_path / "models", said.append)
    assert result.error == ""
    assert result.transfer.external_tokens == sum(result.prompts) == 1410
    assert [line for line in said if line.startswith("d0") and "is ready" in line]
    assert not writers(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "serving.demo"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "starting" in line:
                break
        assert not demo.poll()
        demo.send_signal(number)
        rest = demo.stdout.read()
    assert demo.returncode == 130
    assert "interrupted; everything is stopped" in rest
    assert not group_members(demo.pid)
    assert not writers(tmp_path)


def writers(folder: Path) -> list[str]:
    """Processes that print into a file of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd/1").readlink().is_relative_to(folder):
                found.append(process.name)
        except OSError:  # gone, or somebody else's
            continue
    return found
