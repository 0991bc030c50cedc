"""A real scheduler of vLLM with the connector in it, stepped by hand; no model and no worker.

What a model runner would answer is made here: one token for each request whose prompt is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, cast

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.kv_transfer import KVRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rd2h.connector import SfaRemoteD2HConnector
from rd2h.connector.decode_scheduler import DecodeScheduler
from rd2h.connector.metadata import DecodeStep, PrefillStep
from rd2h.connector.prefill_scheduler import PrefillScheduler
from serving.checkpoint import LLAMA

__all__ = [
    "BLOCK",
    "Engine",
    "decode_params",
    "engine",
    "groups",
    "internal",
    "kv_config",
    "prefill_params",
    "tokens",
    "vllm_config",
]

BLOCK = 4
"""Tokens in a block, unless a test says otherwise."""

Side = Literal["kv_producer", "kv_consumer"]
_numbers = count()


@cache
def model_folder() -> str:
    """A folder with a model's ``config.json``, and no weights."""
    folder = Path(mkdtemp(prefix="rd2h-model-"))
    (folder / "config.json").write_text(json.dumps(LLAMA.config()))
    return str(folder)


def vllm_config(
    role: str = "kv_producer",
    *,
    budget: int = 64,
    seqs: int = 3,
    policy: Literal["fail", "recompute"] = "fail",
    asynchronous: bool = False,
    whole_prompts: bool = True,
    port: int = 20000,
    module: str | None = "rd2h.connector",
    connector: str = "SfaRemoteD2HConnector",
    extra: Mapping[str, object] | None = None,
) -> VllmConfig:
    """vLLM's configuration of an engine; ``budget`` is the longest chunk, in tokens."""
    return VllmConfig(
        model_config=ModelConfig(
            model=model_folder(),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            scheduler_reserve_full_isl=whole_prompts,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role=cast(KVRole, role),
            kv_port=port,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"advertise_host": "127.0.0.1", **(extra or {})},
        ),
    )


def attention(block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)


def latent(block: int = BLOCK) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)


def groups(*names: str, spec: KVCacheSpec | None = None) -> list[KVCacheGroupSpec]:
    """One KV-cache group for each name, with one layer of that name."""
    return [KVCacheGroupSpec([name], spec or attention()) for name in names]


MAIN = "model.layers.0.self_attn.attn"
INDEXER = "model.layers.0.self_attn.indexer.k_cache"


def kv_config(blocks: int, of: Sequence[KVCacheGroupSpec] | None = None) -> KVCacheConfig:
    """vLLM's KV-cache configuration; one group with one attention layer by default."""
    return KVCacheConfig(blocks, [], list(of or groups(MAIN)))


@dataclass
class Step:
    """One step: what was scheduled, and what the workers have to know."""

    output: SchedulerOutput

    @property
    def prefill(self) -> PrefillStep:
        metadata = self.output.kv_connector_metadata
        assert isinstance(metadata, PrefillStep)
        return metadata

    @property
    def decode(self) -> DecodeStep:
        metadata = self.output.kv_connector_metadata
        assert isinstance(metadata, DecodeStep)
        return metadata

    @property
    def scheduled(self) -> dict[str, int]:
        return self.output.num_scheduled_tokens


