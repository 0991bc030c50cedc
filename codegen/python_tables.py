"""Writes ``rd2h/wire/tables.py``: how each control message is laid out at each version."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.python_types import annotation, default_source, field_annotation
from codegen.schema import Field, Message, Record, Schema, Struct
from codegen.text import header, snake_case
from codegen.types import ListOf, MapOf, Msgpack, Named, Scalar, Type

__all__ = ["write_tables"]

_SUPPORT = ("MessageSpec", "Payload", "at_key", "unpack", "unpack_map")


def write_tables(schema: Schema, source: str) -> str:
    """The text of the module, for the control protocol's schema read from file ``source``."""
    body: list[str] = []
    for record in schema.structs:
        body += ["", "", *_write_check(schema, record), *_write_pack_struct(record)]
    for message in schema.messages:
        if message.form == "raw":
            body += ["", "", *_write_raw(message)]
            continue
        body += ["", "", *_write_frame(message), "", "", *_write_check(schema, message)]
        body += [*_write_unpack(schema, message), "", "", *_write_pack(schema, message)]
    body += ["", "", *_write_table(schema), "", *_write_field_types(schema)]
    body += ["", *_write_droppable(schema)]
    text = "\n".join(body)
    support = [name for name in _SUPPORT if f"{name}(" in text or f"{name}[" in text]
    support += ["Payload"] if "Payload" not in support else []
    support += [
        f"require_{kind}"
        for kind in ("at_most", "below", "length", "longer")
        if f"_{kind}(" in text
    ]
    imports = [
        f"# {header(source)}",
        '"""How each message is laid out on the wire, at each version.',
        "",
        "A frame is a message as it travels: an array with the tag first. What programs see is in",
        "`rd2h.wire.messages`; `rd2h.wire.codec` is what uses these tables.",
        '"""',
        "",
        f"from typing import {'Annotated, ' if 'Annotated[' in text else ''}Any",
        "",
        f"from msgspec import {'Meta, ' if 'Meta(' in text else ''}Struct, field",
        "from msgspec.msgpack import Decoder, Encoder",
        "",
        "from rd2h.wire.messages import (",
        *(["    DERIVED,"] if "DERIVED" in text else []),
        *[f"    {record.name}," for record in sorted(schema.records, key=lambda r: r.name)],
        "    UInt64,",
        ")",
        "from rd2h.wire.support import (",
        *[f"    {name}," for name in sorted(support, key=lambda n: (n[0].islower(), n))],
        ")",
        "",
        '__all__ = ["DROPPABLE", "FIELD_TYPES", "MESSAGES"]',
        "",
        "_ENCODER = Encoder()",
    ]
    return "\n".join([*imports, text, ""])


def _constant(message: Message) -> str:
    return snake_case(message.name).upper()


def _structs_inside(schema: Schema, type_: Type) -> Struct | None:
    """The structure that a field's type ends in, if it does."""
    match type_:
        case Named(name):
            record = schema.record(name)
            return record if isinstance(record, Struct) else None
        case ListOf(part) | MapOf(part) | Msgpack(part):
            return _structs_inside(schema, part)
    return None


def _path(record: Record, index: int, field: Field) -> str:
    """The path of a field below its record; a message's element 0 is its tag."""
    if record.form == "map":
        return f".{field.name}"
    return f"[{index + 1}]" if isinstance(record, Message) else f"[{index}]"


def _relations(record: Record) -> Iterator[str]:
    """Statements that check what a type alone cannot say."""
    for index, field in enumerate(record.fields):
        path = f'f"{{path}}{_path(record, index, field)}"'
        value = f"value.{field.name}"
        if (other := field.same_length_as) is not None:
            yield f'require_length({path}, {value}, "{other}", value.{other})'
        if (other := field.at_most_length_of) is not None:
            yield f'require_at_most({path}, {value}, "{other}", value.{other})'
        if (other := field.less_than) is not None:
            yield f'require_below({path}, {value}, "{other}", value.{other})'
        if (pair := field.if_true_longer_than) is not None:
            items, count = pair
            yield f"if {value}:"
            operands = f'"{items}", value.{items}, "{count}", value.{count}'
            yield f"    require_longer({path}, {operands})"


