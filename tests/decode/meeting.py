"""Helpers of the receiver's tests."""

from __future__ import annotations

from tests.transfer.caches import TWO_LAYERS, Cache
from tests.transfer.ranks import Decode, Site
from tests.transfer.scripted import ScriptedPrefill


def greeted(site: Site, decode: Decode, cache: Cache | None = None) -> ScriptedPrefill:
    """A scripted Prefill with memory of its own (``cache``), whose handshake is over."""
    prefill = site.scripted_prefill(decode.endpoint)
    cache = cache or Cache(TWO_LAYERS)
    prefill.greet(site.engine(cache).session, cache)
    site.stack.callback(lambda: cache)  # whose memory outlives this function
    return prefill
