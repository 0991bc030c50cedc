"""Main KV goes into one host pool, each part once; indexers stay with their rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch

from rd2h.connector.decode_worker import DecodeWorker
from rd2h.connector.groups import CacheGroups
from rd2h.connector.metadata import (
    AnnouncedRequest,
    DecodeEndpoint,
    DecodeStep,
    Loading,
    PrefillStep,
)
from rd2h.connector.options import ConnectorOptions
from rd2h.connector.prefill_worker import PrefillWorker
from rd2h.connector.setup import EngineSetup, Side
from rd2h.destinations import (
    Destination,
    SparseOffloadError,
    sparse_offload_destination,
)
from rd2h.devices import CpuDevice
from rd2h.engines.memory import MemoryEngine, MemoryFabric
from rd2h.layout import LayoutError
from serving.ports import free_ports
from tests.destinations.ascend import (
    UNTOUCHED,
    Caches,
    FakeManager,
    HostPool,
    Rank,
    indexer,
    install,
    main,
    memory,
)

BLOCKS = 16
INDEXERS = {0: False, 2: True}
"""Of three layers, the first has an indexer, the second none, the third one with a scale."""

SOURCES = [3, 2, 9, 0, 14, 7, 8]
DESTINATIONS = [5, 6, 1, 12, 11, 2, 15]


def destination(
    monkeypatch: pytest.MonkeyPatch, rank: Rank, tp_rank: int = 0, num_blocks: int = BLOCKS
) -> Destination:
    install(monkeypatch, rank.manager)
    return sparse_offload_destination(rank.kv_caches, num_blocks, tp_rank)


# ------------------------------------------------------------------------------------ end to end


def setup(side: Side, port: int) -> EngineSetup:
    return EngineSetup(
        side=side,
        engine_id=side,
        host="127.0.0.1",
        base_port=port,
        tp_size=2,
        num_blocks=BLOCKS,
        groups=CacheGroups(0, 0, 4, 4),
        options=ConnectorOptions(),
    )


def prefill_caches(rank: int) -> Caches:
    """Caches of a rank without offload; every block of every rank has bytes of its own."""
    caches: Caches = {}
    for layer in range(3):
        caches[main(layer)] = (memory(BLOCKS, 4, 1, 16), memory(BLOCKS, 4, 1, 4))
        if layer in INDEXERS:
            key = torch.int8 if INDEXERS[layer] else torch.bfloat16
            tensors = [memory(BLOCKS, 4, 1, 8, dtype=key)]
            if INDEXERS[layer]:
                tensors.append(memory(BLOCKS, 4, 1, 1, dtype=torch.float16))
            caches[indexer(layer)] = tuple(tensors)
    for number, registered in enumerate(caches.values()):
        for tensor in registered:
            for block in range(BLOCKS):
                content = 100 * rank + 6 * block + number  # below 256, and never the same
                tensor[block].view(torch.uint8).fill_(
                    content if content < UNTOUCHED else content + 1
                )
    return caches


class Engines:
    """A Prefill and a Decode engine of two ranks each; Decode's with offload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        fabric, port = MemoryFabric(), free_ports(2)
        self.endpoint = DecodeEndpoint("127.0.0.1", port, 2)
        self.pool = HostPool(3, BLOCKS)
        self.ranks = [Rank(self.pool, rank, INDEXERS) for rank in range(2)]
        self.sources = [prefill_caches(rank) for rank in range(2)]
        self.decode: list[DecodeWorker] = []
        self.prefill: list[PrefillWorker] = []
        for rank in range(2):
            made = destination(monkeypatch, self.ranks[rank], rank)
            worker = DecodeWorker(setup("decode", port), rank, MemoryEngine(fabric), made)
            stack.callback(worker.close)
            self.decode.append(worker)
        for rank in range(2):
            sender = PrefillWorker(
                setup("prefill", 1),
                rank,
                MemoryEngine(fabric),
                CpuDevice(),
                self.sources[rank],
                writes_before_wait=False,
            )
            stack.callback(sender.close)
            self.prefill.append(sender)

    def announce(self, start: int, end: int) -> None:
        """A step of Prefill that completes these blocks of the prompt."""
        ids = SOURCES[start:end]
        request = AnnouncedRequest(
            "r", self.endpoint, ids, ids, start, start, done=end == len(SOURCES)
        )
        for worker in self.prefill:
            worker.begin(PrefillStep(frozenset(ids), (request,), ()))
            worker.end()

    def receive(self) -> None:
        """Wait until every rank has reported the request."""
        deadline = time.monotonic() + 20
        for worker in self.decode:
            while not (ended := worker.ended()).all:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert not ended.failed


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(monkeypatch, stack)


