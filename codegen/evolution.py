"""What may change between protocol versions, and what never may.

A released version is spoken by engines that nobody will update tonight. Its schema stands
frozen in ``schemas/frozen/``, and the current schema, cut back to that version, must mean the
same. Each rule has an id; ``tests/codegen/fixtures/<id>/`` holds a pair of schemas that breaks
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from codegen.schema import Field, Message, Record, Schema

__all__ = ["Breakage", "Rule", "check_evolution"]


class Rule(Enum):
    """The rules, by id; the value says what the rule protects."""

    FIELD_INSERTED = "a new field goes at the end: peers tell fields by position"
    FIELD_REMOVED = "a released field stays: its position is taken for ever"
    FIELD_RENAMED = "a released field keeps its name: map keys and other programs rely on it"
    FIELD_RETYPED = "a released field keeps its type: peers refuse any other"
    FIELD_DEFAULT_MISSING = "a field that version 1 lacks needs a default: older peers omit it"
    FIELD_DEFAULT_CHANGED = "a released default stays: both sides must fill in the same value"
    FIELD_CONSTRAINT_CHANGED = "released bounds stay: a value that one side sends the other refuses"
    MESSAGE_REMOVED = "a released message or structure stays: peers still send it"
    MESSAGE_CHANGED = "a released tag, direction, form or base stays: peers tell messages by them"
    TAG_REUSED = "a tag names one message for ever: an older peer would read the old one"
    SINCE_REGRESSED = "`since` only grows along a record, and a released version gains nothing"
    RELEASE_MISSING = "every released version has its frozen schema, and no other version has one"


@dataclass(frozen=True)
class Breakage:
    """A rule that is broken, and where.

    Attributes:
        rule: The rule.
        place: ``schema:Record`` or ``schema:Record.field``.
        detail: The two values that disagree.
    """

    rule: Rule
    place: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule.name} {self.place}: {self.detail} ({self.rule.value})"


def check_evolution(current: Schema, frozen: Mapping[int, Schema]) -> list[Breakage]:
    """Find every way in which ``current`` breaks a released version.

    Args:
        current: The schema as it stands.
        frozen: The frozen schema of each released version.

    Returns:
        The breakages; a place that breaks a rule of several versions is named once.
    """
    found = [*_check_alone(current), *_check_releases(current, frozen)]
    for version, released in sorted(frozen.items()):
        found.extend(_check_against(current, version, released))
    first: dict[tuple[Rule, str], Breakage] = {}
    for breakage in found:
        first.setdefault((breakage.rule, breakage.place), breakage)
    return list(first.values())


def _check_alone(schema: Schema) -> Iterator[Breakage]:
    """Rules that a schema can break without a released version beside it."""
    yield from _check_tags(schema, {}, "is {owner}'s already")
    for record in schema.records:
        for field in record.fields:
            if field.since > 1 and not field.has_default:
                yield Breakage(
                    Rule.FIELD_DEFAULT_MISSING,
                    f"{schema.name}:{record.name}.{field.name}",
                    f"since {field.since}, no default",
                )
        for before, after in pairwise(record.fields):
            if after.since < before.since:
                yield Breakage(
                    Rule.SINCE_REGRESSED,
                    f"{schema.name}:{record.name}.{after.name}",
                    f"since {after.since} follows {before.name} with since {before.since}",
                )


def _check_tags(schema: Schema, owners: dict[str, str], complaint: str) -> Iterator[Breakage]:
    """Find messages whose tag is another's: of ``owners``, or of an earlier message."""
    for message in schema.messages:
        if message.wire_tag is None:
            continue
        owner = owners.setdefault(message.wire_tag, message.name)
        if owner != message.name:
            yield Breakage(
                Rule.TAG_REUSED,
                f"{schema.name}:{message.name}",
                f"tag {message.wire_tag!r} {complaint.format(owner=owner)}",
            )


def _check_releases(current: Schema, frozen: Mapping[int, Schema]) -> Iterator[Breakage]:
    for version in sorted(set(current.released) ^ set(frozen)):
        have = "frozen but not released" if version in frozen else "released but not frozen"
        yield Breakage(Rule.RELEASE_MISSING, current.name, f"version {version} is {have}")
    for version, schema in frozen.items():
        if (schema.name, schema.version) != (current.name, version):
            yield Breakage(
                Rule.RELEASE_MISSING,
                current.name,
                f"the file of version {version} says {schema.name} version {schema.version}",
            )
    if current.version < max(current.released, default=0):
        yield Breakage(
            Rule.RELEASE_MISSING,
            current.name,
            f"version {current.version} is older than its release {max(current.released)}",
        )


