"""What rd2h needs to know of the engine that it runs in; read once, and refused at once.

Every rule about vLLM's own configuration that rd2h depends on is checked here, in the scheduler
and in each worker, before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vllm.config import VllmConfig
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import KVCacheConfig

from rd2h.connector.groups import CacheGroups
from rd2h.connector.options import ConnectorOptions, OptionError
from rd2h.topology import TopologyError, base_port

__all__ = ["EngineSetup", "Side"]

Side: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True)
class EngineSetup:
    """One engine's place in the hand-off.

    Attributes:
        side: Which half of the hand-off this engine is.
        engine_id: vLLM's id of the engine.
        host: Where the other side reaches this one.
        base_port: The port of this data-parallel rank's first TP rank; D listens there.
        tp_size: Ranks of the tensor-parallel group.
        num_blocks: Blocks in the KV cache.
        groups: The roles of the KV-cache groups.
        options: What the operator has set.
    """

    side: Side
    engine_id: str
    host: str
    base_port: int
    tp_size: int
    num_blocks: int
    groups: CacheGroups
    options: ConnectorOptions

    @classmethod
    def from_config(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineSetup:
        """Read and check vLLM's configuration.

        Raises:
            OptionError: rd2h cannot work with it; one line that says what to change.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise OptionError("rd2h is a KV connector; give it with --kv-transfer-config")
        side = _side(transfer.kv_role)
        options = ConnectorOptions.from_extra_config(transfer.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        for name, size in (
            ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
            ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
            ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ):
            if size != 1:
                raise OptionError(f"{name} is {size}; rd2h hands over between ranks of TP only")
        try:
            # The global rank: host-local ones would give two hosts' engines the same ports. The
            # index is what stays of it where vLLM runs each rank as an engine of its own.
            port = base_port(
                transfer.kv_port, parallel.data_parallel_index, parallel.tensor_parallel_size
            )
        except TopologyError as error:
            raise OptionError(str(error)) from error
        return cls(
            side=side,
            engine_id=transfer.engine_id,
            host=_host(options),
            base_port=port,
            tp_size=parallel.tensor_parallel_size,
            num_blocks=kv_cache_config.num_blocks,
            groups=CacheGroups.from_config(kv_cache_config),
            options=options,
        )


def _side(kv_role: str | None) -> Side:
    match kv_role:
        case "kv_producer":
            return "prefill"
        case "kv_consumer":
            return "decode"
        case _:
            raise OptionError(
                f"kv_role is {kv_role}; an engine is kv_producer (Prefill) or kv_consumer "
                f"(Decode) with rd2h"
            )


def _host(options: ConnectorOptions) -> str:
    host = options.advertise_host or get_ip()
    if host in ("0.0.0.0", "::"):
        raise OptionError(
            "no address of this machine could be found; set advertise_host in "
            "kv_connector_extra_config, or VLLM_HOST_IP"
        )
    return host
