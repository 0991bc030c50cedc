"""``rd2h proxy``: run the P/D proxy and metaserver.

Imports nothing of the proxy until it runs. Every option is one of `rd2h.proxy.config.Options`, and
None means not given: the defaults are applied there, after those of a file. The ones named here
are for the help alone.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

__all__ = ["proxy"]


def _option(panel: str, metavar: str, default: str, text: str) -> OptionInfo:
    made: OptionInfo = typer.Option(
        help=text, metavar=metavar, rich_help_panel=panel, show_default=default or False
    )
    return made


def proxy(
    config: Annotated[
        Path | None,
        _option("Engines", "FILE", "", "Options from a .toml or .yaml file; flags here win."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        _option("Engines", "URL", "", "Base URL of a Prefill engine; repeat for more."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        _option("Engines", "URL", "", "Base URL of a Decode engine; repeat for more."),
    ] = None,
    host: Annotated[
        str | None,
        _option(
            "Addresses", "ADDRESS", "127.0.0.1", "Address to listen on; 0.0.0.0 or :: for all."
        ),
    ] = None,
    port: Annotated[
        int | None,
        _option("Addresses", "PORT", "8000", "TCP port to listen on; 0 takes a free one."),
    ] = None,
    advertise: Annotated[
        str | None,
        _option(
            "Addresses",
            "ADDRESS",
            "derived",
            "The metaserver as Decode engines reach it: a URL, or a host with or without port.",
        ),
    ] = None,
    connect_timeout: Annotated[
        float | None,
        _option("Limits", "SECONDS", "5", "Longest wait for a TCP connection to an engine."),
    ] = None,
    request_timeout: Annotated[
        float | None, _option("Limits", "SECONDS", "3600", "Longest life of one client request.")
    ] = None,
    rendezvous_timeout: Annotated[
        float | None,
        _option(
            "Limits",
            "SECONDS",
            "300",
            "Longest wait for a request's first rendezvous at one Decode engine.",
        ),
    ] = None,
    batch_wait: Annotated[
        float | None,
        _option(
            "Limits",
            "SECONDS",
            "0.5",
            "How long an incomplete prompt list waits before a part is dispatched.",
        ),
    ] = None,
    prefill_deadline: Annotated[
        float | None,
        _option(
            "Limits",
            "SECONDS",
            "30",
            "How long after a dispatch began another Prefill engine may be tried.",
        ),
    ] = None,
    prefill_timeout: Annotated[
        float | None,
        _option("Limits", "SECONDS", "600", "Longest wait for one Prefill engine's answer."),
    ] = None,
    linger: Annotated[
        float | None,
        _option(
            "Limits",
            "SECONDS",
            "5",
            "How long Prefill's answer is awaited after Decode's is complete.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        _option("Limits", "SECONDS", "30", "How long requests may go on after SIGTERM or SIGINT."),
    ] = None,
    max_body_mib: Annotated[
        int | None, _option("Limits", "MIB", "64", "Largest request body.")
    ] = None,
    max_sequences: Annotated[
        int | None,
        _option("Limits", "COUNT", "4096", "Most sequences (prompts times n) in one request."),
    ] = None,
    attempts: Annotated[
        int | None,
        _option("Health", "COUNT", "3", "How many engines of one side are tried for one request."),
    ] = None,
    failures: Annotated[
        int | None,
        _option(
            "Health", "COUNT", "3", "After how many failed requests in a row an engine is out."
        ),
    ] = None,
    probe_interval: Annotated[
        float | None,
        _option("Health", "SECONDS", "10", "Time between health probes of an engine that is in."),
    ] = None,
    probe_timeout: Annotated[
        float | None, _option("Health", "SECONDS", "5", "Longest wait for a probe's answer.")
    ] = None,
    backoff: Annotated[
        float | None,
        _option(
            "Health",
            "SECONDS",
            "1",
            "Time before the second probe of an engine that is out; doubles.",
        ),
    ] = None,
    backoff_max: Annotated[
        float | None, _option("Health", "SECONDS", "60", "Longest time between two probes.")
    ] = None,
    log_level: Annotated[
        str | None,
        _option(
            "Logging", "LEVEL", "info", "Least level that is logged: debug, info, warning or error."
        ),
    ] = None,
) -> None:
    """Run the P/D proxy: one OpenAI-compatible address before Prefill and Decode engines."""
    given = {name: value for name, value in locals().items() if name != "config"}
    from rd2h.proxy.config import ConfigError, load

    try:
        options = load(config, given)
        # After the options, which can be judged without the extra.
        from rd2h.proxy.server import run

        run(options)
    except ConfigError as error:
        typer.echo(f"rd2h proxy: {error}", err=True)
        raise typer.Exit(2) from None
