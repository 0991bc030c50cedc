"""Read planning: from an announced batch to the byte ranges that one decode rank reads.

:func:`plan_reads` is a pure function of a batch, the two layouts of its layer, the requests'
destinations and this rank's place. It either returns a plan that is safe to read in full, or
raises before anything is read. Which blocks fall to which rank is in ``docs/architecture.md``.

Work per block is done by NumPy, over all requests of a batch at once. Blocks are ordered by
destination before neighbours are merged, for two reasons:

* destinations are distinct, so two blocks that could merge are always neighbours in that
  order; ordering by source would not do, since requests with a common prefix share sources;
* a block pool that has been in use hands out descending ids, which only merge once sorted.

The same order shows a destination that is written twice, so the check costs nothing more.

Everything here is immutable or local to a call: any thread may plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rd2h.layout import LayerLayout, TensorLayout, check_compatible
from rd2h.topology import owned_range
from rd2h.wire import ReadReadyBatch

__all__ = ["PullScope", "ReadPlan", "ReadPlanError", "RequestDestination", "plan_reads"]

_Unsigned: TypeAlias = NDArray[np.uint64]
_BlockIds: TypeAlias = NDArray[np.int64]

_MAX_DESTINATION_ID = 2**63 - 1
_ONE: Final = np.ones(1, np.uint64)


class ReadPlanError(ValueError):
    """An announced batch that cannot be read as a whole; none of it was."""


class RequestDestination:
    """Where one request's blocks go on this engine, over its whole prompt.

    A block's place in a list is its position in the prompt, cached prefix included: sources
    and destinations are lined up by position, never by count.

    Attributes:
        ext_id: the request's external id.
        main_block_ids: read-only, shape ``[blocks of the prompt]``.
        indexer_block_ids: read-only, shape ``[blocks of the prompt]``; empty for a model
            without an indexer. The count may differ from main (each group has a block size).
        cached_main_blocks: how many blocks at the start of the prompt hold its KV already. They
            may be shared with requests that are running, so they are never written, whatever
            the peer announces.
        cached_indexer_blocks: likewise for the indexer.

    Args:
        ext_id: the request's external id.
        main_block_ids: main KV block ids.
        indexer_block_ids: indexer block ids.
        cached_main_blocks: blocks.
        cached_indexer_blocks: blocks.

    Raises:
        ReadPlanError: a block id is negative or above 2**63 - 1, or is no integer; or a count
            of cached blocks is negative.
    """

    __slots__ = (
        "cached_indexer_blocks",
        "cached_main_blocks",
        "ext_id",
        "indexer_block_ids",
        "main_block_ids",
    )

    def __init__(
        self,
        ext_id: str,
        main_block_ids: Sequence[int],
        indexer_block_ids: Sequence[int],
        *,
        cached_main_blocks: int = 0,
        cached_indexer_blocks: int = 0,
    ) -> None:
        self.ext_id: Final = ext_id
        self.main_block_ids: Final = _destination_ids(ext_id, "main", main_block_ids)
        self.indexer_block_ids: Final = _destination_ids(ext_id, "indexer", indexer_block_ids)
        if cached_main_blocks < 0 or cached_indexer_blocks < 0:
            raise ReadPlanError(
                f"request {ext_id}: {cached_main_blocks} main and {cached_indexer_blocks} "
                f"indexer blocks are said to be cached"
            )
        self.cached_main_blocks: Final = cached_main_blocks
        self.cached_indexer_blocks: Final = cached_indexer_blocks

    def __repr__(self) -> str:
        return (
            f"RequestDestination({self.ext_id!r}, {self.main_block_ids.size} main, "
            f"{self.indexer_block_ids.size} indexer blocks)"
        )


@dataclass(frozen=True, slots=True)
class PullScope:
    """This decode rank's share of what a batch announces.

    Attributes:
        tp_rank: this rank in the Decode engine's tensor-parallel group.
        tp_size: ranks in that group.
        main_shared: True when the group's ranks share one pool of main KV (a host pool), so
            that each pulls a disjoint part; False when each has its own and pulls all. The
            indexer is always each rank's own.

    Raises:
        ReadPlanError: on construction, when ``tp_rank`` is outside ``tp_size``.
    """

    tp_rank: int
    tp_size: int
    main_shared: bool

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ReadPlanError(
                f"decode rank {self.tp_rank} is outside a tensor-parallel group of size "
                f"{self.tp_size}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The reads of one batch on one decode rank: one segment for each entry of the arrays.

    Destination ranges never overlap (given that the layer's own tensors do not). All three
    arrays are contiguous and have the shape ``[segments]``; the caller may change them.

    Attributes:
        local_addrs: destination addresses on this host, in bytes.
        remote_addrs: source addresses at the peer, in bytes.
        lengths: bytes of each segment, at least 1.
        segments_before: segments before neighbours were merged (blocks times tensors).
        total_bytes: sum of ``lengths``, as a Python int.
    """

    local_addrs: _Unsigned
    remote_addrs: _Unsigned
    lengths: _Unsigned
    segments_before: int
    total_bytes: int

    @property
    def segments(self) -> int:
        """Segments to read, after merging."""
        return self.lengths.size


