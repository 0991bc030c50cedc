"""The client's side of one request: its answer, in whichever way it comes about.

Owner: the task that serves the request.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rd2h.proxy.errors import Answer, ProxyError
from rd2h.proxy.sse import error_event

__all__ = ["Receive", "Responder", "Scope", "Send"]

# ASGI's own types: messages are dicts of anything.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Responder:
    """Sends one answer: whole, or started and written piece by piece.

    Attributes:
        status: The HTTP status that was sent; 0 before.
        finished: Whether the answer is complete.

    Args:
        send: ASGI's.
        request_id: Sent as ``X-Request-Id``.
        first_byte: Called before the first byte of a Decode engine's answer is sent.
    """

    def __init__(self, send: Send, request_id: str, first_byte: Callable[[], None]) -> None:
        self._send = send
        self._id = (b"x-request-id", request_id.encode("ascii"))
        self._first_byte = first_byte
        self.status = 0
        self.finished = False

    @property
    def started(self) -> bool:
        """Whether the client has seen a status: nothing can be tried again then."""
        return self.status != 0

    async def start(
        self, status: int, headers: tuple[tuple[bytes, bytes], ...], *, counted: bool = True
    ) -> None:
        """Send status and headers; the body follows. ``counted`` if it is a Decode engine's."""
        if counted:
            self._first_byte()
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, self._id]}
        )

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client is slow to take it."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, answer: Answer, *, counted: bool = True) -> None:
        """Send a whole answer; ``counted`` if it is a Decode engine's."""
        length = (b"content-length", str(len(answer.body)).encode("ascii"))
        await self.start(answer.status, (*answer.headers, length), counted=counted)
        await self.finish(answer.body)

    async def fail(self, error: ProxyError) -> None:
        """Tell the client of an error: as a status, or as a stream's last event."""
        if self.finished:
            return
        if self.started:
            await self.finish(error_event(error))
        else:
            await self.answer(error.answer(), counted=False)
