"""Writes ``rd2h/wire/messages.py``: the control messages as programs see them."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.python_types import default_source, derived_source, docstring, field_annotation
from codegen.schema import Field, Record, Schema
from codegen.text import header

__all__ = ["write_messages"]

_DIRECTIONS = {"prefill->decode": "PrefillMessage", "decode->prefill": "DecodeMessage"}


def write_messages(schema: Schema, source: str) -> str:
    """The text of the module, for the control protocol's schema read from file ``source``."""
    aliases = {
        alias: [m.name for m in schema.messages if m.direction == direction]
        for direction, alias in _DIRECTIONS.items()
    }
    exported = [*aliases, "MINIMUM_VERSION", "Message", "PROTOCOL_VERSION"]
    exported += [record.name for record in schema.records]
    lines = [
        f"# {header(source)}",
        '"""The messages of the control protocol, as typed structures.',
        "",
        "They are data and check nothing by themselves: `encode` and `decode` do, both ways. A",
        "field that a peer's version lacks holds its default; a default that depends on other",
        "fields is worked out when the structure is made, so that it is the same on either side.",
        '"""',
        "",
        "from typing import Annotated, Any, TypeAlias",
        "",
        "from msgspec import Meta, Struct, field",
        "from msgspec.structs import force_setattr",
        "",
        "__all__ = [",
        *[f'    "{name}",' for name in sorted(exported, key=_isort_key)],
        "]",
        "",
        f"PROTOCOL_VERSION = {schema.version}",
        f"MINIMUM_VERSION = {schema.minimum_version}",
        "",
        "UInt64: TypeAlias = Annotated[int, Meta(ge=0)]",
        "",
        "# Stands in for a default that depends on other fields, until `__post_init__` has them.",
        "# Any, because it takes the place of a list here and of a bool there.",
        "DERIVED: Any = object()",
    ]
    for record in schema.records:
        lines += ["", "", *_write_class(schema, record)]
    lines += ["", ""]
    lines += [f"{alias}: TypeAlias = {' | '.join(names)}" for alias, names in aliases.items()]
    lines += [f"Message: TypeAlias = {' | '.join(aliases)}", ""]
    return "\n".join(lines)


def _isort_key(name: str) -> tuple[int, str]:
    """The order that the linter wants in ``__all__``: constants, then classes."""
    return (0 if name.isupper() else 1, name)


def _write_class(schema: Schema, record: Record) -> Iterator[str]:
    options = "frozen=True" if record.form == "map" else "frozen=True, array_like=True"
    yield f"class {record.name}(Struct, {options}):"
    yield from docstring(record)
    fields = schema.all_fields(record)
    if fields:
        yield ""
    yield from (f"    {_declare(field)}" for field in fields)
    derived = [
        (field.name, source)
        for field in fields
        if field.has_default and (source := derived_source(field.default_value)) is not None
    ]
    if derived:
        yield ""
        yield "    def __post_init__(self) -> None:"
        for name, source in derived:
            yield f"        if self.{name} is DERIVED:"
            yield f'            force_setattr(self, "{name}", {source})'


def _declare(field: Field) -> str:
    declaration = f"{field.name}: {field_annotation(field)}"
    if field.has_default:
        declaration += f" = {default_source(field.default_value)}"
    return declaration