def plan_reads(
    batch: ReadReadyBatch,
    remote: LayerLayout,
    local: LayerLayout,
    destinations: Mapping[str, RequestDestination],
    scope: PullScope,
) -> ReadPlan:
    """Plan and validate everything that this rank reads for one announced batch.

    Main KV is pulled from member 0 only, and split over the decode ranks when they share one
    pool. Indexer and scale are split over the members. What this member's batch announces is
    checked against the whole destination, also where another rank or member pulls the blocks,
    so that they judge it alike; block ids are checked where they are used. Main ids of other
    members, and indexer ids of a layer without an indexer, are ignored (old peers repeat the
    main ids there). Blocks of the cached prefix are passed over: a peer that knows nothing of
    the prefix announces them too.

    One request may have several entries in a batch, as long as no block is announced twice:
    what must hold is that no destination block is written twice, whichever requests do it.

    Args:
        batch: what the peer announced.
        remote: the peer's layout of the batch's layer.
        local: this engine's layout of it, with known numbers of blocks.
        destinations: by external id; must have every request of the batch.
        scope: this rank's place.

    Returns:
        The plan; with no segments when nothing falls to this rank.

    Raises:
        ReadPlanError: the batch does not fit the destinations or the memory. The message names
            the layer, the request and the values that disagree.
        LayoutMismatchError: the two layouts differ (a block has other bytes here than there).
    """
    layer = batch.layer_name
    if not layer == remote.name == local.name:
        raise ReadPlanError(
            f"layer {layer} was announced, but planned with the layouts of {remote.name} "
            f"(prefill) and {local.name} (decode)"
        )
    member, ratio = batch.group_member_idx, batch.tp_ratio
    if not 0 <= member < ratio:
        raise ReadPlanError(
            f"layer {layer}: prefill announced itself as member {member} of {ratio}; members "
            f"count from 0, so the two disagree"
        )
    check_compatible(remote, local)
    if any(tensor.num_blocks is None for tensor in local.tensors):
        raise ReadPlanError(
            f"layer {layer}: decode's layout does not know its numbers of blocks; plan with the "
            f"layout of the registered tensors"
        )

    main: list[_Entry] = []
    indexer: list[_Entry] = []
    for request in batch.read_reqs:
        destination = destinations.get(request.ext_id)
        if destination is None:
            raise ReadPlanError(
                f"layer {layer}: request {request.ext_id} has no destination blocks on decode "
                f"(destinations are known for {len(destinations)} requests)"
            )
        if member == 0 and request.main_block_ids:
            main.append(
                _Entry(
                    request.ext_id,
                    request.main_block_ids,
                    request.main_start_block,
                    destination.main_block_ids,
                    destination.cached_main_blocks,
                )
            )
        if local.indexer is not None and request.indexer_block_ids:
            indexer.append(
                _Entry(
                    request.ext_id,
                    request.indexer_block_ids,
                    request.indexer_start_block,
                    destination.indexer_block_ids,
                    destination.cached_indexer_blocks,
                )
            )

    rank, size = (scope.tp_rank, scope.tp_size) if scope.main_shared else (0, 1)
    return _to_plan(
        (
            (
                _merged(f"layer {layer}: main", main, remote.main, local.main, rank, size),
                remote.main,
                local.main,
            ),
            (
                _merged(
                    f"layer {layer}: indexer", indexer, remote.indexed, local.indexed, member, ratio
                ),
                remote.indexed,
                local.indexed,
            ),
        )
    )


