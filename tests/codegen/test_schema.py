"""A schema that makes no sense by itself is refused, and the text says where."""

from pathlib import Path

import pytest

from codegen.schema import (
    CopyOf,
    LongerThan,
    OnesForEach,
    SchemaError,
    ZerosThenOnes,
    load_schema,
    parse_schema,
)

ROOT = Path(__file__).parents[2]
BASE = (Path(__file__).parent / "fixtures" / "FIELD_REMOVED" / "before.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("name = ", "nome = ", "nome"),
        ("[[message]]", "[[message]", "line"),
        ("since = 2", "since = 3", "Ping.note: since 3 is not in 1 to 2"),
        ("since = 2", "since = 0", "Ping.note: since 0 is not in 1 to 2"),
        ('type = "list<Item>"', 'type = "list<Thing>"', "Ping.items: type Thing is not declared"),
        ('type = "list<Item>"', 'type = "list<int>"', "Ping.items: unknown type 'int'"),
        ('name = "items"', 'name = "number"', "Ping.number: is declared twice"),
        ('name = "Pong"', 'name = "Ping"', "Ping is declared twice"),
        ('default = ""', "default = 0", "Ping.note: default 0 is not a string"),
        ('default = ""', "default = false", "Ping.note: default False is not a string"),
        ('default = ""', "default = []", "Ping.note: default [] is not a string"),
        ('default = ""', "default = 1.5", "1.5 is not a default"),
        ('default = ""', 'default = { copy_of = "nobody" }', "refers to nobody"),
        ('default = ""', 'default = { sum_of = "number" }', "is not a default"),
        ('default = ""', "default = { copy_of = 1 }", "Expected `str`"),
        ('default = ""', 'default = ""\nless_than = "nobody"', "refers to nobody"),
        ('default = ""', 'default = ""\nsame_length_as = "items"', "bounds lists only"),
        ('tag = "pong"\n', "", "Pong: a msgpack message has a tag or is raw"),
        ('tag = "pong"', 'tag = "pong"\nextends = "Ping"', "Pong: an array cannot extend another"),
        ("minimum_version = 1", "minimum_version = 3", "minimum_version 3 is not in 1 to 2"),
        ('encoding = "msgpack"', 'encoding = "json"', "a json message neither"),
    ],
)
def test_a_schema_without_sense_is_refused(old: str, new: str, complaint: str) -> None:
    assert old in BASE
    with pytest.raises(SchemaError) as caught:
        parse_schema(BASE.replace(old, new, 1) if "minimum" in old else BASE.replace(old, new))
    assert complaint in str(caught.value)


def test_extending_what_is_not_there_is_refused() -> None:
    text = BASE.replace("msgpack", "json").replace('tag = "ping"\n', "")
    text = text.replace('tag = "pong"', 'extends = "Nobody"')
    with pytest.raises(SchemaError, match="extends Nobody, which is not declared"):
        parse_schema(text)


def test_the_path_of_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name =")
    with pytest.raises(SchemaError, match=r"broken\.toml"):
        load_schema(path)


def test_each_kind_of_derived_default_is_read() -> None:
    schema = load_schema(ROOT / "schemas" / "control.toml")
    defaults = {
        field.name: field.default_value
        for record in schema.structs
        for field in record.fields
        if field.has_default
    }
    assert defaults == {
        "block_size_scale": OnesForEach(ones_for_each="base_addrs"),
        "tensor_group_idx": ZerosThenOnes(zeros_then_ones=("base_addrs", "main_tensor_count")),
        "main_tensor_count": 2,
        "has_indexer": LongerThan(longer_than=("base_addrs", "main_tensor_count")),
        "indexer_block_ids": CopyOf(copy_of="main_block_ids"),
        "main_start_block": 0,
        "indexer_start_block": 0,
    }


def test_cut_back_to_a_version_only_its_fields_remain() -> None:
    old = load_schema(ROOT / "schemas" / "control.toml").at_version(1)
    assert [field.name for field in old.record("ReadRequest").fields] == [
        "ext_id",
        "main_block_ids",
    ]
    assert old.released == [1]
