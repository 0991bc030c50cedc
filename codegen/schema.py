"""What a schema file is: its parts as typed structures, read from TOML and checked for sense.

Whether a schema makes sense by itself is decided here (:class:`SchemaError`); whether it may
follow the versions that are released is decided in :mod:`codegen.evolution`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from codegen.types import ListOf, MapOf, Scalar, Type, TypeSyntaxError, named_types, parse_type

__all__ = [
    "CopyOf",
    "Default",
    "Field",
    "LongerThan",
    "Message",
    "OnesForEach",
    "Record",
    "Schema",
    "SchemaError",
    "Struct",
    "ZerosThenOnes",
    "load_schema",
    "parse_schema",
]


class SchemaError(ValueError):
    """The schema file makes no sense by itself; the text says where and why."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in a schema file: a key that is not known is a typing error."""


class CopyOf(_Part, frozen=True, kw_only=True):
    """A default that depends on another field: the same list."""

    copy_of: str


class OnesForEach(_Part, frozen=True, kw_only=True):
    """A default that depends on another field: a 1 for each of its items."""

    ones_for_each: str


class ZerosThenOnes(_Part, frozen=True, kw_only=True):
    """A default: for each item of the first field a 0 while below the second field, then 1."""

    zeros_then_ones: tuple[str, str]


class LongerThan(_Part, frozen=True, kw_only=True):
    """A default: whether the first field has more items than the second field says."""

    longer_than: tuple[str, str]


DerivedDefault: TypeAlias = CopyOf | OnesForEach | ZerosThenOnes | LongerThan
Default: TypeAlias = bool | int | str | list[None] | dict[str, None] | DerivedDefault

_DERIVED: dict[str, type[DerivedDefault]] = {
    "copy_of": CopyOf,
    "ones_for_each": OnesForEach,
    "zeros_then_ones": ZerosThenOnes,
    "longer_than": LongerThan,
}


class Field(_Part, frozen=True, kw_only=True):
    """One field of a message or structure.

    ``default`` is what a reader takes when a peer's version lacks the field. ``droppable`` lets
    a writer leave out a value that is not the default for a peer of an older version.
    ``omit_default`` leaves the key out of a JSON object while it holds the default. The
    remaining keys bound the value; those that name another field relate the two.
    """

    name: str
    type: str
    since: int
    unit: str
    meaning: str
    # `object` here and `Default` from `default_value`: a TOML table is either an empty map or
    # one of the derived defaults, which msgspec can tell apart only by looking at its key.
    default: object | UnsetType = UNSET
    droppable: bool = False
    omit_default: bool = False
    const: bool | None = None
    minimum: int | None = None
    maximum: int | None = None
    same_length_as: str | None = None
    at_most_length_of: str | None = None
    less_than: str | None = None
    if_true_longer_than: tuple[str, str] | None = None

    @property
    def parsed_type(self) -> Type:
        """The field's type as a tree."""
        return parse_type(self.type)

    @property
    def has_default(self) -> bool:
        """Whether a reader has a value for a missing field."""
        return self.default is not UNSET or self.const is not None

    @property
    def default_value(self) -> Default:
        """The default, typed; only for fields that have one."""
        if self.const is not None:
            return self.const
        match self.default:
            case bool() | int() | str():
                return self.default
            case []:
                return []
            case dict() as table if not table:
                return {}
            case dict() as table:
                for key, derived in _DERIVED.items():
                    if key in table:
                        return msgspec.convert(table, derived)
        raise SchemaError(f"field {self.name}: {self.default!r} is not a default")

    @property
    def constraints(self) -> dict[str, object]:
        """The keys that bound the value, as written; empty when any value of the type will do."""
        keys = (
            "droppable",
            "const",
            "minimum",
            "maximum",
            "same_length_as",
            "at_most_length_of",
            "less_than",
            "if_true_longer_than",
        )
        return {key: value for key in keys if (value := getattr(self, key)) not in (None, UNSET)}

    def related_fields(self) -> Iterator[str]:
        """Yield the name of every field that the default or a constraint refers to."""
        yield from filter(None, (self.same_length_as, self.at_most_length_of, self.less_than))
        yield from self.if_true_longer_than or ()
        if self.has_default:
            match self.default_value:
                case CopyOf(copy_of=name) | OnesForEach(ones_for_each=name):
                    yield name
                case ZerosThenOnes(zeros_then_ones=names) | LongerThan(longer_than=names):
                    yield from names
                case _:
                    pass


class Struct(_Part, frozen=True, kw_only=True):
    """A structure that stands inside messages: an array of its fields, or a map by name."""

    name: str
    form: Literal["array", "map"]
    since: int
    meaning: str
    fields: list[Field] = msgspec.field(name="field", default_factory=list)


class Message(_Part, frozen=True, kw_only=True):
    """A message. Of the control protocol it has a ``tag`` (or is ``raw`` bytes)."""

    name: str
    direction: Literal[
        "decode->prefill", "decode->proxy", "prefill->decode", "proxy->decode", "proxy->prefill"
    ]
    since: int
    meaning: str
    tag: str | None = None
    raw: str | None = None
    extends: str | None = None
    fields: list[Field] = msgspec.field(name="field", default_factory=list)

    @property
    def wire_tag(self) -> str | None:
        """What tells the message on the wire: its tag, or its bytes; None in the rendezvous."""
        return self.raw if self.tag is None else self.tag

    @property
    def form(self) -> Literal["array", "raw", "object"]:
        """How the message is laid out: tagged array, bytes as they are, or JSON object."""
        if self.raw is not None:
            return "raw"
        return "array" if self.tag is not None else "object"


