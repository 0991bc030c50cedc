"""``rd2h demo``: the command line of the demo.

Needs typer alone until it runs; the defaults are those of `DemoOptions`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rd2h.cli.demo.options import (
    DemoOptions,
    EngineName,
    Fault,
    OptionError,
    Sabotage,
    check_options,
)
from rd2h.cli.process import available_memory, terminate_as_interrupt

__all__ = ["demo"]

_DEFAULT = DemoOptions()
_SHAPE, _LOAD, _RUN = "Model and caches", "Engines and load", "Run"


def _option(text: str, panel: str, *flags: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(*flags, help=text, rich_help_panel=panel)
    return info


def demo(
    layers: Annotated[int, _option("Layers.", _SHAPE)] = _DEFAULT.layers,
    latent: Annotated[
        int, _option("Width of the main KV's first tensor, bf16.", _SHAPE)
    ] = _DEFAULT.latent,
    rope: Annotated[
        int, _option("Width of its second tensor; 0: one packed tensor.", _SHAPE)
    ] = _DEFAULT.rope,
    indexer_dim: Annotated[
        int, _option("Width of the indexer; 0: none.", _SHAPE)
    ] = _DEFAULT.indexer_dim,
    no_indexer_every: Annotated[
        int, _option("Each such layer has no indexer; 0: all have one.", _SHAPE)
    ] = _DEFAULT.no_indexer_every,
    lic8: Annotated[
        bool,
        _option("The indexer is int8, with scales in a tensor of their own.", _SHAPE, "--lic8"),
    ] = _DEFAULT.lic8,
    block_size: Annotated[int, _option("Tokens in a block.", _SHAPE)] = _DEFAULT.block_size,
    prefill_tp: Annotated[
        int, _option("Prefill ranks; a multiple of --decode-tp.", _LOAD)
    ] = _DEFAULT.prefill_tp,
    decode_tp: Annotated[int, _option("Decode ranks.", _LOAD)] = _DEFAULT.decode_tp,
    buffers: Annotated[
        int, _option("Layer buffers on each Prefill rank, used in turn.", _LOAD)
    ] = _DEFAULT.buffers,
    requests: Annotated[int, _option("Requests.", _LOAD)] = _DEFAULT.requests,
    tokens: Annotated[int, _option("Tokens in each prompt.", _LOAD)] = _DEFAULT.tokens,
    chunk: Annotated[
        int, _option("Tokens of each prompt in one Prefill step.", _LOAD)
    ] = _DEFAULT.chunk,
    engine: Annotated[EngineName, _option("Transfer engine.", _RUN)] = _DEFAULT.engine,
    fault: Annotated[
        Fault | None, _option("What goes wrong on purpose, in the middle.", _RUN)
    ] = None,
    seed: Annotated[int, _option("Of contents and block ids.", _RUN)] = _DEFAULT.seed,
    timeout: Annotated[
        float, _option("Seconds that any one wait, as for the transfer, may take.", _RUN)
    ] = _DEFAULT.timeout,
    json: Annotated[
        bool, _option("Print the result as JSON and nothing else.", _RUN, "--json")
    ] = False,
    verbose: Annotated[
        bool, _option("Show every line that a process logs.", _RUN, "--verbose")
    ] = False,
    sabotage: Annotated[Sabotage | None, typer.Option(hidden=True)] = None,
) -> None:
    """Move a DeepSeek-V3.2-shaped KV cache between real processes, and check every byte.

    Exit status: 0 if everything held, 1 if not, 2 for options that make no sense.
    """
    options = DemoOptions(
        prefill_tp,
        decode_tp,
        layers,
        latent,
        rope,
        indexer_dim,
        no_indexer_every,
        lic8,
        block_size,
        requests,
        tokens,
        chunk,
        buffers,
        engine,
        fault,
        seed,
        timeout,
        sabotage,
    )
    try:
        check_options(options)
        passed = _run(options, json, verbose)
    except OptionError as error:
        typer.echo(f"rd2h demo: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("rd2h demo: interrupted; every process has ended", err=True)
        raise typer.Exit(130) from None
    if not passed:
        raise typer.Exit(1)


def _run(options: DemoOptions, json: bool, verbose: bool) -> bool:
    """Run, print the result, and say whether everything held."""
    from rich.console import Console

    from rd2h.cli.demo.fleet import DemoError
    from rd2h.cli.demo.plan import Plan, check_memory
    from rd2h.cli.demo.progress import Bars, Lines, Progress, Silent
    from rd2h.cli.demo.report import as_json, print_report
    from rd2h.cli.demo.result import RunResult
    from rd2h.cli.demo.run import run_demo

    check_memory(options, available_memory())
    _check_engine(options)
    plan = Plan(options)
    console = Console()
    progress: Progress
    progress = Silent() if json else Bars(console) if console.is_terminal else Lines(console)
    try:
        with terminate_as_interrupt():
            result = run_demo(plan, progress, verbose=verbose)
    except DemoError as error:
        result = RunResult(options, error=str(error))
    finally:
        progress.close()
    if json:
        typer.echo(as_json(result))
    else:
        print_report(console, result)
    return result.ok


def _check_engine(options: DemoOptions) -> None:
    """Refuse an engine that this host does not have, before anything starts."""
    from rd2h.engines import EngineUnavailableError, create_engine

    try:
        create_engine(options.engine).close()
    except EngineUnavailableError as error:
        raise OptionError(f"--engine {options.engine}: {error}") from None
