"""Writes ``rd2h/wire/rendezvous.py``: the rendezvous as typed parameters."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.python_types import default_source, docstring, field_annotation
from codegen.schema import Field, Message, Schema
from codegen.text import header
from codegen.types import MapOf, Named

__all__ = ["write_rendezvous"]


def write_rendezvous(schema: Schema, source: str) -> str:
    """The text of the module, for the rendezvous's schema read from file ``source``."""
    body: list[str] = []
    for message in schema.messages:
        body += ["", "", *_write_class(message)]
    text = "\n".join(body)
    names = ["Meta", "field"]
    used = [name for name in names if f"{name}(" in text]
    imports = [
        f"# {header(source)}",
        '"""The HTTP rendezvous between Decode, the proxy and Prefill, as typed parameters.',
        "",
        "What each class reads and writes is the JSON object that vLLM carries as",
        "`kv_transfer_params`, or that is posted to the metaserver.",
        '"""',
        "",
        "from typing import Annotated, ClassVar, TypeAlias",
        "",
        f"from msgspec import {', '.join(used)}",
        "",
        "from rd2h.wire.params import Params",
        "",
        "__all__ = [",
        *[f'    "{message.name}",' for message in sorted(schema.messages, key=lambda m: m.name)],
        "]",
        "",
        "UInt64: TypeAlias = Annotated[int, Meta(ge=0)]",
    ]
    return "\n".join([*imports, text, ""])


def _write_class(message: Message) -> Iterator[str]:
    base = message.extends or "Params"
    yield f"class {message.name}({base}, frozen=True, kw_only=True):"
    yield from docstring(message)
    yield ""
    yield from (f"    {_declare(field)}" for field in message.fields)
    fields = message.fields
    constants = [f'"{field.name}": {field.const}' for field in fields if field.const is not None]
    omitted = [f'"{field.name}"' for field in fields if field.omit_default]
    maps = [
        f'"{field.name}": {field.parsed_type.value.name}'
        for field in fields
        if isinstance(field.parsed_type, MapOf) and isinstance(field.parsed_type.value, Named)
    ]
    yield from ("",) if constants or omitted or maps else ()
    if constants:
        yield f"    CONSTANTS: ClassVar[dict[str, bool]] = {{{', '.join(constants)}}}"
    if omitted:
        yield f"    OMITTED: ClassVar[frozenset[str]] = frozenset({{{', '.join(omitted)}}})"
    if maps:
        yield f"    MAPS: ClassVar[dict[str, type[Params]]] = {{{', '.join(maps)}}}"


def _declare(field: Field) -> str:
    declaration = f"{field.name}: {field_annotation(field)}"
    if field.has_default:
        declaration += f" = {default_source(field.default_value)}"
    return declaration