class _Entry(NamedTuple):
    """One request's announcement for one role (main or indexer)."""

    ext_id: str
    source_ids: list[int]
    start: int
    destination_ids: _BlockIds
    cached: int


class _Runs(NamedTuple):
    """Runs of blocks that are consecutive on both sides: first ids, and blocks in each."""

    source: _Unsigned
    destination: _Unsigned
    counts: _Unsigned
    blocks: int


_Role: TypeAlias = tuple[_Runs | None, tuple[TensorLayout, ...], tuple[TensorLayout, ...]]


def _merged(
    where: str,
    entries: list[_Entry],
    remote: tuple[TensorLayout, ...],
    local: tuple[TensorLayout, ...],
    rank: int,
    size: int,
) -> _Runs | None:
    """Collect, check and merge what falls to ``rank`` of one list of block ids.

    ``remote`` and ``local`` are the tensors that these ids index. A tensor's blocks have the
    same bytes on both sides, so ids that are consecutive on both sides are adjacent in memory
    in every one of these tensors: merging ids once saves merging addresses of each.
    """
    ids = array("Q")
    parts: list[_BlockIds] = []
    for ext_id, blocks, start, destination_ids, cached in entries:
        count, known = len(blocks), destination_ids.size
        if start + count > known:
            raise ReadPlanError(
                f"{where} blocks of request {ext_id}: prefill announced {count} blocks from "
                f"position {start}, past the {known} destination blocks of decode; check that "
                f"both engines use the same block size and got the same prompt"
            )
        first, end = 0, count
        if size > 1:
            owned = owned_range(start, count, rank, size)
            first, end = owned.start, owned.stop
        # The split is of what was announced: which rank pulls a block hangs on nothing local.
        first = min(max(first, cached - start), end)
        if (first, end) != (0, count):
            blocks = blocks[first:end]
        try:
            # Three times as fast as np.fromiter, and it refuses what is no uint64.
            ids.fromlist(blocks)
        except (OverflowError, TypeError) as error:
            raise ReadPlanError(
                f"{where} blocks of request {ext_id}: a source block id is no 64-bit number: "
                f"{error}"
            ) from None
        parts.append(destination_ids[start + first : start + end])
    if not ids:
        return None

    source = np.frombuffer(ids, np.uint64)
    # Never negative, so the view keeps every value; int64 mixed with uint64 would turn float.
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    destination = joined.view(np.uint64)
    source_limit = min(tensor.addressable_blocks for tensor in remote)
    if int(source.max()) >= source_limit:
        at = int(source.argmax())
        raise ReadPlanError(
            f"{where} blocks of request {_owner(entries, parts, at)}: source block id "
            f"{source[at]} lies outside the address space of prefill's tensor (at most "
            f"{source_limit} blocks)"
        )
    destination_limit = min(tensor.num_blocks or 0 for tensor in local)
    if int(destination.max()) >= destination_limit:
        at = int(destination.argmax())
        raise ReadPlanError(
            f"{where} blocks of request {_owner(entries, parts, at)}: destination block id "
            f"{destination[at]} is outside decode's tensor of {destination_limit} blocks"
        )

    if source.size > 1 and not bool((destination[1:] > destination[:-1]).all()):
        order = destination.argsort()
        source, destination = source[order], destination[order]
        repeated = destination[1:] == destination[:-1]
        if bool(repeated.any()):
            at = int(repeated.argmax())
            earlier, later = sorted(int(place) for place in order[at : at + 2])
            raise ReadPlanError(
                f"{where}: destination block id {destination[at]} would be written twice, for "
                f"request {_owner(entries, parts, earlier)} and for request "
                f"{_owner(entries, parts, later)}"
            )

    if source.size == 1:
        return _Runs(source, destination, _ONE, 1)
    # A difference of 1 cannot come from wrapping: ids are below 2**64 - 1.
    gaps = (destination[1:] - destination[:-1]) != 1
    gaps |= (source[1:] - source[:-1]) != 1
    heads = np.flatnonzero(gaps)
    heads += 1
    heads = np.concatenate((np.zeros(1, np.intp), heads))
    if heads.size == source.size:
        return _Runs(source, destination, np.ones(heads.size, np.uint64), len(ids))
    counts = np.empty(heads.size, np.uint64)
    counts[:-1] = heads[1:] - heads[:-1]
    counts[-1] = source.size - heads[-1]
    return _Runs(source[heads], destination[heads], counts, len(ids))


