"""rd2h's log lines where vLLM's are: vLLM configures its own logger and nobody else's."""

import logging

__all__ = ["share_vllm_logging"]


def share_vllm_logging() -> None:
    """Give rd2h's loggers vLLM's handlers and level, unless somebody has configured them.

    Without that, warnings would come as bare lines without time or process, and the rest not at
    all. Idempotent.
    """
    ours, theirs = logging.getLogger("rd2h"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    # vLLM's own lines stop there, too.
    ours.propagate = theirs.propagate
