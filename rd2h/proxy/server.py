"""The process: sockets, logging, and a shutdown that lets requests finish.

While the proxy drains it goes on listening: Decode engines still have to post the rendezvous of
requests that are in flight.

Owner: the main thread; `handle_exit` runs as a signal handler in it.
"""

import errno
import logging
import socket
from types import FrameType

import uvicorn

from rd2h.proxy.addresses import AddressError
from rd2h.proxy.app import build
from rd2h.proxy.config import ConfigError, Options
from rd2h.proxy.services import Services

__all__ = ["ProxyServer", "listen", "run"]

log = logging.getLogger("rd2h.proxy")

# An address that this machine does not have, as a name may well have one of.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int) -> list[socket.socket]:
    """Open listening sockets on every address of ``host`` that this machine has; all on one port.

    ``::`` takes IPv4 too. Port 0 takes a free one.

    Raises:
        ConfigError: if the address is not this machine's, or the port is taken.
    """
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_open(family, (address[0], chosen, *address[2:]), both=host == "::"))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except (OSError, UnicodeError) as error:
        for opened in sockets:
            opened.close()
        reason = str(error)
        hint = ""
        if isinstance(error, OSError):
            reason = error.strerror or reason
            hint = ": give --port another one" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}{hint}") from None
    return sockets


def _open(family: int, address: tuple[str | int, ...], *, both: bool) -> socket.socket:
    """A socket that is bound; ``both`` if one of IPv6 takes IPv4 too."""
    # With protocol 0, asyncio leaves Nagle's algorithm on for accepted connections: every
    # answer would wait 40 ms for the client's acknowledgement of its headers.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        opened.bind(address)
        opened.setblocking(False)
    except BaseException:
        opened.close()
        raise
    return opened


class ProxyServer(uvicorn.Server):
    """A proxy that listens.

    Attributes:
        sockets: What it listens on; pass them to `run` or `serve`.
        services: Its state; the loop's.
        port: The port that it listens on.

    Args:
        options: See `Options`.

    Raises:
        ConfigError: if it cannot listen, or D could not reach the metaserver.
    """

    def __init__(self, options: Options) -> None:
        self.sockets = listen(options.host, options.port)
        self.port: int = self.sockets[0].getsockname()[1]
        try:
            self.services = Services(options, self.port)
        except AddressError as error:
            for opened in self.sockets:
                opened.close()
            raise ConfigError(str(error)) from None
        self._drain_until: float | None = None
        self._hurry = False
        self._ended = False
        super().__init__(
            uvicorn.Config(
                build(self.services),
                access_log=False,
                # Not whatever happens to be installed: httptools lets more through.
                http="h11",
                lifespan="on",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=30,
                ws="none",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Probe the engines once, then listen."""
        await super().startup(sockets)
        log.info("listening on %s", self.services.options.base_url(self.port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: the first lets requests finish, the second ends them, a third us."""
        if not self.services.draining:
            self.services.draining = True
        elif not self._hurry:
            self._hurry = True
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Stop when nothing is left to do; uvicorn asks ten times a second whether to stop."""
        if self.services.draining and not self.should_exit:
            self._drain(self.services.now())
        return await super().on_tick(counter)

    def _drain(self, now: float) -> None:
        left = self.services.in_flight
        if self._drain_until is None:
            self._drain_until = now + self.services.options.shutdown_timeout
            log.info("no more requests are taken; %d in flight", len(left))
        if self._hurry:
            self._drain_until = min(self._drain_until, now)
        if left and now >= self._drain_until and not self._ended:
            self._ended = True
            log.warning("%d requests in flight are ended", len(left))
            for entry in left:
                if entry.task is not None:
                    entry.task.cancel()
        # Those that were ended need a moment to say so to their clients.
        if not left or now >= self._drain_until + 1:
            self.should_exit = True


def run(options: Options) -> None:
    """Run a proxy until it is told to stop; for the main thread.

    Raises:
        ConfigError: if it cannot start.
    """
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    server = ProxyServer(options)
    for engine, metaserver in server.services.metaservers.items():
        log.info("decode engine %s is told the metaserver %s", engine, metaserver)
    server.run(sockets=server.sockets)
