"""``rd2h check``: the command line of its two ends. Needs typer alone until it runs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rd2h.cli.check.options import (
    DecodeOptions,
    EngineName,
    MemoryName,
    OptionError,
    PrefillOptions,
    check_decode_options,
    check_prefill_options,
    parse_patterns,
    parse_size,
    parse_sizes,
    size_text,
)
from rd2h.cli.process import terminate_as_interrupt

if TYPE_CHECKING:
    from rd2h.cli.check.failures import Failure

__all__ = ["check"]

_PREFILL = PrefillOptions("")
_DECODE = DecodeOptions("")
_READS, _PLACE, _LIMITS = "Reads", "Engine and memory", "Connection and limits"

check = typer.Typer(
    name="check",
    help="Try a data plane out between two machines, without vLLM; compare every byte.",
    no_args_is_help=True,
)


def _option(
    text: str, panel: str, *flags: str, metavar: str | None = None
) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        *flags, help=text, rich_help_panel=panel, metavar=metavar
    )
    return info


@check.command()
def prefill(
    bind: Annotated[
        str, _option("Address of this machine to listen on; 0.0.0.0 or :: for all.", _LIMITS)
    ],
    port: Annotated[
        int, _option("Control port, TCP; 0 takes a free one.", _LIMITS)
    ] = _PREFILL.port,
    engine: Annotated[EngineName, _option("auto: what decode asks for.", _PLACE)] = _PREFILL.engine,
    memory: Annotated[MemoryName, _option("Where the source is.", _PLACE)] = _PREFILL.memory,
    device_id: Annotated[int, _option("The NPU, for memfabric.", _PLACE)] = _PREFILL.device_id,
    limit: Annotated[
        str, _option("Most memory that a check may ask for.", _LIMITS, metavar="SIZE")
    ] = size_text(_PREFILL.limit),
    once: Annotated[
        bool, _option("Serve one check, and end with its result.", _LIMITS, "--once")
    ] = False,
    wait: Annotated[
        float, _option("With --once: seconds until a check must have begun.", _LIMITS)
    ] = _PREFILL.wait,
    timeout: Annotated[
        float, _option("Seconds that any one wait may take.", _LIMITS)
    ] = _PREFILL.timeout,
) -> None:
    """Own the memory that decode pulls; run this first, on the Prefill machine.

    Serves checks until Ctrl-C. Exit status: 0 if there was a check and all passed, 1 if not, 2 for
    options that make no sense.
    """
    try:
        options = PrefillOptions(
            bind, port, engine, memory, device_id, parse_size(limit, "--limit"), once, wait, timeout
        )
        check_prefill_options(options)
    except OptionError as error:
        raise _refused("prefill", error) from None
    if not _serve(options):
        raise typer.Exit(1)


@check.command()
def decode(
    connect: Annotated[str, _option("Prefill's address or host name.", _LIMITS)],
    port: Annotated[int, _option("Prefill's control port.", _LIMITS)] = _DECODE.port,
    engine: Annotated[
        EngineName,
        _option("auto: prefill's; if that is auto, host on one machine, else nixl.", _PLACE),
    ] = _DECODE.engine,
    memory: Annotated[MemoryName, _option("Where the data lands.", _PLACE)] = _DECODE.memory,
    device_id: Annotated[int, _option("The NPU, for memfabric.", _PLACE)] = _DECODE.device_id,
    sizes: Annotated[
        str, _option("Bytes that one read moves; K, M, G: powers of 1024.", _READS)
    ] = ",".join(map(size_text, _DECODE.sizes)),
    patterns: Annotated[str, _option("How its blocks lie on both ends.", _READS)] = ",".join(
        _DECODE.patterns
    ),
    block: Annotated[
        str, _option("Bytes of one block, a segment of a read.", _READS, metavar="SIZE")
    ] = size_text(_DECODE.block),
    rounds: Annotated[
        int, _option("How often each is read, and compared.", _READS)
    ] = _DECODE.rounds,
    kv_port: Annotated[
        int,
        _option("Port at which prefill must reach this machine; 0: any that is free.", _LIMITS),
    ] = _DECODE.kv_port,
    advertise: Annotated[
        str | None,
        _option("Address at which prefill reaches this machine; else what leads to it.", _LIMITS),
    ] = None,
    wait: Annotated[
        float, _option("Seconds to go on trying while prefill is not there.", _LIMITS)
    ] = _DECODE.wait,
    timeout: Annotated[
        float, _option("Seconds that any one wait may take.", _LIMITS)
    ] = _DECODE.timeout,
    json: Annotated[
        bool, _option("Print the result as JSON and nothing else.", _READS, "--json")
    ] = False,
) -> None:
    """Pull memory from prefill, compare every byte, and say how fast it was.

    Exit status: 0 if everything was right, 1 if not, 2 for options that make no sense.
    """
    try:
        options = DecodeOptions(
            connect,
            port,
            engine,
            memory,
            device_id,
            parse_sizes(sizes),
            parse_patterns(patterns),
            parse_size(block, "--block"),
            rounds,
            kv_port,
            advertise,
            wait,
            timeout,
        )
        check_decode_options(options)
    except OptionError as error:
        raise _refused("decode", error) from None
    try:
        passed = _read(options, json)
    except KeyboardInterrupt:
        typer.echo("rd2h check decode: interrupted", err=True)
        raise typer.Exit(130) from None
    if not passed:
        raise typer.Exit(1)


def _refused(name: str, error: OptionError) -> typer.Exit:
    typer.echo(f"rd2h check {name}: {error}", err=True)
    return typer.Exit(2)


def _serve(options: PrefillOptions) -> bool:
    """Serve, print what happens, and say whether there were checks and all passed."""
    from rd2h.cli.check.engine import machine_name, starter
    from rd2h.cli.check.failures import CheckFailed, Side
    from rd2h.cli.check.memory import allocator
    from rd2h.cli.check.report import PrefillLines, make_console
    from rd2h.cli.check.server import PrefillServer
    from rd2h.cli.check.service import PrefillService
    from rd2h.cli.check.steps import Steps

    lines = PrefillLines(make_console(), options)

    def expired(failure: Failure) -> None:
        lines.broken(failure)
        _end_now()

    steps = Steps(Side.PREFILL, options.timeout, expired)
    service = PrefillService(
        options,
        steps,
        starter(Side.PREFILL, options.device_id, options.timeout),
        allocator(options.memory, options.device_id),
        machine_name(),
        lines.begun,
        lines.ended,
    )
    try:
        server = PrefillServer(options, service, steps)
        with terminate_as_interrupt():
            try:
                lines.listening(server.port)
                server.serve()
            except KeyboardInterrupt:
                service.close()
            finally:
                server.close()
    except CheckFailed as error:
        lines.broken(error.failure)
        return False
    lines.verdict(service.passed, service.failed)
    return service.passed > 0 and not service.failed


def _read(options: DecodeOptions, json: bool) -> bool:
    """Run the check, print the result, and say whether everything was right."""
    from rd2h.cli.check.decode import DecodeCheck
    from rd2h.cli.check.engine import starter
    from rd2h.cli.check.failures import Side
    from rd2h.cli.check.memory import allocator
    from rd2h.cli.check.report import as_json, make_console, print_result, print_step
    from rd2h.cli.check.result import StepDone
    from rd2h.cli.check.steps import Steps

    console = make_console()

    def tell(done: StepDone) -> None:
        if not json:
            print_step(console, done)

    def show() -> None:
        if json:
            typer.echo(as_json(checking.result))
        else:
            print_result(console, checking.result)

    def expired(failure: Failure) -> None:
        checking.result.failure = checking.result.failure or failure
        show()
        _end_now()

    steps = Steps(Side.DECODE, options.timeout, expired)
    checking = DecodeCheck(
        options,
        steps,
        starter(Side.DECODE, options.device_id, options.timeout),
        allocator(options.memory, options.device_id),
        tell,
    )
    checking.run()
    show()
    return checking.result.ok


def _end_now() -> NoReturn:
    """End the process from a thread while another one hangs in native code."""
    sys.stdout.flush()
    os._exit(1)
