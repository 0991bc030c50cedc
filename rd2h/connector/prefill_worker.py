"""P's worker half: announces each layer of a step, and keeps memory until Decode has read it.

All methods are called by vLLM on the compute thread. What goes on beside it is the sender's
(:mod:`rd2h.prefill`).

**When memory may be overwritten.** vLLM frees a request's blocks as soon as the request is over on
P or preempted, and the next step may write them. What keeps it from doing so depends on when the
engine asks:

* vllm-ascend calls ``wait_for_layer_load`` before it writes a layer: there, `wait_for_layer`
  waits for the storage slots of that layer, which layers may share. A step begins while Decode
  still reads the layers of the one before.
* vLLM itself writes a layer's KV *before* it calls that. There, `prepare` waits before the step,
  for those who read a block that the step is going to write. vLLM hands out free blocks in the
  order in which they were freed, so that is seldom anybody; a Decode engine that does not answer
  holds up nobody before its blocks' turn has come.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rd2h.connector.metadata import AnnouncedRequest, PrefillStep
from rd2h.connector.setup import EngineSetup
from rd2h.destinations import CacheTensors, cache_layouts, regions_of
from rd2h.devices import Device
from rd2h.engines import TransferEngine
from rd2h.layout import LayerLayout
from rd2h.prefill import LayerTask, Sender, SenderStats
from rd2h.sockets import tcp_address
from rd2h.topology import TpMapping, rank_port
from rd2h.wire import ReadReadyBatch, ReadRequest

__all__ = ["PrefillWorker"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Listener:
    """A Decode rank that this rank feeds as member ``member`` of ``ratio``."""

    address: str
    member: int
    ratio: int
    requests: list[AnnouncedRequest]


class PrefillWorker:
    """One rank of Prefill.

    Args:
        setup: This engine's place.
        tp_rank: This rank.
        engine: The transfer engine; the caches are registered with it here.
        device: Records when a layer is in memory.
        kv_caches: Layer name to cache tensors, as vLLM registers them.
        writes_before_wait: Whether the engine writes a layer's KV before it calls
            ``wait_for_layer_load``.

    Raises:
        LayoutError, EngineError: The caches cannot be exposed.
    """

    def __init__(
        self,
        setup: EngineSetup,
        tp_rank: int,
        engine: TransferEngine,
        device: Device,
        kv_caches: Mapping[str, CacheTensors],
        *,
        writes_before_wait: bool,
    ) -> None:
        self._setup = setup
        self._tp_rank = tp_rank
        self._engine = engine
        self._device = device
        self._writes_before_wait = writes_before_wait
        self._layers: dict[str, LayerLayout] = cache_layouts(kv_caches, setup.num_blocks)
        self._names = sorted(self._layers, key=_in_order)
        self._places = {name: place for place, name in enumerate(self._names)}
        engine.register(regions_of(self._layers.values()))
        self._sender = Sender(engine.session, self._layers, setup.options.sender())
        self._audience: list[_Listener] = []  # of this step
        self._ahead: set[str] = set()  # layers of this step that are not announced yet
        logger.info(
            "Prefill rank %d exposes %d layers of %d blocks as %s",
            tp_rank,
            len(self._layers),
            setup.num_blocks,
            engine.session,
        )

    @property
    def stats(self) -> SenderStats:
        """Counters since the start."""
        return self._sender.stats

    def prepare(self, step: PrefillStep) -> None:
        """Block until a step may write its blocks; again for the same step, it costs nothing.

        Raises:
            LayerSendError: Something was lost and the policy is to raise.
            WaitTimeoutError: Decode has not answered in time.
        """
        if self._writes_before_wait:
            self._sender.wait_blocks(step.written)

    def begin(self, step: PrefillStep) -> None:
        """A step is about to run; waits and raises as `prepare` does."""
        for ext_id in step.finished:
            self._sender.forget(ext_id)
        self._audience = self._listeners(step.requests)
        self._ahead = set(self._layers) if step.requests else set()
        self.prepare(step)

    def wait_for_layer(self, layer_name: str) -> None:
        """The engine asks for a layer's memory; blocks and raises as `wait_for_slots` does.

        Where `prepare` has waited for the whole step, there is nothing left to wait for.
        """
        if not self._writes_before_wait:
            self.wait_for_slots(layer_name)

    def wait_for_slots(self, layer_name: str) -> None:
        """Block until the memory of a layer, of all its blocks, may be overwritten.

        A layer without a cache of its own has nothing to wait for.

        Raises:
            LayerSendError: Something was lost and the policy is to raise.
            WaitTimeoutError: Decode has not answered in time.
        """
        if layer_name in self._layers:
            self._sender.wait(layer_name)

    def written(self, layer_name: str) -> None:
        """A layer's KV of this step is written, or will be once the device gets there.

        The first call of a step counts: an engine may have more than one hook that says so.

        Raises:
            LayerSendError: Something was lost and the policy is to raise.
        """
        if layer_name not in self._ahead:
            return
        self._ahead.remove(layer_name)
        # The last of all, in whatever order the model runs its layers, completes the prompts.
        batches = self._batches(layer_name, last=not self._ahead)
        if batches:
            self._sender.submit(LayerTask(layer_name, batches, self._device.record()))

    def end(self) -> None:
        """The step is over, drafts included: announce the layers that no hook has spoken of.

        Not if it has failed: vLLM comes here in a ``finally``, and then the layers that are left
        were never computed.
        """
        if sys.exception() is not None:
            self._ahead.clear()
        for layer_name in sorted(self._ahead, key=self._places.__getitem__):
            self.written(layer_name)
        self._audience = []

    def layer_name(self, place: int) -> str:
        """The name of a layer by its index: its place in the model, of those with a cache.

        Raises:
            IndexError: There is no such layer.
        """
        if not 0 <= place < len(self._names):
            raise IndexError(f"layer {place} is outside 0 to {len(self._names) - 1}")
        return self._names[place]

    def close(self) -> None:
        """End the threads; batches that are not answered have failed."""
        try:
            self._sender.close(self._setup.options.shutdown_timeout)
        finally:
            self._engine.close()

    def _listeners(self, requests: Iterable[AnnouncedRequest]) -> list[_Listener]:
        """The Decode ranks that this rank feeds in a step, and what each of them awaits."""
        awaited: dict[tuple[str, TpMapping], list[AnnouncedRequest]] = {}
        for request in requests:
            end = request.endpoint
            mapping = TpMapping(self._setup.tp_size, end.tp_size)
            port = rank_port(end.base_port, mapping.decode_rank(self._tp_rank), end.tp_size)
            awaited.setdefault((tcp_address(end.host, port), mapping), []).append(request)
        return [
            _Listener(address, mapping.member(self._tp_rank), mapping.ratio, theirs)
            for (address, mapping), theirs in awaited.items()
        ]

    def _batches(self, layer_name: str, *, last: bool) -> dict[str, ReadReadyBatch]:
        """What to say of a layer, by the Decode rank that this rank feeds."""
        has_indexer = self._layers[layer_name].indexer is not None
        place = self._places[layer_name]
        batches: dict[str, ReadReadyBatch] = {}
        for listener in self._audience:
            read_reqs = [
                ReadRequest(
                    request.ext_id,
                    request.main_block_ids,
                    request.indexer_block_ids if has_indexer else [],
                    request.main_start,
                    request.indexer_start if has_indexer else 0,
                )
                for request in listener.requests
                if request.main_block_ids or (has_indexer and request.indexer_block_ids)
            ]
            done = [request.ext_id for request in listener.requests if last and request.done]
            if read_reqs or done:
                batches[listener.address] = ReadReadyBatch(
                    place, layer_name, read_reqs, done, listener.member, listener.ratio
                )
        return batches


def _in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
