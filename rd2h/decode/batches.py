"""Batches that are not answered yet, and the order that binds those of one peer.

Two batches of one peer keep their order if they are of one layer or share a request. So each
layer and each request has a queue of the peer's batches, and a batch is free to go once it is
the first in each of its queues. A batch that arrives or goes costs its own queues only, however
many others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from rd2h.layout import LayerLayout, LayoutError
from rd2h.wire import ReadReadyBatch

__all__ = ["Batch", "Peer", "Stage"]

Key: TypeAlias = int | str
"""What a queue is for: a layer's index or a request's id."""


class Stage(Enum):
    """How far a batch is; the picture is the machine's."""

    WAITING = "waiting"
    READING = "reading"
    ANSWERING = "answering"


@dataclass(eq=False)
class Batch:
    """One announcement, until its reply was handed over.

    Attributes:
        id: Counts up; the shell names the batch by it.
        peer: Who announced it.
        message: What was announced.
        deadline: Until when its requests must be registered.
        ext_ids: Every request that it speaks of, in order, each once.
        behind: In how many of its queues an earlier batch is before it.
        held: Requests that it keeps from ending.
        succeeded: Whether its reply says that it was read.
    """

    id: int
    peer: Peer
    message: ReadReadyBatch
    deadline: float
    stage: Stage = Stage.WAITING
    ext_ids: tuple[str, ...] = ()
    behind: int = 0
    held: tuple[str, ...] = ()
    succeeded: bool = False

    def __post_init__(self) -> None:
        ids = [request.ext_id for request in self.message.read_reqs]
        self.ext_ids = tuple(dict.fromkeys([*ids, *self.message.done_ext_ids]))

    @property
    def keys(self) -> tuple[Key, ...]:
        """The queues that it stands in."""
        return (self.message.layer_idx, *self.ext_ids)


@dataclass(eq=False)
class Peer:
    """One connection of a Prefill rank.

    Attributes:
        identity: What the ROUTER calls it.
        session: Of its transfer engine.
        layers: Its layouts; an error in place of one that makes no sense.
        batches: Unanswered, by id, in order of arrival.
        ready: Batches that only wait for the peer's read to end, first come first.
        reading: Whether one of its batches is being read.
        lost: Whether the connection is gone.
    """

    identity: bytes
    session: str = ""
    layers: dict[str, LayerLayout | LayoutError] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    ready: dict[int, Batch] = field(default_factory=dict)
    reading: bool = False
    lost: bool = False
    _queues: dict[Key, deque[Batch]] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        """A batch has arrived."""
        self.batches[batch.id] = batch
        for key in batch.keys:
            queue = self._queues.setdefault(key, deque())
            batch.behind += bool(queue)
            queue.append(batch)

    def remove(self, batch: Batch) -> list[Batch]:
        """A batch that was first in its queues was answered.

        Returns:
            Those that are free to go now.
        """
        if self.batches.pop(batch.id, None) is None:
            return []  # it never was in line: its peer had not greeted
        freed = []
        for key in batch.keys:
            queue = self._queues[key]
            queue.popleft()
            if not queue:
                del self._queues[key]
                continue
            queue[0].behind -= 1
            if not queue[0].behind:
                freed.append(queue[0])
        return freed

    def waiting_with(self, ext_id: str) -> Iterable[Batch]:
        """Batches that wait and speak of a request, in order."""
        queue = self._queues.get(ext_id, ())
        return [batch for batch in queue if batch.stage is Stage.WAITING]
