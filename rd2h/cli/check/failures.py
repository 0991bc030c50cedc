"""A check that did not go well: which end, which step, what was seen, what to look at."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

__all__ = ["CheckFailed", "Failure", "Side", "Step", "clean"]

_Text: TypeAlias = Annotated[str, Meta(max_length=4096)]


class Side(StrEnum):
    """The two ends."""

    PREFILL = "prefill"
    DECODE = "decode"


class Step(StrEnum):
    """What a check does, in order; docs/check.md has a line for each."""

    BIND = "bind"
    WAIT = "wait for decode"
    CONNECT = "connect"
    HANDSHAKE = "handshake"
    KV_PORT = "kv port"
    CONNECT_BACK = "connect back"
    PREPARE = "prepare"
    ENGINE_START = "engine start"
    ALLOCATE = "allocate"
    REGISTER = "register"
    FIRST_READ = "first read"
    READ = "read"
    COMPARE_BYTES = "compare bytes"
    COMPARE_REST = "compare the rest"
    COMPARE_DIGEST = "compare digest"
    CLOSE = "close"
    RESULT = "result"


class Failure(Struct, frozen=True):
    """Why a check failed; it also travels to the other end, which shows it as it is.

    Attributes:
        side: The end where it happened.
        step: What was being done there.
        seen: What was seen.
        look: What to look at on that machine, likeliest first.
    """

    side: Side
    step: Step
    seen: _Text
    look: Annotated[list[_Text], Meta(max_length=20)]

    def __str__(self) -> str:
        return f"{self.side}, {self.step}: {self.seen}"


class CheckFailed(Exception):  # noqa: N818 - a result that ends the check, rather than a fault
    """The check is over."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def clean(text: str) -> str:
    """A text of the other end, on one line and without control of the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
