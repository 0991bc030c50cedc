"""Waiting for something that another process does; any thread."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE", "eventually"]

PATIENCE = 90.0
"""Seconds after which something that must come is taken for lost; machines are slow at times."""

_PAUSE = 0.02


def eventually(condition: Callable[[], object], what: str, seconds: float | None = None) -> None:
    """Wait until ``condition`` holds.

    Raises:
        AssertionError: It did not within ``seconds``.
    """
    seconds = PATIENCE if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(_PAUSE)
