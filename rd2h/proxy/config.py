"""The proxy's options: typed, with a reason for everything that is refused.

They come from a TOML or YAML file, from the command line, or both; the command line wins.

Pure but for reading the file; any thread.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rd2h.proxy.addresses import AddressError, advertised_url, bracketed, engine_url

__all__ = ["ConfigError", "Options", "load"]

Seconds = Annotated[float, Meta(gt=0, le=86_400 * 7)]
Port = Annotated[int, Meta(ge=0, le=65_535)]


class ConfigError(ValueError):
    """The options cannot be used; the message is one line that says which and why."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of the proxy. Durations are seconds.

    Attributes:
        prefill: Base URLs of the Prefill engines.
        decode: Base URLs of the Decode engines.
        host: Address or host name to listen on; ``0.0.0.0`` or ``::`` for all.
        port: TCP port to listen on; 0 takes a free one.
        advertise: The metaserver's address as Decode engines reach it: a URL, or a host with or
            without a port. Derived when left out.
        connect_timeout: Longest wait for a TCP connection to an engine.
        request_timeout: Longest life of one client request.
        rendezvous_timeout: Longest wait for the first rendezvous of a request at one engine.
        batch_wait: How long an incomplete prompt list waits for more rendezvous before those
            that are there are dispatched.
        prefill_deadline: How long after a dispatch began another Prefill engine may be tried.
        prefill_timeout: Longest wait for one Prefill engine's answer.
        linger: How long a Prefill answer is awaited after Decode's answer is complete.
        attempts: How many engines of one side are tried for one request.
        failures: After how many failed requests in a row an engine is taken out.
        probe_interval: Time between health probes of an engine that is in.
        probe_timeout: Longest wait for a probe's answer, and for the list of models.
        backoff: Time before the second probe of an engine that is out; doubled each time.
        backoff_max: Longest time between two probes.
        max_body_mib: Largest request body, in MiB.
        max_sequences: Most sequences (prompts times ``n``) in one request.
        shutdown_timeout: How long requests in flight may go on after SIGTERM or SIGINT.
        log_level: Least level that is logged.
    """

    prefill: Annotated[list[str], Meta(min_length=1)]
    decode: Annotated[list[str], Meta(min_length=1)]
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 8000
    advertise: str | None = None
    connect_timeout: Seconds = 5.0
    request_timeout: Seconds = 3600.0
    rendezvous_timeout: Seconds = 300.0
    batch_wait: Seconds = 0.5
    prefill_deadline: Seconds = 30.0
    prefill_timeout: Seconds = 600.0
    linger: Seconds = 5.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    failures: Annotated[int, Meta(ge=1, le=1000)] = 3
    probe_interval: Seconds = 10.0
    probe_timeout: Seconds = 5.0
    backoff: Seconds = 1.0
    backoff_max: Seconds = 60.0
    max_body_mib: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_sequences: Annotated[int, Meta(ge=1, le=65_536)] = 4096
    shutdown_timeout: Seconds = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def base_url(self, port: int) -> str:
        """The URL of this proxy for logs, when it listens on ``port``."""
        return f"http://{bracketed(self.host)}:{port}"


def load(path: Path | None, given: Mapping[str, object]) -> Options:
    """The options of a file, overridden by those ``given``; ``None`` means not given.

    Args:
        path: A ``.toml``, ``.yaml`` or ``.yml`` file, or None.
        given: Options by name, as they stand on the command line.

    Raises:
        ConfigError: if the file cannot be read, an option is unknown, or a value is not allowed.
    """
    values: dict[str, object] = {} if path is None else _read(path)
    values |= {name: value for name, value in given.items() if value is not None}
    if isinstance(values.get("host"), str):
        values["host"] = str(values["host"]).removeprefix("[").removesuffix("]")
    for side in ("prefill", "decode"):
        if not values.get(side):
            raise ConfigError(
                f"no {side} engine: give --{side} URL, or `{side}` in a --config file"
            )
    try:
        options = msgspec.convert(values, Options)
    except msgspec.ValidationError as error:
        where = "" if path is None else f"{path}: "
        raise ConfigError(where + str(error).replace("\n", " ")) from None
    try:
        prefill = _engines(options.prefill, "--prefill")
        decode = _engines(options.decode, "--decode")
        if options.advertise is not None:
            advertised_url(options.advertise, options.port or 1)
    except AddressError as error:
        raise ConfigError(str(error)) from None
    if options.backoff > options.backoff_max:
        raise ConfigError(
            f"backoff {options.backoff:g} s is longer than backoff_max {options.backoff_max:g} s"
        )
    return msgspec.structs.replace(options, prefill=prefill, decode=decode)


def _engines(urls: list[str], what: str) -> list[str]:
    checked = [engine_url(url, what) for url in urls]
    for url in checked:
        if checked.count(url) > 1:
            raise AddressError(f"{what} {url} is given twice")
    return checked


def _read(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    suffix = path.suffix.lower()
    content: object
    if suffix == ".toml":
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: no valid TOML: {error}") from None
    elif suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError:
            raise ConfigError(f"{path}: YAML needs PyYAML: pip install 'rd2h[proxy]'") from None
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None
    else:
        raise ConfigError(f"{path}: a configuration file ends in .toml, .yaml or .yml")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file must hold options by name, not a {_kind(content)}")
    return {str(name): value for name, value in content.items()}


def _kind(content: object) -> str:
    return "list" if isinstance(content, list) else "single value"
