"""The way to D and back: D's bytes go to the client as they come.

Owner: the task that serves the request.
"""

import httpx

from rd2h.proxy.body import Call
from rd2h.proxy.errors import Answer, ErrorKind, ProxyError
from rd2h.proxy.pool import Lease
from rd2h.proxy.rendezvous import Waiter
from rd2h.proxy.responder import Responder
from rd2h.proxy.services import InFlight, Services
from rd2h.proxy.sse import EventSplitter
from rd2h.proxy.transport import Headers, explain, for_client, for_engine

__all__ = ["Decode", "DecodeFailedError"]


class DecodeFailedError(Exception):
    """D failed before the first byte of its answer: another D may be tried.

    Attributes:
        error: What the client gets when there is no other D.
        answer: D's own answer, if it gave one; it goes before ``error``.
    """

    def __init__(self, error: ProxyError, answer: Answer | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.answer = answer


class Decode:
    """One attempt at one D.

    Attributes:
        answering: Whether D has sent a part of its answer, keep-alive comments apart.

    Args:
        services: Shared state.
        call: The request.
        headers: The client's.
        waiter: Where D's rendezvous come in.
        entry: The request; its id is the attempt's.
        responder: Where the answer goes.
    """

    def __init__(
        self,
        services: Services,
        call: Call,
        headers: Headers,
        waiter: Waiter,
        entry: InFlight,
        responder: Responder,
    ) -> None:
        self._services = services
        self._call = call
        self._headers = headers
        self._waiter = waiter
        self._entry = entry
        self._responder = responder
        self._any_byte = False
        self.answering = False

    async def run(self, lease: Lease) -> None:
        """Send the request to D and its answer to the client; releases the lease when done.

        Raises:
            DecodeFailedError: if D failed and another may be tried.
            ProxyError: if D failed after the first byte of its answer.
        """
        engine = lease.engine
        try:
            response = await self._services.transport.send(
                "POST",
                engine.url,
                self._call.endpoint.path,
                for_engine(self._headers, self._entry.request_id),
                self._call.decode_body(self._services.metaservers[engine.url]),
            )
            try:
                await self._relay(response, lease)
            finally:
                await response.aclose()
        except httpx.HTTPError as failure:
            reason, down = explain(failure)
            self._services.failed(engine, reason, down=down)
            if self._any_byte:
                raise ProxyError(
                    ErrorKind.DECODE_BROKEN,
                    f"the Decode engine {engine.url} left in the middle of its answer: {reason}",
                ) from None
            raise DecodeFailedError(
                ProxyError(
                    ErrorKind.DECODE_UNAVAILABLE,
                    f"the Decode engine {engine.url} could not be reached or left: {reason}",
                )
            ) from None

    async def _relay(self, response: httpx.Response, lease: Lease) -> None:
        status = response.status_code
        headers = for_client(response.headers.raw)
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        if 200 <= status < 300 and streamed:
            rest = await self._stream(response, status, headers)
            self._ended(lease)
            await self._responder.finish(rest)
            return
        # A whole answer is sent when it is whole: half a JSON object is of no use to anyone.
        body = bytearray()
        async for chunk in response.aiter_raw():
            # The body of an error is no byte of an answer.
            if status < 300:
                self._saw(chunk)
            body += chunk
        answer = Answer(status, headers, bytes(body))
        if status >= 500 or 300 <= status < 400:
            self._services.failed(lease.engine, f"it answered {status}", down=False)
            error = ProxyError(
                ErrorKind.DECODE_UNAVAILABLE,
                f"the Decode engine {lease.engine.url} answered {status}",
            )
            raise DecodeFailedError(error, answer if status >= 500 else None)
        self._ended(lease)
        await self._responder.answer(answer)

    def _ended(self, lease: Lease) -> None:
        self._services.decode.succeeded(lease.engine)
        # The client may be slow to take what is left, but D is done with it.
        lease.release()
        self._waiter.close()

    async def _stream(
        self, response: httpx.Response, status: int, headers: tuple[tuple[bytes, bytes], ...]
    ) -> bytes:
        """Pass on what comes; returns what is left when it has ended."""
        splitter = EventSplitter()
        async for chunk in response.aiter_raw():
            self._saw(chunk)
            events = splitter.feed(chunk)
            if events:
                if not self._responder.started:
                    await self._responder.start(status, headers)
                await self._responder.write(events)
        if not self._responder.started:
            await self._responder.start(status, headers)
        return splitter.finish()

    def _saw(self, chunk: bytes) -> None:
        self._any_byte = True
        # A comment keeps the connection alive while D waits for its prompt, and says nothing.
        if not self.answering and (not chunk.startswith(b":") or b"\ndata:" in chunk):
            self.answering = True
            self._waiter.answering()
            self._entry.stage = "answering"
