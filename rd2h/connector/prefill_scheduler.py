"""P's scheduler half: what each step completes of the prompts that go to Decode.

Owned by the scheduler's thread. A request is tracked from its first allocation until its last
block was announced; its id is then kept until vLLM says that it is over, so that the workers can
forget it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

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

    def allocated(self, request: Request) -> None:
        """Blocks are allocated for a request that begins, or resumes after preemption.

        The blocks themselves come with the step's schedule.
        """
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
        """What the step that ``output`` schedules completes; forgets what it has told."""
        announced = [
            request
            for request_id, computed in self._follow(output)
            if (request := self._announce(request_id, computed)) is not None
        ]
        finished, self._finished = tuple(self._finished), []
        return PrefillStep(output.total_num_scheduled_tokens > 0, tuple(announced), finished)

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

    def _follow(self, output: SchedulerOutput) -> Iterator[tuple[str, int]]:
        """Take over block ids; give each tracked request that is scheduled and its progress.

        Yields:
            The internal id, and the prompt's tokens that are computed when the step is over.
        """
        split = self._setup.groups.split
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (prompt := self._prompts.get(new.req_id)) is not None:
                prompt.blocks = split(new.block_ids)
                yield new.req_id, new.num_computed_tokens + scheduled.get(new.req_id, 0)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (prompt := self._prompts.get(request_id)) is None:
                continue
            if request_id in cached.resumed_req_ids:
                prompt.blocks = split(blocks or ())
            elif blocks is not None:
                prompt.blocks.extend(split(blocks))
            yield request_id, computed + scheduled.get(request_id, 0)

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
