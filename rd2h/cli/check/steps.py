"""Steps: each has a name, a deadline that holds even in native code, and a failure that advises.

A step runs in the thread that enters it. A timer thread watches each: if the step is still there
some seconds after its own waits should have ended, something hangs that Python cannot interrupt (an
engine's library, a driver), and the timer's `expired` reports and ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rd2h.cli.check.advice import advise
from rd2h.cli.check.facts import gather
from rd2h.cli.check.failures import CheckFailed, Failure, Side, Step, clean
from rd2h.cli.check.messages import ControlError
from rd2h.cli.check.options import EngineName
from rd2h.devices import DeviceUnavailableError
from rd2h.engines import EngineError
from rd2h.texts import cut, text_of

__all__ = ["GRACE", "Steps"]

GRACE = 5.0
"""Seconds beyond ``timeout`` until a step counts as hanging: an engine ends its own waits first."""

_PLAIN = (ControlError, DeviceUnavailableError, EngineError, OSError, MemoryError)
"""What is raised with a text for operators; of anything else the class is named as well."""


class Steps:
    """Runs the steps of one end.

    Args:
        side: This end.
        timeout: Seconds that each wait within a step may take.
        expired: Called on a thread of its own when a step hangs; it ends the process.
        grace: See `GRACE`.

    Attributes:
        engine: The engine that is agreed on, for advice.
    """

    def __init__(
        self,
        side: Side,
        timeout: float,
        expired: Callable[[Failure], None],
        grace: float = GRACE,
    ) -> None:
        self.side = side
        self.timeout = timeout
        self.engine = EngineName.AUTO
        self._expired = expired
        self._grace = grace

    @contextmanager
    def step(self, step: Step, timeout: float | None = None) -> Iterator[None]:
        """Run a step; whatever it raises becomes a `CheckFailed` of that step.

        Args:
            step: Its name.
            timeout: Seconds, if its waits have another limit.

        Raises:
            CheckFailed: it failed. One that comes from the other end is passed on as it is.
        """
        limit = (self.timeout if timeout is None else timeout) + self._grace
        timer = threading.Timer(limit, self._hangs, (step, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(self.failure(step, _seen(error), error)) from error
        finally:
            timer.cancel()

    def failure(self, step: Step, seen: str, error: BaseException | None = None) -> Failure:
        """Describe a failure of this end, with advice for this machine."""
        look = advise(self.side, step, self.engine, error, gather())
        return Failure(self.side, step, _line(seen), [_line(hint) for hint in look])

    def _hangs(self, step: Step, limit: float) -> None:
        self._expired(self.failure(step, f"nothing came of it in {limit:g} s; this end hangs"))


def _line(text: str) -> str:
    """One line that the other end takes; cut first, for it may be a long one, and again after."""
    return cut(clean(cut(text)))


def _seen(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror  # the number in front of it tells an operator nothing
    text = text_of(error)
    return text if isinstance(error, _PLAIN) else f"{type(error).__name__}: {text}"
