"""The sender of one Prefill rank: what the compute thread calls.

Three threads, each owner of its own state:

- the *compute thread* (the caller) shuts gates and hands layers over; it blocks only in `wait`
  and `drain`, on the gates' condition;
- the *event thread* waits for device events, one after the other in the order of submission,
  so that neither the compute thread nor replies are held up by a device;
- the *socket thread* (:mod:`rd2h.prefill.loop`) owns the machine and the sockets.

Layers flow one way, and with them the word that a request is over: compute, event, socket. What
has no event to wait for skips the event thread when nothing is waiting there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from rd2h.layout import LayerLayout, StorageSlots
from rd2h.prefill.actions import Announcement, Failed, Release
from rd2h.prefill.errors import LayerSendError, SenderBrokenError, SenderClosedError
from rd2h.prefill.gates import Gates, Hold
from rd2h.prefill.loop import Forget, Item, SenderLoop
from rd2h.prefill.machine import SenderMachine
from rd2h.prefill.options import SenderOptions
from rd2h.sockets import Ask, Inbox
from rd2h.wire import MfMeta, ReadReadyBatch
from rd2h.wire import encode as encode_message

__all__ = ["DeviceEvent", "LayerTask", "Sender", "SenderStats"]

logger = logging.getLogger(__name__)


class DeviceEvent(Protocol):
    """Marks the moment at which a layer's KV is in memory; recorded by the compute thread."""

    def synchronize(self) -> None:
        """Block the calling thread until that moment. Called on the sender's event thread."""


@dataclass(frozen=True)
class LayerTask:
    """One layer of one step.

    Attributes:
        layer_name: The layer; one of those that the sender was made with.
        batches: What to announce to each Decode rank, by endpoint (``tcp://host:port``).
        event: When the KV is in memory; None if it is now. The event belongs to this task: two
            steps in flight may use the same layer.
    """

    layer_name: str
    batches: Mapping[str, ReadReadyBatch]
    event: DeviceEvent | None = None


@dataclass
class SenderStats:
    """Counters since the start; read them from the compute thread.

    Attributes:
        layers: Layers submitted.
        batches: Batches announced.
        failures: Layers that were lost for a Decode rank.
        gate_wait: Seconds that the compute thread was blocked at gates.
    """

    layers: int = 0
    batches: int = 0
    failures: int = 0
    gate_wait: float = 0.0


@dataclass(frozen=True)
class _Pending:
    event: DeviceEvent
    items: Sequence[Item]


