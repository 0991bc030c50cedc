"""Gates: which memory Prefill may not overwrite yet, and who keeps it from doing so.

Memory is asked for by storage slot, which is all of a layer's cache, or by block, for an engine
that can tell which blocks a step will write.

The one piece of state that the compute thread and the sender's threads share, under a lock of
its own that is held for dictionary operations only. A hold is taken by the compute thread
before it returns from submitting a layer, so that there is no moment at which a layer was
announced and its gate still stood open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
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
        blocks: Lists of the block ids that it announces, of main KV and indexers alike: an engine
            that asks by block hands them out of one pool.
    """

    slots: frozenset[int]
    layer_name: str
    endpoint: str
    blocks: Sequence[Sequence[int]] = ()

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
            released = False
            for slot in hold.slots:
                holders = self._holds.get(slot)
                if holders is None or hold not in holders:
                    continue
                released = True
                holders.remove(hold)
                if not holders:
                    del self._holds[slot]
            if released:
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
        return self._wait(lambda: self._holders(slots), timeout, what)

    def wait_blocks(self, blocks: frozenset[int], timeout: float, what: str) -> float:
        """As `wait`, for the batches that announce any of ``blocks``, whatever their layers."""
        return self._wait(lambda: self._readers(blocks), timeout, what)

    def _wait(self, find: Callable[[], set[Hold]], timeout: float, what: str) -> float:
        with self._changed:
            self._raise_fault()
            if not find():
                return 0.0
            start = self._clock()
            next_word = start + self._progress_interval
            while holders := find():
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

    def _readers(self, blocks: frozenset[int]) -> set[Hold]:
        if not blocks or not self._holds:
            return set()
        return {
            hold
            for hold in self._holders(None)
            if not all(blocks.isdisjoint(ids) for ids in hold.blocks)
        }

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def _listed(holders: set[Hold]) -> str:
    """A few holders by name, the rest as a number."""
    names = sorted(map(str, holders))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
