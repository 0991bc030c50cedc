"""A transfer engine that is watched: bytes are counted, and a fault can happen in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rd2h.engines import TransferEngine, UInt64Array

__all__ = ["WatchedReader"]

_PROGRESS_INTERVAL = 0.1


class WatchedReader:
    """Stands between the receiver and its engine; what `rd2h.decode.Reader` asks for.

    Args:
        engine: The engine that reads.
        expected: Bytes that will be read in all.
        progress: Called now and then with the bytes read so far, and at the end.
        halfway: Called once, on the thread of the first read that passes half of ``expected``,
            before that read.
        delay: Seconds by which each read is slower.
    """

    def __init__(
        self,
        engine: TransferEngine,
        expected: int,
        progress: Callable[[int], None],
        halfway: Callable[[], None] | None = None,
        delay: float = 0.0,
    ) -> None:
        self._engine = engine
        self._expected = expected
        self._progress = progress
        self._halfway = halfway
        self._delay = delay
        self._lock = threading.Lock()
        self._begun = 0
        self._done = 0
        self._told_at = 0.0

    def read(
        self,
        session: str,
        local_addrs: UInt64Array,
        remote_addrs: UInt64Array,
        lengths: UInt64Array,
        /,
    ) -> None:
        """Read, and count; as the engine's."""
        size = int(lengths.sum())
        halfway = self._begin(size)
        if halfway is not None:
            halfway()
        if self._delay:
            time.sleep(self._delay)  # the fault itself: a memory bus that is busy
        self._engine.read(session, local_addrs, remote_addrs, lengths)
        self._end(size)

    def forget(self, session: str, /) -> None:
        """As the engine's."""
        self._engine.forget(session)

    def _begin(self, size: int) -> Callable[[], None] | None:
        """Count a read that starts; return what is to happen before it."""
        with self._lock:
            self._begun += size
            if 2 * self._begun <= self._expected:
                return None
            halfway, self._halfway = self._halfway, None
            return halfway

    def _end(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._told_at < _PROGRESS_INTERVAL and self._done < self._expected:
                return
            self._told_at = now
            self._progress(self._done)
