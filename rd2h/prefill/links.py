"""A link: what the sender's state machine knows of one Decode rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from rd2h.prefill.actions import Announcement

__all__ = ["Link", "Sent", "State"]

FIRST_PAUSE = 0.1
"""Seconds before the first new attempt at a handshake; every further pause is twice as long."""

LONGEST_PAUSE = 2.0
"""Seconds that no pause exceeds."""


class State(Enum):
    """Where a link is in its life; the picture is in the machine's docstring."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    WAITING = "waiting"
    READY = "ready"


@dataclass(frozen=True)
class Sent:
    """A batch that is not answered yet."""

    announcement: Announcement
    at: float


@dataclass
class Link:
    """One Decode rank: the connection to it, and what is on its way there.

    Attributes:
        endpoint: The Decode rank.
        state: Where the link is in its life.
        connection: The number of its latest connection.
        deadline: Of the handshake, while it is under way.
        retry_at: When the next connection is due, in WAITING.
        pause: How long the next WAITING will be.
        queue: What waits for the handshake.
        sent: What waits for an answer, by layer_idx, oldest first.
        open_requests: Requests that were announced and are neither complete nor forgotten.
        lost_requests: Requests that failed there and are not forgotten; later batches leave
            them out.
    """

    endpoint: str
    state: State = State.IDLE
    connection: int = 0
    deadline: float = 0.0
    retry_at: float = 0.0
    pause: float = FIRST_PAUSE
    queue: deque[Announcement] = field(default_factory=deque)
    sent: dict[int, deque[Sent]] = field(default_factory=dict)
    open_requests: set[str] = field(default_factory=set)
    lost_requests: set[str] = field(default_factory=set)

    def outstanding(self) -> Iterable[Sent]:
        """Everything that waits for an answer."""
        for batches in self.sent.values():
            yield from batches

    def oldest(self) -> Sent | None:
        """The batch that has waited longest: each layer's queue is in order of time."""
        heads = (batches[0] for batches in self.sent.values())
        return min(heads, key=lambda sent: sent.at, default=None)

    def wait(self, now: float) -> None:
        """The handshake broke off: pause before the next attempt, longer each time."""
        self.state = State.WAITING
        self.retry_at = now + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def lose(self, ext_ids: Iterable[str]) -> None:
        """These requests have failed; those that are complete or forgotten concern nobody."""
        lost = self.open_requests.intersection(ext_ids)
        self.open_requests -= lost
        self.lost_requests |= lost

    @property
    def has_connection(self) -> bool:
        """Whether there is a socket that is not to be closed yet."""
        return self.state not in (State.IDLE, State.WAITING)

    @property
    def in_handshake(self) -> bool:
        """Whether the handshake's deadline counts."""
        return self.state in (State.CONNECTING, State.GREETING, State.WAITING)

    @property
    def unused(self) -> bool:
        """Whether nothing would be forgotten with the link."""
        return (
            self.state is State.IDLE
            and not self.queue
            and not self.open_requests
            and not self.lost_requests
        )
