"""`rd2h check` as an operator runs it: two processes, real engines; and what goes wrong there."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import typer.testing

import rd2h.cli.check.engine
from rd2h.cli.check.failures import Side, Step
from rd2h.cli.check.result import CheckResult
from rd2h.cli.main import app
from rd2h.engines import UInt64Array, create_engine
from tests.cli.check_ends import Wrapped

pytestmark = pytest.mark.slow

RD2H = [sys.executable, "-m", "rd2h"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
SMALL = ("--sizes", "5000,1M", "--rounds", "2", "--timeout", "30")
LONG = ("--sizes", "1M", "--patterns", "random", "--rounds", "1000", "--timeout", "25")

Process = subprocess.Popen[str]


class Document(msgspec.Struct):
    """What ``--json`` prints."""

    ok: bool
    check: CheckResult


@contextmanager
def running(*arguments: str, command: list[str] = RD2H) -> Iterator[Process]:
    process = subprocess.Popen(
        [*command, "check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def prefill(*arguments: str) -> Iterator[tuple[Process, str]]:
    """A Prefill, and its port."""
    with running("prefill", "--bind", "127.0.0.1", "--port", "0", *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"listening on 127\.0\.0\.1 port (\d+); ", line)
        assert found, line + process.communicate()[1]
        yield process, found[1]


def decode(port: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a Decode to its end; its status, and what it printed."""
    command = [*RD2H, "check", "decode", "--connect", "127.0.0.1", "--port", port]
    # Each step has a deadline, and says which one it was: this one is for all of them together.
    done = subprocess.run(
        [*command, *SMALL, *arguments], capture_output=True, text=True, timeout=180, env=ENVIRONMENT
    )
    assert "Traceback" not in done.stderr
    return done.returncode, [line.rstrip() for line in done.stdout.splitlines()]


def ended(process: Process) -> tuple[int, list[str]]:
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode, [line.rstrip() for line in output.splitlines()]


@pytest.mark.parametrize(
    ("ours", "theirs", "engine"),
    [("auto", "auto", "host"), ("host", "host", "host"), ("nixl", "auto", "nixl")],
)
def test_a_good_check(ours: str, theirs: str, engine: str) -> None:
    with prefill("--once", "--engine", theirs) as (process, port):
        status, lines = decode(port, "--engine", ours)
        assert (status, lines[-1]) == (0, "PASSED"), lines
        assert ended(process) == (
            0,
            [f"127.0.0.1: check begins, engine {engine}", "127.0.0.1: check passed", "PASSED"],
        )
    assert f"{engine} engine, host memory, blocks of 16K, 2 rounds" in lines
    assert sum(line.endswith("│ ok │") for line in lines) == 6
    assert [line for line in lines if line.startswith("ok  compare bytes")]


def test_json() -> None:
    with prefill("--once") as (_, port):
        status, lines = decode(port, "--json")
    document = msgspec.json.decode("\n".join(lines), type=Document)
    assert status == 0
    assert document.ok
    assert [read.segments for read in document.check.reads] == [1, 1, 1, 1, 64, 64]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prefill_serves_until_it_is_told_to_end(number: signal.Signals) -> None:
    with prefill() as (process, port):
        for _ in range(2):
            assert decode(port)[0] == 0
        process.send_signal(number)
        status, lines = ended(process)
    assert (status, lines[-1]) == (0, "PASSED")
    assert lines.count("127.0.0.1: check passed") == 2


def test_prefill_that_nobody_asked_has_not_passed() -> None:
    with prefill() as (process, _):
        process.send_signal(signal.SIGINT)
        assert ended(process) == (1, ["no check was made"])


def test_another_engine_at_the_other_end() -> None:
    with prefill("--engine", "nixl") as (process, port):
        status, lines = decode(port, "--engine", "host")
        assert (status, lines[-1]) == (1, "FAILED")
        assert "handshake failed on prefill" in lines
        assert "prefill uses --engine nixl and decode --engine host" in "".join(lines)
        assert decode(port)[0] == 0  # prefill goes on
        process.send_signal(signal.SIGINT)
        status, lines = ended(process)
    assert (status, lines[-1]) == (1, "FAILED: 1 of 2")


def test_nobody_listens() -> None:
    status, lines = decode("1", "--wait", "0")
    assert (status, lines[0], lines[-1]) == (1, "connect failed on decode", "FAILED")
    assert "nobody listens at 127.0.0.1 port 1" in lines[1]
    assert lines[2].startswith("  look at  prefill: is `rd2h check prefill` running there")


