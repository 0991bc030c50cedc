"""Takes a msgpack payload apart, run of bytes by run of bytes, for the worked examples.

It reads the format by itself, on purpose: an example that our own codec explains could not show
a fault of our codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codegen.schema import Field, Record, Schema, SchemaError
from codegen.types import ListOf, MapOf, Msgpack, Named, Scalar, Type

__all__ = ["Run", "annotate"]

_UINT_WIDTH = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_STR_WIDTH = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BIN_WIDTH = {0xC4: 1, 0xC5: 2, 0xC6: 4}


@dataclass(frozen=True)
class Run:
    """Some bytes of a payload and what they are; ``depth`` is how deep they are nested."""

    data: bytes
    depth: int
    text: str


class _Reader:
    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        return self.payload[start : self.at]

    def length(self, fixed: range, widths: dict[int, int]) -> tuple[int, bytes]:
        """Read the header of something that has a length: ``(length, header bytes)``."""
        start = self.at
        first = self.take(1)[0]
        if first in fixed:
            return first - fixed.start, self.payload[start : self.at]
        length = int.from_bytes(self.take(widths[first]), "big")
        return length, self.payload[start : self.at]

    def uint(self) -> tuple[int, bytes]:
        start = self.at
        first = self.take(1)[0]
        value = first if first < 0x80 else int.from_bytes(self.take(_UINT_WIDTH[first]), "big")
        return value, self.payload[start : self.at]


def annotate(schema: Schema, record: Record, payload: bytes) -> Iterator[Run]:
    """Yield the runs of a message's payload, in order; together they are the payload.

    Raises:
        SchemaError: if the payload is not such a message.
    """
    try:
        yield from _annotate(schema, record, payload)
    except (KeyError, IndexError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"{record.name}: a golden frame does not fit the schema any more ({error!r})"
        ) from error


def _annotate(schema: Schema, record: Record, payload: bytes) -> Iterator[Run]:
    if record.form == "raw":
        yield Run(payload, 0, f"the bytes of `{payload.decode()}`")
        return
    reader = _Reader(payload)
    count, head = reader.length(range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
    yield Run(head, 0, f"array of {count}")
    size, head = reader.length(range(0), _BIN_WIDTH)
    tag = reader.take(size)
    yield Run(head + tag, 1, f'tag: bin of {size}, "{tag.decode()}"')
    yield from _array_fields(schema, record.fields[: count - 1], reader, 1)


def _array_fields(
    schema: Schema, fields: list[Field], reader: _Reader, depth: int
) -> Iterator[Run]:
    for field in fields:
        yield from _value(schema, field.parsed_type, reader, depth, f"{field.name}: ")


def _value(schema: Schema, type_: Type, reader: _Reader, depth: int, label: str) -> Iterator[Run]:
    match type_:
        case Scalar("uint64"):
            value, data = reader.uint()
            yield Run(data, depth, f"{label}{value}")
        case Scalar("bool"):
            data = reader.take(1)
            yield Run(data, depth, f"{label}{'true' if data[0] == 0xC3 else 'false'}")
        case Scalar():
            size, head = reader.length(range(0xA0, 0xC0), _STR_WIDTH)
            text = reader.take(size)
            yield Run(head + text, depth, f'{label}str of {size}, "{text.decode()}"')
        case ListOf(Scalar("uint64")):
            # A list of numbers reads better on one line than on one each.
            count, data = reader.length(range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
            numbers = []
            for _ in range(count):
                value, run = reader.uint()
                numbers.append(str(value))
                data += run
            yield Run(data, depth, f"{label}array of {count}: [{', '.join(numbers)}]")
        case ListOf(item):
            count, head = reader.length(range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
            yield Run(head, depth, f"{label}array of {count}")
            for _ in range(count):
                yield from _value(schema, item, reader, depth + 1, "")
        case MapOf(value_type):
            count, head = reader.length(range(0x80, 0x90), {0xDE: 2, 0xDF: 4})
            yield Run(head, depth, f"{label}map of {count}")
            for _ in range(count):
                yield from _value(schema, Scalar("string"), reader, depth + 1, "key: ")
                yield from _value(schema, value_type, reader, depth + 2, "")
        case Msgpack(content):
            size, head = reader.length(range(0), _BIN_WIDTH)
            yield Run(head, depth, f"{label}bin of {size}, which is msgpack again:")
            yield from _value(schema, content, reader, depth + 1, "")
        case Named(name):
            yield from _record(schema, schema.record(name), reader, depth, label)


def _record(
    schema: Schema, record: Record, reader: _Reader, depth: int, label: str
) -> Iterator[Run]:
    if record.form == "map":
        count, head = reader.length(range(0x80, 0x90), {0xDE: 2, 0xDF: 4})
        yield Run(head, depth, f"{label}{record.name}: map of {count}")
        types = {field.name: field.parsed_type for field in record.fields}
        for _ in range(count):
            size, head = reader.length(range(0xA0, 0xC0), _STR_WIDTH)
            name = reader.take(size)
            yield Run(head + name, depth + 1, f'key "{name.decode()}"')
            yield from _value(schema, types[name.decode()], reader, depth + 2, "")
    else:
        count, head = reader.length(range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
        yield Run(head, depth, f"{label}{record.name}: array of {count}")
        yield from _array_fields(schema, record.fields[:count], reader, depth + 1)
