"""What `rd2h inspect` says of the layout of a frame, and of the version behind it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.schema import load_schema
from rd2h.cli.inspect.layout import SINCE, layout_of
from rd2h.cli.inspect.raw import map_parts
from rd2h.wire import (
    PROTOCOL_VERSION,
    PrefillMessage,
    decode,
    encode,
)
from tests.cli.inspected import drawn, of, pack
from tests.compat.vectors import VECTORS, Vector

ROOT = Path(__file__).parents[2]
NESTED = {"read_reqs", "layers"}  # their defaults are asked after elsewhere


def test_the_table_of_versions_is_that_of_the_schema() -> None:
    schema = load_schema(ROOT / "schemas" / "control.toml")
    assert {kind.__name__: dict(fields) for kind, fields in SINCE.items()} == {
        record.name: {field.name: field.since for field in record.fields}
        for record in schema.records
    }
    # In the order of the wire.
    assert all(list(fields) == list(kind.__struct_fields__) for kind, fields in SINCE.items())


def test_the_direction_is_that_of_the_schema() -> None:
    schema = load_schema(ROOT / "schemas" / "control.toml")
    for vector in VECTORS:
        message = decode(vector.payload)
        expected = next(m.direction for m in schema.messages if m.name == type(message).__name__)
        assert of(vector.payload)["direction"] == expected == vector.direction
        assert isinstance(message, PrefillMessage) == (expected == "prefill->decode")


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.id)
def test_golden_frames(vector: Vector) -> None:
    line = of(vector.payload)
    assert line["ok"]
    assert line["message"] == vector.message
    assert line["bytes"] == len(vector.payload)
    # What every version would write, given the content.
    same = []
    for version in range(1, PROTOCOL_VERSION + 1):
        try:
            if encode(decode(vector.payload), version) == vector.payload:
                same.append(version)
        except ValueError:
            pass
    assert vector.protocol_version in line["versions"]
    assert line["versions"] == same
    assert line["version"] == same[0]
    assert line["newer"] is False
    sizes = line["element_bytes"]
    assert sum(sizes.values()) == len(vector.payload) - (vector.message != "MfMetaAck")
    given_fields = vector.fields
    assert {name: line["fields"][name] for name in given_fields if name not in NESTED} == {
        name: value for name, value in given_fields.items() if name not in NESTED
    }
    # A field that the vector gives is not absent, and one that it does not give is.
    absent = {name for name in line["defaulted"] if "[" not in name}
    assert absent == set(line["fields"]) - set(given_fields)
    text = drawn(vector.payload)
    assert f"here: {vector.message}, {vector.direction}, version {same[0]}" in text
    assert all(f"{name}: " in text for name in line["fields"])


def test_absent_fields_of_version_1() -> None:
    old = next(v for v in VECTORS if v.id == "v1-read_ready.two_field_entry_shared_blocks")
    assert of(old.payload)["defaulted"] == [
        "done_ext_ids",
        "group_member_idx",
        "tp_ratio",
        "read_reqs[0].indexer_block_ids",
        "read_reqs[0].main_start_block",
        "read_reqs[0].indexer_start_block",
    ]
    assert "indexer_block_ids: [3, 1, 2]  3 ids in 2 runs  absent: the default" in drawn(
        old.payload
    )
    meta = next(v for v in VECTORS if v.id == "v1-mf_meta.only_addresses_and_lengths")
    assert 'layers["model.layers.0.self_attn.attn"].has_indexer' in of(meta.payload)["defaulted"]
    assert "layers[*].has_indexer (1 time)" in drawn(meta.payload)


def test_a_mix_that_no_version_sends() -> None:
    line = of(pack(b"read_ready_batch", 0, "l", [["a", [1]]], [], 0, 1))
    assert (line["version"], line["versions"]) == (3, [])
    assert len(line["defaulted"]) == 3
    half = pack(b"read_ready_batch", 0, "l", [], [], 0)
    assert of(half)["defaulted"] == ["tp_ratio"]
    assert "version 3, in a mix that no version sends" in drawn(half)


def test_newer_elements() -> None:
    payload = pack(b"read_ready_batch", 0, "l", [["a", [1], [1], 0, 0, 7]], [], 0, 1, "new", 2)
    line = of(payload)
    assert line["ok"]
    assert (line["version"], line["versions"], line["newer"]) == (None, [], True)
    assert line["extra"] == ["$[7]", "$[8]", "$[3][0][5]"]
    assert line["element_bytes"]["[7]"] == 4
    text = drawn(payload)
    assert "newer than 3: 3 elements or keys not known here" in text
    assert "$[7] (4 bytes): not known here, and ignored" in text
    assert "newer than 3: 1 element or key" in drawn(pack(b"read_done", 1, 2))


def test_newer_keys() -> None:
    layers = {"l": {"base_addrs": [1, 2], "block_len": [1, 2], "colour": "red"}}
    line = of(pack(b"mf_meta", "s", msgspec.msgpack.encode(layers)))
    assert line["newer"]
    assert line["extra"] == ['$[2]["l"]["colour"]']


def test_a_key_that_is_no_text_does_no_harm() -> None:
    # msgspec reads past it, because no field has that name.
    layer = b"\x83\xa2\xff\xfe\x02" + msgspec.msgpack.encode(
        {"base_addrs": [1, 2], "block_len": [1, 2]}
    ).removeprefix(b"\x82")
    payload = pack(b"mf_meta", "s", b"\x81\xa1l" + layer)
    assert of(payload)["extra"] == ['$[2]["l"]["0xa2fffe"]']
    assert "0xa2fffe" in drawn(payload)


def test_maps_of_every_width() -> None:
    pairs = [(bytes([i]), bytes([i + 1])) for i in range(3)]
    body = b"".join(k + v for k, v in pairs)
    for header in (b"\x83", b"\xde\x00\x03", b"\xdf\x00\x00\x00\x03"):
        assert map_parts(header + body) == pairs
    for wrong in (b"", b"\x93\x01\x02\x03", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match="map"):
            map_parts(wrong)


@given(st.sampled_from(VECTORS), st.integers(1, PROTOCOL_VERSION))
def test_the_layout_is_that_of_the_writer(vector: Vector, version: int) -> None:
    message = vector.build()
    try:
        payload = encode(message, version)
    except ValueError:
        return  # it holds what that version cannot carry
    layout = layout_of(payload, message)
    assert version in layout.exact
    assert layout.version == layout.exact[0] <= version