Record: TypeAlias = Struct | Message
R = TypeVar("R", Struct, Message)


class Schema(_Part, frozen=True, kw_only=True):
    """A whole schema file: one protocol, at its current version."""

    name: str
    encoding: Literal["msgpack", "json"]
    version: int
    minimum_version: int
    released: list[int]
    structs: list[Struct] = msgspec.field(name="struct", default_factory=list)
    messages: list[Message] = msgspec.field(name="message", default_factory=list)

    @property
    def records(self) -> list[Record]:
        """Structures, then messages, as declared."""
        return [*self.structs, *self.messages]

    def record(self, name: str) -> Record:
        """The structure or message of that name."""
        return next(record for record in self.records if record.name == name)

    def all_fields(self, record: Record) -> list[Field]:
        """The fields of a record, those of the message that it extends first."""
        if isinstance(record, Message) and record.extends is not None:
            return [*self.all_fields(self.record(record.extends)), *record.fields]
        return record.fields

    def at_version(self, version: int) -> Schema:
        """The schema as a peer of ``version`` knows it: what came later is left out."""

        def trim(records: list[R]) -> list[R]:
            return [
                msgspec.structs.replace(
                    record, fields=[field for field in record.fields if field.since <= version]
                )
                for record in records
                if record.since <= version
            ]

        return msgspec.structs.replace(
            self,
            version=version,
            released=[released for released in self.released if released <= version],
            structs=trim(self.structs),
            messages=trim(self.messages),
        )


def load_schema(path: Path) -> Schema:
    """Read a schema file.

    Raises:
        SchemaError: if it is not TOML, or not a schema; the text begins with the path.
    """
    try:
        return parse_schema(path.read_text(encoding="utf-8"))
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def parse_schema(text: str) -> Schema:
    """Parse a schema file's text.

    Raises:
        SchemaError: if it is not TOML, or not a schema.
    """
    try:
        document: Mapping[str, object] = tomllib.loads(text)
        schema = msgspec.convert(document, Schema)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SchemaError(str(error)) from error
    for problem in _problems(schema):
        raise SchemaError(problem)
    return schema


def _problems(schema: Schema) -> Iterator[str]:
    """Yield what makes no sense in a schema that stands alone."""
    names = [record.name for record in schema.records]
    yield from (f"{name} is declared twice" for name in names if names.count(name) > 1)
    if not 1 <= schema.minimum_version <= schema.version:
        yield f"minimum_version {schema.minimum_version} is not in 1 to {schema.version}"
    for record in schema.records:
        if isinstance(record, Message):
            yield from _message_problems(schema, record)
        fields = schema.all_fields(record)
        for field in fields:
            place = f"{record.name}.{field.name}"
            yield from (f"{place}: {problem}" for problem in _field_problems(schema, field, fields))


def _message_problems(schema: Schema, message: Message) -> Iterator[str]:
    if message.extends is not None and schema.encoding == "msgpack":
        yield f"{message.name}: an array cannot extend another: fields are told by position"
    if message.extends is not None and message.extends not in {m.name for m in schema.messages}:
        yield f"{message.name}: extends {message.extends}, which is not declared"
    elif (schema.encoding == "json") != (message.form == "object"):
        yield f"{message.name}: a msgpack message has a tag or is raw, a json message neither"


def _field_problems(schema: Schema, field: Field, siblings: list[Field]) -> Iterator[str]:
    names = [sibling.name for sibling in siblings]
    if names.count(field.name) > 1:
        yield "is declared twice"
    if not 1 <= field.since <= schema.version:
        yield f"since {field.since} is not in 1 to {schema.version}"
    try:
        unknown = set(named_types(field.parsed_type)) - {record.name for record in schema.records}
    except TypeSyntaxError as error:
        yield str(error)
        return
    yield from (f"type {name} is not declared" for name in sorted(unknown))
    try:
        yield from (
            f"refers to {name}, which is not declared beside it"
            for name in field.related_fields()
            if name not in names
        )
        if field.has_default and not _default_fits(field.parsed_type, field.default_value):
            yield f"default {field.default!r} is not a {field.type}"
    except (SchemaError, msgspec.ValidationError) as error:
        yield str(error)
    is_list = isinstance(field.parsed_type, ListOf)
    if field.same_length_as is not None and not is_list:
        yield "same_length_as bounds lists only"


def _default_fits(type_: Type, default: Default) -> bool:
    """Whether a default is a value of the type (bool and int are two things here)."""
    match default:
        case bool() | LongerThan():
            return type_ == Scalar("bool")
        case int():
            return type_ == Scalar("uint64") and default >= 0
        case str():
            return type_ == Scalar("string")
        case dict():
            return isinstance(type_, MapOf)
        case list() | CopyOf() | OnesForEach() | ZerosThenOnes():
            return isinstance(type_, ListOf)
