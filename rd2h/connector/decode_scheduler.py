"""D's scheduler half: which requests wait for a prompt from Prefill, and where it goes.

Owned by the scheduler's thread; posts to the metaserver run in a thread of their own
(:mod:`rd2h.connector.rendezvous`). Block ids never leave this engine.

A request's blocks stay vLLM's until every worker has reported its end, also when it was aborted:
only then is it sure that nothing is being read into them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from rd2h.connector.ids import external_id
from rd2h.connector.metadata import DecodeStep, Loading
from rd2h.connector.rendezvous import Metaservers, check_url
from rd2h.connector.setup import EngineSetup
from rd2h.wire import MalformedMessageError
from rd2h.wire.rendezvous import Advertisement, DecodeParams

__all__ = ["DecodeScheduler"]

logger = logging.getLogger(__name__)


class DecodeScheduler:
    """Asks for prompts, and follows them until they are there.

    Args:
        setup: This engine's place.
        metaservers: Where rendezvous are posted.
    """

    def __init__(self, setup: EngineSetup, metaservers: Metaservers) -> None:
        self._setup = setup
        self._metaservers = metaservers
        self._loading: dict[str, str] = {}  # internal to external id
        self._ext_ids: set[str] = set()  # the external ones
        self._new: list[Loading] = []
        self._aborted: list[str] = []

    def external_tokens(self, request: Request, computed: int) -> int:
        """How many tokens Prefill will provide beyond ``computed``; has no side effect.

        Args:
            request: A request that waits.
            computed: Tokens of its prompt that this engine has in its own cache, in whole blocks.
        """
        if _params(request) is None:
            return 0
        if external_id(request.request_id) in self._ext_ids:
            return 0  # `allocated` says so, once
        return max(request.num_prompt_tokens - computed, 0)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks are there: ask Prefill for the prompt, or compute it here if nothing is awaited.

        vLLM comes here again when the prompt has arrived, when a request resumes after preemption,
        and when a prompt that could not be handed over is computed here; by then the request does
        not ask any more.
        """
        params = _params(request)
        if params is None or request.kv_transfer_params is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        ext_id = external_id(request.request_id)
        if external_tokens <= 0:
            if ext_id in self._ext_ids:
                logger.warning(
                    "request %s is computed here: a request with the same external id %s waits "
                    "for Prefill; a proxy must give each request an X-Request-Id of its own",
                    request.request_id,
                    ext_id,
                )
            return
        groups, tokens = self._setup.groups, request.num_prompt_tokens
        cached = tokens - external_tokens
        ids = groups.split(blocks.get_block_ids())
        load = Loading(
            request_id=request.request_id,
            ext_id=ext_id,
            # vLLM may have allocated beyond the prompt, for tokens to come.
            main_block_ids=ids.main[: -(-tokens // groups.main_block_size)],
            indexer_block_ids=ids.indexer[: -(-tokens // groups.indexer_block_size)],
            cached_main_blocks=cached // groups.main_block_size,
            cached_indexer_blocks=cached // groups.indexer_block_size,
        )
        self._loading[request.request_id] = ext_id
        self._ext_ids.add(ext_id)
        self._new.append(load)
        self._metaservers.post(params.metaserver, self._advertisement(ext_id, cached))

    def step(self) -> DecodeStep:
        """What the workers have to know in this step; forgets what it has told."""
        step = DecodeStep(tuple(self._new), tuple(self._aborted))
        self._new, self._aborted = [], []
        return step

    def arrived(self, request_ids: Iterable[str]) -> None:
        """Every worker has reported the end of these requests' transfers, good or bad."""
        for request_id in request_ids:
            if (ext_id := self._loading.pop(request_id, None)) is not None:
                self._ext_ids.discard(ext_id)
                self._metaservers.cancel(ext_id)
                if ext_id in self._aborted:
                    # Over already; and the id may be another request's by the next step.
                    self._aborted.remove(ext_id)

    def finished(self, request: Request) -> bool:
        """A request is over in vLLM.

        Returns:
            Whether its blocks must be kept, until the workers have reported its end.
        """
        ext_id = self._loading.get(request.request_id)
        if ext_id is None:
            return False
        self._metaservers.cancel(ext_id)
        self._aborted.append(ext_id)
        return True

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind; all zero when nothing goes on."""
        return {
            "loading": len(self._loading),
            "new": len(self._new),
            "aborted": len(self._aborted),
            "posts": self._metaservers.pending,
        }

    def _advertisement(self, ext_id: str, cached: int) -> Advertisement:
        setup = self._setup
        return Advertisement(
            request_id=ext_id,
            remote_engine_id=setup.engine_id,
            remote_host=setup.host,
            remote_port=setup.base_port,
            remote_tp_size=setup.tp_size,
            remote_pcp_size=1,
            remote_dcp_size=1,
            remote_cached_tokens=cached,
        )


def _params(request: Request) -> DecodeParams | None:
    """The request's parameters if it asks for its prompt; None if it does not, or cannot."""
    params = request.kv_transfer_params
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        read = DecodeParams.from_params(params)
        check_url(read.metaserver)
        return read
    except (MalformedMessageError, ValueError) as error:
        params["do_remote_prefill"] = False
        logger.error(
            "request %s is computed here: its kv_transfer_params: %s", request.request_id, error
        )
        return None