def _to_plan(roles: Iterable[_Role]) -> ReadPlan:
    """Turn runs of ids into addresses, tensor by tensor."""
    parts = [
        (runs, theirs, ours)
        for runs, remote, local in roles
        if runs is not None
        for theirs, ours in zip(remote, local, strict=True)
    ]
    total = sum(runs.counts.size for runs, _, _ in parts)
    local_addrs, remote_addrs, lengths = (np.empty(total, np.uint64) for _ in range(3))
    first = 0
    for runs, theirs, ours in parts:
        # No overflow: ids are below the tensors' limits, whose ends are 64-bit numbers, and a
        # merged segment lies inside the local tensor.
        here = slice(first, first + runs.counts.size)
        block = np.uint64(ours.bytes_per_block)
        np.multiply(runs.counts, block, out=lengths[here])
        for ids, tensor, addrs in (
            (runs.destination, ours, local_addrs[here]),
            (runs.source, theirs, remote_addrs[here]),
        ):
            np.multiply(ids, block, out=addrs)
            addrs += np.uint64(tensor.address)
        first = here.stop
    return ReadPlan(
        local_addrs,
        remote_addrs,
        lengths,
        segments_before=sum(runs.blocks for runs, _, _ in parts),
        total_bytes=sum(runs.blocks * ours.bytes_per_block for runs, _, ours in parts),
    )


def _owner(entries: list[_Entry], parts: list[_BlockIds], place: int) -> str:
    """Return the request to which the block at ``place`` of all parts belongs."""
    ends = accumulate(part.size for part in parts)
    return next(entry.ext_id for entry, end in zip(entries, ends, strict=True) if place < end)


def _destination_ids(ext_id: str, role: str, ids: Sequence[int]) -> _BlockIds:
    values = array("Q")
    try:
        values.fromlist(list(ids))
    except (OverflowError, TypeError) as error:
        raise ReadPlanError(
            f"request {ext_id}: a {role} destination block id is no block id: {error}"
        ) from None
    unsigned = np.frombuffer(values, np.uint64)
    if values and int(unsigned.max()) > _MAX_DESTINATION_ID:
        raise ReadPlanError(
            f"request {ext_id}: {role} destination block id {unsigned.max()} is above "
            f"{_MAX_DESTINATION_ID}"
        )
    signed = unsigned.view(np.int64)
    signed.flags.writeable = False
    return signed
