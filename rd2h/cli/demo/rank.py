"""The body of a process that the demo starts: ``python -m rd2h.cli.demo.rank <descriptor>``.

The descriptor is this rank's end of the pipe. When the parent goes away, however it does, the
pipe breaks and the process ends at once: nothing that it holds outlives it.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

from rd2h.cli.demo.channel import Channel, ChannelClosedError, rank_channel
from rd2h.cli.demo.messages import Broken, Closed, FromRank, LogLine, Role, Start, ToRank
from rd2h.cli.demo.plan import Plan

__all__ = ["Control", "RankBody", "main", "threads_left"]

_CONTROL_THREAD = "rd2h-demo-control"


class RankBody(Protocol):
    """What a process is; made once the plan is known."""

    def run(self) -> list[str]:
        """Do everything, until the parent says stop; return what is left over afterwards."""


class Control:
    """What the parent says, in order.

    Args:
        channel: This rank's end of the pipe.
        timeout: Seconds that any wait for the parent may take.
    """

    def __init__(self, channel: Channel[FromRank, ToRank], timeout: float) -> None:
        self._channel = channel
        self._timeout = timeout
        self._messages: SimpleQueue[ToRank] = SimpleQueue()
        threading.Thread(target=self._listen, name=_CONTROL_THREAD, daemon=True).start()

    def wait(self, what: str) -> ToRank:
        """Return the parent's next message.

        Raises:
            TimeoutError: it said nothing.
        """
        try:
            return self._messages.get(timeout=self._timeout)
        except Empty:
            raise TimeoutError(
                f"waited {self._timeout:g} s for the demo's parent to say {what}"
            ) from None

    def send(self, message: FromRank) -> None:
        """Tell the parent; any thread."""
        try:
            self._channel.send(message)
        except ChannelClosedError:
            _exit_without_parent()

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._channel.receive())
        except ChannelClosedError:
            _exit_without_parent()


def _exit_without_parent() -> NoReturn:
    """End at once: other threads may be anywhere, also in a wait."""
    os._exit(1)


class _LogToParent(logging.Handler):
    """Sends what rd2h logs to the parent, which owns the terminal."""

    def __init__(self, channel: Channel[FromRank, ToRank]) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(LogLine(self.format(record)))
        except ChannelClosedError:
            return


def threads_left() -> list[str]:
    """Name the threads that still run beside the main one and the control thread."""
    known = (threading.main_thread().name, _CONTROL_THREAD)
    names = (thread.name for thread in threading.enumerate())
    return [f"thread {name}" for name in names if name not in known]


def main(fd: int) -> None:
    """Run a rank on its end of the pipe."""
    channel = rank_channel(Connection(fd))
    logging.getLogger().addHandler(_LogToParent(channel))
    start = channel.receive()
    assert isinstance(start, Start), start
    # The parent's own waits end first; this one is for a parent that is stuck.
    control = Control(channel, 4 * start.options.timeout)
    try:
        leftovers = _body(start, control).run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        control.send(Closed(leftovers, peak))
    except Exception as error:
        control.send(Broken(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _body(start: Start, control: Control) -> RankBody:
    plan = Plan(start.options)
    if start.role is Role.PREFILL:
        from rd2h.cli.demo.prefill_rank import PrefillRank

        return PrefillRank(plan, start.rank, control)
    from rd2h.cli.demo.decode_rank import DecodeRank

    assert start.memory_fd is not None
    return DecodeRank(plan, start.engine, start.rank, start.memory_fd, control)


if __name__ == "__main__":
    main(int(sys.argv[1]))
