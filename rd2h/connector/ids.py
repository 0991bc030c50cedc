"""The request id that both engines share, from vLLM's own."""

import re

__all__ = ["external_id"]

# What vLLM 0.32 appends to an id to make it unique inside one engine.
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


def external_id(request_id: str) -> str:
    """The external id behind vLLM's internal one; an id without vLLM's suffix is left alone.

    The proxy makes ids that never end like the suffix by themselves (:mod:`rd2h.proxy.ids`).
    """
    return _SUFFIX.sub("", request_id)
