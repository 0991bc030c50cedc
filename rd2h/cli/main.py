"""The ``rd2h`` command and its sub-commands.

``rd2h --help`` needs typer alone: a sub-command's file imports nothing but typer at its top, and
what it runs inside its function. To add one, write ``rd2h/cli/<name>.py`` with a function of that
name, or a `typer.Typer` of that name for one with commands of its own, and put it into `COMMANDS`.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import rd2h
from rd2h.cli.check.command import check
from rd2h.cli.demo.command import demo
from rd2h.cli.inspect.command import inspect
from rd2h.cli.proxy import proxy

__all__ = ["COMMANDS", "app", "main"]

# In the order of `rd2h --help`.
COMMANDS: tuple[Callable[..., None] | typer.Typer, ...] = (demo, check, proxy, inspect)

app = typer.Typer(
    name="rd2h",
    help="Hand a request's KV cache from a Prefill engine to a Decode engine of vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    if isinstance(command, typer.Typer):
        app.add_typer(command)
    else:
        app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rd2h {rd2h.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version_wanted: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Hand a request's KV cache from a Prefill engine to a Decode engine of vLLM."""


def main() -> None:
    """Run the command line; the entry point of the ``rd2h`` script."""
    try:
        app()
    except ModuleNotFoundError as error:
        # An extra that is not installed. A module of our own that is missing is a bug.
        if (error.name or "").partition(".")[0] == "rd2h":
            raise
        wanted = next((a for a in sys.argv[1:] if not a.startswith("-")), "cli")
        typer.echo(
            f"rd2h {wanted}: {error}; install what it needs: pip install 'rd2h[{wanted}]'", err=True
        )
        sys.exit(1)
