"""Start, watch and end server processes: the side of the nursery that a program sees.

`Launcher` starts the nursery at its first use, and one thread reads what it says. Any thread may
call.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from serving.nursery import Born, Gone, Notice, Order, Ready

__all__ = ["COMMON_ENVIRONMENT", "Launcher", "Process", "ServingError", "group_members"]

# What every vLLM process gets. Several servers share the cores of one machine, and none may look
# for anything outside it.
COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_DISABLE_LOG_LOGO": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONFAULTHANDLER": "1",
    # vLLM and torch warn about each other's old names; an operator cannot do anything about it.
    "PYTHONWARNINGS": "ignore",
}
_ROOT = Path(__file__).resolve().parents[1]


class ServingError(RuntimeError):
    """A server did not start, ended by itself, or refused a request; the message says why."""


class Process:
    """A server's process group.

    Attributes:
        pid: Of its first process, and of the group.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._gone = threading.Event()
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Exit status of the first process, minus the signal that ended it, or None: it lives."""
        return self._code

    def wait(self, seconds: float) -> bool:
        """Wait until the first process ends; false if it did not in that time."""
        return self._gone.wait(seconds)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the first process and all that it started; nothing if all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def set_gone(self, code: int) -> None:
        """Note the end of the first process; the launcher's thread calls it."""
        self._code = code
        self._gone.set()


class Launcher:
    """Starts servers through a nursery; a context manager that leaves none behind.

    Args:
        log: File that gets what the nursery itself prints.
        environment: Variables for every server, beside `COMMON_ENVIRONMENT`.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._environment = {**os.environ, **COMMON_ENVIRONMENT, **(environment or {})}
        # One order at a time: answers come in the order of the orders.
        self._lock = threading.Lock()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._born: queue.Queue[Process | None] = queue.Queue()
        self._ready = threading.Event()
        self._processes: dict[int, Process] = {}
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """The launcher; the nursery starts importing at once, without being waited for."""
        with self._lock:
            self._running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def launch(
        self,
        program: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a server; waits for the nursery, not for the server.

        Args:
            program: ``vllm``, or a module to run.
            arguments: Of the program.
            log: File that gets its output; appended to.
            environment: Variables for this one alone.

        Raises:
            ServingError: The nursery ended, as it does when vLLM cannot be imported.
        """
        order = Order(program, list(arguments), environment or {}, str(log.resolve()))
        with self._lock:
            nursery = self._running()
            assert nursery.stdin is not None
            try:
                nursery.stdin.write(msgspec.json.encode(order) + b"\n")
                nursery.stdin.flush()
            except BrokenPipeError:
                process = None
            else:
                process = self._born.get()
        if process is None:
            raise ServingError(f"the nursery ended: {tail(self._log)}")
        return process

    def wait_ready(self, seconds: float) -> bool:
        """Wait until vLLM is imported; false if it was not in that time."""
        with self._lock:
            self._running()
        return self._ready.wait(seconds)

    def close(self) -> None:
        """End the nursery and every server that still runs."""
        with self._lock:
            nursery, self._nursery = self._nursery, None
            if nursery is None:
                return
            assert nursery.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                nursery.stdin.close()
            try:
                nursery.wait(10)
            except subprocess.TimeoutExpired:
                # Still importing, most likely: then it has no servers.
                nursery.kill()
                nursery.wait()
            for pid, process in self._processes.items():
                if group_members(pid):
                    process.signal_group(signal.SIGKILL)
        if self._reader is not None:
            self._reader.join()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._nursery is None:
            with self._log.open("ab") as log:
                self._nursery = subprocess.Popen(
                    [sys.executable, "-m", "serving.nursery"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=_ROOT,
                    env=self._environment,
                    start_new_session=True,
                )
            self._reader = threading.Thread(
                target=self._read, args=(self._nursery,), name="nursery", daemon=True
            )
            self._reader.start()
        return self._nursery

    def _read(self, nursery: subprocess.Popen[bytes]) -> None:
        """Follow what the nursery says, until it ends."""
        assert nursery.stdout is not None
        decoder = msgspec.json.Decoder(Notice)
        with nursery.stdout as lines:
            for line in lines:
                match decoder.decode(line):
                    case Ready():
                        self._ready.set()
                    case Born(pid):
                        process = self._processes[pid] = Process(pid)
                        self._born.put(process)
                    case Gone(pid, code):
                        self._processes[pid].set_gone(code)
        for process in self._processes.values():
            if process.code is None:
                process.set_gone(-signal.SIGKILL)
        self._born.put(None)


def group_members(group: int) -> list[int]:
    """Process ids in a process group that live; the dead that nobody buried yet are not counted."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name, in parentheses, may hold anything.
            state, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(member_of) == group and state not in "ZX":
            members.append(int(entry.name))
    return members


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"
