"""Serve with a Prefill and a Decode engine of vLLM, and compare with one engine that does it all.

Four servers on this machine's CPU: a vLLM by itself, a P and a D with rd2h between them, and the
proxy. All get the same prompts; the answers must be the same, token by token, and D must have
received every prompt from P.

Run it with ``python -m serving.demo``.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import NoReturn

import httpx
from rich.console import Console
from rich.table import Table

from serving.checkpoint import write_checkpoint
from serving.client import RequestFailedError
from serving.deployment import Deployment, DeploymentOptions, with_rd2h
from serving.launcher import Launcher, ServingError
from serving.options import VllmOptions
from serving.servers import VllmServer, start_all, stop_all
from serving.shapes import LLAMA, MLA
from serving.transfer import Transfer, transferred

__all__ = ["Options", "Result", "main", "report", "run"]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the demo does.

    Attributes:
        requests: How many prompts; they go from 40 to 900 tokens.
        tokens: Tokens to generate for each.
        mla: A DeepSeek-V2 with latent attention, instead of a Llama.
        prefill_tp: TP size of P; a multiple of D's.
        decode_tp: TP size of D.
    """

    requests: int = 6
    tokens: int = 12
    mla: bool = False
    prefill_tp: int = 1
    decode_tp: int = 1


@dataclass(frozen=True)
class Result:
    """What came of it.

    Attributes:
        prompts: Tokens of each prompt.
        single: The answers of the single server.
        handed: The answers of P and D.
        transfer: What P and D counted.
        ranks: TP size of D; each rank counts the prompts.
    """

    prompts: Sequence[int]
    single: Sequence[tuple[int, ...]]
    handed: Sequence[tuple[int, ...]]
    transfer: Transfer
    ranks: int = 1

    @property
    def error(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        wrong = sum(a != b for a, b in zip(self.single, self.handed, strict=True))
        if wrong:
            return f"{wrong} of {len(self.single)} answers differ"
        received, wanted = self.transfer.requests_received, len(self.prompts) * self.ranks
        if received != wanted:
            return f"D counted {received} received prompts on {self.ranks} ranks, not {wanted}"
        return ""


def run(launcher: Launcher, options: Options, folder: Path, models: Path, say: Say) -> Result:
    """Start the servers, ask them, and stop them.

    Args:
        launcher: Starts the servers.
        options: What to do.
        folder: Where logs go.
        models: Where checkpoints are kept from run to run.
        say: Takes a line about what goes on.

    Raises:
        ServingError: A server did not start.
        RequestFailedError: A server refused a request.
        httpx.TransportError: A server did not answer.
    """
    shape = MLA if options.mla else LLAMA
    model = write_checkpoint(models / ("mla" if options.mla else "llama"), shape)
    say(f"model: {shape.layers} layers, {shape.kv_bytes_per_token:,} bytes of KV for a token")
    plain = VllmOptions(model=model)
    single = VllmServer(launcher, plain, "single", folder)
    deployment = Deployment(
        launcher,
        DeploymentOptions(
            prefill=[with_rd2h(_with_tp(plain, options.prefill_tp), "kv_producer")],
            decode=[with_rd2h(_with_tp(plain, options.decode_tp), "kv_consumer")],
        ),
        folder,
    )
    say("importing vLLM, once for all servers")
    launcher.wait_ready(600)
    servers = [single, *deployment.servers]
    say(f"starting {', '.join(server.name for server in servers)}")
    try:
        start_all(
            servers,
            ready=lambda one, took: say(f"{one.name:6} is ready on {one.url} after {took:.1f} s"),
        )
        random = SystemRandom()
        prompts = [
            [random.randrange(shape.vocabulary) for _ in range(length)]
            for length in lengths(options.requests)
        ]
        with single.client() as alone, deployment.proxy.client() as proxy:
            say("asking the single server")
            expected = alone.complete_all(prompts, options.tokens, at_once=4)
            say("asking P and D through the proxy")
            start = time.perf_counter()
            handed = proxy.complete_all(prompts, options.tokens, at_once=4)
            seconds = time.perf_counter() - start
        say(f"{len(prompts)} requests took {seconds:.2f} s through P and D")
        with deployment.prefill[0].client() as p, deployment.decode[0].client() as d:
            transfer = transferred(p, d, len(prompts) * options.decode_tp)
    finally:
        say("stopping")
        stop_all(servers)
    return Result(
        [len(prompt) for prompt in prompts],
        [answer.tokens for answer in expected],
        [answer.tokens for answer in handed],
        transfer,
        options.decode_tp,
    )


def lengths(count: int) -> list[int]:
    """Prompt lengths from 40 to 900 tokens, neither of which fills its last block."""
    return [40 + 860 * number // max(count - 1, 1) for number in range(count)]


def report(console: Console, result: Result) -> None:
    """Print the answers side by side, what was transferred, and the verdict."""
    answers = Table(title="Tokens", title_justify="left")
    for column in ("prompt", "one server", "P and D", ""):
        answers.add_column(column, justify="right" if column == "prompt" else "left")
    rows = zip(result.prompts, result.single, result.handed, strict=True)
    for length, single, handed in rows:
        same = "[green]same" if single == handed else "[bold red]DIFFERENT"
        answers.add_row(f"{length}", _listed(single), _listed(handed), same)
    console.print(answers)
    moved = Table(title="Transfer", title_justify="left", show_header=False)
    for name, value in result.transfer.rows():
        moved.add_row(name, value)
    console.print(moved)
    console.print(f"[bold red]FAILED[/]: {result.error}" if result.error else "[bold green]PASSED")


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.demo", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=Options.requests, help="prompts to send")
    parser.add_argument("--tokens", type=int, default=Options.tokens, help="tokens to generate")
    parser.add_argument("--mla", action="store_true", help="latent attention, as DeepSeek's")
    parser.add_argument("--prefill-tp", type=int, default=1, help="TP size of P")
    parser.add_argument("--decode-tp", type=int, default=1, help="TP size of D")
    options = Options(**vars(parser.parse_args(arguments)))
    # As Ctrl-C does: through every `finally`.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - begin:5.1f} s  {text}", highlight=False, markup=False)

    folder = Path(tempfile.mkdtemp(prefix="rd2h-demo-"))
    say(f"logs: {folder}")
    try:
        with Launcher(folder / "nursery.log") as launcher:
            result = run(launcher, options, folder, _models(), say)
    except KeyboardInterrupt:
        say("interrupted; everything is stopped")
        return 130
    except (ServingError, RequestFailedError, httpx.TransportError) as error:
        console.print("FAILED:", str(error) or type(error).__name__, markup=False)
        return 1
    report(console, result)
    return 1 if result.error else 0


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _models() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rd2h" / "models"


def _with_tp(options: VllmOptions, size: int) -> VllmOptions:
    return replace(options, tensor_parallel=size)


def _listed(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


if __name__ == "__main__":
    sys.exit(main())
