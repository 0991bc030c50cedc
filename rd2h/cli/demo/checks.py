"""What must hold after a run. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

import msgspec

from rd2h.cli.demo.messages import Verdict, Verified
from rd2h.cli.demo.options import Fault
from rd2h.cli.demo.plan import Plan
from rd2h.cli.demo.result import Check, RunResult

__all__ = ["run_checks"]

_NOTICE_LIMIT = 15.0
"""Seconds until Decode must know that a Prefill rank is gone: heartbeats tell after 10."""


def run_checks(
    plan: Plan,
    result: RunResult,
    verified: Sequence[Verified],
    deaths: Mapping[str, int],
    leftovers: Sequence[str],
) -> RunResult:
    """Judge a run.

    Args:
        plan: The run.
        result: Its figures.
        verified: What living Decode ranks found in their memory.
        deaths: Processes that ended in the middle, by name, and their status.
        leftovers: What was still there at the end.

    Returns:
        The result with its checks.
    """
    checks = [_contents(verified), _requests(result), *_fault(plan, result, deaths)]
    if all(request.expected in (Verdict.DONE, Verdict.LOST) for request in result.requests):
        checks.append(_read_once(result))
    checks.append(
        Check(
            "back at idle",
            not leftovers,
            f"left over: {'; '.join(leftovers)}"
            if leftovers
            else f"{plan.options.processes} processes ended, no thread, gate or memory left",
        )
    )
    return msgspec.structs.replace(result, checks=checks)


def _contents(verified: Sequence[Verified]) -> Check:
    wrong = sum(v.wrong for v in verified)
    if wrong:
        examples = [example for v in verified for example in v.examples]
        text = f"{wrong} of Decode's blocks are wrong: {'; '.join(examples[:3])}"
        return Check("every byte", False, text)
    size, blocks = sum(v.bytes for v in verified), sum(v.blocks for v in verified)
    guards = sum(v.guards for v in verified)
    return Check(
        "every byte",
        blocks > 0,
        f"{size:,} bytes in {blocks:,} blocks are right, {guards:,} other blocks untouched",
    )


def _requests(result: RunResult) -> Check:
    wrong = [request for request in result.requests if request.verdict is not request.expected]
    if wrong:
        texts = [
            f"{request.ext_id} is {request.verdict or 'open'}, not {request.expected}"
            + (f" ({request.reason})" if request.reason else "")
            for request in wrong[:3]
        ]
        return Check("requests", False, f"{len(wrong)} ended wrongly: {'; '.join(texts)}")
    counts = dict.fromkeys(Verdict, 0)
    for request in result.requests:
        counts[request.expected] += 1
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    hurt = counts[Verdict.DONE] < len(result.requests)
    return Check("requests", True, text + (", as they must be" if hurt else ""))


def _read_once(result: RunResult) -> Check:
    wrong = [rank for rank in result.decode if rank.bytes != rank.expected_bytes]
    if wrong:
        texts = [f"{r.name} read {r.bytes:,} bytes of {r.expected_bytes:,}" for r in wrong]
        return Check("read once", False, "; ".join(texts))
    return Check("read once", True, "every rank read exactly its share")


def _fault(plan: Plan, result: RunResult, deaths: Mapping[str, int]) -> list[Check]:
    """What is special about the fault, beside how the requests end."""
    failures = sum(rank.failures for rank in result.prefill)
    match plan.options.fault:
        case Fault.KILL_DECODE:
            text = f"lost {failures} batches to the dead engine and went on"
            checks = [Check("prefill", failures > 0, text)]
        case Fault.KILL_PREFILL:
            text = f"Decode reported the loss {result.notice_seconds:.2f} s after the kill"
            checks = [Check("decode", result.notice_seconds <= _NOTICE_LIMIT, text)]
        case Fault.SLOW_DECODE:
            fed = {plan.prefill_name(rank) for rank in plan.mapping.prefill_ranks(0)}
            waited = sum(rank.gate_wait for rank in result.prefill if rank.name in fed)
            text = f"{', '.join(sorted(fed))} waited {waited:.2f} s for the slow rank"
            checks = [Check("gates", waited > 0, text)]
        case _:
            checks = []
    killed = -int(signal.SIGKILL)
    for name in plan.victims:
        status = deaths.get(name)
        text = f"{name} ended with status {status}"
        checks.append(Check("the kill", status == killed, text))
    return checks
