"""What an operator can set about the receiver."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReceiverOptions"]


@dataclass(frozen=True)
class ReceiverOptions:
    """The receiver's deadlines and size; times in seconds.

    Attributes:
        read_threads: Peers that are read from at a time.
        park_timeout: How long a batch waits for its requests to be registered. Shorter than
            Prefill's ``answer_timeout``.
        idle_timeout: How long a registered request goes without a batch before it fails.
    """

    read_threads: int = 4
    park_timeout: float = 60.0
    idle_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.read_threads < 1:
            raise ValueError(f"read_threads is {self.read_threads}; it is at least 1")
        for name in ("park_timeout", "idle_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a time above 0 s")
