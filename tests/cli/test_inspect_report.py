"""What `rd2h inspect` says of bad frames, how it draws good ones, and that it takes any bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.cli.inspect.places import excerpt, offset_of
from rd2h.cli.inspect.tree import id_list, printable
from rd2h.wire import (
    LayerMetadata,
    MfMeta,
    ReadReadyBatch,
    ReadRequest,
    encode,
)
from tests.cli.inspected import BAD, drawn, mutated, of, pack
from tests.compat.vectors import VECTORS, Vector


@pytest.mark.parametrize(
    ("payload", "path", "at"),
    [
        (bytes.fromhex(BAD), "$[1]", b"\xa1a"),
        (pack(b"read_ready_batch", 0, "l", [["a", [1, "x"]]]), "$[3][0][1][1]", b"\xa1x"),
        (
            pack(b"mf_meta", "s", msgspec.msgpack.encode({"k": 1, "l": 2})),
            '$[2]["k"]',
            b"\x01\xa1l\x02",
        ),
        (pack(b"what", 1), "$[0]", b"\xc4\x04what"),
        (pack(b"read_ready_batch", 0, "l", [], [], 4, 4), "$[5]", b"\x04\x04"),
    ],
)
def test_the_byte_of_a_fault(payload: bytes, path: str, at: bytes) -> None:
    error = of(payload)["error"]
    assert error["path"] == path
    assert payload[error["offset"] :].startswith(at)
    assert f"^^ byte {error['offset']}" in drawn(payload)


def test_the_byte_of_a_fault_inside_a_layer() -> None:
    layers = {"a": {"base_addrs": [1], "block_len": [5], "main_tensor_count": 1}}
    layers["b.c"] = layers["a"] | {"block_len": [5, 6]}  # lists that do not belong together
    payload = pack(b"mf_meta", "s", msgspec.msgpack.encode(layers))
    error = of(payload)["error"]
    assert error["path"] == '$[2]["b.c"].block_len'
    assert payload[error["offset"] :].startswith(b"\x92\x05\x06")


@pytest.mark.parametrize("path", ["$", "", "$[9]", '$[1]["x"]', "$.name"])
def test_a_place_that_is_not_there(path: str) -> None:
    assert offset_of(bytes.fromhex(BAD), path) in (None, 0, 12)


def test_excerpts() -> None:
    data = bytes(range(200))
    assert excerpt(data, None)[-1] == "... 136 bytes more"
    assert excerpt(b"", None) == []
    around = excerpt(data, 101)
    assert around[0] == "... 80 bytes before"
    mark = next(i for i, line in enumerate(around) if "^^ byte 101" in line)
    column = around[mark].index("^^")
    assert around[mark - 1][column : column + 2] == "65"
    assert around[-1] == "... 72 bytes more"


def test_a_bad_frame_is_told_by_its_tag() -> None:
    text = drawn(bytes.fromhex(BAD))
    assert "here: BAD 14 bytes, by its tag ReadDone" in text
    assert "Expected `int`, got `str`" in text
    assert "at $[1]  MalformedMessageError" in text
    assert "here: BAD 5 bytes\n" in drawn(b"hello")
    assert "UnknownMessageError" in drawn(pack(b"what"))


def test_ids() -> None:
    assert id_list([]) == "[]"
    assert id_list([7]) == "[7]  1 id in 1 run"
    assert id_list(range(100)) == "[0, 1, 2, 3, ... 98, 99]  100 ids in 1 run"
    assert id_list(range(9), full=True) == "[0, 1, 2, 3, 4, 5, 6, 7, 8]  9 ids in 1 run"
    assert id_list([5, 4, 3]) == "[5, 4, 3]  3 ids in 3 runs"


def test_long_lists_are_cut_unless_full() -> None:
    names = [f"r{i}" for i in range(20)]
    message = ReadReadyBatch(0, "l", [ReadRequest("a", list(range(1000, 1050)))], names)
    short, long = drawn(encode(message)), drawn(encode(message), full=True, width=2000)
    assert '["r0", "r1", "r2", "r3", ..., "r18", "r19"]  20 ids' in short
    assert "[1000, 1001, 1002, 1003, ... 1048, 1049]  50 ids in 1 run" in short
    assert '"r10"' in long
    assert "1025" in long


def test_an_id_that_occurs_twice_is_remarked() -> None:
    message = ReadReadyBatch(0, "l", [ReadRequest("a", [1, 2, 1], [])])
    assert "main_block_ids has an id more than once" in drawn(encode(message))


def test_layers() -> None:
    layer = LayerMetadata([0x1000, 0x2000, 0x3000, 0x4000], [8, 8, 4, 2], [2, 1, 1, 1])
    rest = LayerMetadata([1, 2, 3], [1, 1, 1], has_indexer=False)
    rows = [
        r.strip("│├└─ ").split()
        for r in drawn(encode(MfMeta("s", {"l": layer, "r": rest}))).splitlines()
    ]
    assert ["0", "main", "0x1000", "8", "2", "16", "0"] in rows
    assert ["2", "indexer", "0x3000", "4", "1", "4", "1"] in rows
    assert ["3", "indexer", "scale", "0x4000", "2", "1", "2", "1"] in rows
    assert ["2", "unused", "0x3", "1", "1", "1", "1"] in rows


def test_nothing_reaches_the_terminal_that_moves_its_cursor() -> None:
    evil = "\x1b[2J\r\n\u202e[red]"
    message = ReadReadyBatch(0, evil, [ReadRequest(evil, [1])], [evil])
    text = drawn(encode(message))
    assert not set(text) & set("\x1b\r\u202e")
    assert r"\x1b[2J\r\n\u202e[red]" in text
    assert printable("é 漢") == "é 漢"


def check_any(payload: bytes) -> None:
    line = of(payload)
    text = drawn(payload, width=60)
    assert text.startswith("here: ")
    if "error" in line:
        assert not line["ok"]
        offset = line["error"]["offset"]
        assert offset is None or 0 <= offset <= len(payload)
    elif payload:
        assert line["ok"]
        assert sum(line["element_bytes"].values()) <= len(payload)


@given(st.binary(max_size=80))
def test_any_bytes(payload: bytes) -> None:
    check_any(payload)


@given(mutated())
def test_any_mutation(payload: bytes) -> None:
    check_any(payload)


@given(st.sampled_from(VECTORS), st.data())
def test_any_cut(vector: Vector, data: st.DataObject) -> None:
    check_any(vector.payload[: data.draw(st.integers(0, len(vector.payload)))])


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x92\xc4\x09read_done" + b"\x91" * 5000,
        b"\x93\xc4\x09read_done\x00" + b"\x91" * 5000 + b"\x00",
        b"\x93\xc4\x07mf_meta\xa0\xc4\x05\xdf\xff\xff\xff\xff",
    ],
)
def test_frames_that_are_nested_or_long_without_end(payload: bytes) -> None:
    check_any(payload)


@pytest.mark.parametrize("header", [b"\x9f", b"\xdc\x00\x0f", b"\xdd\x00\x00\x00\x0f"])
def test_a_frame_that_was_cut_off_is_told_by_its_tag_too(header: bytes) -> None:
    line = of(header + msgspec.msgpack.encode(b"read_ready_batch") + b"\x00")
    assert (line["ok"], line["message"]) == (False, "ReadReadyBatch")
    assert line["error"]["path"] == "$"
