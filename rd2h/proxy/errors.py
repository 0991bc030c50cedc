"""Every error that the proxy itself answers, in one table.

An error of an engine is passed on as the engine wrote it (`PassOn`). All others are OpenAI error
objects made here: ``{"error": {"message", "type", "param", "code"}}``.

Pure; any thread.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

__all__ = ["Answer", "ErrorKind", "PassOn", "ProxyError"]

JSON_HEADERS = ((b"content-type", b"application/json"),)


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer: status, end-to-end headers without ``content-length``, body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ErrorKind(Enum):
    """What can go wrong: ``code`` of the error object, and the HTTP status."""

    INVALID_JSON = ("invalid_json", 400)
    INVALID_REQUEST = ("invalid_request", 400)
    INVALID_VALUE = ("invalid_value", 400)
    MISSING_FIELD = ("missing_required_parameter", 400)
    NOT_FOUND = ("not_found", 404)
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405)
    BODY_TOO_LARGE = ("body_too_large", 413)
    INTERNAL = ("internal_error", 500)
    DECODE_UNAVAILABLE = ("decode_unavailable", 502)
    DECODE_BROKEN = ("decode_broken", 502)
    PREFILL_UNAVAILABLE = ("prefill_unavailable", 502)
    SHUTTING_DOWN = ("shutting_down", 503)
    RENDEZVOUS_TIMEOUT = ("rendezvous_timeout", 504)
    PREFILL_TIMEOUT = ("prefill_timeout", 504)
    REQUEST_TIMEOUT = ("request_timeout", 504)
    # Answers of the metaserver, to a Decode engine.
    RENDEZVOUS_MALFORMED = ("rendezvous_malformed", 400)
    RENDEZVOUS_UNKNOWN = ("rendezvous_unknown", 404)
    RENDEZVOUS_DUPLICATE = ("rendezvous_duplicate", 409)
    RENDEZVOUS_LATE = ("rendezvous_late", 410)

    def __init__(self, code: str, status: int) -> None:
        self.code = code
        self.status = status


class ProxyError(Exception):
    """An error that the proxy answers.

    Attributes:
        kind: What went wrong.
        message: For people: what was expected, what was there, what to do.
        param: The field of the request that is at fault, if one is.
    """

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param

    def to_json(self) -> bytes:
        """The OpenAI error object as JSON text, in one line."""
        kind = "invalid_request_error" if self.kind.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.kind.code,
        }
        return msgspec.json.encode({"error": error})

    def answer(self) -> Answer:
        """The error as a whole HTTP answer."""
        headers: tuple[tuple[bytes, bytes], ...] = JSON_HEADERS
        if self.kind is ErrorKind.SHUTTING_DOWN:
            headers += ((b"retry-after", b"1"), (b"connection", b"close"))
        return Answer(self.kind.status, headers, self.to_json())


class PassOn(Exception):  # noqa: N818 - it carries an answer; whether that is an error is the engine's
    """An engine's own answer, which the client gets as it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"the engine answered {answer.status}")
        self.answer = answer
