"""A bounded rate for log lines that somebody else causes.

Pure; the time is passed in. Owner: whoever made it.
"""

__all__ = ["Limiter"]


class Limiter:
    """A token bucket that counts what it held back.

    Args:
        rate: Lines for each second, in the long run.
        burst: Lines that may come at once.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._last = float("-inf")
        self._held_back = 0

    def allow(self, now: float) -> int | None:
        """How many lines were held back before this one; None if this one is held back too."""
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
        self._last = now
        if self._tokens < 1:
            self._held_back += 1
            return None
        self._tokens -= 1
        held_back, self._held_back = self._held_back, 0
        return held_back
