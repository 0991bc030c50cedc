"""D's worker half: pulls announced layers into this rank's memory, and tells what has ended.

All methods are called by vLLM on the compute thread. What goes on beside it is the receiver's
(:mod:`rd2h.decode`).

A request's end is reported once by every rank. vLLM's executor counts the reports of all TP ranks
and tells the scheduler when the last has come, with a failure if any rank has failed; so no rank
asks another, and a step with nothing outstanding costs nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rd2h.connector.metadata import DecodeStep, Loading
from rd2h.connector.setup import EngineSetup
from rd2h.decode import Outcome, Receiver, ReceiverStats
from rd2h.destinations import Destination
from rd2h.engines import TransferEngine
from rd2h.reads import PullScope, RequestDestination
from rd2h.sockets import tcp_address
from rd2h.topology import rank_port

__all__ = ["DecodeWorker", "Ended"]

logger = logging.getLogger(__name__)


@dataclass
class Ended:
    """Requests whose transfer has ended on this rank since the last report, by internal id.

    Attributes:
        all: All of them, good or bad.
        failed: Those whose blocks do not hold their prompt.
        failed_blocks: Main block ids of these that were awaited from Prefill.
        aborted: How many of all were not wanted any more.
    """

    all: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    aborted: int = 0


class DecodeWorker:
    """One rank of Decode.

    Args:
        setup: This engine's place.
        tp_rank: This rank.
        engine: The transfer engine; the destination is registered with it here.
        destination: Where to read to.

    Raises:
        PortTakenError: This rank's port cannot be listened on.
        EngineError: The memory cannot be registered.
    """

    def __init__(
        self,
        setup: EngineSetup,
        tp_rank: int,
        engine: TransferEngine,
        destination: Destination,
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._loading: dict[str, Loading] = {}  # by external id
        engine.register(destination.regions)
        port = rank_port(setup.base_port, tp_rank, setup.tp_size)
        # Every interface; an address of IPv6 is reached on a socket of that family only.
        interface = "::" if ":" in setup.host else "*"
        self._receiver = Receiver(
            tcp_address(interface, port),
            destination.layers,
            PullScope(tp_rank, setup.tp_size, destination.main_shared),
            engine,
            setup.options.receiver(),
        )
        logger.info(
            "Decode rank %d listens on port %d for %d layers of %d blocks, advertised as %s",
            tp_rank,
            port,
            len(destination.layers),
            setup.num_blocks,
            setup.host,
        )

    @property
    def stats(self) -> ReceiverStats:
        """Counters since the start."""
        return self._receiver.stats

    def begin(self, step: DecodeStep) -> None:
        """A step is about to run: end what is not wanted any more, and register what waits."""
        # First, since what is aborted was told in an earlier step than what is new.
        for ext_id in step.aborted:
            self._receiver.abort(ext_id)
        for load in step.loads:
            self._loading[load.ext_id] = load
            self._receiver.register(
                RequestDestination(
                    load.ext_id,
                    load.main_block_ids,
                    load.indexer_block_ids,
                    cached_main_blocks=load.cached_main_blocks,
                    cached_indexer_blocks=load.cached_indexer_blocks,
                )
            )

    def ended(self) -> Ended:
        """What has ended since the last call, each request once.

        Raises:
            ReceiverBrokenError: The receiver itself has failed.
        """
        ended = Ended()
        if not self._loading:
            return ended
        for finished in self._receiver.take_finished():
            load = self._loading.pop(finished.ext_id)
            ended.all.add(load.request_id)
            ended.aborted += finished.outcome is Outcome.ABORTED
            if finished.outcome is Outcome.FAILED:
                ended.failed.add(load.request_id)
                # Of the cached prefix nothing was written, and others may be using it.
                ended.failed_blocks.update(load.main_block_ids[load.cached_main_blocks :])
        return ended

    def sizes(self) -> dict[str, int]:
        """How much is kept, by kind."""
        return {"loading": len(self._loading), **self._receiver.sizes()}

    def close(self) -> None:
        """Let reads in flight finish, and end the threads."""
        try:
            self._receiver.close(self._setup.options.shutdown_timeout)
        finally:
            self._engine.close()
