"""Request ids: which one the engines get, and which ids vLLM will make of it.

vLLM takes the ``X-Request-Id`` header as the base of its ids. With that, the external id of every
sequence is known before D has seen the request:

* chat: ``chatcmpl-<id>``
* completions, prompt ``i`` of the list (also of a single prompt): ``cmpl-<id>-<i>``
* with ``n > 1``, child ``c`` of each: ``<c>_`` before that

Internally vLLM appends ``-`` and 8 hex digits, which the connector strips again. An id of ours must
therefore never end that way by itself.

Pure; any thread. Randomness is passed in.
"""

import re
from collections.abc import Callable

__all__ = ["Minter", "attempt_id", "external_ids", "usable"]

# What may stand in an HTTP header, a log line and an HTML page without a second thought.
_USABLE = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


def usable(client_id: str | None) -> str | None:
    """The client's own ``X-Request-Id`` if it is safe to use; else None."""
    if client_id is not None and _USABLE.match(client_id):
        return client_id
    return None


class Minter:
    """Makes request ids, unique over requests and proxies.

    An id is the client's own, if it gave one, and a token of ours. The token starts with a mark of
    this process, so that a rendezvous that comes too late can be told from one that was never ours
    without keeping a list of the past.

    Args:
        random_hex: Gives ``n`` random bytes as ``2 n`` hex digits.
    """

    def __init__(self, random_hex: Callable[[int], str]) -> None:
        self._random_hex = random_hex
        self._mark = random_hex(4)
        self._ours = re.compile(rf"(\A|-){self._mark}[0-9a-f]{{16}}(\.r[0-9]+)?(-[0-9]+)?\Z")

    def mint(self, client_id: str | None) -> str:
        """A new id for a request, with ``client_id`` (a `usable` one) at its start."""
        token = self._mark + self._random_hex(8)
        return token if client_id is None else f"{client_id}-{token}"

    def is_ours(self, external_id: str) -> bool:
        """Whether this process made the id that ``external_id`` was made of."""
        return self._ours.search(external_id) is not None


def attempt_id(request_id: str, attempt: int) -> str:
    """The id of a request's attempt at a D, counted from 1.

    Each has its own: the rendezvous of an attempt that failed may still be on its way.
    """
    return request_id if attempt == 1 else f"{request_id}.r{attempt}"


def external_ids(prefix: str, request_id: str, prompts: int | None, n: int) -> list[str]:
    """The external id of every sequence, prompt by prompt, children in order.

    Args:
        prefix: ``cmpl`` or ``chatcmpl``.
        request_id: What the engine gets as ``X-Request-Id``.
        prompts: How many prompts a completion has; None for a chat.
        n: How many sequences of each prompt.
    """
    bases = (
        [f"{prefix}-{request_id}"]
        if prompts is None
        else [f"{prefix}-{request_id}-{i}" for i in range(prompts)]
    )
    if n == 1:
        return bases
    return [f"{child}_{base}" for base in bases for child in range(n)]
