"""Connectors that record who is asked when, to be put into one `Rd2hMultiConnector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rd2h.connector import Rd2hMultiConnector
from rd2h.connector.multi import MultiStep
from tests.connector.engine import kv_config, vllm_config

Waiter = Callable[[int], None]


class Plain(KVConnectorBase_V1):
    """A sibling that records what it is called with, in one list for all."""

    calls: ClassVar[list[str]] = []
    hits: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def _note(self, *what: object) -> None:
        self.calls.append(" ".join(map(str, (self.name, *what))))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        del kv_caches

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._note("bind")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        del forward_context, kwargs
        self._note("start")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("load", layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        del kv_layer, attn_metadata, kwargs
        self._note("save", layer_name)

    def wait_for_save(self) -> None:
        self._note("end")

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        del request, num_computed_tokens
        return self.hits, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        del request
        self._note("alloc", len(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        del scheduler_output
        return KVConnectorMetadata()


class Hooked(Plain, SupportsHMA):
    """A sibling with the earlier hook, that supports the hybrid manager."""

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        self._note("written", layer_name)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del request, block_ids
        return False, None


class Provider(Hooked):
    """A completion provider; its waits raise what `failure` says."""

    supports_layerwise_buffer_reuse: ClassVar[bool] = True
    requires_full_blocks_on_update_after_alloc: ClassVar[bool] = True
    failure: ClassVar[Exception | None] = None

    def wait_for_layer_send(self, layer_idx: int) -> None:
        self._note("sent", layer_idx)

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        self._note("reuse", layer_idx)
        if self.failure is not None:
            raise self.failure


class Reuser(Hooked):
    """A provider of the least: without a wait of its own for what is sent."""

    supports_layerwise_buffer_reuse: ClassVar[bool] = True

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        self._note("reuse", layer_idx)


class Idle(Provider):
    """One that could be a provider, but is none in this engine."""

    supports_layerwise_buffer_reuse: ClassVar[bool] = False


class Sink(Hooked):
    """A sibling that waits for others' memory itself, if `answer` is not False."""

    answer: ClassVar[bool | None] = True
    waiter: ClassVar[Waiter | None] = None

    def set_external_slot_release_waiter(self, waiter: Waiter) -> bool | None:
        self._note("waiter")
        Sink.waiter = waiter
        return self.answer


def children(*classes: type[KVConnectorBase_V1], role: str = "kv_producer") -> list[object]:
    return [
        {"kv_connector": one.__name__, "kv_connector_module_path": one.__module__, "kv_role": role}
        for one in classes
    ]


def config(*classes: type[KVConnectorBase_V1], role: str = "kv_producer") -> VllmConfig:
    return vllm_config(
        role,
        connector="Rd2hMultiConnector",
        extra={"connectors": children(*classes, role=role)},
    )


def worker(
    *classes: type[KVConnectorBase_V1],
    role: KVConnectorRole = KVConnectorRole.WORKER,
    cache: KVCacheConfig | None = None,
) -> Rd2hMultiConnector:
    return Rd2hMultiConnector(config(*classes), role, cache or kv_config(8))


def save(multi: Rd2hMultiConnector, layer_name: str) -> None:
    # Nobody looks at it.
    multi.save_kv_layer(layer_name, torch.empty(0), AttentionMetadata())


def step(number: int, *, loads: bool = True) -> MultiStep:
    """A step of ``number`` connectors, in which a sibling has got blocks to load into, or not."""
    return MultiStep(tuple(KVConnectorMetadata() for _ in range(number)), sibling_loads=loads)
