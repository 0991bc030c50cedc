"""What this machine says about itself that decides whether a data plane works."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Facts", "gather"]

_CAP_SYS_PTRACE = 19


@dataclass(frozen=True)
class Facts:
    """Texts for people; each says "unknown" where the system does not tell.

    Attributes:
        user: Number of the user that runs this.
        ptrace_scope: ``kernel.yama.ptrace_scope``; "no Yama" without.
        ptrace_right: Whether this process has CAP_SYS_PTRACE.
        memlock: Limit of locked memory.
        huge_pages: Free and all huge pages, and the size of one.
        driver: The Ascend devices and driver that are there.
        ucx: Variables of the environment that limit UCX.
    """

    user: str
    ptrace_scope: str
    ptrace_right: str
    memlock: str
    huge_pages: str
    driver: str
    ucx: str


def gather(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Facts:
    """Ask the machine; never raises.

    Args:
        root: Where ``proc``, ``dev`` and ``usr`` are.
        environment: The variables of this process.
    """
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    return Facts(
        user=str(os.geteuid()),
        ptrace_scope="no Yama" if scope is None else scope.strip(),
        ptrace_right=_ptrace_right(root),
        memlock=_memlock(),
        huge_pages=_huge_pages(root),
        driver=_driver(root),
        ucx=", ".join(f"{k}={v}" for k, v in sorted(environment.items()) if k.startswith("UCX_"))
        or "none set",
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _fields(text: str | None) -> dict[str, str]:
    """The lines ``name: value`` of a file below ``/proc``."""
    pairs = (line.partition(":") for line in (text or "").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _ptrace_right(root: Path) -> str:
    mask = _fields(_read(root / "proc/self/status")).get("CapEff", "")
    try:
        return "yes" if int(mask, 16) >> _CAP_SYS_PTRACE & 1 else "no"
    except ValueError:
        return "unknown"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"


def _huge_pages(root: Path) -> str:
    fields = _fields(_read(root / "proc/meminfo"))
    names = ("HugePages_Free", "HugePages_Total", "Hugepagesize")
    free, total, size = (fields.get(name, "unknown") for name in names)
    return f"{free} free of {total}, {size} each"


def _driver(root: Path) -> str:
    try:
        devices = sorted(path.name for path in (root / "dev").glob("davinci[0-9]*"))
    except OSError:
        devices = []
    version = _fields(
        (_read(root / "usr/local/Ascend/driver/version.info") or "").replace("=", ":")
    )
    driver = f"driver {version['Version']}" if "Version" in version else "no driver version"
    return f"{driver}, {len(devices)} devices {', '.join(devices[:4])}".rstrip()
