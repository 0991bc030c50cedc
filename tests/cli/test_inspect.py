"""`rd2h inspect` as a command: where frames come from, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.cli.inspect.report import as_json, inspect_frame
from rd2h.cli.inspect.sources import HexError, frames_of_lines, parse_hex
from rd2h.cli.main import app
from rd2h.wire import (
    ReadReadyBatch,
    ReadRequest,
    encode,
)
from tests.cli.inspected import BAD, BATCH, Line, mutated

ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
ROOT = Path(__file__).parents[2]


def run(*arguments: str, stdin: str | bytes = "") -> typer.testing.Result:
    # Result of click, which typer carries with it.
    result = typer.testing.CliRunner().invoke(
        app, ["inspect", *arguments], input=stdin, env=ENVIRONMENT
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def lines(result: typer.testing.Result) -> list[Line]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "text", ["93c4ff", "93C4FF", "0x93c4ff", "93 c4 ff", "93:c4:ff", "0x93 0xc4 0XFF", " 93c4\tff "]
)
def test_ways_to_write_hex(text: str) -> None:
    assert parse_hex(text) == b"\x93\xc4\xff"


@pytest.mark.parametrize("text", ["9", "93c", "xy", "0x9", "93-c4", "\u0663\u0663", "0x0x93"])
def test_what_is_no_hex(text: str) -> None:
    with pytest.raises(HexError):
        parse_hex(text)


def test_arguments_go_on_after_bad_ones() -> None:
    result = run("abc", "no/file", BAD, BATCH.payload_hex, "zz", "", "41434b", "a\0b", "9" * 5001)
    assert result.exit_code == 1
    text = result.stdout
    assert "argument 1: an odd number of hex digits, 3, in 'abc'; and no such file" in text
    assert "argument 2: no such file: 'no/file'" in text
    assert "argument 3: BAD" in text
    assert "argument 4: ReadReadyBatch, prefill->decode, version 2, 83 bytes" in text
    assert "argument 5: not hex: 'z' in 'zz'; and no such file" in text
    assert "argument 6: empty frame" in text
    assert "argument 7: MfMetaAck, decode->prefill, version 1 (the same in 2, 3), 3 bytes" in text
    assert "argument 8: not hex" in text
    assert "argument 9: an odd number of hex digits, 5001" in text


def test_a_good_frame_and_an_empty_one_are_no_failure() -> None:
    assert run(BATCH.payload_hex, "").exit_code == 0


def test_json() -> None:
    result = run("--json", BATCH.payload_hex, BAD, "", "zz")
    assert result.exit_code == 1
    good, bad, empty, no_frame = lines(result)
    assert good == {
        "source": "argument 1",
        "ok": True,
        "message": "ReadReadyBatch",
        "direction": "prefill->decode",
        "bytes": 83,
        "version": 2,
        "versions": [2],
        "newer": False,
        "extra": [],
        "defaulted": ["group_member_idx", "tp_ratio"],
        "element_bytes": {
            "tag": 18,
            "layer_idx": 1,
            "layer_name": 30,
            "read_reqs": 32,
            "done_ext_ids": 1,
        },
        "fields": BATCH.fields | {"group_member_idx": 0, "tp_ratio": 1},
    }
    assert bad["ok"] is False
    assert bad["error"] == {
        "kind": "MalformedMessageError",
        "path": "$[1]",
        "reason": "Expected `int`, got `str`",
        "offset": 12,
    }
    assert (empty["ok"], empty["message"], empty["bytes"]) == (True, None, 0)
    assert (no_frame["error"]["kind"], no_frame["error"]["path"]) == ("InputError", None)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input(arguments: list[str]) -> None:
    text = f"# captured\n\n0x{BATCH.payload_hex}  # a batch\nnot hex\n41:43:4b\n"
    result = run("--json", *arguments, stdin=text)
    assert [(line["source"], line["message"]) for line in lines(result)] == [
        ("stdin:3", "ReadReadyBatch"),
        ("stdin:4", None),
        ("stdin:5", "MfMetaAck"),
    ]
    assert result.exit_code == 1


def test_the_version_of_the_golden_files() -> None:
    for version, own in ((1, [1] * 4), (2, [2, 2, 2, 2, 2, 2, 1, 1, 2, 2])):
        path = ROOT / "tests" / "compat" / "golden" / f"v{version}.json"
        assert [line["version"] for line in lines(run("--json", str(path)))] == own
    path = ROOT / "tests" / "compat" / "golden" / "v3.json"
    versions = {line["source"].split(":")[-1]: line for line in lines(run("--json", str(path)))}
    assert versions["read_ready.unequal_tp_member3_of_4"]["version"] == 3
    assert versions["mf_meta.three_layers_indexer_none_scale"]["versions"] == [2, 3]


def test_no_frames_are_told() -> None:
    result = run("--json", stdin="# nothing\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no frames" in result.stderr


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frame.bin").write_bytes(BATCH.payload)
    Path("ack").write_bytes(b"ACK")
    Path("lines.txt").write_bytes(
        b"\xef\xbb\xbf" + f"{BATCH.payload_hex}\r\n\r\n41434b\r\n".encode()
    )
    Path("latin.txt").write_bytes(b"41434b # caf\xe9\n")
    Path("empty").write_bytes(b"")
    Path("none.txt").write_text("\n")
    Path("face").write_text("41434b")
    Path("golden.json").write_text('[{"name": "a", "payload_hex": "41434b"}]')
    Path("half.json").write_text('[{"name": "a", "payload_hex": "414"}]')
    Path("other.json").write_text("[1]")
    result = run(
        *("--json", "frame.bin", "ack", "lines.txt", "latin.txt", "empty", "none.txt", "./face"),
        *("face", "golden.json", "half.json", "other.json", str(tmp_path)),
    )
    found = [
        (line["source"], line["message"] or line.get("error", {}).get("kind"))
        for line in lines(result)
    ]
    assert found == [
        ("frame.bin", "ReadReadyBatch"),
        ("ack", "MfMetaAck"),
        ("lines.txt:1", "ReadReadyBatch"),
        ("lines.txt:3", "MfMetaAck"),
        ("latin.txt:1", "MfMetaAck"),
        ("empty", None),
        ("./face:1", "MfMetaAck"),
        ("argument 8", "MalformedMessageError"),  # face is hex
        ("golden.json:a", "MfMetaAck"),
        ("half.json:a", "InputError"),
        ("other.json", "InputError"),
        (str(tmp_path), "InputError"),
    ]
    forced = run("--json", "--file", "face", "41434b")
    assert [line["source"] for line in lines(forced)] == ["face:1", "argument 2"]
    assert forced.exit_code == 1


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(name).write_text("41434b")
    assert lines(run("--json", name))[0]["source"].endswith(r"caf\xe9.txt:1")
    assert r"caf\xe9.txt:1: MfMetaAck" in run(name).stdout


@pytest.mark.slow
def test_as_a_process() -> None:
    for encoding in ("utf-8", "ascii"):
        message = ReadReadyBatch(0, "é", [ReadRequest("漢", [1])])
        done = subprocess.run(
            [sys.executable, "-m", "rd2h", "inspect", "-", BAD],
            input=encode(message, 1).hex().encode() + b"\n",
            capture_output=True,
            timeout=60,
            env=os.environ | ENVIRONMENT | {"PYTHONIOENCODING": encoding},
        )
        text = done.stdout.decode(encoding)
        assert done.stderr == b""
        assert done.returncode == 1
        assert "stdin:1: ReadReadyBatch, prefill->decode, version 1" in text
        assert ('"漢"' if encoding == "utf-8" else r'"\u6f22"') in text
        assert "argument 2: BAD" in text


@given(st.lists(st.binary(max_size=12) | st.text(max_size=12).map(str.encode), max_size=4))
def test_any_lines(some: list[bytes]) -> None:
    for captured in frames_of_lines("stdin", some):
        assert json.loads(as_json(inspect_frame(captured)))["source"].startswith("stdin:")


@settings(max_examples=30)  # each runs the command twice
@given(
    st.lists(
        st.text(max_size=20) | st.binary(max_size=20).map(os.fsdecode) | mutated().map(bytes.hex),
        min_size=1,
        max_size=3,
    )
)
def test_any_arguments(arguments: list[str]) -> None:
    for flags in (["--json"], []):
        result = run(*flags, "--", *arguments)
        assert result.exit_code in (0, 1)


DOCUMENTED = re.findall(
    r"^```console\n\$ rd2h inspect (.*)\n((?s:.*?))^```",
    (ROOT / "docs" / "inspect.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("arguments", "output"), DOCUMENTED)
def test_the_documentation_shows_what_is_printed(arguments: str, output: str) -> None:
    printed = run(*shlex.split(arguments)).stdout
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


def test_there_is_documentation() -> None:
    assert len(DOCUMENTED) >= 2
