"""Whole events only."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.proxy.sse import EventSplitter, error_event


def test_whole_events_pass_at_once() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert splitter.feed(b"data: 2\n\ndata: 3\n\n") == b"data: 2\n\ndata: 3\n\n"
    assert splitter.finish() == b""


def test_half_an_event_waits_for_its_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\ndata: {") == b"data: 1\n\n"
    assert splitter.feed(b"}\n") == b""
    assert splitter.feed(b"\nda") == b"data: {}\n\n"
    assert splitter.finish() == b"da"


events = st.lists(st.sampled_from([b"data: x", b": c", b"data: a\ndata: b"]), max_size=6)


@given(events, st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]), st.lists(st.integers(0, 80)))
def test_no_cut_loses_or_adds_a_byte(parts: list[bytes], mark: bytes, cuts: list[int]) -> None:
    data = b"".join(part + mark for part in parts) + b"tail"
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    splitter = EventSplitter()
    passed = b""
    for start, end in pairwise(edges):
        piece = splitter.feed(data[start:end])
        assert not piece or piece.endswith(mark)
        passed += piece
    assert passed == data[: -len(b"tail")]
    assert passed + splitter.finish() == data


def test_an_error_is_one_event() -> None:
    event = error_event(ProxyError(ErrorKind.DECODE_BROKEN, "two\nlines"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"] == {
        "message": "two\nlines", "type": "server_error", "param": None, "code": "decode_broken",
    }  # fmt: skip
