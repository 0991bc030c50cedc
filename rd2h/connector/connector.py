"""The KV connector that vLLM loads: it hands vLLM's calls to the half that they are for.

vLLM makes one of these in its scheduler and one in each worker. Which methods are called where, in
which order and with what, is vLLM's contract (`KVConnectorBase_V1`); what rd2h makes of it stands
in the four halves:

* P: :mod:`rd2h.connector.prefill_scheduler`, :mod:`rd2h.connector.prefill_worker`
* D: :mod:`rd2h.connector.decode_scheduler`, :mod:`rd2h.connector.decode_worker`

A call for another half does nothing: vLLM makes the same calls on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.platforms import current_platform
from vllm.v1.outputs import KVConnectorOutput

from rd2h.connector.compat import TransferResults, hit_source, required_layout
from rd2h.connector.decode_scheduler import DecodeScheduler
from rd2h.connector.decode_worker import DecodeWorker, Ended
from rd2h.connector.logs import share_vllm_logging
from rd2h.connector.metadata import DecodeStep, PrefillStep
from rd2h.connector.prefill_scheduler import PrefillScheduler
from rd2h.connector.prefill_worker import PrefillWorker
from rd2h.connector.rendezvous import Metaservers
from rd2h.connector.setup import EngineSetup
from rd2h.connector.stats import TransferMetrics, TransferStats, counters_of
from rd2h.destinations import check_prefill_platform, decode_destination
from rd2h.devices import device_for
from rd2h.engines import EngineBinding, TransferEngine, create_engine
from rd2h.engines.binding import EngineRole

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["Rd2hConnector", "SfaRemoteD2HConnector"]


class SfaRemoteD2HConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands a prompt's KV from a Prefill to a Decode engine, layer by layer.

    The name is that of the connector which speaks the same protocol in vllm-ascend, so that a
    configuration can change from one to the other.

    Args:
        vllm_config: The engine's configuration.
        role: Scheduler or worker.
        kv_cache_config: The engine's KV-cache groups.

    Raises:
        OptionError: rd2h cannot work with the configuration; one line that says what to change.
    """

    engine_factory: ClassVar[Callable[..., TransferEngine]] = staticmethod(create_engine)
    """Makes the transfer engine, with the arguments of :func:`rd2h.engines.create_engine`."""

    if (_source := hit_source()) is not None:
        _cache_hit_source = _source

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_vllm_logging()
        self._setup = EngineSetup.from_config(vllm_config, kv_cache_config)
        self._prefill_scheduler: PrefillScheduler | None = None
        self._decode_scheduler: DecodeScheduler | None = None
        self._metaservers: Metaservers | None = None
        self._prefill_worker: PrefillWorker | None = None
        self._decode_worker: DecodeWorker | None = None
        self._failed_blocks: set[int] = set()
        self._received = self._failed = 0
        self._reported = TransferStats()
        if role is KVConnectorRole.SCHEDULER:
            if self._setup.side == "prefill":
                self._prefill_scheduler = PrefillScheduler(self._setup)
            else:
                self._metaservers = Metaservers(self._setup.options.rendezvous_timeout)
                self._decode_scheduler = DecodeScheduler(self._setup, self._metaservers)

    # ------------------------------------------------------------------- scheduler: both sides

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What this step's schedule means for the workers."""
        if self._prefill_scheduler is not None:
            return self._prefill_scheduler.step(scheduler_output)
        assert self._decode_scheduler is not None
        return self._decode_scheduler.step()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """D: the tokens that Prefill will provide, asynchronously. Never on P."""
        if self._decode_scheduler is None:
            return 0, False
        tokens = self._decode_scheduler.external_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are allocated: D asks for the prompt, P begins to follow it."""
        if self._prefill_scheduler is not None:
            self._prefill_scheduler.allocated(request, blocks)
        if self._decode_scheduler is not None:
            self._decode_scheduler.allocated(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """D: what all workers have reported."""
        if self._decode_scheduler is not None:
            self._decode_scheduler.arrived(connector_output.finished_recving or ())

    # Any: vLLM's signature; rd2h adds nothing to a response.
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine with one KV-cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, well or not.

        Returns:
            Whether its blocks must be kept for now: on D, while its prompt may still be read into
            them. And nothing for the response.
        """
        del block_ids  # known from the schedule
        if self._prefill_scheduler is not None:
            self._prefill_scheduler.finished(request)
        return self._decode_scheduler is not None and self._decode_scheduler.finished(request), None

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A hand-off restores the request's own blocks, of every group."""
        del request
        return self._kv_cache_config.transfer_group_ids

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a prompt that is computed was announced, whatever becomes of its blocks."""
        return False

    @property
    def requires_full_blocks_on_update_after_alloc(self) -> bool:
        """P: whether a multi-connector must hand on blocks also when another one was chosen."""
        return self._setup.side == "prefill"

    # --------------------------------------------------------------------- workers: both sides

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's cache is there: expose it (P), or listen for what goes into it (D)."""
        rank = get_tensor_model_parallel_rank()
        platform = current_platform.device_type
        # Before anything is started that would have to be ended again.
        destination = None
        if self._setup.side == "prefill":
            check_prefill_platform(platform)
        else:
            destination = decode_destination(platform, kv_caches, self._setup.num_blocks, rank)
        index = _device_index(kv_caches)
        device = device_for(platform, index)
        setup = self._setup
        backend = _backend(setup.options.transfer_backend, platform)
        role: EngineRole = "Prefill" if setup.side == "prefill" else "Decode"
        engine = type(self).engine_factory(
            backend,
            timeout=setup.options.read_timeout,
            # The only one that is bound; it wants a numeric address, the others do not.
            binding=EngineBinding(role, index, setup.host) if backend == "memfabric" else None,
            enter_thread=device.enter_thread,
        )
        if destination is None:
            self._prefill_worker = PrefillWorker(
                setup, rank, engine, device, kv_caches, writes_before_wait=platform != "npu"
            )
        else:
            self._decode_worker = DecodeWorker(setup, rank, engine, destination)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """P: block until Decode has read what the step is about to overwrite.

        vLLM calls it before anything of a step is written, in every step.
        """
        if self._prefill_worker is not None and isinstance(kv_connector_metadata, PrefillStep):
            self._prefill_worker.prepare(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._prefill_worker is not None and isinstance(connector_metadata, PrefillStep):
            self._prefill_worker.begin(connector_metadata)
        if self._decode_worker is not None and isinstance(connector_metadata, DecodeStep):
            self._decode_worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: D's reads run beside the steps, from `bind_connector_metadata` on."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """P: block until Decode has read what this layer is about to overwrite."""
        if self._prefill_worker is not None:
            self._prefill_worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """P: a layer's KV is written."""
        del kv_layer, attn_metadata, kwargs
        self.on_kv_cache_written(layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """P: a layer's KV is written; engines that have this hook call it before attention."""
        if self._prefill_worker is not None:
            self._prefill_worker.written(layer_name)

    def wait_for_save(self) -> None:
        """P: the step's forwards are over, drafts included. Waits for nobody."""
        if self._prefill_worker is not None:
            self._prefill_worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """D: requests whose prompt has arrived, or will not; failures are told by request."""
        del finished_req_ids
        ended = self._take_ended()
        return TransferResults(finished_recving=ended.all, failed_recving=ended.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """D: as `get_transfer_results`, for a vLLM that does not have it.

        Failures are told by block then, in `get_block_ids_with_load_errors` of the same step.
        """
        del finished_req_ids
        ended = self._take_ended()
        self._failed_blocks |= ended.failed_blocks
        return None, ended.all or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """D: blocks of failed requests that `get_finished` has reported; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has been moved since the last call; None if nothing was."""
        if self._prefill_worker is not None:
            now = counters_of(sender=self._prefill_worker.stats)
        elif self._decode_worker is not None:
            now = counters_of(
                receiver=self._decode_worker.stats,
                requests_received=self._received,
                requests_failed=self._failed,
            )
        else:
            return None
        growth = now.since(self._reported)
        self._reported = now
        return None if growth.is_empty() else growth

    def shutdown(self) -> None:
        """End every thread and socket, with reads in flight finished first."""
        for part in (self._metaservers, self._prefill_worker, self._decode_worker):
            if part is not None:
                part.close()

    # ----------------------------------------------------------------- layerwise buffer reuse

    @property
    def supports_layerwise_buffer_reuse(self) -> bool:
        """P: several layers may share one buffer; its gates follow addresses, not names."""
        return self._setup.side == "prefill"

    def wait_for_layer_send(self, layer_idx: int) -> None:
        """P: block until Decode has answered everything announced of a layer's buffers.

        Args:
            layer_idx: The layer's place in the model, of those with a cache.
        """
        if self._prefill_worker is not None:
            self._prefill_worker.wait_for_slots(self._prefill_worker.layer_name(layer_idx))

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        """P: block until the buffers that a layer is about to overwrite may be.

        Whichever layers have used them before: what is waited for are ranges of memory, so this is
        the same wait as `wait_for_layer_send`.
        """
        self.wait_for_layer_send(layer_idx)

    # --------------------------------------------------------------------------- class methods

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A layer's blocks must lie back to back: one address and a block id find any of them."""
        del vllm_config
        return required_layout()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: a graph over all layers would leave no place to speak of each."""
        del extra_config
        return True

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics from what vLLM has carried between processes."""
        return TransferStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The counters on the engine's ``/metrics``."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _take_ended(self) -> Ended:
        if self._decode_worker is None:
            return Ended()
        ended = self._decode_worker.ended()
        self._failed += len(ended.failed)
        self._received += len(ended.all) - len(ended.failed) - ended.aborted
        return ended


class Rd2hConnector(SfaRemoteD2HConnector):
    """The same under a name that nobody else has."""


def _backend(wanted: str, platform: str) -> str:
    if wanted != "auto":
        return wanted
    return {"npu": "memfabric", "cuda": "nixl"}.get(platform, "host")


def _device_index(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor | None]]) -> int:
    """The number of the device that holds the caches; 0 on a CPU.

    With sparse KV offload a layer's tensors are on the device, on the host, or not there (None).
    """
    for registered in kv_caches.values():
        for tensor in [registered] if isinstance(registered, torch.Tensor) else registered:
            if tensor is not None and tensor.device.index is not None:
                return tensor.device.index
    return 0
