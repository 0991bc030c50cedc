"""What a scheduler half tells the worker halves in each step; vLLM carries it, pickled.

Plain values: made by the scheduler thread, read by the workers' compute threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

__all__ = ["AnnouncedRequest", "DecodeEndpoint", "DecodeStep", "Loading", "PrefillStep"]


@dataclass(frozen=True)
class DecodeEndpoint:
    """Where a Decode engine listens.

    Attributes:
        host: Name or address of its ranks.
        base_port: Rank ``r`` listens on ``base_port + r``.
        tp_size: Its tensor-parallel size.
    """

    host: str
    base_port: int
    tp_size: int


@dataclass(frozen=True)
class AnnouncedRequest:
    """What one step completes of one request.

    Attributes:
        ext_id: The id that Decode knows.
        endpoint: Where to.
        main_block_ids: Source blocks of main KV that this step completes.
        indexer_block_ids: Likewise of the indexer.
        main_start: Position in the prompt of the first main block, in blocks.
        indexer_start: Likewise of the indexer.
        done: Whether this is the end of the prompt.
    """

    ext_id: str
    endpoint: DecodeEndpoint
    main_block_ids: list[int]
    indexer_block_ids: list[int]
    main_start: int
    indexer_start: int
    done: bool


@dataclass(frozen=True)
class PrefillStep(KVConnectorMetadata):
    """One step of Prefill.

    Attributes:
        written: Blocks that the step is the first to write for the request that has them now. Of
            whoever had them before, Decode may still be reading.
        requests: What it completes.
        finished: External ids of requests that are over on Prefill since the last step.
    """

    written: frozenset[int]
    requests: tuple[AnnouncedRequest, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True)
class Loading:
    """A request whose prompt is awaited from Prefill.

    Attributes:
        request_id: vLLM's internal id.
        ext_id: The id that both engines share.
        main_block_ids: Blocks of the whole prompt, cached prefix included.
        indexer_block_ids: Likewise of the indexer; empty without one.
        cached_main_blocks: Blocks of the cached prefix, which are never written.
        cached_indexer_blocks: Likewise of the indexer.
    """

    request_id: str
    ext_id: str
    main_block_ids: list[int]
    indexer_block_ids: list[int]
    cached_main_blocks: int
    cached_indexer_blocks: int


@dataclass(frozen=True)
class DecodeStep(KVConnectorMetadata):
    """One step of Decode.

    Attributes:
        loads: Requests that have got their blocks.
        aborted: External ids of requests that are not wanted any more.
    """

    loads: tuple[Loading, ...]
    aborted: tuple[str, ...]
