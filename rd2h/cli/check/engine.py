"""Which engine both ends use, and how an end makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from rd2h.cli.check.failures import Side
from rd2h.cli.check.options import EngineName
from rd2h.devices import device_for
from rd2h.engines import EngineBinding, EngineUnavailableError, TransferEngine, create_engine
from rd2h.engines.host_session import Machine

__all__ = ["Disagreement", "StartEngine", "agree", "machine_name", "starter"]

StartEngine: TypeAlias = Callable[[EngineName, str], TransferEngine]
"""Makes an engine of that name, for a process that peers reach at that address."""


class Disagreement(Exception):  # noqa: N818 - the two ends disagree; neither is at fault
    """The two ends were told to use different engines; the text is one line."""


def agree(decode: EngineName, prefill: EngineName, *, same_machine: bool) -> EngineName:
    """Settle on an engine.

    Args:
        decode: What Decode was told to use.
        prefill: What Prefill was told to use.
        same_machine: Whether both have one boot id and one PID namespace.

    Returns:
        The one that was named; if both are ``auto``: ``host`` within one machine, else ``nixl``.

    Raises:
        Disagreement: each was told something else.
    """
    named = {name for name in (decode, prefill) if name is not EngineName.AUTO}
    if len(named) > 1:
        raise Disagreement(
            f"prefill uses --engine {prefill} and decode --engine {decode}; give both the same, "
            "or one of them none"
        )
    if named:
        return named.pop()
    return EngineName.HOST if same_machine else EngineName.NIXL


def machine_name() -> str:
    """Boot id and PID namespace of this process; empty where they cannot be told."""
    try:
        machine = Machine.current()
    except EngineUnavailableError:
        return ""
    return f"{machine.boot_id}/{machine.pid_namespace}"


def starter(side: Side, device_id: int, timeout: float) -> StartEngine:
    """Say how an end makes its engine.

    Args:
        side: The end.
        device_id: The NPU, for memfabric.
        timeout: Seconds that one read may take.
    """

    def start(name: EngineName, host: str) -> TransferEngine:
        if name is not EngineName.MEMFABRIC:
            return create_engine(name.value, timeout=timeout)
        return create_engine(
            name.value,
            timeout=timeout,
            binding=EngineBinding("Prefill" if side is Side.PREFILL else "Decode", device_id, host),
            enter_thread=device_for("npu", device_id).enter_thread,
        )

    return start
