"""Who feeds whom, who pulls which blocks, and who listens where: pure integer arithmetic.

Every rank of both engines computes these answers on its own, without asking another rank, so
the functions here are the only place where the rules of ``docs/architecture.md`` (block
ownership, unequal tensor parallelism, ports) are written down. Nothing here holds state: any
thread may call anything.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_PORT", "TopologyError", "TpMapping", "base_port", "owned_range", "rank_port"]

MAX_PORT = 65535
"""The highest TCP port."""


class TopologyError(ValueError):
    """The two engines' sizes, ranks or ports do not fit together."""


@dataclass(frozen=True, slots=True)
class TpMapping:
    """How the tensor-parallel ranks of a Prefill engine feed those of a Decode engine.

    Each decode rank is fed by ``ratio`` neighbouring prefill ranks, its *contributors*; a
    contributor's place among them is its *member* index.

    Attributes:
        prefill_tp: tensor-parallel size of the Prefill engine, in ranks.
        decode_tp: tensor-parallel size of the Decode engine, in ranks.

    Raises:
        TopologyError: on construction, when a size is not positive or ``prefill_tp`` is not a
            multiple of ``decode_tp``.
    """

    prefill_tp: int
    decode_tp: int

    def __post_init__(self) -> None:
        if self.prefill_tp < 1 or self.decode_tp < 1:
            raise TopologyError(
                f"tensor-parallel sizes must be at least 1, got prefill {self.prefill_tp} and "
                f"decode {self.decode_tp}; check --tensor-parallel-size of both engines"
            )
        if self.prefill_tp % self.decode_tp:
            raise TopologyError(
                f"prefill tensor-parallel size {self.prefill_tp} is not a multiple of decode "
                f"tensor-parallel size {self.decode_tp}: each decode rank needs the same number "
                f"of prefill ranks; change --tensor-parallel-size of one engine so that the "
                f"prefill size is a multiple of the decode size"
            )

    @property
    def ratio(self) -> int:
        """Prefill ranks that feed one decode rank."""
        return self.prefill_tp // self.decode_tp

    def decode_rank(self, prefill_rank: int) -> int:
        """Return the decode rank that ``prefill_rank`` feeds.

        Raises:
            TopologyError: ``prefill_rank`` is not a rank of the Prefill engine.
        """
        _check_rank(prefill_rank, self.prefill_tp, "prefill")
        return prefill_rank // self.ratio

    def member(self, prefill_rank: int) -> int:
        """Return the place of ``prefill_rank`` among its decode rank's contributors.

        Raises:
            TopologyError: ``prefill_rank`` is not a rank of the Prefill engine.
        """
        _check_rank(prefill_rank, self.prefill_tp, "prefill")
        return prefill_rank % self.ratio

    def prefill_ranks(self, decode_rank: int) -> range:
        """Return the contributors of ``decode_rank``, in member order.

        Raises:
            TopologyError: ``decode_rank`` is not a rank of the Decode engine.
        """
        _check_rank(decode_rank, self.decode_tp, "decode")
        return range(decode_rank * self.ratio, (decode_rank + 1) * self.ratio)


def owned_range(start: int, count: int, rank: int, size: int) -> range:
    """Return the part of ``count`` announced blocks that falls to ``rank`` of ``size``.

    The split is contiguous, disjoint and complete. Rank order is rotated so that rank
    ``start % size`` comes first, and earlier ranks take the remainder: without the rotation a
    prompt that arrives in many small chunks would put all its blocks on rank 0.

    Args:
        start: position in the prompt of the first announced block, in blocks.
        count: announced blocks.
        rank: the rank (or member) that asks.
        size: ranks (or members) that share the blocks.

    Returns:
        Offsets into the announced blocks (0 is the block at position ``start``); empty when
        nothing falls to ``rank``.

    Raises:
        TopologyError: a negative ``start`` or ``count``, or ``rank`` outside ``size``.
    """
    if start < 0 or count < 0:
        raise TopologyError(f"start and count must not be negative, got {start} and {count}")
    _check_rank(rank, size, "owning")
    place = (rank - start) % size
    share, remainder = divmod(count, size)
    first = place * share + min(place, remainder)
    return range(first, first + share + (place < remainder))


def base_port(kv_port: int, global_dp_rank: int, tp_size: int) -> int:
    """Return the first of the ``tp_size`` ports that belong to one data-parallel rank.

    The data-parallel rank is the global one: a host-local rank would give two hosts' engines
    the same ports behind one address.

    Args:
        kv_port: the configured port, that of data-parallel rank 0 and TP rank 0.
        global_dp_rank: data-parallel rank over all hosts.
        tp_size: ranks in one tensor-parallel group; each takes one port.

    Raises:
        TopologyError: a value is out of range, or the group's last port is above 65535.
    """
    if global_dp_rank < 0 or tp_size < 1:
        raise TopologyError(
            f"global data-parallel rank must be at least 0 and tensor-parallel size at least 1, "
            f"got {global_dp_rank} and {tp_size}"
        )
    base = kv_port + global_dp_rank * tp_size
    highest = base + tp_size - 1
    if kv_port < 1 or highest > MAX_PORT:
        raise TopologyError(
            f"kv_port {kv_port} with global data-parallel rank {global_dp_rank} and "
            f"tensor-parallel size {tp_size} needs ports {base} to {highest}, outside 1 to "
            f"{MAX_PORT}; set kv_port to at least 1 and at most "
            f"{MAX_PORT + 1 - (global_dp_rank + 1) * tp_size}"
        )
    return base


def rank_port(base: int, tp_rank: int, tp_size: int) -> int:
    """Return the port on which TP rank ``tp_rank`` listens.

    Args:
        base: the group's first port: :func:`base_port`, or ``remote_port`` of a rendezvous.
        tp_rank: tensor-parallel rank.
        tp_size: ranks in the tensor-parallel group. The whole group is checked, so that all
            its ranks refuse a bad base alike and none is left waiting for the others.

    Raises:
        TopologyError: ``tp_rank`` is outside the group, or the group's ports are outside 1 to
            65535.
    """
    _check_rank(tp_rank, tp_size, "tensor-parallel")
    highest = base + tp_size - 1
    if base < 1 or highest > MAX_PORT:
        raise TopologyError(
            f"base port {base} with tensor-parallel size {tp_size} needs ports {base} to "
            f"{highest}, outside 1 to {MAX_PORT}; lower kv_port of the engine that listens there"
        )
    return base + tp_rank


def _check_rank(rank: int, size: int, what: str) -> None:
    if not 0 <= rank < size:
        raise TopologyError(f"{what} rank {rank} is outside a group of size {size}")
