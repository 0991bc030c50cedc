"""Steps, their deadlines, and what is advised when one fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rd2h.cli.check.advice import advise
from rd2h.cli.check.facts import Facts, gather
from rd2h.cli.check.failures import CheckFailed, Failure, Side, Step, clean
from rd2h.cli.check.messages import ControlError, Goodbye, encode, from_decode
from rd2h.cli.check.options import EngineName
from rd2h.cli.check.steps import Steps
from rd2h.devices import DeviceUnavailableError
from rd2h.engines import EngineError, EnginePermissionError, PeerGoneError, ReadTimeoutError
from tests.cli.check_ends import unexpected

FACTS = Facts("USER", "SCOPE", "RIGHT", "MEMLOCK", "HUGE", "DRIVER", "UCX_VARIABLES")
DOCS = Path(__file__).parents[2] / "docs" / "check.md"


def failure_of(error: Exception) -> Failure:
    steps = Steps(Side.DECODE, 10, unexpected)
    with pytest.raises(CheckFailed) as raised, steps.step(Step.REGISTER):
        raise error
    return raised.value.failure


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (EngineError("no"), "no"),
        (MemoryError("no"), "no"),
        (ControlError("no"), "no"),
        (DeviceUnavailableError("no"), "no"),
        (OSError(111, "connection refused"), "connection refused"),
        (FileNotFoundError(2, "no such file", "it"), "[Errno 2] no such file: 'it'"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError: RuntimeError"),
        (EngineError("two\nlines \x1b[31m"), "two\\nlines \\x1b[31m"),
    ],
)
def test_what_was_seen(error: Exception, seen: str) -> None:
    failure = failure_of(error)
    assert (failure.side, failure.step, failure.seen) == (Side.DECODE, Step.REGISTER, seen)
    assert failure.look
    assert str(failure) == f"decode, register: {seen}"


@pytest.mark.parametrize("char", ["x", "\n", "\u202e", "\U000e0001", "\ud800"])
def test_a_text_without_end_is_cut_so_that_the_other_end_takes_it(char: str) -> None:
    failure = failure_of(EngineError(char * 1_000_000))
    assert len(failure.seen) == 1000
    assert from_decode(encode(Goodbye(failure=failure))) == Goodbye(failure=failure)


def test_a_failure_of_the_other_end_stays_as_it_is() -> None:
    theirs = Failure(Side.PREFILL, Step.ENGINE_START, "no driver", ["there"])
    assert failure_of(CheckFailed(theirs)) is theirs


def test_clean() -> None:
    assert clean("a\u00e9\u4e2d [b] \x1b[0m\r\n\u202e") == "a\u00e9\u4e2d [b] \\x1b[0m\\r\\n\\u202e"


def test_a_step_that_hangs_is_reported_from_outside() -> None:
    failures: list[Failure] = []
    reported = threading.Event()

    def expired(failure: Failure) -> None:
        failures.append(failure)
        reported.set()

    steps = Steps(Side.PREFILL, 0.05, expired, grace=0.05)
    with steps.step(Step.ENGINE_START):
        assert reported.wait(10)
    (failure,) = failures
    assert (failure.side, failure.step) == (Side.PREFILL, Step.ENGINE_START)
    assert failure.seen == "nothing came of it in 0.1 s; this end hangs"


def test_a_step_that_ends_is_not_watched_any_more() -> None:
    before = threading.active_count()
    steps = Steps(Side.DECODE, 5.0, unexpected, grace=5.0)
    for _ in range(50):
        with steps.step(Step.READ):
            pass
    with pytest.raises(CheckFailed), steps.step(Step.READ):
        raise EngineError("no")
    deadline = threading.Event()
    while threading.active_count() > before:
        assert not deadline.wait(0.01)


# ------------------------------------------------------------------------------------- advice


@pytest.mark.parametrize("engine", list(EngineName))
@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("step", list(Step))
def test_every_step_has_advice(side: Side, step: Step, engine: EngineName) -> None:
    for error in (None, EngineError("x"), ConnectionRefusedError(), PeerGoneError("x")):
        hints = advise(side, step, engine, error, FACTS)
        assert 0 < len(hints) <= 20
        assert all(": " in hint or "wrong bytes" in hint for hint in hints)


@pytest.mark.parametrize(
    ("step", "engine", "error", "words"),
    [
        (Step.CONNECT, EngineName.AUTO, ConnectionRefusedError(), ["is `rd2h check prefill`"]),
        (Step.CONNECT, EngineName.AUTO, TimeoutError(), ["firewall", "route"]),
        (Step.CONNECT_BACK, EngineName.AUTO, None, ["firewall", "--advertise", "--kv-port"]),
        (Step.ENGINE_START, EngineName.NIXL, None, ["pip install", "UCX_VARIABLES"]),
        (Step.ENGINE_START, EngineName.MEMFABRIC, None, ["DRIVER", "HUGE", "--device-id"]),
        (Step.ENGINE_START, EngineName.HOST, None, ["process_vm_readv"]),
        (Step.REGISTER, EngineName.NIXL, None, ["MEMLOCK", "HUGE"]),
        (Step.REGISTER, EngineName.MEMFABRIC, None, ["HUGE", "DRIVER", "MEMLOCK"]),
        (
            Step.FIRST_READ,
            EngineName.HOST,
            EnginePermissionError("x"),
            ["ptrace_scope is SCOPE", "user USER", "CAP_SYS_PTRACE: RIGHT", "SYS_PTRACE"],
        ),
        (Step.READ, EngineName.HOST, PeerGoneError("x"), ["does it still run", "PID namespace"]),
        (
            Step.FIRST_READ,
            EngineName.NIXL,
            ReadTimeoutError("x"),
            ["firewall", "UCX_VARIABLES", "MEMLOCK", "--timeout"],
        ),
        (Step.READ, EngineName.NIXL, PeerGoneError("x"), ["does it still run"]),
        (Step.READ, EngineName.HOST, ControlError("x"), ["what does its own terminal say"]),
        (Step.FIRST_READ, EngineName.MEMFABRIC, None, ["DRIVER", "hccn_tool", "firewall"]),
        (Step.COMPARE_BYTES, EngineName.NIXL, None, ["wrong bytes", "firmware", "dmesg"]),
    ],
)
def test_advice_names_what_it_must(
    step: Step, engine: EngineName, error: BaseException | None, words: list[str]
) -> None:
    text = "\n".join(advise(Side.DECODE, step, engine, error, FACTS))
    assert [word for word in words if word not in text] == []


def test_the_docs_have_a_line_for_each_step() -> None:
    rows = [line.split("|")[1].strip() for line in DOCS.read_text().splitlines() if "| `" in line]
    missing = [step for step in Step if f"`{step}`" not in " ".join(rows)]
    assert missing == []


# -------------------------------------------------------------------------------------- facts


def test_facts_of_a_machine(tmp_path: Path) -> None:
    for name, text in (
        ("proc/sys/kernel/yama/ptrace_scope", "2\n"),
        ("proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n"),
        (
            "proc/meminfo",
            "HugePages_Total:      16\nHugePages_Free:        3\nHugepagesize:       2048 kB\n",
        ),
        ("usr/local/Ascend/driver/version.info", "Version=25.0.1\nascendhal_version=7\n"),
        ("dev/davinci0", ""),
        ("dev/davinci1", ""),
        ("dev/davinci_manager", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = gather(tmp_path, {"UCX_TLS": "tcp", "HOME": "/", "UCX_NET_DEVICES": "eth0"})
    assert facts.ptrace_scope == "2"
    assert facts.ptrace_right == "yes"
    assert facts.huge_pages == "3 free of 16, 2048 kB each"
    assert facts.driver == "driver 25.0.1, 2 devices davinci0, davinci1"
    assert facts.ucx == "UCX_NET_DEVICES=eth0, UCX_TLS=tcp"


def test_facts_of_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    facts = gather(tmp_path, {})
    assert facts.ptrace_scope == "no Yama"
    assert facts.ptrace_right == "unknown"
    assert facts.huge_pages == "unknown free of unknown, unknown each"
    assert facts.driver == "no driver version, 0 devices"
    assert facts.ucx == "none set"


def test_facts_of_this_machine() -> None:
    facts = gather()
    assert facts.ptrace_right in ("yes", "no")
    assert facts.memlock == "unlimited" or facts.memlock.endswith(" KiB")
