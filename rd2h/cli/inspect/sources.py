"""Where frames come from: arguments, files and lines of hex."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from rd2h.wire.tables import MESSAGES

__all__ = ["Captured", "HexError", "frames", "frames_of_file", "frames_of_lines", "parse_hex"]

_SEPARATORS = re.compile(r"[\s:]+")
_NOT_HEX = re.compile(r"[^0-9a-fA-F]")
_RAW_PAYLOADS = frozenset(spec.tag for spec in MESSAGES if spec.raw)
_CONTROLS = bytes({*range(0x20), 0x7F} - set(b"\t\n\r\f\v"))
_UTF8_MARK = b"\xef\xbb\xbf"


class HexError(ValueError):
    """Text that should be a frame in hex, and is not."""


class Captured(msgspec.Struct, frozen=True):
    """One frame, or why there is none.

    Attributes:
        source: ``argument 1``, ``frames.txt:3``, ``stdin:1``.
        payload: The frame's bytes.
        problem: What kept it from being found; then ``payload`` means nothing.
    """

    source: str
    payload: bytes = b""
    problem: str = ""


class _Golden(msgspec.Struct, frozen=True):
    """The part of a golden file's entry that matters here."""

    name: str
    payload_hex: str


_GOLDEN = msgspec.json.Decoder(list[_Golden])


def parse_hex(text: str) -> bytes:
    """Read hex with or without ``0x``, spaces and colons.

    Raises:
        HexError: if there is something else in it, or half a byte.
    """
    digits = []
    for word in filter(None, _SEPARATORS.split(text)):
        bare = word[2:] if word[:2] in ("0x", "0X") else word
        wrong = _NOT_HEX.search(bare)
        if wrong is not None:
            raise HexError(f"not hex: {wrong[0]!r} in {_short(word)}")
        if len(bare) % 2:
            raise HexError(f"an odd number of hex digits, {len(bare)}, in {_short(word)}")
        digits.append(bare)
    return bytes.fromhex("".join(digits))


def frames(
    arguments: Iterable[str], lines: Callable[[], Iterable[bytes]], *, only_files: bool = False
) -> Iterator[Captured]:
    """Yield the frames of all arguments in turn, as they are found.

    Args:
        arguments: Hex, names of files, or ``-``.
        lines: Gives the lines of standard input.
        only_files: Take every argument but ``-`` as the name of a file.
    """
    for number, argument in enumerate(arguments, start=1):
        if argument == "-":
            yield from frames_of_lines("stdin", lines())
        else:
            yield from _frames_of_argument(argument, f"argument {number}", only_files)


def _frames_of_argument(argument: str, source: str, only_files: bool) -> Iterator[Captured]:
    named = os.sep in argument or "/" in argument or "." in argument
    why = f"no such file: {_short(argument)}"
    if not only_files and not named:
        try:
            yield Captured(source, parse_hex(argument))
            return
        except HexError as error:
            why = f"{error}; and no such file"
    try:
        exists = Path(argument).exists()
    except (OSError, ValueError):  # too long for a name, or with a NUL in it
        exists = False
    if exists:
        yield from frames_of_file(argument)
    else:
        yield Captured(source, problem=why)


def frames_of_file(name: str) -> Iterator[Captured]:
    """Yield the frames of one file: a binary frame, lines of hex, or a golden file."""
    source = os.fsencode(name).decode("utf-8", "backslashreplace")
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        yield Captured(source, problem=error.strerror or str(error))
        return
    if not _is_text(data):
        yield Captured(source, data)
    elif data.lstrip()[:1] == b"[":
        yield from _golden_frames(source, data)
    else:
        yield from frames_of_lines(source, data.removeprefix(_UTF8_MARK).splitlines())


def _is_text(data: bytes) -> bool:
    """Whether a file is text: no msgpack array begins as text does."""
    if not data or data in _RAW_PAYLOADS:
        return False
    begins = data[0] < 0x80 or data.startswith(_UTF8_MARK)
    return begins and len(data.translate(None, _CONTROLS)) == len(data)


def _golden_frames(source: str, data: bytes) -> Iterator[Captured]:
    try:
        entries = _GOLDEN.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        yield Captured(source, problem=f"begins like a golden file, but is not one: {error}")
        return
    for entry in entries:
        here = f"{source}:{entry.name}"
        try:
            yield Captured(here, parse_hex(entry.payload_hex))
        except HexError as error:
            yield Captured(here, problem=str(error))


def frames_of_lines(source: str, lines: Iterable[bytes]) -> Iterator[Captured]:
    """Yield the frame of each line; blank lines and ``#`` comments have none."""
    for number, line in enumerate(lines, start=1):
        text = line.decode("utf-8", "replace").partition("#")[0].strip()
        if not text:
            continue
        try:
            yield Captured(f"{source}:{number}", parse_hex(text))
        except HexError as error:
            yield Captured(f"{source}:{number}", problem=str(error))


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