class Sender:
    """Tells Decode ranks which layers are ready, and Prefill which memory is free again.

    All methods are for the compute thread; the waits may be called from any other one, too.

    Args:
        session: What the transfer engine publishes of this rank's memory.
        layers: This rank's cache layouts, by layer name.
        options: Policy and deadlines.

    Raises:
        UnencodableMessageError: the session or a layer's name or layout cannot be sent.
    """

    def __init__(
        self,
        session: str,
        layers: Mapping[str, LayerLayout],
        options: SenderOptions | None = None,
    ) -> None:
        metadata = MfMeta(session, {name: layout.to_wire() for name, layout in layers.items()})
        encode_message(metadata)  # here, where it can be the caller's fault only
        self._options = options or SenderOptions()
        self._slots = StorageSlots.from_layouts(layers.values())
        self._gates = Gates()
        self._inbox: Inbox[Item] = Inbox()
        self._events: SimpleQueue[_Pending | None] = SimpleQueue()
        self._undone = _Counter()  # items that the event thread has not handed on
        self._failures: deque[LayerSendError] = deque()
        self._closing = threading.Event()
        self._closed = False
        self.stats = SenderStats()
        machine = SenderMachine(
            metadata,
            handshake_timeout=self._options.handshake_timeout,
            answer_timeout=self._options.answer_timeout,
        )
        loop = SenderLoop(
            machine, self._inbox, self._closing.is_set, self._on_release, self._on_failed
        )
        # A fault of the loop is known before its end opens the gates.
        bodies = {"rd2h-send": (loop.run, loop.close), "rd2h-events": (self._wait_for_events,)}
        self._threads = [
            threading.Thread(target=self._guard, args=body, name=name, daemon=True)
            for name, body in bodies.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: LayerTask) -> None:
        """Announce a layer; the gates of its slots are shut when this returns.

        Raises:
            LayoutError: the layer is unknown.
            UnencodableMessageError: a batch holds what cannot be sent. Nothing has happened.
            LayerSendError: something announced earlier was lost, and the policy is to raise.
            SenderBrokenError: the sender itself has failed.
        """
        self._check()
        slots = self._slots.slots_of(task.layer_name)
        announcements = [
            Announcement(
                Hold(slots, task.layer_name, endpoint, _source_blocks(batch)),
                batch,
                encode_message(batch),
            )
            for endpoint, batch in task.batches.items()
        ]
        for announcement in announcements:
            self._gates.hold(announcement.hold)
        self.stats.layers += 1
        self.stats.batches += len(announcements)
        self._hand_on(announcements, task.event)

    def wait(self, layer_name: str, timeout: float | None = None) -> float:
        """Block until every slot that this layer will overwrite may be overwritten.

        Args:
            layer_name: The layer about to be computed.
            timeout: Seconds; the options' ``wait_timeout`` if None.

        Returns:
            Seconds that the call was blocked.

        Raises:
            WaitTimeoutError: at the deadline; it says who did not answer.
            LayerSendError, SenderBrokenError: as `submit` does.
        """
        slots = self._slots.slots_of(layer_name)
        return self._wait(partial(self._gates.wait, slots), timeout, f"layer {layer_name}")

    def wait_blocks(self, blocks: frozenset[int], timeout: float | None = None) -> float:
        """Block until nobody reads any of these blocks, of whatever layer; as `wait` otherwise.

        For an engine that writes a layer before it asks: it can ask for a whole step, by block.

        Args:
            blocks: Block ids that are about to be overwritten.
            timeout: Seconds; the options' ``wait_timeout`` if None.
        """
        what = f"a step that writes {len(blocks)} blocks"
        return self._wait(partial(self._gates.wait_blocks, blocks), timeout, what)

    def drain(self, timeout: float | None = None) -> float:
        """Block until every batch so far is answered or has failed; as `wait` otherwise."""
        return self._wait(partial(self._gates.wait, None), timeout, "draining")

    def forget(self, ext_id: str) -> None:
        """A request is over on Prefill: nothing more will be announced for it.

        Batches that are still on their way are not called back, and their failure is still
        told. The id may be used again once they are answered.

        Raises:
            SenderBrokenError, SenderClosedError: if nothing can be announced any more.
        """
        self._check_alive()
        self._hand_on([Forget(ext_id)], None)

    def sizes(self, timeout: float = 5.0) -> dict[str, int]:
        """How much is kept, by kind; all zero when every request is over and forgotten.

        Args:
            timeout: Seconds to wait for the socket thread.

        Raises:
            TimeoutError: if it does not answer.
            SenderBrokenError, SenderClosedError: if it has ended.
        """
        self._check_alive()
        answer: SimpleQueue[dict[str, int]] = SimpleQueue()
        self._inbox.put(Ask(answer))
        try:
            return answer.get(timeout=timeout)
        except Empty:
            self._gates.raise_fault()
            raise TimeoutError(f"waited {timeout:g} s for the sender's socket thread") from None

    def close(self, timeout: float = 5.0) -> None:
        """End the threads and close the sockets; what is not answered has failed.

        Raises:
            TimeoutError: if a thread did not end within ``timeout`` seconds; it says which, and
                another call waits for it again.
        """
        if self._closed:
            return
        self._closing.set()
        self._inbox.wakeup.set()
        self._events.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise TimeoutError(f"{', '.join(alive)} did not end within {timeout:g} s")
        self._closed = True
        self._gates.fail(SenderClosedError("the sender is closed"))
        self._inbox.wakeup.close()

    # -------------------------------------------------------------------------------- internals

    def _wait(self, wait: Callable[[float, str], float], timeout: float | None, what: str) -> float:
        self._check()
        waited = wait(self._options.wait_timeout if timeout is None else timeout, what)
        self.stats.gate_wait += waited
        self._check()
        return waited

    def _hand_on(self, items: Sequence[Item], event: DeviceEvent | None) -> None:
        """To the socket thread, once the event has come and in the order of the calls."""
        if event is None and self._undone.value == 0:
            self._inbox.put(*items)
        else:
            self._undone.add(1)
            self._events.put(_Pending(event or _NOW, items))

    def _check_alive(self) -> None:
        self._gates.raise_fault()
        if self._closing.is_set():
            raise SenderClosedError("the sender is closed")

    def _check(self) -> None:
        self._check_alive()
        if self._options.failure_policy == "raise":
            try:
                failure = self._failures.popleft()
            except IndexError:
                return  # nothing has failed, or another thread has just raised it
            raise failure

    def _on_release(self, release: Release) -> None:
        self._gates.release(release.hold)

    def _on_failed(self, failed: Failed) -> None:
        self.stats.failures += len(failed.layer_names)
        if self._closing.is_set():
            return
        error = LayerSendError(failed.layer_names, failed.endpoint, failed.ext_ids, failed.reason)
        logger.error("%s", error)
        if self._options.failure_policy == "raise":
            self._failures.append(error)

    def _wait_for_events(self) -> None:
        """Body of the event thread."""
        while (pending := self._events.get()) is not None and not self._closing.is_set():
            pending.event.synchronize()
            self._inbox.put(*pending.items)
            self._undone.add(-1)

    def _guard(self, *steps: Callable[[], None]) -> None:
        """Run a thread's body; a fault there must reach the compute thread, whatever it is."""
        for step in steps:
            try:
                step()
            except BaseException as error:
                logger.exception("%s has failed", threading.current_thread().name)
                broken = SenderBrokenError(f"{threading.current_thread().name} has failed: {error}")
                broken.__cause__ = error
                self._gates.fail(broken)


def _source_blocks(batch: ReadReadyBatch) -> list[list[int]]:
    """The lists of source block ids of a batch; they are looked into only if somebody waits."""
    return [
        ids
        for request in batch.read_reqs
        for ids in (request.main_block_ids, request.indexer_block_ids)
        if ids
    ]


class _Now:
    """The event of a layer that is in memory already."""

    def synchronize(self) -> None:
        return


_NOW = _Now()


class _Counter:
    """A number that two threads change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self, amount: int) -> None:
        with self._lock:
            self.value += amount
