"""Addresses: of engines, of the socket that we listen on, and of the metaserver as D sees it.

Pure but for `Metaserver.for_engine`, which asks the kernel which local address routes to D (nothing
is sent to D), and looks D's host name up. Any thread.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["AddressError", "Metaserver", "engine_url", "is_wildcard"]

METASERVER_PATH = "/v1/metaserver"
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?\Z")


class AddressError(ValueError):
    """An address that cannot be used; the message says why, and what to give instead."""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_wildcard(host: str) -> bool:
    """Whether ``host`` (without brackets) means every address of this machine."""
    ip = _ip(host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip is not None and ip.is_unspecified


def bracketed(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class _Parts:
    scheme: str
    host: str
    port: int | None
    path: str


def _split(text: str, what: str) -> _Parts:
    """Take a URL apart, strictly.

    Raises:
        AddressError: with ``what`` (such as ``--prefill``) and the text that is at fault.
    """
    try:
        url = urlsplit(text)
        port = url.port
        host = url.hostname or ""
    except ValueError as error:
        raise AddressError(f"{what} {text!r}: {error}") from None
    if url.scheme not in ("http", "https"):
        raise AddressError(f"{what} {text!r}: give a URL with http:// or https://")
    if url.username is not None or url.password is not None:
        raise AddressError(
            f"{what}: a URL with a user name or password would show in logs and in /status; "
            "leave them out, the client's Authorization header is passed through"
        )
    if url.query or url.fragment:
        raise AddressError(f"{what} {text!r}: a query or fragment has no meaning here")
    if not host or (_ip(host) is None and not _HOST_NAME.match(host)):
        raise AddressError(f"{what} {text!r}: {host!r} is no host name, IPv4 or IPv6 address")
    if port == 0:
        raise AddressError(f"{what} {text!r}: port 0 is no port that can be connected to")
    return _Parts(url.scheme, host, port, url.path)


def engine_url(text: str, what: str) -> str:
    """Check an engine's base URL and bring it into one form, without a slash at its end.

    Raises:
        AddressError: if it is no http(s) URL of one host.
    """
    parts = _split(text, what)
    if is_wildcard(parts.host):
        raise AddressError(
            f"{what} {text!r}: {parts.host} is where a server listens, not where it can be "
            "reached; give the engine's own address"
        )
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{bracketed(parts.host)}{port}{parts.path.rstrip('/')}"


def host_of(url: str) -> str:
    """The host of a URL that `engine_url` has passed, without brackets."""
    return urlsplit(url).hostname or ""


@dataclass(frozen=True)
class Metaserver:
    """Where D engines find the metaserver.

    Attributes:
        host: The address that we listen on; a wildcard means all of this machine's.
        port: The TCP port that we listen on.
        advertise: What the operator gave instead: a URL, or a host with or without a port.
    """

    host: str
    port: int
    advertise: str | None = None

    def for_engine(self, url: str) -> str:
        """The metaserver URL for the D engine at ``url``.

        Raises:
            AddressError: if D cannot reach that address; the message says what to give.
        """
        if self.advertise is not None:
            return advertised_url(self.advertise, self.port)
        if is_wildcard(self.host):
            host = _local_address_towards(host_of(url), self.host)
        else:
            host = self.host
            here = _ip(host)
            local = host == "localhost" or (here is not None and here.is_loopback)
            if local and not _is_this_machine(host_of(url)):
                raise AddressError(
                    f"the Decode engine {url} cannot reach the metaserver at {host}, which is "
                    "this machine alone: give --host an address that it can reach, or --advertise"
                )
        return f"http://{bracketed(host)}:{self.port}{METASERVER_PATH}"


def _is_this_machine(host: str) -> bool:
    """Whether a Decode engine's host is, or may be, a loopback address.

    Raises:
        AddressError: if it is a name that cannot be looked up.
    """
    ip = _ip(host)
    if ip is not None:
        return ip.is_loopback
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise AddressError(
            f"cannot tell whether the Decode engine host {host} is this machine, which alone "
            f"reaches the metaserver at a loopback address ({reason}): give --advertise"
        ) from None
    return any(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        for _, _, _, _, address in found
    )


def advertised_url(text: str, port: int) -> str:
    """The metaserver URL that ``--advertise`` means: a URL, or a host with or without a port.

    Raises:
        AddressError: if it is none, or a wildcard.
    """
    what = "--advertise"
    if "://" in text:
        parts = _split(text, what)
        given = parts.port
    else:
        # A bare IPv6 address has colons of its own.
        bare = f"[{text}]" if _ip(text) is not None and ":" in text else text
        parts = _split(f"http://{bare}", what)
        given = parts.port or port
    if is_wildcard(parts.host):
        raise AddressError(
            f'{what} {text}: {parts.host} means "every address of this machine" where a server '
            "listens; sent to a Decode engine it would mean that engine's own machine. Give the "
            f"host name or address by which the Decode engines reach this one (--host may stay "
            f"{parts.host})"
        )
    where = bracketed(parts.host) + ("" if given is None else f":{given}")
    path = parts.path if parts.path not in ("", "/") else METASERVER_PATH
    return f"{parts.scheme}://{where}{path}"


def _local_address_towards(host: str, wildcard: str) -> str:
    """The local address from which packets to ``host`` leave, of a family that we listen on."""
    # 0.0.0.0 takes IPv4 alone; :: is opened for both families.
    family = socket.AF_UNSPEC if ":" in wildcard else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)
        for kind, _, _, _, address in found:
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # connecting UDP asks for the route and sends nothing
                local = str(probe.getsockname()[0])
            ip = ipaddress.ip_address(local.partition("%")[0])
            if not ip.is_link_local:  # its zone has a meaning on this machine only
                return str(ip)
        reason = "only link-local addresses lead there"
    except OSError as error:
        reason = error.strerror or str(error)
    raise AddressError(
        f"cannot tell by which address the Decode engine host {host} reaches this machine "
        f"({reason}): give --advertise"
    )
