"""A Prefill or a Decode rank in a process of its own, on the host engine, told what to do.

Commands go in on standard input, one JSON list a line, and each is answered with one JSON value
on standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import zlib
from types import TracebackType
from typing import Any, Self

import numpy as np

from rd2h.decode import Receiver, ReceiverOptions
from rd2h.engines.host import HostEngine
from rd2h.prefill import LayerSendError, LayerTask, Sender, SenderOptions
from rd2h.reads import PullScope, RequestDestination
from tests.transfer.caches import PATIENCE, UNTOUCHED, Cache, Shape
from tests.transfer.ranks import ask, batch

LAYERS = 4
SHAPES = {f"layer.{layer}": Shape(main=(4096, 512), blocks=32) for layer in range(LAYERS)}


def fill(cache: Cache, seed: int) -> Cache:
    """What the Prefill rank with this seed has computed."""
    rng = np.random.default_rng(seed)
    for tensors in cache.tensors.values():
        for tensor in tensors:
            tensor[:] = rng.integers(0, UNTOUCHED, tensor.shape)
    return cache


class RankProcess:
    """The parent's end."""

    def __init__(self, role: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.processes", role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # or a line that was read ahead would be hidden from `select`
        )
        self._hello: Any = None

    @property
    def hello(self) -> Any:
        """What it says first; several processes can start before one is asked."""
        if self._hello is None:
            self._hello = self._read()
        return self._hello

    def tell(self, *command: object) -> None:
        """Give a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    # Any: what an answer is depends on the command; the tests compare it with what they expect.
    def answer(self) -> Any:
        """What it says next."""
        assert self.hello
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, f"waited {PATIENCE:g} s for an answer"
        line = self._process.stdout.readline()
        assert line, "the process has died"
        return json.loads(line)

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def prefill(endpoint: str, seed: int) -> None:
    """Body of a Prefill process: ``[layer, ext_id, source blocks, done?]`` each."""
    cache = fill(Cache(SHAPES), seed)
    engine = HostEngine()
    engine.register(cache.regions)
    sender = Sender(engine.session, cache.layouts, SenderOptions())
    say("ready")
    for line in sys.stdin:
        layer, ext_id, blocks, done = json.loads(line)
        announced = batch(layer, [ask(ext_id, blocks)], [ext_id] if done else [])
        try:
            sender.submit(LayerTask(f"layer.{layer}", {endpoint: announced}))
            sender.drain()
            say("handed over")
        except LayerSendError as error:
            say(str(error))


def decode(address: str) -> None:
    """Body of a Decode process: ``[ext_id, blocks]`` registers, ``[]`` waits for one to end."""
    cache = Cache(SHAPES, UNTOUCHED)
    engine = HostEngine()
    engine.register(cache.regions)
    scope = PullScope(0, 1, False)
    receiver = Receiver(address, cache.layouts, scope, engine, ReceiverOptions())
    say(receiver.endpoint)
    for line in sys.stdin:
        match json.loads(line):
            case [ext_id, blocks]:
                receiver.register(RequestDestination(ext_id, blocks, []))
                say("registered")
            case _:
                (finished,) = receiver.wait_finished(PATIENCE)
                say([finished.ext_id, finished.outcome.value, finished.reason, digest(cache)])


def digest(cache: Cache) -> list[int]:
    """A number for the content of each tensor."""
    return [
        zlib.crc32(tensor.tobytes()) for tensors in cache.tensors.values() for tensor in tensors
    ]


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill(*json.loads(sys.argv[2]))
    else:
        decode(*json.loads(sys.argv[2]))
