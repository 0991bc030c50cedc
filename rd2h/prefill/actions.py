"""What the sender's state machine takes and what it wants done: announcements in, actions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rd2h.prefill.gates import Hold
from rd2h.wire import PrefillMessage, ReadReadyBatch

__all__ = ["Action", "Announcement", "Close", "Connect", "Failed", "Release", "Send"]


@dataclass(frozen=True, eq=False)
class Announcement:
    """One batch for one Decode rank, and the hold that it has on storage slots.

    Attributes:
        hold: Released when the batch is answered or has failed.
        batch: What to say.
        payload: The batch encoded; None if that is yet to be done.
    """

    hold: Hold
    batch: ReadReadyBatch
    payload: bytes | None = None

    @property
    def endpoint(self) -> str:
        """The Decode rank it goes to."""
        return self.hold.endpoint

    @property
    def ext_ids(self) -> tuple[str, ...]:
        """Every request that the batch speaks of, each once, in order."""
        ids = [request.ext_id for request in self.batch.read_reqs]
        return tuple(dict.fromkeys([*ids, *self.batch.done_ext_ids]))

    def without(self, lost: set[str]) -> Announcement | None:
        """The announcement with lost requests left out; None if nothing is left to say."""
        if lost.isdisjoint(self.ext_ids):
            return self
        read_reqs = [request for request in self.batch.read_reqs if request.ext_id not in lost]
        done_ext_ids = [ext_id for ext_id in self.batch.done_ext_ids if ext_id not in lost]
        if not read_reqs and not done_ext_ids:
            return None
        batch = msgspec.structs.replace(self.batch, read_reqs=read_reqs, done_ext_ids=done_ext_ids)
        return Announcement(self.hold, batch)


# ------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Connect:
    """Open a new socket to ``endpoint`` and watch it; ``connection`` numbers it."""

    endpoint: str
    connection: int


@dataclass(frozen=True)
class Close:
    """Close a socket; nothing is heard from that connection again."""

    endpoint: str
    connection: int


@dataclass(frozen=True)
class Send:
    """Send a message on a connection that is established.

    Attributes:
        endpoint: The Decode rank.
        connection: The number that `Connect` gave.
        message: What to say.
        payload: The message encoded; None if that is yet to be done.
    """

    endpoint: str
    connection: int
    message: PrefillMessage
    payload: bytes | None = None


@dataclass(frozen=True)
class Release:
    """The batch no longer keeps its slots shut."""

    hold: Hold


@dataclass(frozen=True)
class Failed:
    """Requests are lost for one Decode rank.

    It comes before the `Release` of each batch: whoever waits at a gate must find the failure
    when the gate opens.

    Attributes:
        layer_names: The layers that could not be handed over, oldest first. None if everything
            announced so far was answered, but the requests had more to come.
        endpoint: The Decode rank.
        ext_ids: The requests; at least one unless the batches had none.
        reason: Why, of a length that a log can bear.
    """

    layer_names: tuple[str, ...]
    endpoint: str
    ext_ids: tuple[str, ...]
    reason: str


Action: TypeAlias = Connect | Close | Send | Release | Failed
