"""Reasons that are short and can be sent, whatever a peer or an engine says.

They go into a message, into logs and to the scheduler: a layer name of ten million characters,
five thousand ids or half a surrogate pair must not get that far.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

__all__ = ["cut", "listed", "reason_of", "short", "text_of"]

LONGEST = 1000
"""Characters of a reason, with everything that is appended to it."""

_LONGEST_NAME = 100
_MOST_NAMES = 3


def cut(text: str, longest: int = LONGEST) -> str:
    """A text that UTF-8 can carry, with its middle left out if it is too long.

    Both ends stay: the first says of what it speaks, the last mostly what was wrong.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= longest:
        return text
    note = f" ... {len(text) - longest} more characters ... "
    room = max(longest - len(note), 2)
    return text[: room - room // 3] + note + text[-(room // 3) :]


def short(name: str) -> str:
    """A layer's or a request's name, in part if it is a long one."""
    return cut(name, _LONGEST_NAME)


def listed(names: Collection[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(short(name) for name in islice(names, _MOST_NAMES)) or "none") + more


def reason_of(error: str, ext_ids: Collection[str]) -> str:
    """What is said about a batch that failed: why, and whose it was."""
    whose = f" (requests {listed(ext_ids)})" if ext_ids else ""
    return cut(error, LONGEST - len(whose)) + whose


def text_of(error: BaseException) -> str:
    """An exception's text, or its type if it has none or cannot say it."""
    try:
        return str(error) or type(error).__name__
    except BaseException:  # whatever its `__str__` does, the thread that asks must live
        return type(error).__name__
