"""Several connectors in one engine, in the order that layerwise buffers need.

vLLM's own `MultiConnector` asks its connectors in the order of the configuration. That is wrong as
soon as one of them knows when memory may be overwritten: a *completion provider*, as rd2h is on P
(:class:`rd2h.connector.providers.CompletionProvider`). It must have shut a layer's gates before a
sibling hears that the layer is written, and it must have been waited for before a sibling loads
into the layer's memory. So providers go first, whatever the order in the configuration.

vLLM calls everything on the scheduler's or the compute thread. The one exception is
`wait_for_slot_release`: a sibling with loading threads of its own calls it on those.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)

from rd2h.connector.connector import Rd2hConnector, SfaRemoteD2HConnector
from rd2h.connector.options import OptionError
from rd2h.connector.providers import (
    CompletionProvider,
    SendWait,
    SlotReleaseSink,
    WrittenHook,
)
from rd2h.destinations import is_indexer

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["MultiStep", "Rd2hMultiConnector"]

_OWN = (SfaRemoteD2HConnector, Rd2hConnector)


@dataclass
class MultiStep(MultiKVConnectorMetadata):
    """What the scheduler tells the workers in a step, for all connectors.

    Attributes:
        sibling_loads: Whether a connector that is no provider got blocks to load into.
    """

    sibling_loads: bool = False


class Rd2hMultiConnector(MultiConnector):
    """vLLM's `MultiConnector`, with completion providers first.

    Args:
        vllm_config: The engine's configuration; ``connectors`` in ``kv_connector_extra_config``
            lists those of the connectors, as vLLM's own wants it.
        role: Scheduler or worker.
        kv_cache_config: The engine's KV-cache groups.

    Raises:
        OptionError: There is no list of connectors, one of them cannot work with several
            KV-cache groups, or a connector's own reason.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(_without_hybrid(vllm_config, kv_cache_config), role, kv_cache_config)
        self._sibling_loads = False  # since the last step; the scheduler's
        self._layers = 0  # that have a cache of main KV, as `layer_idx` counts them
        self._waiter_error: BaseException | None = None
        providers = [c for c in self._connectors if _is_provider(c)]
        self._providers = providers
        self._siblings = [c for c in self._connectors if c not in providers]
        # Asked one by one: each of them that can take it must have it.
        taken = [
            sibling.set_external_slot_release_waiter(self.wait_for_slot_release)
            for sibling in self._siblings
            if role is KVConnectorRole.WORKER and providers and isinstance(sibling, SlotReleaseSink)
        ]
        # False is a refusal; a sibling that returns nothing has taken it.
        self._waiter_taken = any(answer is not False for answer in taken)

    # ------------------------------------------------------------------------------ scheduler

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Give every connector the request's blocks; only the chosen one loads into them.

        vLLM 0.32 does so itself; older ones give the others no blocks, and rd2h on P would lose
        those of a request that a sibling loads.
        """
        chosen = self._requests_to_connector.get(request.request_id)
        for place, connector in enumerate(self._connectors):
            tokens = num_external_tokens if place == chosen else 0
            connector.update_state_after_alloc(request, blocks, tokens)
            self._sibling_loads |= tokens > 0 and connector in self._siblings

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiStep:
        """What this step's schedule means for the workers of all connectors."""
        step = super().build_connector_meta(scheduler_output)
        loads, self._sibling_loads = self._sibling_loads, False
        return MultiStep(step.metadata, step.extra_async_saves, loads)

    @property
    def requires_full_blocks_on_update_after_alloc(self) -> bool:
        """Whether any of the connectors does, for a multi-connector around this one."""
        return any(
            getattr(c, "requires_full_blocks_on_update_after_alloc", False)
            for c in self._connectors
        )

    # -------------------------------------------------------------------------------- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's cache is there."""
        super().register_kv_caches(kv_caches)
        self._layers = sum(not is_indexer(layer_name) for layer_name in kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; no sibling loads into memory in it that a provider still needs.

        A sibling may load before any layer is asked for, and in a step that computes nothing. What
        it loads into was freed in an earlier step, so it is enough to wait for those, here, and
        only when it has got new blocks.
        """
        super().bind_connector_metadata(connector_metadata)
        loads = isinstance(connector_metadata, MultiStep) and connector_metadata.sibling_loads
        if loads and not self._waiter_taken:
            for place in range(self._layers):
                self.wait_for_layer_reuse(place)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Providers, unless a sibling waits for them by itself, then the siblings."""
        self._raise_waiter_error()
        if not self._waiter_taken:
            for provider in self._providers:
                provider.wait_for_layer_load(layer_name)
        for sibling in self._siblings:
            sibling.wait_for_layer_load(layer_name)
        self._raise_waiter_error()

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """A layer's KV is written: providers first, which shut its gates."""
        self._raise_waiter_error()
        for connector in (*self._providers, *self._siblings):
            connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """As `save_kv_layer`, where the engine has this earlier hook; for those that have it."""
        self._raise_waiter_error()
        for connector in (*self._providers, *self._siblings):
            if isinstance(connector, WrittenHook):
                connector.on_kv_cache_written(layer_name)

    # ----------------------------------------------------------------- layerwise buffer reuse

    @property
    def supports_layerwise_buffer_reuse(self) -> bool:
        """Whether any of the connectors is a provider."""
        return bool(self._providers)

    def wait_for_layer_send(self, layer_idx: int) -> None:
        """Block until every provider has sent what was written of a layer.

        Args:
            layer_idx: The layer's place in the model, of those with a cache.
        """
        for provider in self._providers:
            if isinstance(provider, SendWait):
                provider.wait_for_layer_send(layer_idx)
            else:
                cast(CompletionProvider, provider).wait_for_layer_reuse(layer_idx)

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        """Block until no provider needs the memory that a layer is about to overwrite.

        Args:
            layer_idx: The layer's place in the model, of those with a cache.
        """
        for provider in self._providers:
            cast(CompletionProvider, provider).wait_for_layer_reuse(layer_idx)

    def wait_for_slot_release(self, layer_idx: int) -> None:
        """What a `SlotReleaseSink` calls, on any thread, before it loads a layer.

        It raises what `wait_for_layer_reuse` does, and the compute thread raises it again: a
        failure must not end with the sibling's thread.
        """
        try:
            self.wait_for_layer_reuse(layer_idx)
        except BaseException as error:
            self._waiter_error = error
            raise

    def _raise_waiter_error(self) -> None:
        if self._waiter_error is not None:
            error, self._waiter_error = self._waiter_error, None
            raise error

    # --------------------------------------------------------------------------- class methods

    # Any: vLLM's signature; by connector's name, its statistics or the data of such.
    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics of all connectors, from what vLLM has carried between processes.

        vLLM looks classes up by name among those that are registered. rd2h's need not be, and one
        of its names may be registered for somebody else's.
        """
        if data is not None:
            own = {one.__name__: one for one in _OWN}
            data = {
                name: own[name].build_kv_connector_stats(stats)
                if name in own and not isinstance(stats, KVConnectorStats)
                else stats
                for name, stats in data.items()
            }
        return super().build_kv_connector_stats(data)


def _is_provider(connector: KVConnectorBase_V1) -> bool:
    return isinstance(connector, CompletionProvider) and connector.supports_layerwise_buffer_reuse


def _without_hybrid(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> VllmConfig:
    """A configuration that vLLM's class takes, if it can work at all.

    Where the connector is called ``MultiConnector``, vLLM asks each of its connectors whether it
    supports the hybrid KV-cache manager, and goes without it if one does not. Under any other
    name it asks the class alone, which does. With one KV-cache group that makes no difference to
    the cache, and the connectors may see what they would have seen.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.kv_connector_extra_config.get("connectors"):
        raise OptionError(
            'Rd2hMultiConnector needs "connectors" in kv_connector_extra_config: the list of '
            "configurations of its connectors"
        )
    scheduler = vllm_config.scheduler_config
    if scheduler.disable_hybrid_kv_cache_manager or MultiConnector.all_children_support_hma(
        transfer
    ):
        return vllm_config
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise OptionError(
            f"the model has {len(kv_cache_config.kv_cache_groups)} KV-cache groups, and not all "
            f"connectors of Rd2hMultiConnector support that; set "
            f"--disable-hybrid-kv-cache-manager, or leave out the one that does not"
        )
    changed = copy.copy(vllm_config)
    changed.scheduler_config = copy.copy(scheduler)
    changed.scheduler_config.disable_hybrid_kv_cache_manager = True
    return changed
