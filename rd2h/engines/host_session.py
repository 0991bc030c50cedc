"""Identity of a process on this machine, and the session text of the host engine.

    host/1:<boot id>:<pid namespace>:<pid>:<start time>:<cookie address>:<cookie>

A pid alone names whoever has it now. Boot id and namespace say where the pid means anything,
the start time (clock ticks since boot) tells a reused pid, and the cookie, 16 random bytes in
the peer's memory, lets each read prove that it read from the address space that published it.
Only reads files under ``/proc``; any thread may call.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rd2h.engines.errors import EngineUnavailableError, PeerGoneError, SessionError, quote_session

__all__ = ["COOKIE_BYTES", "HostSession", "Machine", "start_time"]

COOKIE_BYTES = 16
_SESSION = re.compile(
    r"host/1:([0-9a-f-]{36}):([0-9]{1,19}):([0-9]{1,10}):([0-9]{1,20}):([0-9a-f]{1,16}):([0-9a-f]{32})"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a pid has a meaning.

    Attributes:
        boot_id: The kernel's id of this boot.
        pid_namespace: Inode of the PID namespace.
    """

    boot_id: str
    pid_namespace: int

    @classmethod
    def current(cls) -> "Machine":
        """Return the machine of this process.

        Raises:
            EngineUnavailableError: ``/proc`` is not mounted, so nothing can be identified.
        """
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            return cls(boot_id, Path("/proc/self/ns/pid").stat().st_ino)
        except OSError as error:
            raise EngineUnavailableError(
                f"the host engine needs Linux with /proc mounted: {error}"
            ) from error


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot.

    Raises:
        ProcessLookupError: No process has this pid.
        OSError: ``/proc`` does not tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    # The command name stands in parentheses and may hold spaces and parentheses itself, so
    # count from the last one: start time is field 22, and field 3 is the first after it.
    return int(stat[stat.rindex(b")") + 1 :].split()[22 - 3])


@dataclass(frozen=True, slots=True)
class HostSession:
    """A parsed session of the host engine.

    Attributes:
        machine: Where the peer runs.
        pid: The peer's process id there.
        started: When it started, in clock ticks since boot.
        cookie_address: Where in its memory the cookie lies.
        cookie: The 16 bytes that lie there.
    """

    machine: Machine
    pid: int
    started: int
    cookie_address: int
    cookie: bytes

    def __str__(self) -> str:
        return (
            f"host/1:{self.machine.boot_id}:{self.machine.pid_namespace}:{self.pid}:"
            f"{self.started}:{self.cookie_address:x}:{self.cookie.hex()}"
        )

    @property
    def name(self) -> str:
        """The session as messages show it."""
        return quote_session(str(self))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "HostSession":
        """Parse the text that a peer published; every read of a peer asks for the same one.

        Raises:
            SessionError: It is not a session of the host engine, version 1.
        """
        found = _SESSION.fullmatch(text)
        if found is None or not 0 < int(found[3]) < 2**31:
            raise SessionError(
                f"{quote_session(text)} is not a session of the host engine, version 1; do both "
                "sides run the same engine?"
            )
        return cls(
            Machine(found[1], int(found[2])),
            int(found[3]),
            int(found[4]),
            int(found[5], 16),
            bytes.fromhex(found[6]),
        )

    def check_machine(self, here: Machine) -> None:
        """Refuse a peer whose pid means nothing here.

        Raises:
            PeerGoneError: The peer is on another machine or in another PID namespace.
        """
        if self.machine.boot_id != here.boot_id:
            raise PeerGoneError(
                f"peer {self.name} is on another machine, or this one was rebooted (boot id here: "
                f"{here.boot_id}); the host engine works within one machine, use nixl or "
                "memfabric across machines"
            )
        if self.machine.pid_namespace != here.pid_namespace:
            raise PeerGoneError(
                f"peer {self.name} is in another PID namespace (here: {here.pid_namespace}); "
                "start both containers with the same one, for example `--pid=host`"
            )

    def check_process(self) -> None:
        """Refuse a peer that is no longer the process it was.

        It opens a file, so it is asked before the first read and when one has failed; what
        proves the reads between is the cookie.

        Raises:
            PeerGoneError: No such process, or a reused pid.
        """
        name = self.name
        try:
            started = start_time(self.pid)
        except (OSError, ValueError) as error:
            raise PeerGoneError(f"peer {name} has exited: {error}") from error
        if started != self.started:
            raise PeerGoneError(
                f"peer {name} has exited: its pid {self.pid} now belongs to a process started "
                f"at tick {started}"
            )
