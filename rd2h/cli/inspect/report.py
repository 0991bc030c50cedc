"""All that is known of one frame, as a value that prints as JSON. Pure."""

from __future__ import annotations

import msgspec

from rd2h.cli.inspect.layout import Layout, layout_of
from rd2h.cli.inspect.places import excerpt, offset_of
from rd2h.cli.inspect.sources import Captured
from rd2h.wire import Message, PrefillMessage, WireError, decode
from rd2h.wire.tables import MESSAGES

__all__ = ["Fault", "Report", "as_json", "inspect_frame"]

# The first byte of an array with a length field, and how long its header is. Others: one byte.
_HEADER_WIDTH = {0xDC: 3, 0xDD: 5}


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a frame.

    Attributes:
        kind: Class of the `WireError`, or ``InputError`` for what never became a frame.
        reason: What is wrong.
        path: Where in the message; None for an ``InputError``.
        offset: The byte of the frame at which that place begins, where it can be told.
        excerpt: Lines of a hexdump around it.
    """

    kind: str
    reason: str
    path: str | None = None
    offset: int | None = None
    excerpt: list[str] = []


class Report(msgspec.Struct, frozen=True):
    """One frame.

    Attributes:
        source: Where it came from.
        size: Its bytes.
        name: The message; for a bad frame the one that its tag claims; None if there is none.
        message: What it says, if it can be read. An empty frame has neither message nor fault.
        layout: How it is laid out, if it can be read.
        fault: What is wrong, if it cannot.
    """

    source: str
    size: int
    name: str | None = None
    message: Message | None = None
    layout: Layout | None = None
    fault: Fault | None = None

    @property
    def direction(self) -> str | None:
        """Who sends such a message to whom."""
        if self.message is None:
            return None
        return "prefill->decode" if isinstance(self.message, PrefillMessage) else "decode->prefill"


def inspect_frame(captured: Captured) -> Report:
    """Find out all about one frame; never raises for what a frame holds."""
    if captured.problem:
        return Report(captured.source, 0, fault=Fault("InputError", captured.problem))
    payload = captured.payload
    size = len(payload)
    if not payload:
        return Report(captured.source, 0)
    try:
        message = decode(payload)
    except WireError as error:
        offset = offset_of(payload, error.path)
        fault = Fault(
            type(error).__name__, error.reason, error.path, offset, excerpt(payload, offset)
        )
        return Report(captured.source, size, _claimed(payload), fault=fault)
    name = type(message).__name__
    return Report(captured.source, size, name, message, layout_of(payload, message))


def _claimed(payload: bytes) -> str | None:
    """The message that a bad frame's tag names, also where the frame was cut off after it."""
    at = _HEADER_WIDTH.get(payload[0], 1)
    for spec in MESSAGES:
        if not spec.raw and payload.startswith(msgspec.msgpack.encode(spec.tag), at):
            return spec.message.__name__
    return None


def as_json(report: Report) -> str:
    """One line of JSON."""
    layout, fault = report.layout, report.fault
    line: dict[str, object] = {
        "source": report.source,
        "ok": fault is None,
        "message": report.name,
        "direction": report.direction,
        "bytes": report.size,
    }
    if layout is not None:
        line |= {
            "version": None if layout.extra else layout.version,
            "versions": layout.exact,
            "newer": bool(layout.extra),
            "extra": layout.extra,
            "defaulted": layout.absent,
            "element_bytes": layout.element_bytes,
            "fields": _plain(report.message),
        }
    if fault is not None:
        line["error"] = {
            "kind": fault.kind,
            "path": fault.path,
            "reason": fault.reason,
            "offset": fault.offset,
        }
    return msgspec.json.encode(line).decode()


def _plain(value: object) -> object:
    """Structures as maps by name: on the wire most are arrays, which nobody could read."""
    match value:
        case msgspec.Struct():
            return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
    return value
