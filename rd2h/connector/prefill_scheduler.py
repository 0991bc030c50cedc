"""P's scheduler half: what each step completes of the prompts that go to Decode.

Owned by the scheduler's thread. A request is tracked from its first allocation until its last
block was announced; its id is then kept until vLLM says that it is over, so that the workers can
forget it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rd2h.connector.groups import BlockIds
from rd2h.connector.ids import external_id
from rd2h.connector.metadata import AnnouncedRequest, DecodeEndpoint, PrefillStep
from rd2h.connector.setup import EngineSetup
from rd2h.topology import TopologyError, TpMapping, rank_port
from rd2h.wire import MalformedMessageError
from rd2h.wire.rendezvous import Advertisement, PrefillParams

__all__ = ["PrefillScheduler"]

logger = logging.getLogger(__name__)


@dataclass
class _Prompt:
    """A prompt on its way to Decode; counts of blocks are positions in the prompt."""

    ext_id: str
    endpoint: DecodeEndpoint
    tokens: int
    blocks: BlockIds
    announced_main: int
    announced_indexer: int


class PrefillScheduler:
    """Follows vLLM's schedule, and says what the workers have to announce.

    Args:
        setup: This engine's place.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._prompts: dict[str, _Prompt] = {}
        # Every request that was ever handed over and is not over: internal to Decode's id.
        self._ext_ids: dict[str, str] = {}
        self._finished: list[str] = []
        self._allocated: dict[str, BlockIds] = {}  # since the last step, by internal id

    def allocated(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Blocks are allocated for a request that begins, or resumes after preemption.

        What is computed into them comes with the step's schedule.
        """
        if ids := blocks.get_block_ids(allow_none=True):
            self._allocated[request.request_id] = self._setup.groups.split(ids)
        if request.request_id in self._ext_ids:
            return
        advertisement = _advertisement(request)
        if advertisement is None:
            return
        try:
            endpoint = self._endpoint(advertisement)
        except TopologyError as error:
            logger.error(
                "request %s is computed here but not handed over to %s:%d: %s",
                request.request_id,
                advertisement.remote_host,
                advertisement.remote_port,
                error,
            )
            return
        groups, cached = self._setup.groups, advertisement.remote_cached_tokens
        self._ext_ids[request.request_id] = advertisement.request_id
        self._prompts[request.request_id] = _Prompt(
            ext_id=advertisement.request_id,
            endpoint=endpoint,
            tokens=request.num_prompt_tokens,
            blocks=BlockIds([], []),
            announced_main=cached // groups.main_block_size,
            announced_indexer=cached // groups.indexer_block_size,
        )

    def step(self, output: SchedulerOutput) -> PrefillStep:
        """What the step of ``output`` writes and completes; forgets what it has told."""
        written: set[int] = set()
        announced: list[AnnouncedRequest] = []
        for request_id, computed, fresh in self._follow(output):
            self._allocated.pop(request_id, None)
            written.update(fresh.main, fresh.indexer)
            if request_id in self._prompts:
                end = computed + output.num_scheduled_tokens.get(request_id, 0)
                if (request := self._announce(request_id, end)) is not None:
                    announced.append(request)
        # What is not scheduled yet is being loaded by another connector, beside the steps.
        for loaded in self._allocated.values():
            written.update(loaded.main, loaded.indexer)
        self._allocated.clear()
        finished, self._finished = tuple(self._finished), []
        return PrefillStep(frozenset(written), tuple(announced), finished)

    def finished(self, request: Request) -> None:
        """A request is over in vLLM, whether it was handed over, in part, or aborted.

        Its blocks may be freed at once: the gates keep a step from overwriting what Decode reads.
        """
        self._prompts.pop(request.request_id, None)
        if (ext_id := self._ext_ids.pop(request.request_id, None)) is not None:
            self._finished.append(ext_id)

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind; all zero when nothing goes on."""
        return {
            "prompts": len(self._prompts),
            "ext_ids": len(self._ext_ids),
            "finished": len(self._finished),
            "allocated": len(self._allocated),
        }

    def _endpoint(self, advertisement: Advertisement) -> DecodeEndpoint:
        """Check that this engine's ranks can feed those of Decode."""
        if (advertisement.remote_pcp_size, advertisement.remote_dcp_size) != (1, 1):
            raise TopologyError(
                f"decode runs with context parallelism (prefill "
                f"{advertisement.remote_pcp_size}, decode {advertisement.remote_dcp_size}); rd2h "
                f"hands over between ranks of TP only"
            )
        size = advertisement.remote_tp_size
        TpMapping(self._setup.tp_size, size)
        rank_port(advertisement.remote_port, size - 1, size)
        return DecodeEndpoint(advertisement.remote_host, advertisement.remote_port, size)

    def _follow(self, output: SchedulerOutput) -> Iterator[tuple[str, int, BlockIds]]:
        """Go through what is scheduled, and take over the block ids of tracked prompts.

        Yields:
            The internal id, the tokens that were computed before this step, and the blocks of the
            request that this step is the first to write.
        """
        split = self._setup.groups.split
        for new in output.scheduled_new_reqs:
            blocks = split(new.block_ids)
            self._take(new.req_id, blocks)
            yield new.req_id, new.num_computed_tokens, self._beyond(blocks, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is None:
                yield request_id, computed, BlockIds([], [])
                continue
            blocks = split(block_ids)
            if request_id in cached.resumed_req_ids:
                self._take(request_id, blocks)
                blocks = self._beyond(blocks, computed)
            elif (prompt := self._prompts.get(request_id)) is not None:
                prompt.blocks.extend(blocks)
            yield request_id, computed, blocks

    def _take(self, request_id: str, blocks: BlockIds) -> None:
        """These are all blocks of a request; what it had before is not its any more."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.blocks = blocks

    def _beyond(self, blocks: BlockIds, computed: int) -> BlockIds:
        """The blocks without those that hold nothing but computed tokens."""
        groups = self._setup.groups
        return BlockIds(
            blocks.main[computed // groups.main_block_size :],
            blocks.indexer[computed // groups.indexer_block_size :],
        )

    def _announce(self, request_id: str, computed: int) -> AnnouncedRequest | None:
        prompt, groups = self._prompts[request_id], self._setup.groups
        done = computed >= prompt.tokens
        main_start, indexer_start = prompt.announced_main, prompt.announced_indexer
        prompt.announced_main = max(
            main_start, _complete(computed, prompt.tokens, groups.main_block_size)
        )
        prompt.announced_indexer = max(
            indexer_start, _complete(computed, prompt.tokens, groups.indexer_block_size)
        )
        main = prompt.blocks.main[main_start : prompt.announced_main]
        indexer = prompt.blocks.indexer[indexer_start : prompt.announced_indexer]
        if done:
            del self._prompts[request_id]
        elif not main and not indexer:
            return None
        return AnnouncedRequest(
            ext_id=prompt.ext_id,
            endpoint=prompt.endpoint,
            main_block_ids=main,
            indexer_block_ids=indexer,
            main_start=main_start,
            indexer_start=indexer_start,
            done=done,
        )


def _complete(computed: int, tokens: int, block_size: int) -> int:
    """Blocks that hold all they ever will of the prompt: the last one may be partly filled."""
    return -(-tokens // block_size) if computed >= tokens else computed // block_size


def _advertisement(request: Request) -> Advertisement | None:
    """What Decode has posted about a request; None if it goes nowhere, or nobody can tell."""
    params = request.kv_transfer_params
    if not params or not params.get("do_remote_decode"):
        return None
    try:
        read = PrefillParams.from_params(params)
    except MalformedMessageError as error:
        logger.error(
            "request %s is computed here but not handed over: its kv_transfer_params: %s",
            request.request_id,
            error,
        )
        return None
    if not read.batch_kv_transfer_params:
        return read
    entry = read.batch_kv_transfer_params.get(external_id(request.request_id))
    if entry is None:
        logger.error(
            "request %s is computed here but not handed over: batch_kv_transfer_params has no "
            "entry for it, but %d others; the proxy must name this engine's external ids",
            request.request_id,
            len(read.batch_kv_transfer_params),
        )
    return entry