def _needs_check(schema: Schema, record: Record) -> bool:
    inside = [_structs_inside(schema, field.parsed_type) for field in record.fields]
    return any(_relations(record)) or any(_needs_check(schema, part) for part in inside if part)


def _write_check(schema: Schema, record: Record) -> Iterator[str]:
    if not _needs_check(schema, record):
        return
    yield f'def _check_{snake_case(record.name)}(value: {record.name}, path: str = "$") -> None:'
    yield from (f"    {line}" for line in _relations(record))
    for index, field in enumerate(record.fields):
        part = _structs_inside(schema, field.parsed_type)
        if part is None or not _needs_check(schema, part):
            continue
        check, path = f"_check_{snake_case(part.name)}", _path(record, index, field)
        if isinstance(field.parsed_type, ListOf):
            yield f"    for index, item in enumerate(value.{field.name}):"
            yield f'        {check}(item, f"{{path}}{path}[{{index}}]")'
        else:
            yield f"    for key, item in value.{field.name}.items():"
            yield f'        {check}(item, at_key(f"{{path}}{path}", key))'
    yield from ("", "")


def _versions(record: Record) -> list[int]:
    """The versions at which a record gained fields, newest first."""
    return sorted({record.since, *(field.since for field in record.fields)}, reverse=True)


def _write_pack_struct(record: Struct) -> Iterator[str]:
    yield f"def _pack_{snake_case(record.name)}(value: {record.name}, version: int) -> object:"
    newest, *older = _versions(record)
    if not older:
        yield "    del version  # it never changed"
        yield "    return value"
        return
    yield f"    if version >= {newest}:"
    yield "        return value"
    for version in older:
        fields = [field.name for field in record.fields if field.since <= version]
        if record.form == "map":
            packed = "{" + ", ".join(f'"{name}": value.{name}' for name in fields) + "}"
        else:
            packed = _tuple([f"value.{name}" for name in fields])
        yield from _return_from(version, record.since, packed)


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _return_from(version: int, since: int, packed: str) -> Iterator[str]:
    """Return ``packed`` to peers of ``version`` and newer; unconditionally for the oldest."""
    if version > since:
        yield f"    if version >= {version}:"
        yield f"        return {packed}"
    else:
        yield f"    return {packed}"


def _write_frame(message: Message) -> Iterator[str]:
    yield f"class _{message.name}Frame(Struct, frozen=True, array_like=True):"
    yield "    tag: bytes"
    for field in message.fields:
        type_ = field.parsed_type
        declared = "bytes" if isinstance(type_, Msgpack) else field_annotation(field)
        default = f" = {default_source(field.default_value)}" if field.has_default else ""
        yield f"    {field.name}: {declared}{default}"


def _write_unpack(schema: Schema, message: Message) -> Iterator[str]:
    name = snake_case(message.name)
    yield f"_{_constant(message)} = Decoder(_{message.name}Frame)"
    arguments = []
    for index, field in enumerate(message.fields):
        argument = f"frame.{field.name}"
        if isinstance(field.parsed_type, Msgpack):
            content = field.parsed_type.content
            part = _structs_inside(schema, content)
            if not isinstance(content, MapOf) or part is None:
                raise NotImplementedError(f"{message.name}.{field.name}: {field.type}")
            decoder = f"_{_constant(message)}_{field.name.upper()}"
            yield f"{decoder} = Decoder({annotation(content)})"
            path = f"${_path(message, index, field)}"
            argument = f'unpack_map({decoder}, {part.name}, {argument}, "{path}")'
        arguments.append(f"{field.name}={argument}")
    yield from ("", "")
    yield f"def _unpack_{name}(payload: Payload) -> {message.name}:"
    yield f"    frame = unpack(_{_constant(message)}, payload)"
    checked = _needs_check(schema, message)
    yield f"    {'message =' if checked else 'return'} {message.name}("
    yield from (f"        {argument}," for argument in arguments)
    yield "    )"
    if checked:
        yield f"    _check_{name}(message)"
        yield "    return message"