def _check_against(current: Schema, version: int, released: Schema) -> Iterator[Breakage]:
    now = {record.name: record for record in current.records}
    owners = {m.wire_tag: m.name for m in released.messages if m.wire_tag is not None}
    yield from _check_tags(current, owners, "was released as {owner}'s")
    for record in released.records:
        place = f"{current.name}:{record.name}"
        successor = now.get(record.name)
        if successor is None:
            yield Breakage(Rule.MESSAGE_REMOVED, place, f"it is part of version {version}")
            continue
        yield from _check_record(place, record, successor)
        yield from _check_fields(place, version, record.fields, successor.fields)
    known = {record.name for record in released.records}
    for record in current.records:
        if record.name not in known and record.since <= version:
            yield Breakage(
                Rule.SINCE_REGRESSED,
                f"{current.name}:{record.name}",
                f"since {record.since}, but version {version} was released without it",
            )


def _check_record(place: str, released: Record, current: Record) -> Iterator[Breakage]:
    def identity(record: Record) -> dict[str, object]:
        shape: dict[str, object] = {"form": record.form}
        if isinstance(record, Message):
            shape |= {
                "tag": record.tag,
                "raw": record.raw,
                "direction": record.direction,
                "extends": record.extends,
            }
        return shape

    before, after = identity(released), identity(current)
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            yield Breakage(
                Rule.MESSAGE_CHANGED,
                place,
                f"{key} was {before.get(key)!r} and is {after.get(key)!r}",
            )
    if released.since != current.since:
        yield Breakage(
            Rule.SINCE_REGRESSED, place, f"since was {released.since} and is {current.since}"
        )


def _check_fields(
    place: str, version: int, released: list[Field], current: list[Field]
) -> Iterator[Breakage]:
    """Walk both field lists in step, as a reader that goes by position would."""
    old_names = {field.name for field in released}
    remaining = list(current)
    for field in released:
        while (
            remaining
            and remaining[0].name not in old_names
            and field.name in {later.name for later in remaining}
        ):
            inserted = remaining.pop(0)
            yield Breakage(
                Rule.FIELD_INSERTED, f"{place}.{inserted.name}", f"it stands before {field.name}"
            )
        if field.name in {later.name for later in remaining}:
            successor = next(later for later in remaining if later.name == field.name)
            if successor is not remaining[0]:
                moved = remaining[0].name
                yield Breakage(
                    Rule.FIELD_INSERTED, f"{place}.{moved}", f"it stands before {field.name}"
                )
            remaining.remove(successor)
            yield from _check_field(f"{place}.{field.name}", field, successor)
        elif remaining and remaining[0].name not in old_names and remaining[0].since <= field.since:
            renamed = remaining.pop(0)
            yield Breakage(
                Rule.FIELD_RENAMED, f"{place}.{field.name}", f"it is called {renamed.name} now"
            )
        else:
            yield Breakage(
                Rule.FIELD_REMOVED, f"{place}.{field.name}", f"it is part of version {version}"
            )
    for field in remaining:
        if field.since <= version:
            yield Breakage(
                Rule.SINCE_REGRESSED,
                f"{place}.{field.name}",
                f"since {field.since}, but version {version} was released without it",
            )


def _check_field(place: str, released: Field, current: Field) -> Iterator[Breakage]:
    if released.parsed_type != current.parsed_type:
        yield Breakage(Rule.FIELD_RETYPED, place, f"was {released.type} and is {current.type}")
    if released.has_default and not current.has_default:
        yield Breakage(Rule.FIELD_DEFAULT_MISSING, place, f"was {released.default!r} and is gone")
    elif (released.default, released.omit_default) != (current.default, current.omit_default):
        yield Breakage(
            Rule.FIELD_DEFAULT_CHANGED, place, f"was {released.default!r}, is {current.default!r}"
        )
    if released.constraints != current.constraints:
        yield Breakage(
            Rule.FIELD_CONSTRAINT_CHANGED,
            place,
            f"was {released.constraints}, is {current.constraints}",
        )
    if released.since != current.since:
        yield Breakage(
            Rule.SINCE_REGRESSED, place, f"since was {released.since} and is {current.since}"
        )
