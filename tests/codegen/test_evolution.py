"""Each rule has a pair of schemas that breaks it, and the checker names that rule and place."""

from pathlib import Path

import pytest

from codegen.evolution import Rule, check_evolution
from codegen.freeze import load_frozen
from codegen.schema import Schema, load_schema, parse_schema

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parents[2]


def releases(schema: Schema) -> dict[int, Schema]:
    """The frozen versions of a schema, as `freeze` would have written them."""
    return {version: schema.at_version(version) for version in schema.released}


def test_every_rule_has_a_fixture_and_every_fixture_a_rule() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == {rule.name for rule in Rule}


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name)
def test_a_pair_breaks_its_rule_and_no_other(rule: Rule) -> None:
    before = load_schema(FIXTURES / rule.name / "before.toml")
    after = FIXTURES / rule.name / "after.toml"
    # The first line of the pair's second half: "# breaks RULE at PLACE".
    _, _, expected_rule, _, expected_place = after.read_text().splitlines()[0].split()
    found = check_evolution(load_schema(after), releases(before))
    assert [(b.rule.name, b.place) for b in found] == [(expected_rule, expected_place)]
    assert expected_rule == rule.name


@pytest.mark.parametrize("name", ["control", "rendezvous"])
def test_the_real_schemas_break_nothing(name: str) -> None:
    schema = load_schema(ROOT / "schemas" / f"{name}.toml")
    assert check_evolution(schema, load_frozen(ROOT / "schemas" / "frozen", name)) == []


BASE = (FIXTURES / "FIELD_REMOVED" / "before.toml").read_text()


def edited(*changes: tuple[str, str]) -> Schema:
    """The base schema with pieces of its text replaced; each piece must be there."""
    text = BASE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_schema(text)


def broken(current: Schema) -> set[tuple[str, str]]:
    found = check_evolution(current, releases(parse_schema(BASE)))
    return {(breakage.rule.name, breakage.place) for breakage in found}


NOTE = BASE[
    BASE.index('[[message.field]]\nname = "note"') : BASE.index('[[message]]\nname = "Pong"')
]
EXTRA = NOTE.replace('"note"', '"extra"').replace("since = 2", "since = 3")


def test_a_field_appended_in_a_new_version_breaks_nothing() -> None:
    assert broken(edited((NOTE, NOTE + EXTRA), ("version = 2\n", "version = 3\n"))) == set()


def test_a_field_cannot_join_a_version_that_is_released() -> None:
    late = EXTRA.replace("since = 3", "since = 2")
    assert broken(edited((NOTE, NOTE + late))) == {("SINCE_REGRESSED", "sample:Ping.extra")}


def test_since_only_grows_along_a_record() -> None:
    first, second = EXTRA, EXTRA.replace('"extra"', '"other"').replace("since = 3", "since = 4")
    schema = edited((NOTE, NOTE + second + first), ("version = 2\n", "version = 4\n"))
    assert broken(schema) == {("SINCE_REGRESSED", "sample:Ping.extra")}


def test_two_released_fields_cannot_change_places() -> None:
    number = BASE[BASE.index('[[message.field]]\nname = "number"') :].partition("\n\n")[0] + "\n\n"
    items = BASE[BASE.index('[[message.field]]\nname = "items"') :].partition("\n\n")[0] + "\n\n"
    schema = edited((number + items, items + number))
    assert ("FIELD_INSERTED", "sample:Ping.items") in broken(schema)


def test_a_released_default_cannot_be_taken_away() -> None:
    schema = edited(('default = ""\n', ""))
    assert broken(schema) == {("FIELD_DEFAULT_MISSING", "sample:Ping.note")}


def test_a_structure_cannot_turn_into_a_map() -> None:
    assert broken(edited(('form = "array"', 'form = "map"'))) == {
        ("MESSAGE_CHANGED", "sample:Item")
    }


def test_a_message_cannot_join_a_version_that_is_released() -> None:
    pong = BASE[BASE.index('[[message]]\nname = "Pong"') :]
    probe = pong.replace("Pong", "Probe").replace('"pong"', '"probe"')
    assert broken(edited((pong, pong + "\n" + probe))) == {("SINCE_REGRESSED", "sample:Probe")}


def test_a_message_keeps_its_since() -> None:
    pong = BASE[BASE.index('[[message]]\nname = "Pong"') :]
    schema = edited((pong, pong.replace("since = 1", "since = 2")))
    assert ("SINCE_REGRESSED", "sample:Pong") in broken(schema)


def test_two_messages_of_one_schema_cannot_share_a_tag() -> None:
    assert ("TAG_REUSED", "sample:Pong") in broken(edited(('tag = "pong"', 'tag = "ping"')))


def test_an_edited_frozen_file_is_found() -> None:
    schema = parse_schema(BASE)
    frozen = releases(schema)
    frozen[1] = parse_schema(BASE.replace("released = [1, 2]", "released = []"))
    assert [b.rule for b in check_evolution(schema, frozen)] == [Rule.RELEASE_MISSING]


def test_the_current_version_is_not_older_than_its_release() -> None:
    schema = edited(("version = 2\n", "version = 1\n"), ("since = 2", "since = 1"))
    assert ("RELEASE_MISSING", "sample") in broken(schema)


def test_a_breakage_says_the_rule_the_place_and_the_values() -> None:
    (breakage,) = check_evolution(
        edited(('name = "number"\ntype = "uint64"', 'name = "number"\ntype = "bool"')),
        releases(parse_schema(BASE)),
    )
    assert str(breakage).startswith(
        "FIELD_RETYPED sample:Ping.number: was uint64 and is bool (a released field keeps its type"
    )
