"""How requests end, gathered over the ranks of their Decode engines. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rd2h.cli.demo.messages import Ended, Verdict
from rd2h.cli.demo.plan import Plan, Request

__all__ = ["End", "EndBook"]

_WORST_FIRST = (Verdict.FAILED, Verdict.ABORTED, Verdict.DONE)


@dataclass(frozen=True)
class End:
    """How a request ended, and why if it was not done."""

    verdict: Verdict
    reason: str


class EndBook:
    """What every Decode rank has reported.

    Args:
        plan: The run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_ext_id = {request.ext_id: request for request in plan.requests}
        self._heard: dict[str, dict[int, Ended]] = {ext_id: {} for ext_id in self._by_ext_id}
        self._dead_engines: set[int] = set()

    def record(self, engine: int, rank: int, ended: Ended) -> Request | None:
        """A rank has reported a request.

        Returns:
            The request, if this was the last of its ranks to report it.

        Raises:
            ValueError: it is none of that engine's, or was reported before.
        """
        request = self._by_ext_id.get(ended.ext_id)
        if request is None or request.engine != engine or rank in self._heard[ended.ext_id]:
            raise ValueError(f"{ended.ext_id} was reported by a rank that had no reason to")
        self._heard[ended.ext_id][rank] = ended
        return None if self._silent_ranks(request) else request

    def engine_died(self, engine: int) -> None:
        """A Decode engine is gone, and its requests with it."""
        self._dead_engines.add(engine)

    def is_dead(self, engine: int) -> bool:
        """Whether a Decode engine is gone."""
        return engine in self._dead_engines

    def end_of(self, request: Request) -> End | None:
        """How a request ended: done only if every rank says so; None before that is known."""
        if request.engine in self._dead_engines:
            return End(Verdict.LOST, "its Decode engine died")
        if self._silent_ranks(request):
            return None
        ends = {ended.verdict: ended for ended in self._heard[request.ext_id].values()}
        worst = next(ends[verdict] for verdict in _WORST_FIRST if verdict in ends)
        return End(worst.verdict, worst.reason)

    def missing(self) -> Iterator[str]:
        """Name what is not reported yet."""
        for request in self._plan.requests:
            for rank in self._silent_ranks(request):
                name = self._plan.decode_name(request.engine, rank)
                yield f"the end of {request.ext_id} on {name}"

    def _silent_ranks(self, request: Request) -> list[int]:
        if request.engine in self._dead_engines:
            return []
        heard = self._heard[request.ext_id]
        return [rank for rank in range(self._plan.options.decode_tp) if rank not in heard]