def blocks_of(tensor: torch.Tensor) -> list[int | None]:
    """The byte that fills each block; None for a block that nothing was read to."""
    contents: list[int | None] = []
    for block in tensor:
        values = set(block.view(torch.uint8).flatten().tolist())
        assert len(values) == 1, "a block is torn"
        contents.append(None if values == {UNTOUCHED} else values.pop())
    return contents


def hand_over(engines: Engines) -> None:
    load = Loading("r-00000000", "r", DESTINATIONS, DESTINATIONS, 0, 0)
    for worker in engines.decode:
        worker.begin(DecodeStep((load,), ()))
    engines.announce(0, 4)
    engines.announce(4, 7)
    engines.receive()


def test_ranks_fill_the_pool_together_each_its_part(engines: Engines) -> None:
    hand_over(engines)
    for layer in range(3):
        name = main(layer)
        for role, pooled in enumerate((engines.pool.k[layer], engines.pool.v[layer])):
            wanted: list[int | None] = [None] * BLOCKS
            # Two of the four blocks of the first chunk each; the second chunk begins with rank 0,
            # as its position is even, and gives it the odd block.
            for position, rank in enumerate([0, 0, 1, 1, 0, 0, 1]):
                source = engines.sources[rank][name][role]
                wanted[DESTINATIONS[position]] = blocks_of(source)[SOURCES[position]]
            assert blocks_of(pooled) == wanted


@pytest.mark.parametrize("rank", [0, 1])
def test_indexers_and_scales_come_to_every_rank_as_a_whole(engines: Engines, rank: int) -> None:
    hand_over(engines)
    for layer, scaled in INDEXERS.items():
        theirs = engines.sources[rank][indexer(layer)]
        ours = engines.ranks[rank].kv_caches[indexer(layer)]
        assert len(ours) == len(theirs) == 1 + scaled
        for source, tensor in zip(theirs, ours, strict=True):
            wanted: list[int | None] = [None] * BLOCKS
            for position, block in enumerate(DESTINATIONS):
                wanted[block] = blocks_of(source)[SOURCES[position]]
            assert blocks_of(tensor) == wanted


def test_no_byte_of_main_kv_is_read_twice(engines: Engines) -> None:
    hand_over(engines)
    main_block = sum(engines.pool.k[0][0].nbytes + engines.pool.v[0][0].nbytes for _ in range(3))
    indexed_block = sum(
        tensor[0].nbytes
        for layer in INDEXERS
        for tensor in engines.ranks[0].kv_caches[indexer(layer)]
    )
    read = sum(worker.stats.bytes for worker in engines.decode)
    assert read == len(SOURCES) * (main_block + 2 * indexed_block)


# --------------------------------------------------------------------------------- what it makes


def test_layers_stand_in_the_order_of_the_pool_and_main_kv_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(HostPool(3, BLOCKS), 0, INDEXERS)
    made = destination(monkeypatch, rank)
    assert made.main_shared
    assert list(made.layers) == [main(0), main(1), main(2)]
    assert [len(layer.indexed) for layer in made.layers.values()] == [1, 0, 2]


