"""From the path of a fault to the byte where it lies, and the bytes around it. Pure."""

from __future__ import annotations

import json
import re

from rd2h.cli.inspect.raw import UNREADABLE, array_parts, bin_content, map_parts, text_of

__all__ = ["excerpt", "offset_of"]

# One step of a path: `[3]`, `["a key"]`, or `.name`.
_STEP = re.compile(r'\[(?P<index>\d+)\]|\[(?P<key>"(?:[^"\\]|\\.)*")\]|\.(?P<name>\w+)')

_WIDTH = 16
_HEAD_ROWS = 4


def offset_of(payload: bytes, path: str) -> int | None:
    """Where in a frame the value at a `WireError` path begins; None if it cannot be told.

    A path that leads to nothing (an element that is missing, say) gives the place of what should
    hold it.
    """
    if path == "$" or not path.startswith("$"):
        return None
    steps = list(_STEP.finditer(path))
    offset, data = 0, payload
    try:
        for step in steps:
            if step is not steps[0]:
                offset, data = _into_bin(offset, data)
            found = _step(data, step)
            if found is None:
                break
            offset, data = offset + found[0], found[1]
    except UNREADABLE:
        return offset or None
    return offset


def _into_bin(offset: int, data: bytes) -> tuple[int, bytes]:
    """Go into a bin value, which holds msgpack; anything else stays as it is."""
    try:
        content = bin_content(data)
    except UNREADABLE:
        return offset, data
    return offset + len(data) - len(content), content


def _step(data: bytes, step: re.Match[str]) -> tuple[int, bytes] | None:
    """Where one step leads inside a value, and the bytes there."""
    if step["index"] is not None:
        parts = array_parts(data)
        index = int(step["index"])
        if index >= len(parts):
            return None
        return len(data) - sum(map(len, parts[index:])), parts[index]
    key = step["name"] or json.loads(step["key"])
    items = map_parts(data)
    at = len(data) - sum(len(k) + len(v) for k, v in items)
    for raw_key, value in items:
        if text_of(raw_key) == key:
            return at + len(raw_key), value
        at += len(raw_key) + len(value)
    return None


def excerpt(payload: bytes, offset: int | None) -> list[str]:
    """Some lines of a hexdump: around ``offset``, which is marked, or from the start."""
    rows = -(-len(payload) // _WIDTH)
    if offset is None:
        first, last = 0, min(rows, _HEAD_ROWS)
    else:
        first = max(0, offset // _WIDTH - 1)
        last = min(rows, first + _HEAD_ROWS - 1)
    lines = [f"... {first * _WIDTH} bytes before"] if first else []
    for row in range(first, last):
        data = payload[row * _WIDTH : (row + 1) * _WIDTH]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in data)
        lines.append(f"{row * _WIDTH:04x}  {data.hex(' '):<{3 * _WIDTH}} {text}")
        if offset is not None and offset // _WIDTH == row:
            lines.append(f"{'':{6 + 3 * (offset % _WIDTH)}}^^ byte {offset}")
    if last < rows:
        lines.append(f"... {len(payload) - last * _WIDTH} bytes more")
    return lines