def _write_pack(schema: Schema, message: Message) -> Iterator[str]:
    name = snake_case(message.name)
    yield f"def _pack_{name}(value: {message.name}, version: int) -> tuple[object, ...]:"
    sources: dict[str, str] = {}
    for field in message.fields:
        part = _structs_inside(schema, field.parsed_type)
        sources[field.name] = f"value.{field.name}"
        if part is None:
            continue
        pack = f"_pack_{snake_case(part.name)}"
        if isinstance(field.parsed_type, ListOf):
            packed = f"[{pack}(item, version) for item in value.{field.name}]"
        else:
            packed = f"{{key: {pack}(item, version) for key, item in value.{field.name}.items()}}"
        yield f"    {field.name} = {packed}"
        embedded = isinstance(field.parsed_type, Msgpack)
        sources[field.name] = f"_ENCODER.encode({field.name})" if embedded else field.name
    versions = _versions(message)
    if len(versions) == 1 and not any(
        _structs_inside(schema, f.parsed_type) for f in message.fields
    ):
        yield "    del version  # it never changed"
    for version in versions:
        items = [sources[field.name] for field in message.fields if field.since <= version]
        packed = _tuple([f'b"{message.tag}"', *items])
        yield from _return_from(version, message.since, packed)


def _write_raw(message: Message) -> Iterator[str]:
    name = snake_case(message.name)
    yield f"def _unpack_{name}(payload: Payload) -> {message.name}:"
    yield "    del payload  # it was told by its bytes, and has no others"
    yield f"    return {message.name}()"
    yield from ("", "")
    yield f"def _pack_{name}(value: {message.name}, version: int) -> tuple[object, ...]:"
    yield "    del value, version  # a raw message is its tag"
    yield "    return ()"


def _write_table(schema: Schema) -> Iterator[str]:
    yield "# Any: each entry is of its own message."
    yield "MESSAGES: tuple[MessageSpec[Any], ...] = ("
    for message in schema.messages:
        name = snake_case(message.name)
        yield "    MessageSpec("
        yield f"        message={message.name},"
        yield f'        tag=b"{message.wire_tag}",'
        yield f"        raw={message.form == 'raw'},"
        yield f"        since={message.since},"
        yield f"        pack=_pack_{name},"
        yield f"        unpack=_unpack_{name},"
        yield "    ),"
    yield ")"


def _write_droppable(schema: Schema) -> Iterator[str]:
    names = [(r.name, field.name) for r in schema.records for field in r.fields if field.droppable]
    yield "# Fields that a writer may leave out for an older peer whatever they carry."
    yield "DROPPABLE: frozenset[tuple[type[Struct], str]] = frozenset("
    yield "    {"
    yield from (f'        ({record}, "{name}"),' for record, name in names)
    yield "    }"
    yield ")"


def _write_field_types(schema: Schema) -> Iterator[str]:
    yield "# What each field holds: its class, and that of its items where they are checked, too."
    yield "# Numbers in lists are not: there are many, and reading back finds what they are."
    yield "FIELD_TYPES: dict[type[Struct], tuple[tuple[str, type, type | None], ...]] = {"
    for record in schema.records:
        yield f"    {record.name}: ("
        for field in record.fields:
            kind, item = _classes(field.parsed_type)
            yield f'        ("{field.name}", {kind}, {item}),'
        yield "    ),"
    yield "}"


def _classes(type_: Type) -> tuple[str, str]:
    """The class of a value of the type, and of its items (None: none, or not checked)."""
    match type_:
        case Scalar(name):
            return {"bool": "bool", "string": "str", "uint64": "int"}[name], "None"
        case Named(name):
            return name, "None"
        case ListOf(item):
            kind = _classes(item)[0]
            return "list", "None" if kind == "int" else kind
        case MapOf(value):
            return "dict", _classes(value)[0]
        case Msgpack(content):
            return _classes(content)
