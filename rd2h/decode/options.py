"""What an operator can set about the receiver."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReceiverOptions"]


@dataclass(frozen=True)
class ReceiverOptions:
    """The receiver's deadlines and size; times in seconds.

    Attributes:
        read_threads: Peers that are read from at a time; a slow one keeps its thread, and
            others wait when none is left. So there are more than the ranks that feed one
            Decode rank (8 at a ratio of 16:2); a thread that waits for its read costs little.
        park_timeout: How long a batch waits for its requests to be registered. Shorter than
            Prefill's ``answer_timeout``.
        idle_timeout: How long a registered request goes without a batch before it fails.
        remember: How long the id of a request that has ended is remembered, for the last
            1,000,000 of them (some 300 bytes each). A batch that still comes for it is
            acknowledged without reading; once it is forgotten, such a batch waits
            ``park_timeout`` for it to be registered, and then fails with every request in it.
            Longer than Prefill may still compute for a request that Decode has aborted.
    """

    read_threads: int = 16
    park_timeout: float = 60.0
    idle_timeout: float = 300.0
    remember: float = 4 * 3600.0

    def __post_init__(self) -> None:
        if self.read_threads < 1:
            raise ValueError(f"read_threads is {self.read_threads}; it is at least 1")
        for name in ("park_timeout", "idle_timeout", "remember"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a time above 0 s")
