"""Server-sent events: whole events only, and an error as the last one.

An engine that dies may leave half an event behind. A client would try to read it as JSON, so an
event is passed on when it is complete; that costs nothing, since vLLM writes whole events.

Pure; any thread.
"""

from rd2h.proxy.errors import ProxyError

__all__ = ["EventSplitter", "error_event"]

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class EventSplitter:
    """Cuts a stream of bytes after its last complete event."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns those that may be passed on, possibly none."""
        if not self._rest and data.endswith(_ENDS):
            return data
        # An end may have begun in the last bytes that were here before; what comes before them was
        # searched already, so that a long event in small pieces is searched once.
        start = max(0, len(self._rest) - 3)
        self._rest += data
        end = 0
        for mark in _ENDS:
            found = self._rest.rfind(mark, start)
            if found >= 0:
                end = max(end, found + len(mark))
        passed = bytes(self._rest[:end])
        del self._rest[:end]
        return passed

    def finish(self) -> bytes:
        """What is left when the stream has ended as it should."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def error_event(error: ProxyError) -> bytes:
    """The event with which a stream ends that cannot go on."""
    return b"data: " + error.to_json() + b"\n\n"
