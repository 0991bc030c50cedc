"""What ``rd2h check`` can be asked for, and which of it makes no sense.

Pure, and needs the standard library alone: everything is checked before anything starts.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "DEFAULT_PORT",
    "DecodeOptions",
    "EngineName",
    "MemoryName",
    "OptionError",
    "Pattern",
    "PrefillOptions",
    "check_decode_options",
    "check_prefill_options",
    "parse_patterns",
    "parse_size",
    "parse_sizes",
    "size_text",
]

DEFAULT_PORT = 18750
"""TCP port of the control connection: below the range that Linux hands out by itself."""

MAX_SIZE = 1 << 40
MAX_SEGMENTS = 1 << 20
MAX_RUNS = 256
MAX_ROUNDS = 1000
MAX_TIMEOUT = 86_400.0

_SIZE = re.compile(r"([0-9]{1,15})([KMG]?)(?:iB)?", re.IGNORECASE | re.ASCII)
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}


class OptionError(ValueError):
    """An option, or a combination of options, that makes no sense; the text is one line."""


class EngineName(StrEnum):
    """The transfer engines; ``auto`` is what both ends agree on when they meet."""

    AUTO = "auto"
    HOST = "host"
    NIXL = "nixl"
    MEMFABRIC = "memfabric"


class MemoryName(StrEnum):
    """Where an end keeps its memory."""

    HOST = "host"
    NPU = "npu"


class Pattern(StrEnum):
    """How the blocks of one read lie in the memory of both ends."""

    CONTIGUOUS = "contiguous"
    STRIDED = "strided"
    RANDOM = "random"


@dataclass(frozen=True)
class PrefillOptions:
    """The serving end.

    Attributes:
        bind: Address of this machine to listen on; without brackets also for IPv6.
        port: Control port; 0 takes a free one.
        engine: The transfer engine.
        memory: Where the source memory is.
        device_id: The NPU, for the memfabric engine.
        limit: Most bytes of source memory that one check may ask for.
        once: Serve one check, and end with its result.
        wait: With ``once``: seconds until a check must have begun.
        timeout: Seconds that any one wait may take.
    """

    bind: str
    port: int = DEFAULT_PORT
    engine: EngineName = EngineName.AUTO
    memory: MemoryName = MemoryName.HOST
    device_id: int = 0
    limit: int = 1 << 30
    once: bool = False
    wait: float = 600.0
    timeout: float = 30.0


@dataclass(frozen=True)
class DecodeOptions:
    """The end that reads.

    Attributes:
        connect: Prefill's address or host name.
        port: Its control port.
        engine: The transfer engine.
        memory: Where the destination memory is.
        device_id: The NPU, for the memfabric engine.
        sizes: Bytes that one read moves, in the order in which they are tried.
        patterns: How its blocks lie.
        block: Bytes of one block; the last one of a read may be shorter.
        rounds: How often each read is repeated; every one is compared.
        kv_port: Port on which Prefill must reach this machine; 0 takes a free one.
        advertise: Address at which Prefill shall reach it; None: the one that leads to Prefill.
        wait: Seconds to go on trying while nobody listens on the control port.
        timeout: Seconds that any one wait may take.
    """

    connect: str
    port: int = DEFAULT_PORT
    engine: EngineName = EngineName.AUTO
    memory: MemoryName = MemoryName.HOST
    device_id: int = 0
    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    patterns: tuple[Pattern, ...] = tuple(Pattern)
    block: int = 16 << 10
    rounds: int = 5
    kv_port: int = 0
    advertise: str | None = None
    wait: float = 5.0
    timeout: float = 30.0


def parse_size(text: str, option: str) -> int:
    """Read a size in bytes: ``4096``, ``64K``, ``1MiB``; K, M and G are powers of 1024.

    Raises:
        OptionError: it is not one, or not between 1 byte and 1 TiB.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise OptionError(f"{option}: {text!a} is no size; write bytes, or 64K, 1M, 2G")
    size = int(found[1]) << _SHIFTS[found[2].upper()]
    if not 1 <= size <= MAX_SIZE:
        raise OptionError(f"{option}: {text!a} is not between 1 byte and 1024G")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read ``--sizes``: sizes between commas; a repeated one counts once.

    Raises:
        OptionError: one of them is no size.
    """
    return tuple(dict.fromkeys(parse_size(part, "--sizes") for part in text.split(",")))


def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Read ``--patterns``: names between commas; a repeated one counts once.

    Raises:
        OptionError: one of them is not known.
    """
    known = {pattern.value: pattern for pattern in Pattern}
    names = [part.strip().lower() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise OptionError(f"--patterns: {name!a} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def size_text(size: int) -> str:
    """Write a size the way `parse_size` reads it, as short as is exact."""
    for suffix in ("G", "M", "K"):
        if size and size % (1 << _SHIFTS[suffix]) == 0:
            return f"{size >> _SHIFTS[suffix]}{suffix}"
    return str(size)


def check_prefill_options(options: PrefillOptions) -> None:
    """Refuse what makes no sense.

    Raises:
        OptionError: one line that names the option, the value, and what would do.
    """
    try:
        address = ipaddress.ip_address(options.bind)
    except ValueError:
        raise OptionError(
            f"--bind {options.bind!a} is no IP address; give one of this machine, or 0.0.0.0 or ::"
        ) from None
    if options.engine is EngineName.MEMFABRIC and (address.version != 4 or address.is_unspecified):
        raise OptionError(
            f"--bind {options.bind} with --engine memfabric: the engine publishes the address; "
            "give the IPv4 address at which Decode reaches this machine"
        )
    _check_common(options)


def check_decode_options(options: DecodeOptions) -> None:
    """Refuse what makes no sense.

    Raises:
        OptionError: one line that names the option, the value, and what would do.
    """
    if not options.connect or len(options.connect) > 255 or not options.connect.isprintable():
        raise OptionError(f"--connect {options.connect[:72]!a} is no address; give Prefill's")
    if options.port == 0:
        raise OptionError("--port is 0; give the port that `rd2h check prefill` prints")
    if not 0 <= options.kv_port <= 65535:
        raise OptionError(f"--kv-port is {options.kv_port}; a port is 0 to 65535")
    if options.advertise is not None:
        try:
            unspecified = ipaddress.ip_address(options.advertise).is_unspecified
        except ValueError:
            unspecified = True
        if unspecified:
            raise OptionError(
                f"--advertise {options.advertise[:72]!a} is no IP address that Prefill can reach"
            )
    if not 1 <= options.rounds <= MAX_ROUNDS:
        raise OptionError(f"--rounds is {options.rounds}; it is 1 to {MAX_ROUNDS}")
    if len(options.sizes) * len(options.patterns) > MAX_RUNS:
        raise OptionError(
            f"{len(options.sizes)} --sizes in {len(options.patterns)} --patterns are too many; "
            f"one check goes up to {MAX_RUNS} together"
        )
    most = max(options.sizes)
    if most > options.block * MAX_SEGMENTS:
        raise OptionError(
            f"--sizes {size_text(most)} in blocks of {size_text(options.block)} are more than "
            f"{MAX_SEGMENTS:,} blocks; give a larger --block"
        )
    _check_common(options)


def _check_common(options: PrefillOptions | DecodeOptions) -> None:
    if not 0 <= options.port <= 65535:
        raise OptionError(f"--port is {options.port}; a port is 0 to 65535")
    if not 0 <= options.device_id <= 1023:
        raise OptionError(f"--device-id is {options.device_id}; it is 0 to 1023")
    if not 1 <= options.timeout <= MAX_TIMEOUT:
        raise OptionError(f"--timeout is {options.timeout:g}; it is 1 to {MAX_TIMEOUT:.0f} seconds")
    if not 0 <= options.wait <= MAX_TIMEOUT:
        raise OptionError(f"--wait is {options.wait:g}; it is 0 to {MAX_TIMEOUT:.0f} seconds")
    if options.memory is MemoryName.NPU and options.engine is not EngineName.MEMFABRIC:
        raise OptionError(
            f"--memory npu with --engine {options.engine}: only memfabric reaches device memory; "
            "give --engine memfabric on both ends"
        )
