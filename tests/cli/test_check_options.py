"""`rd2h check`: what it can be asked for, and what it refuses before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer.testing
from hypothesis import given
from hypothesis import strategies as st

from rd2h.cli.check.command import check
from rd2h.cli.check.options import (
    MAX_SIZE,
    DecodeOptions,
    EngineName,
    MemoryName,
    OptionError,
    Pattern,
    PrefillOptions,
    check_decode_options,
    check_prefill_options,
    parse_patterns,
    parse_size,
    parse_sizes,
    size_text,
)
from rd2h.cli.main import COMMANDS, app

PREFILL = PrefillOptions("10.0.0.1")
DECODE = DecodeOptions("10.0.0.1")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4K", 4096),
        (" 64k ", 65536),
        ("1M", 1 << 20),
        ("3MiB", 3 << 20),
        ("2G", 2 << 30),
        ("1024G", MAX_SIZE),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--sizes") == size


@pytest.mark.parametrize(
    "text", ["", "K", "-1", "1.5M", "1T", "4KB", "0x10", "\u0664K", "4 K", "9" * 16]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match=r"--limit: .* is no size; write bytes, or 64K"):
        parse_size(text, "--limit")


@pytest.mark.parametrize("text", ["0", "0G", "1025G"])
def test_sizes_out_of_range(text: str) -> None:
    with pytest.raises(OptionError, match="not between 1 byte and 1024G"):
        parse_size(text, "--sizes")


@given(st.integers(1, MAX_SIZE))
def test_a_size_is_written_as_it_is_read(size: int) -> None:
    assert parse_size(size_text(size), "--sizes") == size


def test_lists() -> None:
    assert parse_sizes("4K, 1M,4096") == (4096, 1 << 20)
    assert parse_patterns("random, Contiguous,random") == (Pattern.RANDOM, Pattern.CONTIGUOUS)
    with pytest.raises(OptionError, match="--sizes: '' is no size"):
        parse_sizes("4K,")
    with pytest.raises(OptionError, match="--patterns: 'zigzag' is none of contiguous, strided"):
        parse_patterns("random,zigzag")


def test_the_defaults_make_sense() -> None:
    check_prefill_options(PREFILL)
    check_decode_options(DECODE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (replace(PREFILL, bind="here"), "--bind 'here' is no IP address"),
        (replace(PREFILL, port=65536), "--port is 65536"),
        (replace(PREFILL, device_id=-1), "--device-id is -1"),
        (replace(PREFILL, timeout=0.5), "--timeout is 0.5; it is 1 to 86400 seconds"),
        (replace(PREFILL, timeout=float("nan")), "--timeout is nan"),
        (replace(PREFILL, wait=-1), "--wait is -1"),
        (
            replace(PREFILL, memory=MemoryName.NPU),
            "--memory npu with --engine auto: only memfabric",
        ),
        (
            replace(PREFILL, bind="0.0.0.0", engine=EngineName.MEMFABRIC),
            "--bind 0.0.0.0 with --engine memfabric: the engine publishes the address",
        ),
        (replace(PREFILL, bind="::1", engine=EngineName.MEMFABRIC), "give the IPv4 address"),
    ],
)
def test_what_prefill_refuses(options: PrefillOptions, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        check_prefill_options(options)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (replace(DECODE, connect=""), "--connect '' is no address"),
        (replace(DECODE, connect="a\nb"), r"--connect 'a\nb' is no address"),
        (replace(DECODE, port=0), "--port is 0; give the port that"),
        (replace(DECODE, kv_port=70_000), "--kv-port is 70000"),
        (replace(DECODE, advertise="me"), "--advertise 'me' is no IP address"),
        (replace(DECODE, advertise="0.0.0.0"), "--advertise '0.0.0.0'"),
        (replace(DECODE, rounds=0), "--rounds is 0; it is 1 to 1000"),
        (replace(DECODE, sizes=tuple(range(1, 100))), "99 --sizes in 3 --patterns are too many"),
        (replace(DECODE, sizes=(2 << 20,), block=1), "--sizes 2M in blocks of 1 are more than"),
        (replace(DECODE, memory=MemoryName.NPU, engine=EngineName.NIXL), "--engine nixl"),
    ],
)
def test_what_decode_refuses(options: DecodeOptions, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        check_decode_options(options)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        replace(PREFILL, bind="::"),
        replace(PREFILL, bind="10.0.0.1", engine=EngineName.MEMFABRIC, memory=MemoryName.NPU),
        replace(PREFILL, port=0),
    ],
)
def test_what_prefill_takes(options: PrefillOptions) -> None:
    check_prefill_options(options)


# --------------------------------------------------------------------------- the command line


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(
        app, ["check", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["prefill", "--bind", "nowhere"], "rd2h check prefill: --bind 'nowhere'"),
        (["prefill", "--bind", "::1", "--limit", "much"], "rd2h check prefill: --limit: 'much'"),
        (["decode", "--connect", "h", "--sizes", "4Q"], "rd2h check decode: --sizes: '4Q'"),
        (["decode", "--connect", "h", "--block", "0"], "rd2h check decode: --block: '0'"),
        (["decode", "--connect", "h", "--patterns", "x"], "rd2h check decode: --patterns: 'x'"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(text)
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["prefill"], ["decode"], ["both"], []])
def test_what_typer_refuses_is_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_it_is_a_command() -> None:
    assert check in COMMANDS
    help_text = run("decode", "--help").stdout
    assert "4K,64K,1M,16M" in help_text
    assert "contiguous,strided,random" in help_text
    assert "[default: 18750]" in help_text
