"""vLLM servers and the rd2h proxy as processes, with typed options.

A server is used as a context manager. `launch` and `wait_ready` are apart, so that several can
start at the same time. Any thread may call; one server is for one thread at a time.
"""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from serving.client import Client
from serving.launcher import Launcher, Process, ServingError, group_members, tail
from serving.options import KvTransfer, VllmOptions
from serving.ports import free_ports

__all__ = [
    "KvTransfer",
    "ProxyServer",
    "Server",
    "VllmOptions",
    "VllmServer",
    "start_all",
    "stop_all",
]

# A start takes 6 s alone, and an import of 16 s before the first; machines are slow at times.
START_SECONDS = 240.0
STOP_SECONDS = 15.0
_PAUSE = 0.05


class Server(ABC):
    """A server process that answers ``/health`` when it is ready.

    Attributes:
        name: What messages call it.
        port: Its HTTP port on 127.0.0.1; it keeps it when it is started again.
        log: File with all that it printed, over all its starts.
    """

    ready_path = "/health"

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.port = free_ports()
        self.log = folder / f"{name}.log"
        self._launched_at = 0.0
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether its first process lives."""
        return self._process is not None and self._process.code is None

    @property
    def pids(self) -> list[int]:
        """Every process that belongs to it."""
        return [] if self._process is None else group_members(self._process.pid)

    def client(self) -> Client:
        """A client of it, which the caller closes."""
        return Client(self.url)

    def launch(self) -> None:
        """Start it without waiting until it is ready.

        Raises:
            ServingError: It runs already, or cannot be started at all.
        """
        if self.pids:
            raise ServingError(f"{self.name} runs already")
        self._launched_at = time.monotonic()
        self._process = self._launch()

    def wait_ready(self, seconds: float = START_SECONDS) -> float:
        """Wait until it answers.

        Returns:
            Seconds since it was launched.

        Raises:
            ServingError: It ended, or is not ready in time and was killed; with the end of its log.
        """
        process = self._running()
        deadline = time.monotonic() + seconds
        with httpx.Client(trust_env=False, timeout=5) as client:
            while not process.wait(_PAUSE):
                try:
                    if client.get(f"{self.url}{self.ready_path}").status_code == 200:
                        return time.monotonic() - self._launched_at
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    log = tail(self.log)
                    self.kill()
                    raise ServingError(f"{self.name} was not ready in {seconds:g} s:\n{log}")
        # What it started may still be there.
        self.kill()
        raise ServingError(
            f"{self.name} ended with status {process.code} before it was ready:\n{tail(self.log)}"
        )

    def start(self, seconds: float = START_SECONDS) -> float:
        """Launch it and wait until it is ready; returns and raises what `wait_ready` does."""
        self.launch()
        return self.wait_ready(seconds)

    def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Ask it to end, and kill what has not ended in time.

        Returns:
            Whether all of it ended by itself.
        """
        if self._process is None:
            return True
        self._process.signal_group(signal.SIGCONT)
        self._terminate(self._process)
        self._process.wait(seconds)
        # The others follow the first one within moments, if they follow at all.
        clean = self._wait_empty(2.0)
        self.kill()
        return clean

    def kill(self) -> None:
        """Kill all its processes at once, and wait until they are dead."""
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)
            if not self._wait_empty(30.0):
                raise ServingError(f"{self.name} cannot be killed: processes {self.pids}")

    def restart(self, seconds: float = START_SECONDS) -> float:
        """Start it again with the same options and ports, after `stop` or `kill`, or as it runs."""
        self.stop()
        return self.start(seconds)

    def freeze(self) -> None:
        """Stop all its processes where they are (SIGSTOP), as a machine that hangs would."""
        self._running().signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._running().signal_group(signal.SIGCONT)

    @abstractmethod
    def _launch(self) -> Process:
        """Start the process."""

    def _terminate(self, process: Process) -> None:
        """Ask the process to end: its first one only, which ends the others in their order."""
        if process.code is None:
            with suppress(ProcessLookupError):  # it has just ended, and nobody has told us yet
                os.kill(process.pid, signal.SIGTERM)

    def _running(self) -> Process:
        if self._process is None:
            raise ServingError(f"{self.name} was not launched")
        return self._process

    def _wait_empty(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pids:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


class VllmServer(Server):
    """One vLLM API server with its engine core and workers.

    Args:
        launcher: Starts it.
        options: How.
        name: Of the server and its log.
        folder: Where the log goes.
    """

    def __init__(self, launcher: Launcher, options: VllmOptions, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.options = options
        self._launcher = launcher

    def _launch(self) -> Process:
        return self._launcher.launch(
            "vllm", self.options.command_line(self.port), self.log, self.options.environment
        )


class ProxyServer(Server):
    """``rd2h proxy``, as a user runs it; ready when an engine is in on each side.

    Args:
        launcher: Starts it.
        prefill: Base URLs of the Prefill engines.
        decode: Base URLs of the Decode engines.
        folder: Where the log goes.
        arguments: Further options of ``rd2h proxy``.
        name: Of the server and its log.
    """

    ready_path = "/ready"

    def __init__(
        self,
        launcher: Launcher,
        prefill: Sequence[str],
        decode: Sequence[str],
        folder: Path,
        arguments: Sequence[str] = (),
        name: str = "proxy",
    ) -> None:
        super().__init__(name, folder)
        self._launcher = launcher
        self._arguments = [
            *(f"--prefill={url}" for url in prefill),
            *(f"--decode={url}" for url in decode),
            f"--port={self.port}",
            # Engines come and go quickly here.
            "--backoff=0.2", "--backoff-max=0.5", "--probe-interval=1",
            *arguments,
        ]  # fmt: skip

    def _launch(self) -> Process:
        return self._launcher.launch("rd2h", ["proxy", *self._arguments], self.log)


def start_all(
    servers: Sequence[Server],
    seconds: float = START_SECONDS,
    ready: Callable[[Server, float], None] | None = None,
) -> list[float]:
    """Start servers at the same time; if one fails, all are stopped.

    Args:
        servers: Which.
        seconds: Longest wait for each.
        ready: Told of each, in order, when it is ready, and how many seconds that took.

    Returns:
        For each, the seconds until it was ready.

    Raises:
        ServingError: One of them did not start.
    """
    try:
        for server in servers:
            server.launch()
        took: list[float] = []
        for server in servers:
            took.append(server.wait_ready(seconds))
            if ready is not None:
                ready(server, took[-1])
        return took
    except BaseException:
        for server in servers:
            server.kill()
        raise


def stop_all(servers: Sequence[Server], seconds: float = STOP_SECONDS) -> None:
    """Stop servers at the same time."""
    with ThreadPoolExecutor(max(len(servers), 1)) as pool:
        list(pool.map(lambda server: server.stop(seconds), servers))
