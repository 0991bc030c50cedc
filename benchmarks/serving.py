"""A real hand-off between two vLLM servers: rd2h beside vLLM's own NixlConnector.

All servers run at the same time on this machine, with the same model and options, and take turns on
the same prompts, so that whatever else the machine does hits all alike. Measured at the client: the
time from sending a request to its first token, and requests a second with 8 in flight. Every answer
is compared with that of a single server, which is in the table too: what it takes is the prompt
itself.

NIXL's UCX thread keeps a core busy in each of NixlConnector's two servers, at rest too and with
`num_threads` 0 or 1 as well. So these servers are stopped when it is not their turn, and what
each takes at rest is a figure of its own. On a machine of two cores these threads leave the model
little in their own turns: the ratios there say more about that than about the transfer. They say
nothing about a machine with cores to spare, where nobody has measured.

rd2h is measured twice: through ``rd2h proxy``, as a site runs it, and with this program as its
metaserver, which is as few hops as NixlConnector's hand-off gets here. The difference is the proxy.

Run it with ``python -m benchmarks.serving``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.hand_offs import HandOff, Nixl, Rd2hDirect, Rd2hProxy, Single, Timing
from benchmarks.proxy import cpu_seconds
from benchmarks.report import machine
from benchmarks.serving_figures import (
    AT_ONCE,
    AT_ONCE_LENGTH,
    FEW,
    LENGTHS,
    MANY,
    Figures,
    report,
)
from serving.checkpoint import write_checkpoint
from serving.deployment import Deployment, DeploymentOptions, Role, with_nixl, with_rd2h
from serving.launcher import Launcher
from serving.options import VllmOptions
from serving.servers import Server, VllmServer, start_all, stop_all
from serving.shapes import BENCHMARK

__all__ = ["measure"]

AT_REST_SECONDS = 5


class Prompts:
    """Prompts that never come twice, and what a single server answers."""

    def __init__(self, single: Single, seed: int) -> None:
        self._single = single
        self._random = Random(seed)

    def new(self, length: int) -> list[int]:
        """A prompt."""
        return [self._random.randrange(BENCHMARK.vocabulary) for _ in range(length)]

    def right(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Its answer."""
        return self._single.complete(prompt, tokens).tokens


def check(hand_off: HandOff, timing: Timing, right: tuple[int, ...]) -> None:
    """Refuse a figure that a wrong answer gave.

    Raises:
        RuntimeError: The answer is wrong.
    """
    if timing.tokens != right:
        raise RuntimeError(f"{hand_off.name} answered {timing.tokens}, a single server {right}")


def at_rest(servers: Sequence[Server]) -> float:
    """Cores that servers use when nobody asks them anything."""

    def used() -> float:
        return sum(cpu_seconds(pid) for server in servers for pid in server.pids)

    # The last request's loose ends come first.
    time.sleep(1)
    before = used()
    time.sleep(AT_REST_SECONDS)
    return (used() - before) / AT_REST_SECONDS


