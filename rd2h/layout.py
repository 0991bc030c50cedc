"""The layout of a KV cache: where each layer's tensors lie and how large a block is.

A layout is built from an engine's own tensors (:meth:`TensorLayout.from_shape`; this module
does not know torch) or from a peer's metadata (:meth:`LayerLayout.from_wire`). The fields and
their order on the wire are in ``docs/protocol.md``, the words in ``docs/architecture.md``.

Everything here is immutable after construction: any thread may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from rd2h.wire import LayerMetadata

__all__ = [
    "ADDRESS_LIMIT",
    "LayerLayout",
    "LayoutError",
    "LayoutMismatchError",
    "StorageSlots",
    "TensorLayout",
    "check_compatible",
]

ADDRESS_LIMIT = 2**64 - 1
"""Where the last byte range may end. Ends are exclusive and must themselves be 64-bit numbers,
so the very last byte of the address space is given up; no allocator hands it out."""


class LayoutError(ValueError):
    """A cache layout that cannot be right, whoever made it."""


class LayoutMismatchError(LayoutError):
    """The Prefill and the Decode engine lay out the same layer differently."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One paged cache tensor: ``num_blocks`` blocks, back to back, from ``address`` on.

    Attributes:
        address: of block 0, in bytes.
        block_len: bytes of one kernel block.
        block_size_scale: kernel blocks in one block.
        num_blocks: blocks in the tensor; None for a peer's tensor (it is not on the wire).

    Raises:
        LayoutError: on construction, when a value is out of range or the tensor (its first
            block, when ``num_blocks`` is unknown) ends past the address space.
    """

    address: int
    block_len: int
    block_size_scale: int = 1
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.address < ADDRESS_LIMIT:
            raise LayoutError(f"address {self.address:#x} is not a 64-bit address")
        if self.block_len < 1 or self.block_size_scale < 1:
            raise LayoutError(
                f"block_len and block_size_scale must be at least 1, got {self.block_len} and "
                f"{self.block_size_scale}"
            )
        if self.num_blocks is not None and self.num_blocks < 1:
            raise LayoutError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if (self.num_blocks or 1) > self.addressable_blocks:
            raise LayoutError(
                f"{self.num_blocks or 1} block(s) of {self.bytes_per_block} bytes at address "
                f"{self.address:#x} end past the 64-bit address space"
            )

    @classmethod
    def from_shape(
        cls,
        address: int,
        shape: Sequence[int],
        itemsize: int,
        *,
        block_size_scale: int = 1,
        strides: Sequence[int] | None = None,
    ) -> TensorLayout:
        """Build the layout of a tensor whose first dimension counts kernel blocks.

        Args:
            address: of the tensor's first element (``tensor.data_ptr()``).
            shape: of the tensor, in elements: ``[kernel blocks, ...]``.
            itemsize: bytes of one element.
            block_size_scale: kernel blocks in one block.
            strides: of the tensor, in elements (``tensor.stride()``). Give them: a read moves
                whole blocks as bytes, which is wrong for a tensor with holes or permuted
                dimensions, and this is where that is noticed.

        Raises:
            LayoutError: the first dimension is no multiple of ``block_size_scale``, the tensor
                is not contiguous, or any of the class's own checks.
        """
        if len(shape) < 2:
            raise LayoutError(
                f"a paged cache tensor has at least 2 dimensions, got shape {tuple(shape)}"
            )
        if block_size_scale < 1 or shape[0] % block_size_scale:
            raise LayoutError(
                f"{shape[0]} kernel blocks cannot be grouped into blocks of "
                f"block_size_scale {block_size_scale}"
            )
        # The stride of a dimension of size 1 is never used, and torch leaves anything there.
        if strides is not None and any(
            size != 1 and stride != prod(shape[dim + 1 :])
            for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
        ):
            raise LayoutError(
                f"tensor of shape {tuple(shape)} with strides {tuple(strides)} is not "
                f"contiguous; register the tensor in the order in which it lies in memory"
            )
        return cls(
            address, prod(shape[1:]) * itemsize, block_size_scale, shape[0] // block_size_scale
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: all its kernel blocks."""
        return self.block_len * self.block_size_scale

    @property
    def addressable_blocks(self) -> int:
        """Blocks that fit between ``address`` and the end of the address space.

        An upper bound for block ids when ``num_blocks`` is unknown.
        """
        return (ADDRESS_LIMIT - self.address) // self.bytes_per_block

    @property
    def extent(self) -> int:
        """Bytes of the whole tensor.

        Raises:
            LayoutError: ``num_blocks`` is unknown.
        """
        if self.num_blocks is None:
            raise LayoutError(
                f"tensor at {self.address:#x} came from a peer: its number of blocks is unknown"
            )
        return self.num_blocks * self.bytes_per_block

    @property
    def end(self) -> int:
        """Address of the first byte after the tensor.

        Raises:
            LayoutError: ``num_blocks`` is unknown.
        """
        return self.address + self.extent


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """All cache tensors of one layer.

    Attributes:
        name: the layer's name in the model, the same on both engines.
        main: the main KV tensors, at least one.
        indexer: the sparse-attention key cache; None for a layer without one.
        scale: the scale of a quantised indexer; None without one.
        indexed: the tensors that indexer block ids index: none, the indexer, or it and its scale.
        tensors: all tensors, in wire order: main, indexer, scale.

    Raises:
        LayoutError: on construction, when there is no main tensor, or a scale but no indexer.
    """

    name: str
    main: tuple[TensorLayout, ...]
    indexer: TensorLayout | None = None
    scale: TensorLayout | None = None
    # Worked out once: every batch asks for them several times.
    indexed: tuple[TensorLayout, ...] = field(init=False, repr=False, compare=False)
    tensors: tuple[TensorLayout, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.main:
            raise LayoutError(f"layer {self.name}: no main KV tensor")
        if self.scale is not None and self.indexer is None:
            raise LayoutError(
                f"layer {self.name}: a scale tensor without an indexer; the scale belongs to a "
                f"quantised indexer"
            )
        indexed = tuple(tensor for tensor in (self.indexer, self.scale) if tensor is not None)
        object.__setattr__(self, "indexed", indexed)
        object.__setattr__(self, "tensors", self.main + indexed)

    def to_wire(self, *, main_group: int = 0, indexer_group: int = 1) -> LayerMetadata:
        """Return the metadata that announces this layer.

        Args:
            main_group: KV-cache group index to write for main tensors.
            indexer_group: KV-cache group index to write for indexer and scale. No receiver may
                rely on either; they are written because older peers expect the field.
        """
        tensors = self.tensors
        main_count = len(self.main)
        return LayerMetadata(
            base_addrs=[tensor.address for tensor in tensors],
            block_len=[tensor.block_len for tensor in tensors],
            block_size_scale=[tensor.block_size_scale for tensor in tensors],
            tensor_group_idx=[main_group] * main_count
            + [indexer_group] * (len(tensors) - main_count),
            main_tensor_count=main_count,
            has_indexer=self.indexer is not None,
        )

    @classmethod
    def from_wire(cls, name: str, metadata: LayerMetadata) -> LayerLayout:
        """Build a peer's layout from its announced metadata.

        Args:
            name: the layer's name, the metadata's key in ``mf_meta``.
            metadata: as decoded.

        Returns:
            A layout whose tensors have ``num_blocks`` None.

        Raises:
            LayoutError: the metadata describes no possible layer; the message names the layer,
                the tensor and the values.
        """
        count, main_count = len(metadata.base_addrs), metadata.main_tensor_count
        lengths = (len(metadata.block_len), len(metadata.block_size_scale))
        if lengths != (count, count):
            raise LayoutError(
                f"layer {name}: {count} addresses, but {lengths[0]} values of block_len and "
                f"{lengths[1]} of block_size_scale"
            )
        if not 1 <= main_count <= count:
            raise LayoutError(
                f"layer {name}: main_tensor_count {main_count} does not fit its {count} tensors"
            )
        extra = count - main_count
        if extra > 2:
            raise LayoutError(
                f"layer {name}: {count} tensors of which {main_count} are main leave {extra}, "
                f"but only an indexer and its scale may follow"
            )
        if metadata.has_indexer != (extra > 0):
            raise LayoutError(
                f"layer {name}: has_indexer is {metadata.has_indexer}, but {extra} tensors "
                f"follow the {main_count} main tensors"
            )
        tensors: list[TensorLayout] = []
        for index, values in enumerate(
            zip(metadata.base_addrs, metadata.block_len, metadata.block_size_scale, strict=True)
        ):
            try:
                tensors.append(TensorLayout(*values))
            except LayoutError as error:
                role = _role(index, main_count)
                raise LayoutError(f"layer {name}: {role} tensor: {error}") from None
        return cls(
            name,
            tuple(tensors[:main_count]),
            tensors[main_count] if extra else None,
            tensors[main_count + 1] if extra > 1 else None,
        )


def check_compatible(prefill: LayerLayout, decode: LayerLayout) -> None:
    """Check that blocks of ``prefill`` can be copied into ``decode`` byte by byte.

    What must agree is a block's bytes, tensor by tensor. Its parts need not: the engines'
    kernel blocks may differ while their blocks agree.

    Args:
        prefill: the Prefill engine's layout of the layer.
        decode: the Decode engine's layout of the same layer.

    Raises:
        LayoutMismatchError: the message names the layer, the tensor, both values and what to
            change.
    """
    name = decode.name
    if prefill.name != name:
        raise LayoutMismatchError(
            f"layer {name} of decode was compared with layer {prefill.name} of prefill; serve "
            f"the same model on both engines"
        )
    if len(prefill.main) != len(decode.main):
        raise LayoutMismatchError(
            f"layer {name}: number of main KV tensors: prefill {len(prefill.main)}, decode "
            f"{len(decode.main)}; use the same attention backend on both engines"
        )
    main_count = len(decode.main)
    for role, theirs, ours in (
        ("indexer", prefill.indexer, decode.indexer),
        ("scale", prefill.scale, decode.scale),
    ):
        if (theirs is None) != (ours is None):
            raise LayoutMismatchError(
                f"layer {name}: {role} tensor: prefill {'no' if theirs is None else 'yes'}, "
                f"decode {'no' if ours is None else 'yes'}; use the same model and the same "
                f"indexer quantisation on both engines"
            )
    for index, (sent, wanted) in enumerate(zip(prefill.tensors, decode.tensors, strict=True)):
        if sent.bytes_per_block != wanted.bytes_per_block:
            raise LayoutMismatchError(
                f"layer {name}: bytes per block of the {_role(index, main_count)} tensor: "
                f"prefill {_bytes(sent)}, decode {_bytes(wanted)}; use the same --block-size "
                f"and --kv-cache-dtype on both engines, and the same --tensor-parallel-size if "
                f"the model's KV heads are split over TP ranks (all but MLA)"
            )


class StorageSlots:
    """The physical ranges of memory that layers' caches occupy, and which layers share them.

    Tensors whose byte ranges overlap are one slot, also when they do so only through a third;
    ranges that merely touch are not. With layerwise buffer reuse several layers share a slot,
    and writing one of them destroys the others: that is found here from addresses, since names
    do not tell it.

    Slots are numbered from 0 by ascending address.
    """

    __slots__ = ("_layers", "_slots")

    def __init__(self, slots: Mapping[str, frozenset[int]], count: int) -> None:
        layers: list[set[str]] = [set() for _ in range(count)]
        for name, members in slots.items():
            for slot in members:
                layers[slot].add(name)
        self._slots = MappingProxyType(dict(slots))
        self._layers = tuple(map(frozenset, layers))

    @classmethod
    def from_layouts(cls, layouts: Iterable[LayerLayout]) -> StorageSlots:
        """Find the slots of these layers, in O(n log n) of their tensors.

        Args:
            layouts: this engine's own layers (their numbers of blocks must be known). For a
                mapping by name, pass its values.

        Raises:
            LayoutError: a tensor's extent is unknown, or a layer is given twice.
        """
        slots: dict[str, set[int]] = {}
        ranges: list[tuple[int, int, str]] = []
        for layout in layouts:
            if layout.name in slots:
                raise LayoutError(f"layer {layout.name} is given twice")
            slots[layout.name] = set()
            for index, tensor in enumerate(layout.tensors):
                if tensor.num_blocks is None:
                    role = _role(index, len(layout.main))
                    raise LayoutError(
                        f"layer {layout.name}: {role} tensor: number of blocks is unknown; "
                        f"storage slots need this engine's own layouts"
                    )
                ranges.append((tensor.address, tensor.end, layout.name))
        ranges.sort()
        current, covered = -1, 0
        for start, end, name in ranges:
            if current < 0 or start >= covered:
                current += 1
            covered = max(covered, end)
            slots[name].add(current)
        return cls({name: frozenset(found) for name, found in slots.items()}, current + 1)

    def __len__(self) -> int:
        return len(self._layers)

    def slots_of(self, layer_name: str) -> frozenset[int]:
        """Return the slots that a layer's tensors occupy.

        Raises:
            LayoutError: the layer is unknown.
        """
        try:
            return self._slots[layer_name]
        except KeyError:
            raise LayoutError(
                f"layer {layer_name} has no registered cache; {len(self._slots)} layers have"
            ) from None

    def layers_of(self, slot: int) -> frozenset[str]:
        """Return the layers that occupy ``slot``.

        Raises:
            LayoutError: there is no such slot.
        """
        if not 0 <= slot < len(self._layers):
            raise LayoutError(f"storage slot {slot} is outside 0 to {len(self._layers) - 1}")
        return self._layers[slot]


def _role(index: int, main_count: int) -> str:
    """Name the tensor at a place in wire order."""
    if index < main_count:
        return f"main {index}"
    return ("indexer", "scale")[index - main_count]


def _bytes(tensor: TensorLayout) -> str:
    if tensor.block_size_scale == 1:
        return str(tensor.bytes_per_block)
    return f"{tensor.bytes_per_block} ({tensor.block_size_scale} x {tensor.block_len})"
