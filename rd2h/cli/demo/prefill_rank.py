"""One Prefill rank: computes layers into few buffers, and hands each over before it is reused.

Used as a compute thread would use the sender: wait for the layer's memory, write it, submit.
"""

from __future__ import annotations

import os
import signal
import time

from rd2h.cli.demo.content import BlockContent, block_keys
from rd2h.cli.demo.memory import prefill_memory
from rd2h.cli.demo.messages import Begin, PrefillDone, PrefillProgress, Ready, Stop
from rd2h.cli.demo.options import DemoOptions, Fault, Sabotage
from rd2h.cli.demo.plan import Piece, Plan, Step
from rd2h.cli.demo.rank import Control, threads_left
from rd2h.cli.demo.shape import TensorShape
from rd2h.engines import create_engine
from rd2h.prefill import LayerTask, Sender, SenderOptions
from rd2h.wire import ReadReadyBatch, ReadRequest

__all__ = ["PrefillRank"]

_PROGRESS_INTERVAL = 0.1


class PrefillRank:
    """The body of a Prefill process.

    Args:
        plan: The run.
        rank: This rank.
        control: The parent.
    """

    def __init__(self, plan: Plan, rank: int, control: Control) -> None:
        self._plan = plan
        self._options = plan.options
        self._rank = rank
        self._control = control
        self._memory = prefill_memory(plan)
        self._content = {
            shape.tensor: BlockContent(plan.options.seed, shape.words)
            for shape in (*plan.shape.main, *plan.shape.indexed)
        }
        self._engine = create_engine(plan.options.engine, timeout=plan.options.timeout / 4)
        self._engine.register(self._memory.regions)
        self._sender = Sender(
            self._engine.session, self._memory.layouts, _sender_options(plan.options)
        )
        self._layers_done = 0
        self._told_at = 0.0

    def run(self) -> list[str]:
        """Compute every step, wait until all of it is answered, close; as `RankBody`."""
        self._control.send(Ready(""))
        begin = self._control.wait("begin")
        assert isinstance(begin, Begin), begin
        start = time.perf_counter()
        gate_wait = sum(self._compute(step, begin.endpoints) for step in self._plan.steps)
        self._sender.drain()
        seconds = time.perf_counter() - start
        for request in self._plan.requests:
            self._sender.forget(request.ext_id)
        stats = self._sender.stats
        self._control.send(
            PrefillDone(stats.layers, stats.batches, stats.failures, gate_wait, seconds)
        )
        stop = self._control.wait("stop")
        assert isinstance(stop, Stop), stop
        # Nothing may hold a gate any more: with nothing outstanding this returns at once.
        held = self._sender.drain(1.0)
        kept = {kind: count for kind, count in self._sender.sizes().items() if count}
        self._sender.close()
        self._engine.close()
        return [
            *(["a gate that was shut"] if held else []),
            *(f"{count} {kind} in the sender" for kind, count in kept.items()),
            *threads_left(),
        ]

    def _compute(self, step: Step, endpoints: list[str]) -> float:
        """Compute one chunk of every request of a wave; return seconds waited at gates."""
        waited = 0.0
        for layer in range(self._plan.shape.layers):
            name = self._plan.shape.name(layer)
            dying = self._dies_at(step, layer)
            if dying:
                # So that the requests of the first wave are complete, whatever the timing.
                self._sender.drain()
            waited += self._sender.wait(name)
            self._write(step, layer)
            self._sender.submit(LayerTask(name, self._batches(step, layer, endpoints)))
            if dying:
                os.kill(os.getpid(), signal.SIGKILL)
            self._tell_progress()
        return waited

    def _write(self, step: Step, layer: int) -> None:
        """Stand in for the model: put what it would compute into the layer's buffer."""
        memory, table = self._memory.layers[layer], self._plan.prefill
        for piece in step.pieces:
            index, here = piece.request.index, slice(piece.start, piece.start + piece.count)
            stale = self._is_stale(piece, layer)
            for ids, tensors in (
                (table.main[index][here], memory.main),
                (table.indexer[index][here], memory.indexed),
            ):
                for tensor, words in tensors:
                    content = self._content[tensor]
                    keys = block_keys(self._options.seed, layer, index, piece.positions, tensor)
                    for block, key in zip(ids.tolist()[stale:], keys[stale:], strict=True):
                        content.write(words[block], key)

    def _batches(self, step: Step, layer: int, endpoints: list[str]) -> dict[str, ReadReadyBatch]:
        """What to tell this rank's Decode rank in each Decode engine."""
        shape, mapping = self._plan.shape, self._plan.mapping
        indexed, last_layer = shape.indexed_of(layer), layer == shape.layers - 1
        batches = {}
        for engine, endpoint in enumerate(endpoints):
            pieces = [piece for piece in step.pieces if piece.request.engine == engine]
            if not pieces:
                continue
            batches[endpoint] = ReadReadyBatch(
                layer,
                shape.name(layer),
                [self._announce(piece, layer, indexed) for piece in pieces],
                [piece.request.ext_id for piece in pieces if piece.last and last_layer],
                mapping.member(self._rank),
                mapping.ratio,
            )
        return batches

    def _announce(self, piece: Piece, layer: int, indexed: tuple[TensorShape, ...]) -> ReadRequest:
        index, here = piece.request.index, slice(piece.start, piece.start + piece.count)
        main: list[int] = self._plan.prefill.main[index][here].tolist()
        indexer: list[int] = self._plan.prefill.indexer[index][here].tolist() if indexed else []
        if self._options.sabotage is Sabotage.SWAP and (layer, index, piece.start) == (0, 0, 0):
            main[:2] = main[1::-1]
        return ReadRequest(piece.request.ext_id, main, indexer, piece.start, piece.start)

    def _dies_at(self, step: Step, layer: int) -> bool:
        """Whether this rank is to be killed once this layer is announced."""
        return (
            self._options.fault is Fault.KILL_PREFILL
            and self._rank == 0
            and step is next(s for s in self._plan.steps if s.wave == 1)
            and layer == (self._plan.shape.layers - 1) // 2  # never the last: more must be due
        )

    def _is_stale(self, piece: Piece, layer: int) -> bool:
        """Whether to leave a block as it is: for tests of the demo."""
        return (
            self._options.sabotage is Sabotage.STALE
            and self._rank == 0
            and (piece.request.index, piece.start) == (0, 0)
            and layer == self._plan.shape.layers - 1
        )

    def _tell_progress(self) -> None:
        self._layers_done += 1
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_INTERVAL:
            self._told_at = now
            self._control.send(PrefillProgress(self._layers_done))


def _sender_options(options: DemoOptions) -> SenderOptions:
    """Every wait ends before the parent's own does."""
    return SenderOptions(
        failure_policy="contain" if options.fault is Fault.KILL_DECODE else "raise",
        handshake_timeout=options.timeout / 4,
        answer_timeout=options.timeout / 2,
        wait_timeout=options.timeout,
    )