def measure(
    hand_offs: Sequence[HandOff],
    prompts: Prompts,
    rounds: int,
    at_once_rounds: int,
    say: Callable[[str], None],
) -> Figures:
    """Let the hand-offs take turns.

    Args:
        hand_offs: What is measured.
        prompts: What is asked.
        rounds: For the first token, of each length.
        at_once_rounds: For requests at once; each has twice `AT_ONCE` requests.
        say: Takes a line about what goes on.

    Raises:
        RuntimeError: An answer is wrong.
    """
    figures = Figures(
        {length: {one.name: [] for one in hand_offs} for length in LENGTHS},
        {one.name: [] for one in hand_offs},
        {},
    )
    say("warming up")
    for length in (*LENGTHS, *LENGTHS):
        prompt = prompts.new(length)
        right = prompts.right(prompt, FEW)
        for one in hand_offs:
            with one.turn():
                check(one, one.complete(prompt, FEW), right)
    for one in hand_offs:
        say(f"{one.name}: at rest")
        with one.turn():
            figures.at_rest[one.name] = at_rest(one.servers)
    for turn in range(rounds):
        say(f"first token, round {turn + 1} of {rounds}")
        for length in LENGTHS:
            prompt = prompts.new(length)
            right = prompts.right(prompt, FEW)
            for one in _turned(hand_offs, turn):
                with one.turn():
                    timing = one.complete(prompt, FEW)
                check(one, timing, right)
                figures.first_token[length][one.name].append(timing.first_token)
    for turn in range(at_once_rounds):
        say(f"{AT_ONCE} at once, round {turn + 1} of {at_once_rounds}")
        asked = [prompts.new(AT_ONCE_LENGTH) for _ in range(2 * AT_ONCE)]
        answers = [prompts.right(prompt, MANY) for prompt in asked]
        for one in _turned(hand_offs, turn):
            with one.turn(), ThreadPoolExecutor(AT_ONCE) as pool:
                start = time.perf_counter()
                timings = list(pool.map(partial(one.complete, max_tokens=MANY), asked))
                seconds = time.perf_counter() - start
            for timing, right in zip(timings, answers, strict=True):
                check(one, timing, right)
            figures.requests[one.name].append(len(asked) / seconds)
    return figures


def _turned(hand_offs: Sequence[HandOff], turn: int) -> list[HandOff]:
    """Another one first in each round."""
    first = turn % len(hand_offs)
    return [*hand_offs[first:], *hand_offs[:first]]


def run(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Figures:
    """Start everything, measure, and stop it."""
    model = write_checkpoint(folder / "model", BENCHMARK)
    plain = VllmOptions(
        model=model,
        kv_cache_mib=640,
        prefix_caching=False,
        # A server that has been stopped must not close its connections as soon as it goes on.
        environment={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"},
    )
    with Launcher(folder / "nursery.log") as launcher, ExitStack() as clients:
        single = VllmServer(launcher, plain, "single", folder)
        servers: list[Server] = [single]
        alone = Single(single, clients.enter_context(single.client()))
        hand_offs: list[HandOff] = [alone]

        def pair(
            name: str,
            with_connector: Callable[[VllmOptions, Role], VllmOptions],
            proxy: Sequence[str] | None,
        ) -> Deployment:
            sides = DeploymentOptions(
                prefill=[with_connector(plain, "kv_producer")],
                decode=[with_connector(plain, "kv_consumer")],
                proxy=proxy,
            )
            deployment = Deployment(launcher, sides, folder, f"{name}-")
            servers.extend(deployment.servers)
            return deployment

        if options.only != "rd2h":
            nixl = pair("nixl", with_nixl, None)
            hand_offs.append(
                Nixl(
                    nixl.servers,
                    clients.enter_context(nixl.prefill[0].client()),
                    clients.enter_context(nixl.decode[0].client()),
                )
            )
        if options.only != "nixl":
            rd2h = pair("rd2h", with_rd2h, ())
            hand_offs.append(Rd2hProxy(rd2h.servers, clients.enter_context(rd2h.proxy.client())))
            hand_offs.append(
                clients.enter_context(
                    Rd2hDirect(
                        [*rd2h.prefill, *rd2h.decode],
                        clients.enter_context(rd2h.prefill[0].client()),
                        clients.enter_context(rd2h.decode[0].client()),
                    )
                )
            )
        try:
            say(f"starting {len(servers)} servers")
            start_all(
                servers, 600, ready=lambda one, took: say(f"{one.name}: ready after {took:.1f} s")
            )
            prompts = Prompts(alone, options.seed)
            return measure(hand_offs, prompts, options.rounds, options.at_once_rounds, say)
        finally:
            stop_all(servers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="first tokens of each length")
    parser.add_argument("--at-once-rounds", type=int, default=5, help="rounds of requests at once")
    parser.add_argument("--only", choices=["nixl", "rd2h"], help="leave the other one out")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    options = parser.parse_args()
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)

    print(machine())
    with tempfile.TemporaryDirectory(prefix="rd2h-serving-") as folder:
        figures = run(options, Path(folder), say)
    print(report(figures))


if __name__ == "__main__":
    main()
