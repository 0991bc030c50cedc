"""What the tests of `rd2h inspect` share: frames, and how to look at them."""

from __future__ import annotations

import io
import json
from typing import Any, TypeAlias

import msgspec
from hypothesis import strategies as st
from rich.console import Console

from rd2h.cli.inspect.report import as_json, inspect_frame
from rd2h.cli.inspect.sources import Captured
from rd2h.cli.inspect.tree import print_report
from tests.compat.vectors import VECTORS

__all__ = ["BAD", "BATCH", "Line", "drawn", "mutated", "of", "pack"]
Line: TypeAlias = dict[str, Any]  # Any: JSON
BATCH = next(v for v in VECTORS if v.id == "v2-read_ready.one_request_first_layer")
BAD = "92c409726561645f646f6e65a161"  # read_done whose layer_idx is text


def of(payload: bytes) -> Line:
    line: Line = json.loads(as_json(inspect_frame(Captured("here", payload))))
    return line


def drawn(payload: bytes, *, full: bool = False, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, inspect_frame(Captured("here", payload)), full=full)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pack(*elements: object) -> bytes:
    return msgspec.msgpack.encode(elements)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A golden frame with some bytes changed, cut out or put in."""
    data = bytearray(draw(st.sampled_from(VECTORS)).payload)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 3))
        data[at : at + cut] = draw(st.binary(max_size=3))
    return bytes(data)
