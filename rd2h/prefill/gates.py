"""Gates: which storage slots Prefill may not overwrite yet, and who keeps it from doing so.

The one piece of state that the compute thread and the sender's threads share, under a lock of
its own that is held for dictionary operations only. A hold is taken by the compute thread
before it returns from submitting a layer, so that there is no moment at which a layer was
announced and its gate still stood open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Gates", "Hold", "WaitTimeoutError"]

logger = logging.getLogger(__name__)


class WaitTimeoutError(TimeoutError):
    """A gate stayed shut until the deadline; the text says who did not answer."""


@dataclass(frozen=True, eq=False)
class Hold:
    """One batch that keeps slots shut until it is answered or has failed.

    Attributes:
        slots: The storage slots of the layer.
        layer_name: The layer that the batch announces.
        endpoint: The Decode rank that must answer.
    """

    slots: frozenset[int]
    layer_name: str
    endpoint: str

    def __str__(self) -> str:
        return f"{self.layer_name} at {self.endpoint}"


class Gates:
    """Counts, for each storage slot, the batches that are not answered yet. Any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, progress_interval: float = 5.0
    ) -> None:
        """``progress_interval``: seconds after which a wait says in the log what it waits for."""
        self._clock = clock
        self._progress_interval = progress_interval
        self._changed = threading.Condition()
        self._holds: dict[int, set[Hold]] = {}
        self._fault: BaseException | None = None

    def hold(self, hold: Hold) -> None:
        """Shut the gates of a batch's slots."""
        with self._changed:
            for slot in hold.slots:
                self._holds.setdefault(slot, set()).add(hold)

    def release(self, hold: Hold) -> None:
        """Let go of a batch's slots; releasing a hold twice changes nothing."""
        with self._changed:
            opened = False
            for slot in hold.slots:
                holders = self._holds.get(slot)
                if holders is None:
                    continue
                holders.discard(hold)
                if not holders:
                    del self._holds[slot]
                    opened = True
            if opened:
                self._changed.notify_all()

    def fail(self, fault: BaseException) -> None:
        """Prefill's own machinery has broken: every wait, now and later, raises ``fault``."""
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def raise_fault(self) -> None:
        """Raise what `fail` was told, if anything."""
        with self._changed:
            self._raise_fault()

    def holders(self, slots: frozenset[int] | None = None) -> set[Hold]:
        """The batches that keep any of ``slots`` (all slots, if None) shut."""
        with self._changed:
            return self._holders(slots)

    def wait(self, slots: frozenset[int] | None, timeout: float, what: str) -> float:
        """Block until all of ``slots`` (all slots there are, if None) are open.

        Args:
            slots: What is about to be overwritten.
            timeout: Seconds.
            what: Who waits, for the log and the error.

        Returns:
            Seconds that the caller was blocked; 0.0 if the gates stood open.

        Raises:
            WaitTimeoutError: at the deadline.
        """
        with self._changed:
            self._raise_fault()
            if not self._holders(slots):
                return 0.0
            start = self._clock()
            next_word = start + self._progress_interval
            while holders := self._holders(slots):
                now = self._clock()
                if now - start >= timeout:
                    raise WaitTimeoutError(
                        f"{what} waited {timeout:g} s for Decode to answer {_listed(holders)}; "
                        f"it may overwrite their memory only then"
                    )
                if now >= next_word:
                    next_word = now + self._progress_interval
                    logger.warning(
                        "%s has waited %.1f s for Decode to answer %s",
                        what,
                        now - start,
                        _listed(holders),
                    )
                self._changed.wait(min(start + timeout, next_word) - now)
                self._raise_fault()
            return self._clock() - start

    def _holders(self, slots: frozenset[int] | None) -> set[Hold]:
        wanted = self._holds.keys() if slots is None else slots & self._holds.keys()
        return {hold for slot in wanted for hold in self._holds[slot]}

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def _listed(holders: set[Hold]) -> str:
    """A few holders by name, the rest as a number."""
    names = sorted(map(str, holders))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
