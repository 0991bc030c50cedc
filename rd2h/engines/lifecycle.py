"""Opening and closing of an engine, with calls in flight.

Any thread enters and leaves; `close` waits for those inside. The engine looks at `closing`
wherever it could otherwise stay for long.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rd2h.engines.errors import EngineClosedError

__all__ = ["Lifecycle"]


class Lifecycle:
    """Counts the calls inside an engine and shuts the door behind them.

    Args:
        engine: Name of the engine, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._inside = 0
        self._closing = False
        self._closed = False

    @property
    def closing(self) -> bool:
        """True from the moment `close` was called."""
        return self._closing

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Hold the engine open for one call.

        Raises:
            EngineClosedError: `close` has been called.
        """
        with self._changed:
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raise `EngineClosedError` if `close` has been called."""
        if self._closing:
            raise EngineClosedError(f"the {self._engine} engine is closed")

    def begin_close(self) -> None:
        """Refuse new calls from now on, without waiting for those inside."""
        with self._changed:
            self._closing = True

    def close(self) -> bool:
        """Refuse new calls and wait until those inside have left.

        Returns:
            True for the first caller, which gives the resources back; False for all others.
        """
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._inside)
            first, self._closed = not self._closed, True
            return first
