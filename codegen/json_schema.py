"""Writes ``docs/rendezvous.schema.json``: the rendezvous for programs in any language."""

from __future__ import annotations

import json

from codegen.schema import Field, Message, Schema
from codegen.text import header, one_line
from codegen.types import ListOf, MapOf, Msgpack, Named, Scalar, Type

__all__ = ["write_json_schema"]


def write_json_schema(schema: Schema, source: str) -> str:
    """The JSON Schema document (draft 2020-12); each message stands under ``$defs``."""
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": header(source),
        "title": "rd2h rendezvous",
        "$defs": {message.name: _object(schema, message) for message in schema.messages},
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _object(schema: Schema, message: Message) -> dict[str, object]:
    fields = schema.all_fields(message)
    return {
        "type": "object",
        "description": one_line(message.meaning),
        "properties": {field.name: _property(field) for field in fields},
        "required": [field.name for field in fields if not field.has_default],
        "additionalProperties": True,
    }


def _property(field: Field) -> dict[str, object]:
    unit = "" if field.unit == "none" else f" Unit: {field.unit}."
    described: dict[str, object] = {"description": one_line(field.meaning) + unit}
    described |= _type(field.parsed_type)
    bounds = {"const": field.const, "minimum": field.minimum, "maximum": field.maximum}
    described |= {key: value for key, value in bounds.items() if value is not None}
    if field.has_default:
        described["default"] = field.default_value
    return described


def _type(type_: Type) -> dict[str, object]:
    match type_:
        case Scalar("uint64"):
            return {"type": "integer", "minimum": 0}
        case Scalar("bool"):
            return {"type": "boolean"}
        case Scalar():
            return {"type": "string"}
        case Named(name):
            return {"$ref": f"#/$defs/{name}"}
        case ListOf(item):
            return {"type": "array", "items": _type(item)}
        case MapOf(value):
            return {"type": "object", "additionalProperties": _type(value)}
        case Msgpack():
            raise NotImplementedError("a JSON document holds no msgpack")
