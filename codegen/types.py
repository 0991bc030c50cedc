"""The type language of the schemas: ``uint64``, ``list<ReadRequest>``, ``map<string, T>``, ...

A type is parsed once into a small tree; every writer walks that tree and none parses text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "SCALARS",
    "ListOf",
    "MapOf",
    "Msgpack",
    "Named",
    "Scalar",
    "Type",
    "TypeSyntaxError",
    "named_types",
    "parse_type",
]

SCALARS = ("bool", "string", "uint64")


class TypeSyntaxError(ValueError):
    """The text is not a type of the schema language."""


@dataclass(frozen=True)
class Scalar:
    """A value without parts: one of ``SCALARS``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Named:
    """A structure (or, in the rendezvous, a message) that the same schema file declares."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ListOf:
    """``list<item>``: any number of items."""

    item: Type

    def __str__(self) -> str:
        return f"list<{self.item}>"


@dataclass(frozen=True)
class MapOf:
    """``map<string, value>``: distinct string keys."""

    value: Type

    def __str__(self) -> str:
        return f"map<string, {self.value}>"


@dataclass(frozen=True)
class Msgpack:
    """``msgpack<content>``: a binary value whose bytes are the msgpack encoding of ``content``."""

    content: Type

    def __str__(self) -> str:
        return f"msgpack<{self.content}>"


Type: TypeAlias = Scalar | Named | ListOf | MapOf | Msgpack

_SHAPE = re.compile(r"(?P<head>\w+)\s*(?:<(?P<inner>.*)>)?")


def parse_type(text: str) -> Type:
    """Parse a type of the schema language.

    Raises:
        TypeSyntaxError: if the text is not one.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise TypeSyntaxError(f"not a type: {text!r}")
    head, inner = match["head"], match["inner"]
    if inner is None:
        if head in SCALARS:
            return Scalar(head)
        if head[0].isupper():
            return Named(head)
        raise TypeSyntaxError(f"unknown type {head!r}; scalars are {', '.join(SCALARS)}")
    if head == "list":
        return ListOf(parse_type(inner))
    if head == "msgpack":
        return Msgpack(parse_type(inner))
    if head == "map":
        key, comma, value = inner.partition(",")
        if not comma or key.strip() != "string":
            raise TypeSyntaxError(f"a map is map<string, T>, not {text!r}")
        return MapOf(parse_type(value))
    raise TypeSyntaxError(f"unknown type {head!r} in {text!r}")


def named_types(type_: Type) -> Iterator[str]:
    """Yield the name of every structure that ``type_`` refers to."""
    match type_:
        case Named(name):
            yield name
        case ListOf(part) | MapOf(part) | Msgpack(part):
            yield from named_types(part)
        case Scalar():
            pass