def test_the_layer_to_pool_index_says_where_a_layer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(2, BLOCKS), 0, {})
    rank.manager.layer_name_to_offload_id = {main(0): 1, main(1): 0}
    made = destination(monkeypatch, rank)
    assert made.layers[main(0)].main[0].address == rank.manager.gvas_k_bases[1]
    assert made.layers[main(1)].main[1].address == rank.manager.gvas_v_bases[0]


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_every_rank_registers_the_whole_pool_and_its_own_indexers(
    monkeypatch: pytest.MonkeyPatch, tp_rank: int
) -> None:
    rank = Rank(pool := HostPool(3, BLOCKS), tp_rank, INDEXERS)
    regions = destination(monkeypatch, rank, tp_rank).regions
    own = [tensor for layer in INDEXERS for tensor in rank.kv_caches[indexer(layer)]]
    wanted = {(tensor.data_ptr(), tensor.nbytes) for tensor in (*pool.k, *pool.v, *own)}
    assert {(region.address, region.length) for region in regions} == wanted


def test_a_block_may_be_several_kernel_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS, scale=2), 0, {})
    k, v = destination(monkeypatch, rank).layers[main(0)].main
    assert (k.bytes_per_block, v.bytes_per_block) == (2 * 4 * 16 * 2, 2 * 4 * 4 * 2)
    assert k.num_blocks == v.num_blocks == BLOCKS


def test_views_of_the_pool_on_another_rank_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(pool := HostPool(1, BLOCKS), 1, {})
    rank.manager.k_caches_cpu, rank.manager.v_caches_cpu = list(pool.k), list(pool.v)
    assert destination(monkeypatch, rank, 1).main_shared
    rank.manager.k_caches_cpu = [pool.k[0].clone()]
    with pytest.raises(SparseOffloadError, match=f"{main(0)}.*k pool.*global virtual address"):
        destination(monkeypatch, rank, 1)


# ---------------------------------------------------------------------------- failures at start


def _set(name: str, value: object) -> Callable[[FakeManager], None]:
    return lambda manager: setattr(manager, name, value)


def _resized(blocks: int) -> Callable[[FakeManager], None]:
    """K of the second layer is replaced by a tensor of other blocks, in its place."""

    def change(manager: FakeManager) -> None:
        manager.k_caches_cpu[1] = manager.k_caches_cpu[1][:blocks]

    return change


def _spaced(manager: FakeManager) -> None:
    manager.k_caches_cpu[1] = manager.k_caches_cpu[1][:, ::2]


CONTRADICTIONS: Sequence[tuple[Callable[[FakeManager], None], str]] = [
    (_set("gvas_k_bases", [1]), "2 layers.*1 entries in gvas_k_bases on rank 0"),
    (_set("gvas_v_bases", [1, 2, 3]), "2 layers.*3 entries in gvas_v_bases"),
    (_set("cpu_block_lens", []), "2 layers.*0 entries in cpu_block_lens"),
    (_set("k_caches_cpu", []), "2 layers.*0 entries in k_caches_cpu"),
    (_set("v_caches_cpu", []), "2 layers.*0 entries in v_caches_cpu"),
    (_set("layer_name_to_offload_id", {main(0): 0}), f"2 layers.*{main(0)} at 0"),
    (_set("layer_name_to_offload_id", {main(0): 0, main(1): 0}), f"{main(1)} at 0"),
    (_set("layer_name_to_offload_id", {main(0): 1, main(1): 2}), f"{main(1)} at 2"),
    (_set("cpu_block_lens", [(128, 32), (128, 32, 8)]), rf"{main(1)}: cpu_block_lens is \(128"),
    (_set("cpu_block_lens", [(128, 32), (0, 32)]), rf"{main(1)}: .*k pool: its block.* is 0;"),
    (_set("cpu_block_lens", [(128, 32), (128, -32)]), rf"{main(1)}: .*v pool: its block.* is -32;"),
    (_set("cpu_block_lens", [(True, 32), (128, 32)]), rf"{main(0)}: .*k pool: .* is True;"),
    (_set("cpu_block_lens", [(128, 32.0), (128, 32)]), rf"{main(0)}: .*v pool: .* is 32\.0;"),
    (_set("cpu_block_lens", [(128, 32), (192, 32)]), "2048 bytes hold 10 blocks of 192"),
    (_set("cpu_block_lens", [(128, 32), (96, 32)]), "96 bytes.*kernel blocks of 128 bytes"),
    (_set("gvas_k_bases", [0, 1]), f"{main(0)}: .*gvas_k_bases is 0"),
    (
        _set("gvas_v_bases", [4096, 4096]),
        f"{main(0)}: .*v pool: .*global virtual address is 0x1000",
    ),
    (_resized(BLOCKS - 1), f"{main(1)}: .*k pool.* hold 15 blocks.*ids of 16 blocks"),
    (_spaced, f"{main(1)}: .*k pool.*not contiguous"),
    (_set("use_fused_copy_sfa", True), '"fused_op_type": "none".*--additional-config'),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS)