def test_prefill_whose_port_is_taken() -> None:
    with prefill() as (_, port), running("prefill", "--bind", "127.0.0.1", "--port", port) as other:
        status, lines = ended(other)
    assert (status, lines[0], lines[-1]) == (1, "bind failed on prefill", "FAILED")
    assert "Address already in use" in lines[1]


@contextmanager
def reading(port: str, *arguments: str) -> Iterator[Process]:
    """A Decode in the middle of its reads."""
    connect = ("decode", "--connect", "127.0.0.1", "--port", port)
    with running(*connect, *LONG, *arguments) as process:
        assert process.stdout is not None
        lines = [""]
        while "first read" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], (lines, process.communicate())
        yield process


@pytest.mark.parametrize("engine", ["host", "nixl"])
def test_prefill_is_killed_in_the_middle(engine: str) -> None:
    with prefill("--engine", engine) as (process, port), reading(port) as reader:
        process.kill()
        status, lines = ended(reader)
    assert (status, lines[-1]) == (1, "FAILED")
    assert "read failed on decode" in lines
    assert any("does it still run" in line or "it has ended" in line for line in lines)


@pytest.mark.parametrize("engine", ["host", "nixl"])
def test_decode_is_killed_in_the_middle(engine: str) -> None:
    with prefill("--engine", engine) as (process, port):
        with reading(port) as reader:
            reader.kill()
        assert decode(port)[0] == 0  # it waits until prefill has noticed
        process.send_signal(signal.SIGINT)
        status, lines = ended(process)
    assert (status, lines[-1]) == (1, "FAILED: 1 of 2")
    assert any("decode left before the check was over" in line for line in lines)


def test_prefill_is_ended_in_the_middle() -> None:
    with prefill() as (process, port), reading(port) as reader:
        process.send_signal(signal.SIGINT)
        status, lines = ended(process)
        assert (status, lines[-1]) == (1, "FAILED: 1 of 1")
        assert any("prefill was ended during the check" in line for line in lines)
        status, lines = ended(reader)
    assert (status, lines[-1]) == (1, "FAILED")
    assert "read failed on decode" in lines


def test_decode_is_interrupted() -> None:
    with prefill("--once") as (process, port):
        with reading(port) as reader:
            reader.send_signal(signal.SIGINT)
            _, errors = reader.communicate(timeout=30)
            assert reader.returncode == 130
            assert errors == "rd2h check decode: interrupted\n"
        status, lines = ended(process)
    assert (status, lines[-1]) == (1, "FAILED: 1 of 1")


def in_this_process(port: str, *arguments: str) -> Document:
    """Run a Decode here, so that its engine can be tampered with."""
    result = typer.testing.CliRunner().invoke(
        app,
        ["check", "decode", "--connect", "127.0.0.1", "--port", port, *SMALL, "--json", *arguments],
    )
    document = msgspec.json.decode(result.stdout, type=Document)
    assert result.exit_code == (0 if document.ok else 1)
    return document


@pytest.mark.parametrize("engine", ["host", "nixl"])
def test_one_corrupted_byte_on_the_way(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupting(name: str, *, timeout: float) -> Wrapped:
        def flip(local: UInt64Array, _lengths: UInt64Array) -> None:
            byte = ctypes.c_ubyte.from_address(int(local[-1]))
            byte.value ^= 0x10

        return Wrapped(create_engine(name, timeout=timeout), flip)

    with prefill("--once", "--engine", engine) as (process, port):
        monkeypatch.setattr(rd2h.cli.check.engine, "create_engine", corrupting)
        document = in_this_process(port)
        status, lines = ended(process)
    failure = document.check.failure
    assert failure is not None
    assert (failure.side, failure.step) == (Side.DECODE, Step.COMPARE_BYTES)
    assert "compare bytes failed on decode" in lines  # prefill prints it, too
    assert (status, lines[-1]) == (1, "FAILED: 1 of 1")


HANGS = """
import sys, threading
import rd2h.cli.check.engine
from rd2h.cli.main import main

class Hangs:
    session = "hangs"
    def register(self, regions): pass
    def read(self, *_): threading.Event().wait()
    def forget(self, session): pass
    def close(self): pass

rd2h.cli.check.engine.create_engine = lambda *_, **__: Hangs()
main()
"""


def test_an_engine_that_hangs_in_native_code() -> None:
    with (
        prefill("--once") as (process, port),
        running(
            *("decode", "--connect", "127.0.0.1", "--port", port, "--timeout", "5"),
            command=[sys.executable, "-c", HANGS],
        ) as hanging,
    ):
        status, lines = ended(hanging)
        assert (status, lines[-1]) == (1, "FAILED")
        assert "first read failed on decode" in lines
        assert "nothing came of it in 10 s; this end hangs" in "".join(lines)
        assert ended(process)[0] == 1  # it has noticed