@dataclass
class Engine:
    """An engine without workers.

    Attributes:
        scheduler: vLLM's.
        outputs: What it has said of each request, by internal id.
    """

    scheduler: Scheduler
    outputs: dict[str, list[EngineCoreOutput]] = field(default_factory=dict)

    @property
    def connector(self) -> SfaRemoteD2HConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, SfaRemoteD2HConnector)
        return connector

    @property
    def half(self) -> PrefillScheduler | DecodeScheduler:
        connector = self.connector
        half = connector._prefill_scheduler or connector._decode_scheduler
        assert half is not None
        return half

    @property
    def idle(self) -> bool:
        """Whether the connector keeps nothing any more."""
        return not any(self.half.sizes().values())

    @property
    def free(self) -> int:
        """Free blocks of the real pool, those of the prefix cache included."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def blocks(self, request_id: str) -> tuple[list[int], ...]:
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)

    def status(self, request_id: str) -> RequestStatus | None:
        """The status of a request that vLLM still knows."""
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    def add(
        self,
        ext_id: str,
        prompt: Sequence[int],
        params: Mapping[str, object] | None = None,
        *,
        max_tokens: int = 1,
        priority: int = 0,
        whole: bool = False,
    ) -> str:
        """Give the scheduler a request; ``whole`` for one that may not use the prefix cache.

        Returns:
            Its internal id.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
            prompt_logprobs=1 if whole else None,
        )
        request = Request(
            request_id=internal(ext_id),
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            priority=priority,
            block_hasher=get_request_block_hasher(self.scheduler.hash_block_size, sha256),
        )
        self.scheduler.add_request(request)
        return request.request_id

    def schedule(self) -> Step:
        return Step(self.scheduler.schedule())

    def answer(
        self,
        step: Step,
        arrived: Iterable[str] = (),
        failed: Iterable[str] = (),
        failed_blocks: Iterable[int] = (),
    ) -> None:
        """What the workers say once a step is over.

        Args:
            step: The step.
            arrived: Requests, by internal id, whose transfer has ended on all ranks.
            failed: Of these, those that have failed, told by request.
            failed_blocks: Blocks of those that have failed, for a vLLM that is told by block.
        """
        ids = list(step.scheduled)
        requests = self.scheduler.requests
        sampled = [
            [7] if (r := requests.get(i)) is not None and not r.is_prefill_chunk else []
            for i in ids
        ]
        ended = KVConnectorOutput(
            finished_recving=set(arrived) or None,
            failed_recving=set(failed),
            invalid_block_ids=set(failed_blocks),
        )
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=ended,
        )
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for output in outputs.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def step(self, arrived: Iterable[str] = (), failed: Iterable[str] = ()) -> Step:
        """One step, and its answer at once."""
        step = self.schedule()
        self.answer(step, arrived, failed)
        return step

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_reason(self, request_id: str) -> str | None:
        """Why a request ended, as its client is told; None as long as it goes on."""
        for output in self.outputs.get(request_id, []):
            if output.finish_reason is not None:
                return str(output.finish_reason)
        return None


@contextmanager
def engine(
    role: Side,
    *,
    blocks: int = 64,
    of: Sequence[KVCacheGroupSpec] | None = None,
    block: int = BLOCK,
    hash_block: int | None = None,
    config: VllmConfig | None = None,
    resumed_as_new: bool = False,
) -> Iterator[Engine]:
    """An engine with ``blocks`` blocks, one of which vLLM keeps for itself.

    Args:
        role: Its ``kv_role``.
        blocks: Of each KV-cache group.
        of: The KV-cache groups.
        block: Tokens in a block: the least that all groups' blocks divide.
        hash_block: Tokens that the prefix cache knows apart; ``block`` by default.
        config: vLLM's; `vllm_config` of the role by default.
        resumed_as_new: Whether a preempted request is scheduled anew as a new one, as vLLM does
            for its second model runner.
    """
    init_none_hash(sha256)
    config = config or vllm_config(role)
    config.cache_config.num_gpu_blocks = blocks
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=kv_config(blocks, of or groups(MAIN, spec=attention(block))),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        hash_block_size=hash_block,
    )
    scheduler.use_v2_model_runner = resumed_as_new
    try:
        yield Engine(scheduler)
    finally:
        scheduler.shutdown()


def internal(ext_id: str) -> str:
    """An internal id as vLLM makes them: never the same twice."""
    return f"{ext_id}-{next(_numbers):08x}"


def tokens(number: int, seed: int = 0) -> list[int]:
    """A prompt that shares its first blocks with none of another seed."""
    return [(seed * 131 + place) % 1000 for place in range(number)]


def prefill_params(ext_id: str, **changes: object) -> dict[str, object]:
    """What P is given of a request that Decode waits for."""
    return {
        "request_id": ext_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "decode",
        "remote_host": "127.0.0.1",
        "remote_port": 21000,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
        **changes,
    }


def decode_params(metaserver: str) -> dict[str, object]:
    """What D is given of a request whose prompt Prefill computes."""
    return {"do_remote_prefill": True, "metaserver": metaserver}