def test_a_pool_that_contradicts_itself_fails(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeManager], None], message: str
) -> None:
    rank = Rank(HostPool(2, BLOCKS), 0, {})
    destination(monkeypatch, rank)  # good without the change
    change(rank.manager)
    with pytest.raises(SparseOffloadError, match=message):
        destination(monkeypatch, rank)


def test_tensors_that_overlap_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(2, BLOCKS), 1, {})
    k = rank.manager.gvas_k_bases
    k[1] = k[0] + 128
    with pytest.raises(
        SparseOffloadError, match=f"k of layer {main(0)} ends at .*{main(1)} begins"
    ):
        destination(monkeypatch, rank, 1)


def test_a_manager_whose_caches_are_not_registered_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(pool := HostPool(1, BLOCKS), 0, {})
    rank.manager = FakeManager(pool, 0)
    with pytest.raises(
        SparseOffloadError, match=r"no caches yet.*register_kv_caches must run before"
    ):
        destination(monkeypatch, rank)


def test_a_manager_of_another_version_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS), 0, {})
    del rank.manager.layer_name_to_offload_id
    with pytest.raises(SparseOffloadError, match=r"has no layer_name_to_offload_id.*0\.30\.0rc2"):
        destination(monkeypatch, rank)


def test_main_layers_outside_the_pool_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(2, BLOCKS), 0, {})
    rank.kv_caches["draft.attn"] = memory(BLOCKS, 4)
    with pytest.raises(SparseOffloadError, match=r"3 attention layers .* 2 are in .*draft\.attn"):
        destination(monkeypatch, rank)


def test_layers_of_the_pool_that_are_not_registered_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(2, BLOCKS), 0, {})
    del rank.kv_caches[main(1)]
    with pytest.raises(SparseOffloadError, match=f"1 attention layers .* 2 are in .*{main(1)}"):
        destination(monkeypatch, rank)


def test_an_indexer_without_a_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS), 0, {})
    rank.kv_caches[indexer(7)] = memory(BLOCKS, 4)
    with pytest.raises(SparseOffloadError, match=rf"{indexer(7)}: 0 of the 1 layers.*layers\.7\."):
        destination(monkeypatch, rank)


def test_a_layer_with_two_indexers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS), 0, {0: False})
    rank.kv_caches["model.layers.0.self_attn.indexer.other"] = memory(BLOCKS, 4)
    with pytest.raises(SparseOffloadError, match=rf"{main(0)}: both {indexer(0)} and .*other"):
        destination(monkeypatch, rank)


def test_an_indexer_with_other_blocks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(HostPool(1, BLOCKS), 0, {0: False})
    rank.kv_caches[indexer(0)] = memory(BLOCKS + 1, 4)
    with pytest.raises(LayoutError, match=f"{indexer(0)}: .*16 blocks"):
        destination(monkeypatch, rank)
