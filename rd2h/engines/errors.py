"""What can go wrong in a transfer engine, one class for each thing a caller does about it.

Every message names the session, the segment, and what the operator can change. Nothing here
touches a thread or a socket.
"""

__all__ = [
    "EngineClosedError",
    "EngineError",
    "EnginePermissionError",
    "EngineUnavailableError",
    "LocalRangeError",
    "NotRegisteredError",
    "PeerGoneError",
    "ReadTimeoutError",
    "RemoteRangeError",
    "SegmentError",
    "SessionError",
    "quote_session",
]


class EngineError(Exception):
    """A transfer engine could not do what it was asked; the base of all errors here."""


class EngineUnavailableError(EngineError):
    """The engine is unknown, or its library is missing or does not start on this host."""


class EngineClosedError(EngineError):
    """The engine was closed before the call, or while it ran."""


class NotRegisteredError(EngineError):
    """The session was asked for before any memory was registered."""


class SegmentError(EngineError):
    """The three arrays of a read do not describe segments: a bug of the caller on this side."""


class LocalRangeError(EngineError):
    """A destination lies outside what this engine registered, or cannot be written."""


class RemoteRangeError(EngineError):
    """A source is not mapped in the peer, or the peer did not register it."""


class SessionError(EngineError):
    """The session string is malformed, or made for another engine or version."""


class PeerGoneError(EngineError):
    """The peer behind the session has exited, restarted, closed, or cannot be reached."""


class EnginePermissionError(EngineError):
    """The operating system does not let this process read the peer's memory."""


class ReadTimeoutError(EngineError):
    """The read did not finish before the engine's deadline; nothing lands after this error."""


def quote_session(session: str) -> str:
    """Quote a session for a message: printable, on one line, at most about 100 characters."""
    # Cut before quoting: a hostile peer's megabyte must not become four megabytes first.
    if len(session) <= 72:
        return ascii(session)
    return f"{session[:72]!a}... ({len(session)} characters)"
