"""What servers log while a test runs, and which of it speaks of an error; for one thread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.servers import Server

__all__ = ["LogWatch", "errors_in", "running", "watched"]

_ERROR = re.compile(
    r"\bERROR\b|\bCRITICAL\b|Traceback \(most recent call last\)|request \S+ failed:"
)
_HARMLESS = re.compile(r"WARNING .*base\.py:\d+\] Traceback")  # no tokenizer, no chat template
# vLLM's processes end in no fixed order when they are asked to, and miss each other.
_STOPS = "[shutdown] API server: shutdown triggered"
_STARTS = "non-default args:"

_WATCHED: list[Sequence[Server]] = []


@contextmanager
def watched(servers: Sequence[Server]) -> Iterator[None]:
    """Watch the logs of servers in every test of the block."""
    _WATCHED.append(servers)
    try:
        yield
    finally:
        _WATCHED.remove(servers)


def running() -> list[Server]:
    """All servers that are watched now."""
    return [server for servers in _WATCHED for server in servers]


class LogWatch:
    """What servers have logged since it was made."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._from = {server: _size(server.log) for server in servers}

    def new(self, server: Server) -> str:
        """All that a server has logged."""
        if not server.log.exists():
            return ""
        with server.log.open("rb") as log:
            log.seek(self._from.get(server, 0))
            return log.read().decode(errors="replace")

    def errors(self, server: Server, expected: Sequence[str]) -> list[str]:
        """Lines that speak of errors which nobody expects."""
        return errors_in(self.new(server), expected)


def errors_in(log: str, expected: Sequence[str]) -> list[str]:
    """Lines that speak of errors, but for those that match a pattern and those of a shutdown."""
    errors, stopping = [], False
    for line in log.splitlines():
        stopping = (stopping or _STOPS in line) and _STARTS not in line
        if (
            not stopping
            and _ERROR.search(line)
            and not _HARMLESS.search(line)
            and not any(re.search(pattern, line) for pattern in expected)
        ):
            errors.append(line)
    return errors


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0
