"""The shape of the caches: which tensors a layer has, and how large a block of each is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rd2h.cli.demo.options import DemoOptions, OptionError

__all__ = ["WORD", "CacheShape", "Tensor", "TensorShape"]

WORD = 8
"""Bytes of the words of which contents are made."""
_BF16 = 2
_FLOAT16 = 2
_INT8 = 1


class Tensor(IntEnum):
    """What a tensor is; the number is part of its contents."""

    LATENT = 0
    ROPE = 1
    INDEXER = 2
    SCALE = 3


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a layer.

    Attributes:
        tensor: What it is.
        words: 64-bit words of one block.
    """

    tensor: Tensor
    words: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.words * WORD


@dataclass(frozen=True)
class CacheShape:
    """All layers.

    Attributes:
        layers: How many.
        main: The main tensors; every layer has them.
        indexed: Indexer and scale, as far as the model has them.
        no_indexer_every: Each such layer has no indexer; 0 if all have one.
    """

    layers: int
    main: tuple[TensorShape, ...]
    indexed: tuple[TensorShape, ...]
    no_indexer_every: int

    @classmethod
    def from_options(cls, options: DemoOptions) -> CacheShape:
        """Work the shape out.

        Raises:
            OptionError: a block is not a whole number of 64-bit words, which the contents need.
        """
        widths = {
            Tensor.LATENT: options.latent * _BF16,
            Tensor.ROPE: options.rope * _BF16,
            Tensor.INDEXER: options.indexer_dim * (_INT8 if options.lic8 else _BF16),
            Tensor.SCALE: _FLOAT16 if options.lic8 else 0,
        }
        shapes: dict[Tensor, TensorShape] = {}
        for tensor, width in widths.items():
            size = width * options.block_size
            if size % WORD:
                raise OptionError(
                    f"a block of the {tensor.name.lower()} tensor has {size} bytes ({width} bytes "
                    f"x --block-size {options.block_size}); the demo writes 64-bit words, choose "
                    f"a multiple of {WORD}"
                )
            if size:
                shapes[tensor] = TensorShape(tensor, size // WORD)
        return cls(
            options.layers,
            tuple(s for t, s in shapes.items() if t in (Tensor.LATENT, Tensor.ROPE)),
            tuple(s for t, s in shapes.items() if t in (Tensor.INDEXER, Tensor.SCALE)),
            options.no_indexer_every,
        )

    def name(self, layer: int) -> str:
        """The layer's name, as vLLM would give it."""
        return f"model.layers.{layer}.self_attn.attn"

    def indexed_of(self, layer: int) -> tuple[TensorShape, ...]:
        """Indexer and scale of one layer; empty if it has none."""
        every = self.no_indexer_every
        return () if every and layer % every == every - 1 else self.indexed

    @property
    def indexed_layers(self) -> int:
        """Layers with an indexer."""
        return sum(bool(self.indexed_of(layer)) for layer in range(self.layers))

    @property
    def main_block_bytes(self) -> int:
        """Bytes of one block of one layer's main tensors."""
        return sum(shape.block_bytes for shape in self.main)

    @property
    def indexed_block_bytes(self) -> int:
        """Bytes of one block of one layer's indexer and scale."""
        return sum(shape.block_bytes for shape in self.indexed)
