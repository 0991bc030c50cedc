"""The whole demo, small: real processes, sockets and engines; each fault; what it must notice."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from typer.testing import CliRunner

from rd2h.cli.demo.fleet import DemoError, Fleet
from rd2h.cli.demo.messages import Begin, Closed, Ready, Role, Start, Verdict
from rd2h.cli.demo.options import DemoOptions
from rd2h.cli.demo.result import Check, RunResult, Totals
from rd2h.cli.main import app

pytestmark = pytest.mark.slow

SMALL = (
    *("--layers", "11", "--latent", "64", "--rope", "16", "--indexer-dim", "32"),
    *("--block-size", "16", "--tokens", "250", "--chunk", "72", "--requests", "4"),
    *("--prefill-tp", "2", "--decode-tp", "2", "--timeout", "60"),
)


class Document(msgspec.Struct):
    """What ``--json`` prints."""

    ok: bool
    totals: Totals
    run: RunResult


def run(*arguments: str, status: int = 0) -> Document:
    """Run the demo with ``--json``; standard output must be that and nothing else."""
    result = CliRunner().invoke(app, ["demo", *SMALL, "--json", *arguments])
    assert result.exit_code == status, result.output
    document = msgspec.json.decode(result.stdout, type=Document)
    assert document.ok == (status == 0)
    return document


def wrong_checks(document: Document) -> list[Check]:
    return [check for check in document.run.checks if not check.ok]


def verdicts(document: Document) -> list[Verdict | None]:
    return [request.verdict for request in document.run.requests]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefill-tp", "4", "--decode-tp", "2"],
        ["--lic8"],
        ["--prefill-tp", "1", "--decode-tp", "1", "--buffers", "1"],
        ["--prefill-tp", "2", "--decode-tp", "1", "--rope", "0", "--chunk", "10"],
        ["--prefill-tp", "4", "--decode-tp", "1", "--indexer-dim", "0"],
        ["--prefill-tp", "3", "--decode-tp", "3", "--no-indexer-every", "1", "--requests", "1"],
        ["--prefill-tp", "16", "--decode-tp", "2", "--layers", "5"],
        ["--engine", "nixl"],
    ],
    ids=" ".join,
)
def test_every_byte_arrives(arguments: list[str]) -> None:
    document = run(*arguments)
    assert set(verdicts(document)) == {Verdict.DONE}
    totals = document.totals
    assert totals.bytes == sum(rank.expected_bytes for rank in document.run.decode) > 0
    assert totals.reads <= totals.reads_before_merging
    assert totals.layers == {rank.layers for rank in document.run.prefill}.pop()


def test_kill_decode() -> None:
    document = run("--fault", "kill-decode", "--prefill-tp", "4")
    assert verdicts(document) == [Verdict.DONE, Verdict.LOST] * 2
    assert [rank.name for rank in document.run.decode] == ["decode A0", "decode A1"]
    assert len(document.run.prefill) == 4  # all of Prefill went on


def test_kill_prefill() -> None:
    document = run("--fault", "kill-prefill", "--prefill-tp", "4")
    assert verdicts(document) == [Verdict.DONE] * 2 + [Verdict.FAILED] * 2
    assert [rank.name for rank in document.run.prefill] == ["prefill 1", "prefill 2", "prefill 3"]
    assert all(request.reason for request in document.run.requests[2:])


def test_slow_decode() -> None:
    document = run("--fault", "slow-decode")
    assert set(verdicts(document)) == {Verdict.DONE}


def test_abort() -> None:
    document = run("--fault", "abort")
    assert verdicts(document) == [Verdict.DONE, Verdict.ABORTED] * 2


# --------------------------------------------------------------------- what it must not let pass


@pytest.mark.parametrize(
    ("sabotage", "check", "text"),
    [
        ("swap", "every byte", "block 0 of the prompt, latent: it holds the block of layer 0"),
        ("stale", "every byte", "layer 10, request 0, block 0 of the prompt, latent: it holds"),
        ("guard", "every byte", "block id 0 is no request's"),
        ("leftover", "back at idle", "thread rd2h-receive of decode 0"),
    ],
)
def test_the_demo_notices_what_is_wrong(sabotage: str, check: str, text: str) -> None:
    single = ("--prefill-tp", "1", "--decode-tp", "1")
    document = run("--sabotage", sabotage, *single, status=1)
    (wrong,) = wrong_checks(document)
    assert wrong.name == check
    assert text in wrong.detail


def test_a_rank_that_cannot_go_on_ends_the_run_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # NIXL is there for the parent, and its library is not for the ranks.
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/nowhere")
    document = run("--engine", "nixl", "--prefill-tp", "1", "--decode-tp", "1", status=1)
    assert "cannot go on: " in document.run.error


# ---------------------------------------------------------------------------------- processes


@contextmanager
def one_decode_rank() -> Iterator[Fleet]:
    fd = os.memfd_create("test")
    options = DemoOptions(layers=1, requests=1, tokens=1, timeout=30)
    os.ftruncate(fd, 1 << 24)
    try:
        with Fleet(print) as fleet:
            fleet.start("decode 0", Start(Role.DECODE, 0, 0, options, fd))
            yield fleet
    finally:
        os.close(fd)


def test_a_wait_has_a_deadline_and_says_what_was_waited_for() -> None:
    with one_decode_rank() as fleet:
        fleet.collect(fleet.ranks, Ready, "that it is ready", 30)
        with pytest.raises(DemoError, match=r"waited 0\.1 s for its end from decode 0"):
            fleet.collect(fleet.ranks, Closed, "its end", 0.1)
        (rank,) = fleet.ranks
    assert rank.process.returncode == 1  # the pipe broke, and nobody had to kill it


def test_a_rank_that_dies_is_named() -> None:
    with one_decode_rank() as fleet:
        (rank,) = fleet.ranks
        fleet.collect(fleet.ranks, Ready, "that it is ready", 30)
        rank.process.kill()
        with pytest.raises(DemoError, match="decode 0 ended with status -9 instead of: its end"):
            fleet.collect([rank], Closed, "its end", 30)
        fleet.send(rank, Begin([]))  # to nobody: no error, its end was the news
        assert fleet.ranks == []


def test_a_rank_that_does_not_end_is_killed() -> None:
    with one_decode_rank() as fleet:
        (rank,) = fleet.ranks
        fleet.collect(fleet.ranks, Ready, "that it is ready", 30)
        rank.process.send_signal(signal.SIGSTOP)
        assert fleet.end(timeout=0.1) == [f"process {rank.process.pid}, decode 0"]


@contextmanager
def long_run() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run in the middle of its transfer, and descriptors of its ranks' processes."""
    token = uuid4().hex
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rd2h", "demo", *SMALL, "--layers", "150"),
            *("--fault", "slow-decode", "--decode-tp", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RD2H_TEST": token},
    )
    ranks: list[int] = []
    with process:
        try:
            assert process.stdout is not None
            assert " % read" in process.stdout.readline()
            for environ in Path("/proc").glob("[0-9]*/environ"):
                try:
                    ours = token.encode() in environ.read_bytes()
                except OSError:
                    continue
                if ours and (pid := int(environ.parent.name)) != process.pid:
                    ranks.append(os.pidfd_open(pid))
            assert len(ranks) == 3
            yield process, ranks
        finally:
            process.kill()
            for fd in ranks:
                os.close(fd)


def all_ended(ranks: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    return all(
        select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] for fd in ranks
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything(number: signal.Signals) -> None:
    with long_run() as (process, ranks):
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert errors == "rd2h demo: interrupted; every process has ended\n"
        assert all_ended(ranks, within=0)


def test_no_rank_outlives_a_parent_that_is_killed() -> None:
    with long_run() as (process, ranks):
        process.kill()
        assert all_ended(ranks, within=20)
