"""Free TCP ports of this machine."""

import random
import socket

__all__ = ["free_ports"]

# Below what Linux gives to clients by itself (32768 and up): such a port is not taken by
# whoever connects somewhere in the next second.
_FIRST, _LAST = 15_000, 32_000
_handed_out: set[int] = set()


def free_ports(count: int = 1) -> int:
    """The first of ``count`` consecutive ports that nobody listens on.

    Nothing holds them until the caller listens; this process does not hand one out twice.

    Raises:
        OSError: There are none.
    """
    for _ in range(1000):
        first = random.randrange(_FIRST, _LAST - count + 1)
        ports = range(first, first + count)
        if _handed_out.isdisjoint(ports) and all(map(_free, ports)):
            _handed_out.update(ports)
            return first
    raise OSError(f"no {count} consecutive free ports from {_FIRST} to {_LAST}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            # Every address: an engine may listen on any of them.
            probe.bind(("", port))
        except OSError:
            return False
    return True
