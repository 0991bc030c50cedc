"""What a command asks of its own process and of the machine under it. Needs nothing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["available_memory", "terminate_as_interrupt"]


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end everything as Ctrl-C does. For the main thread."""

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def available_memory(root: Path = Path("/")) -> int:
    """Return how much memory new processes may take, in bytes: the host's and the container's.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    free = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    cgroup = root / "sys/fs/cgroup"
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
