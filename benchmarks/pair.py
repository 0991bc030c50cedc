"""A Prefill in this process and a Decode in another one, over loopback and the host engine."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from rd2h.decode import Receiver
from rd2h.engines import MemoryRegion
from rd2h.engines.host import HostEngine
from rd2h.layout import LayerLayout, TensorLayout
from rd2h.prefill import Sender
from rd2h.reads import PullScope, RequestDestination

__all__ = ["NAME", "IoVec", "Pair", "Shape", "make_layer", "regions", "running_pair"]

NAME = "model.layers.0.self_attn.attn"


@dataclass(frozen=True)
class Shape:
    """One layer's cache: bytes of a block in each main tensor and in the indexer, and blocks."""

    main: tuple[int, ...]
    indexer: int | None
    blocks: int


@dataclass
class Pair:
    """What a benchmark works with.

    Attributes:
        sender: This process's.
        endpoint: Where the other process's receiver listens.
        decode_pid: The other process.
        prefill: This process's layer.
    """

    sender: Sender
    endpoint: str
    decode_pid: int
    prefill: LayerLayout
    _pipe: Connection

    def register(self, requests: dict[str, tuple[list[int], list[int]]]) -> None:
        """Register requests on Decode: external id to main and indexer block ids."""
        self._pipe.send(requests)
        assert self._pipe.recv() == "registered"


def make_layer(shape: Shape) -> tuple[LayerLayout, list[NDArray[np.uint8]]]:
    """A layer in memory of this process, every page of it touched."""
    tensors = [
        np.full((shape.blocks, size), 7, np.uint8)
        for size in (*shape.main, *([] if shape.indexer is None else [shape.indexer]))
    ]
    layouts = [TensorLayout.from_shape(t.ctypes.data, t.shape, 1) for t in tensors]
    count = len(shape.main)
    indexer = layouts[count] if shape.indexer is not None else None
    return LayerLayout(NAME, tuple(layouts[:count]), indexer), tensors


def regions(layer: LayerLayout) -> list[MemoryRegion]:
    """What the engine has to know of a layer."""
    return [MemoryRegion(tensor.address, tensor.extent) for tensor in layer.tensors]


def _decode(pipe: Connection, shape: Shape) -> None:
    """Body of the Decode process."""
    # Requests of a benchmark are never finished, and fail when it ends: that is no news.
    logging.getLogger("rd2h").setLevel(logging.CRITICAL)
    layer, _memory = make_layer(shape)
    engine = HostEngine()
    engine.register(regions(layer))
    receiver = Receiver(
        "tcp://127.0.0.1:0", {NAME: layer}, PullScope(0, 1, main_shared=False), engine
    )
    pipe.send(receiver.endpoint)
    while (requests := pipe.recv()) is not None:
        for ext_id, (main, indexer) in requests.items():
            receiver.register(RequestDestination(ext_id, main, indexer))
        pipe.send("registered")
    receiver.close()
    engine.close()


@contextmanager
def running_pair(shape: Shape) -> Iterator[Pair]:
    """Start both ends, and stop them afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_decode, args=(theirs, shape), daemon=True)
    process.start()
    layer, _memory = make_layer(shape)
    engine = HostEngine()
    engine.register(regions(layer))
    sender = Sender(engine.session, {NAME: layer})
    try:
        endpoint = ours.recv()
        assert process.pid is not None
        yield Pair(sender, endpoint, process.pid, layer, ours)
    finally:
        sender.close()
        ours.send(None)
        process.join(10)
        engine.close()


class IoVec(ctypes.Structure):
    """``struct iovec`` of the C library."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
