"""Helpers of the sender's tests."""

from __future__ import annotations

from dataclasses import replace

from rd2h.prefill import WaitTimeoutError
from tests.transfer.ranks import PATIENT, Prefill, ask, batch
from tests.transfer.scripted import ScriptedDecode

RAISING = replace(PATIENT, failure_policy="raise")


def is_shut(prefill: Prefill, layer: int) -> bool:
    """Whether the layer's gate is shut now."""
    try:
        prefill.sender.wait(f"layer.{layer}", timeout=0.01)
    except WaitTimeoutError:
        return True
    return False


def meet(prefill: Prefill, decode: ScriptedDecode, layer: int = 0) -> bytes:
    """Have a layer announced, with the handshake before; returns the sender's identity."""
    prefill.submit(layer, decode.endpoint, ask("a", [1]))
    peer, _ = decode.greet()
    assert decode.hear_batch() == (peer, batch(layer, [ask("a", [1])]))
    return peer
