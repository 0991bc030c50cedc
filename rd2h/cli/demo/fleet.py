"""The processes of a run: started, heard, and ended whatever happens. The parent's alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias, TypeVar

from rd2h.cli.demo.channel import Channel, ChannelClosedError, parent_channel
from rd2h.cli.demo.messages import Broken, FromRank, LogLine, Start, ToRank

__all__ = ["Deadline", "DemoError", "Event", "Fleet", "Gone", "Rank", "mappings_of"]

_END_TIMEOUT = 5.0

_Message = TypeVar("_Message")


class DemoError(Exception):
    """The run cannot go on; the text says what was waited for, or who broke."""


class Deadline:
    """A moment until which something must have happened.

    Args:
        seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self._at - time.monotonic())


@dataclass(frozen=True, eq=False)
class Rank:
    """One process.

    Attributes:
        name: How people call it.
        engine: Its Decode engine; 0 for Prefill.
        index: Its rank there.
        process: The process.
        channel: The parent's end of the pipe.
    """

    name: str
    engine: int
    index: int
    process: subprocess.Popen[bytes]
    channel: Channel[ToRank, FromRank]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Gone:
    """The process has ended; a negative status is the signal that ended it."""

    status: int


Event: TypeAlias = FromRank | Gone


class Fleet:
    """All processes of one run. A context: leaving it ends whatever is still there.

    Args:
        log: Called with each line that a rank has logged.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.ranks: list[Rank] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, start: Start) -> Rank:
        """Start a process, and tell it who it is."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rd2h.cli.demo.rank", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *([] if start.memory_fd is None else [start.memory_fd])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the parent's: with --json it is read by a program
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the others
            )
        channel = parent_channel(Connection(ours.detach()))
        rank = Rank(name, start.engine, start.rank, process, channel)
        self.ranks.append(rank)
        self.send(rank, start)
        return rank

    def send(self, rank: Rank, message: ToRank) -> None:
        """Say something to a process; if it has gone, that is heard as an event."""
        try:
            rank.channel.send(message)
        except ChannelClosedError:
            return

    def events(self, deadline: Deadline, what: Callable[[], str]) -> Iterator[tuple[Rank, Event]]:
        """Yield what processes say, until the caller stops; their log lines excepted.

        Args:
            deadline: Until when.
            what: Says what is waited for, for the error.

        Raises:
            DemoError: at the deadline, or when a rank says that it is broken.
        """
        while True:
            by_connection = {rank.channel.connection: rank for rank in self.ranks}
            ready = wait(list(by_connection), deadline.remaining())
            if not ready:
                raise DemoError(f"waited {deadline.seconds:g} s for {what()}")
            for connection in ready:
                rank = by_connection[connection]  # type: ignore[index]  # it also takes sockets
                event = self._event(rank)
                if event is not None:
                    yield rank, event

    def collect(
        self, ranks: Collection[Rank], kind: type[_Message], what: str, timeout: float
    ) -> dict[Rank, _Message]:
        """Wait until each of ``ranks`` has said one message of a kind; others are dropped.

        Raises:
            DemoError: at the deadline, or when one of them ends instead.
        """
        found: dict[Rank, _Message] = {}
        missing = set(ranks)
        if not missing:
            return found

        def waited_for() -> str:
            return f"{what} from {', '.join(sorted(map(str, missing)))}"

        for rank, event in self.events(Deadline(timeout), waited_for):
            if isinstance(event, kind):
                found[rank] = event
                missing.discard(rank)
            elif isinstance(event, Gone) and rank in missing:
                raise DemoError(f"{rank} ended with status {event.status} instead of: {what}")
            if not missing:
                return found
        raise AssertionError("events do not end")

    def end(self, timeout: float = _END_TIMEOUT) -> list[str]:
        """Break every pipe, which ends the processes; kill those that stay.

        Returns:
            What had to be killed.
        """
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.channel.close()
        deadline = Deadline(timeout)
        killed = []
        for rank in ranks:
            try:
                rank.process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
                killed.append(f"process {rank.process.pid}, {rank}")
        return killed

    # -------------------------------------------------------------------------------- internals

    def _event(self, rank: Rank) -> Event | None:
        try:
            message = rank.channel.receive()
        except ChannelClosedError:
            return self._reap(rank)
        if isinstance(message, LogLine):
            self._log(f"{rank}: {message.text}")
            return None
        if isinstance(message, Broken):
            raise DemoError(f"{rank} cannot go on: {message.reason}")
        return message

    def _reap(self, rank: Rank) -> Gone:
        """The pipe broke: the process has ended, or is about to."""
        self.ranks.remove(rank)
        rank.channel.close()
        try:
            return Gone(rank.process.wait(_END_TIMEOUT))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
            raise DemoError(f"{rank} closed its pipe and did not end; it was killed") from None


def mappings_of(fd: int) -> list[str]:
    """Name the processes that still map a memory file, this one included."""
    inode = os.fstat(fd).st_ino
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            # address, access, offset, device, inode, path
            lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
            if any(len(f) > 5 and f[4] == str(inode) and "memfd:" in f[5] for f in lines):
                found.append(f"process {maps.parent.name} maps the main pool")
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found
