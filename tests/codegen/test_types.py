import pytest

from codegen.types import (
    ListOf,
    MapOf,
    Msgpack,
    Named,
    Scalar,
    Type,
    TypeSyntaxError,
    named_types,
    parse_type,
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("bool", Scalar("bool")),
        ("string", Scalar("string")),
        ("uint64", Scalar("uint64")),
        ("Item", Named("Item")),
        ("list<uint64>", ListOf(Scalar("uint64"))),
        ("list<list<Item>>", ListOf(ListOf(Named("Item")))),
        ("map<string, Item>", MapOf(Named("Item"))),
        ("msgpack<map<string, list<bool>>>", Msgpack(MapOf(ListOf(Scalar("bool"))))),
    ],
)
def test_a_type_is_parsed_and_printed_as_it_was(text: str, parsed: Type) -> None:
    assert parse_type(text) == parsed
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    ["", "int", "list", "list<>", "list<int", "map<uint64, bool>", "map<string>", "set<bool>"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(TypeSyntaxError):
        parse_type(text)


def test_the_structures_inside_a_type_are_named() -> None:
    assert list(named_types(parse_type("msgpack<map<string, Item>>"))) == ["Item"]
    assert list(named_types(parse_type("list<uint64>"))) == []
