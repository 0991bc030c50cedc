"""P's and D's workers together: every byte, over real sockets, in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from rd2h.connector.decode_worker import DecodeWorker, Ended
from rd2h.decode import PortTakenError
from rd2h.destinations import CacheTensors, paged_destination
from rd2h.engines.memory import MemoryEngine
from rd2h.prefill import LayerSendError
from tests.connector.hosts import (
    BLOCKS,
    CANARY,
    Hosts,
    announced,
    engine_setup,
    filled,
    hosts,
    load,
    prefill_step,
    run_step,
    tensors_of,
)


def ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


Caches = dict[str, CacheTensors]
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


@pytest.fixture
def site() -> Iterator[Hosts]:
    with hosts() as made:
        yield made


def empty_like(caches: Caches) -> Caches:
    """The same tensors, laid out alike, with nothing in them."""

    def empty(registered: CacheTensors) -> CacheTensors:
        found = [torch.empty_like(t).fill_(CANARY) for t in tensors_of(registered)]
        return found[0] if isinstance(registered, torch.Tensor) else found

    made = {name: empty(registered) for name, registered in caches.items()}
    for name, registered in caches.items():
        for ours, theirs in zip(tensors_of(made[name]), tensors_of(registered), strict=True):
            assert ours.stride() == theirs.stride()
    return made


def packed() -> Caches:
    return {name: filled(BLOCKS, 4, 9) + 1000 * i for i, name in enumerate(NAMES)}


def keys_and_values_apart() -> Caches:
    return {name: filled(2, BLOCKS, 4, 2, 3) for name in NAMES}


def latent_and_rope() -> Caches:
    return {name: (filled(BLOCKS, 4, 5), filled(BLOCKS, 4, 2) + 5000) for name in NAMES}


def permuted() -> Caches:
    return {name: filled(BLOCKS, 2, 4, 6).permute(0, 2, 1, 3) for name in NAMES}


def in_kernel_blocks() -> Caches:
    return {name: filled(BLOCKS * 4, 1, 7) for name in NAMES}


def with_indexer() -> Caches:
    """The first layer only."""
    return packed() | {"model.layers.0.indexer.k_cache": filled(BLOCKS, 4, 3) + 7000}


def with_indexer_and_scale() -> Caches:
    scaled = (filled(BLOCKS * 2, 2, 3) + 7000, filled(BLOCKS, 4) + 9000)
    return packed() | {"model.layers.0.indexer.k_cache": scaled}


def all_in_one_tuple() -> Caches:
    return {
        NAMES[0]: (filled(BLOCKS, 8), filled(BLOCKS, 2) + 500, filled(BLOCKS, 3) + 800),
        NAMES[1]: (filled(BLOCKS, 8), filled(BLOCKS, 2) + 500),
    }


KINDS: list[Callable[[], Caches]] = [
    packed,
    keys_and_values_apart,
    latent_and_rope,
    permuted,
    in_kernel_blocks,
    with_indexer,
    with_indexer_and_scale,
    all_in_one_tuple,
]


def by_block(tensor: torch.Tensor) -> torch.Tensor:
    """A view-like copy of shape ``[blocks, bytes of all that belongs to one]``."""
    if tensor.shape[0] == 2:
        return torch.cat([tensor[0].reshape(BLOCKS, -1), tensor[1].reshape(BLOCKS, -1)], 1)
    return tensor.reshape(BLOCKS, -1)


def check(source: Caches, target: Caches, main: dict[int, int], indexer: dict[int, int]) -> None:
    """That these blocks, destination to source, were moved and nothing else was written."""
    for name, registered in source.items():
        for place, (theirs, ours) in enumerate(
            zip(tensors_of(registered), tensors_of(target[name]), strict=True)
        ):
            indexed = "indexer" in name or place >= 2
            expected = torch.full_like(by_block(ours), CANARY)
            for to_block, from_block in (indexer if indexed else main).items():
                expected[to_block] = by_block(theirs)[from_block]
            assert torch.equal(by_block(ours), expected), f"{name}, tensor {place}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_arrives_in_two_chunks_behind_a_cached_prefix(
    site: Hosts, kind: Callable[[], Caches]
) -> None:
    source = kind()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target)
    # Block 9 of main and 8 of the indexer hold a prefix that others may be using.
    decode.begin(load("a", [9, 3, 12, 7], [8, 2, 11, 6], cached=1))
    tell = partial(announced, "a", decode.endpoint)
    # A peer that knows nothing of the prefix announces it too.
    run_step(prefill, prefill_step(tell([1, 2], [5, 4], done=False)), NAMES)
    assert decode.workers[0].ended() == Ended()
    run_step(prefill, prefill_step(tell([10, 14], [13, 15], start=2)), NAMES)
    assert decode.wait("a!") == Ended(all={"a!"})
    check(source, target, {3: 2, 12: 10, 7: 14}, {2: 4, 11: 13, 6: 15})
    assert decode.workers[0].ended() == Ended()  # told once
    assert decode.workers[0].stats.failed == 0


def test_layers_that_no_hook_has_spoken_of_arrive_at_the_end_of_the_step(site: Hosts) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target)
    decode.begin(load("a", [3]))
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [5])), NAMES[:1])
    assert decode.wait("a!") == Ended(all={"a!"})
    check(source, target, {3: 5}, {})


def test_several_requests_to_two_decodes(site: Hosts) -> None:
    source = packed()
    one, two = empty_like(source), empty_like(source)
    prefill, first, second = site.prefill(source), site.decode(one), site.decode(two)
    first.begin(load("a", [1, 2]), load("b", [3]))
    second.begin(load("c", [1]))
    step = prefill_step(
        announced("a", first.endpoint, [4, 5]),
        announced("c", second.endpoint, [6]),
        announced("b", first.endpoint, [7]),
    )
    run_step(prefill, step, NAMES)
    assert first.wait("a!", "b!") == Ended(all={"a!", "b!"})
    assert second.wait("c!") == Ended(all={"c!"})
    check(source, one, {1: 4, 2: 5, 3: 7}, {})
    check(source, two, {1: 6}, {})


def test_a_failed_read_names_the_blocks_that_were_awaited(site: Hosts) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source, policy="contain"), site.decode(target)
    decode.engines[0].fail_read()
    decode.begin(load("a", [9, 3, 12], cached=1), load("b", [5]))
    for ext_id, ids in (("a", [1, 2, 4]), ("b", [6])):
        run_step(prefill, prefill_step(announced(ext_id, decode.endpoint, ids)), NAMES)
    assert decode.wait("a!", "b!") == Ended(all={"a!", "b!"}, failed={"a!"}, failed_blocks={3, 12})
    assert torch.equal(
        by_block(tensors_of(target[NAMES[1]])[0])[5], by_block(tensors_of(source[NAMES[1]])[0])[6]
    )


def test_a_failed_read_raises_on_prefill_if_the_policy_says_so(site: Hosts) -> None:
    source = packed()
    prefill, decode = site.prefill(source), site.decode(empty_like(source))
    decode.engines[0].fail_read()
    decode.begin(load("a", [9]))
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1], done=False)), NAMES)
    with pytest.raises(LayerSendError, match=r"requests a\b"):
        prefill._sender.drain()
    assert decode.wait("a!").failed == {"a!"}


def test_an_aborted_request_ends_once_without_being_read(site: Hosts) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target)
    decode.begin(load("a", [9]))
    decode.begin(aborted=["a"])
    assert decode.wait("a!") == Ended(all={"a!"}, aborted=1)
    # What still comes for it hurts nobody.
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1])), NAMES)
    prefill._sender.drain()
    check(source, target, {}, {})
    assert decode.workers[0].ended() == Ended()


def test_an_aborted_request_ends_once_its_read_is_over(site: Hosts) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target)
    held = decode.engines[0].hold_read()
    decode.begin(load("a", [9]))
    prefill.begin(prefill_step(announced("a", decode.endpoint, [1])))
    prefill.written(NAMES[0])
    assert held.started.wait(20)
    decode.begin(aborted=["a"])
    decode.workers[0].sizes()  # the receiver has heard of it
    assert decode.workers[0].ended() == Ended()
    held.release()
    assert decode.wait("a!") == Ended(all={"a!"}, aborted=1)


def test_an_abort_of_the_step_before_does_not_touch_a_new_request_of_the_same_id(
    site: Hosts,
) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target)
    decode.begin(load("a", [9]), aborted=["a"])
    decode.workers[0].sizes()  # the receiver has heard of both
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1])), NAMES)
    assert decode.wait("a!") == Ended(all={"a!"})
    check(source, target, {9: 1}, {})


def test_prefill_that_goes_away_fails_what_it_feeds(site: Hosts) -> None:
    source = packed()
    prefill, decode = site.prefill(source), site.decode(empty_like(source))
    decode.begin(load("a", [9, 3]))
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1], done=False)), NAMES)
    prefill._sender.drain()
    prefill.close()
    assert decode.wait("a!") == Ended(all={"a!"}, failed={"a!"}, failed_blocks={9, 3})


def test_a_request_that_hears_nothing_fails(site: Hosts) -> None:
    decode = site.decode(empty_like(packed()), times={"idle_timeout": 0.05})
    decode.begin(load("a", [9]))
    assert decode.wait("a!").failed == {"a!"}


def test_nothing_is_kept_when_all_is_over(site: Hosts) -> None:
    source = packed()
    prefill, decode = site.prefill(source), site.decode(empty_like(source))
    decode.begin(load("a", [9]))
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1])), NAMES)
    decode.wait("a!")
    run_step(prefill, prefill_step(finished=["a"]), NAMES)
    assert not any(prefill._sender.sizes().values())
    sizes = decode.workers[0].sizes()
    assert {name: size for name, size in sizes.items() if size} == {"peers": 1, "ended": 1}


def test_each_rank_listens_on_its_own_port_and_a_taken_one_is_refused(site: Hosts) -> None:
    decode = site.decode(empty_like(packed()), empty_like(packed()))
    for rank in range(2):
        with pytest.raises(PortTakenError, match=str(decode.endpoint.base_port + rank)):
            DecodeWorker(
                engine_setup("decode", tp=2, port=decode.endpoint.base_port),
                rank,
                MemoryEngine(site.fabric),
                paged_destination(packed(), BLOCKS),
            )


@pytest.mark.skipif(not ipv6(), reason="this host has no IPv6")
def test_a_decode_that_advertises_an_ipv6_address(site: Hosts) -> None:
    source = packed()
    target = empty_like(source)
    prefill, decode = site.prefill(source), site.decode(target, host="::1")
    decode.begin(load("a", [9]))
    run_step(prefill, prefill_step(announced("a", decode.endpoint, [1])), NAMES)
    assert decode.wait("a!") == Ended(all={"a!"})
    check(source, target, {9: 1}, {})


# ----------------------------------------------------------------------------------- TP 2 and up


def aggregate(aggregator: KVOutputAggregator, ended: list[Ended]) -> KVConnectorOutput:
    """What vLLM's executor makes of what its workers say in one step."""
    outputs: list[ModelRunnerOutput | None] = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(rank.all), failed_recving=set(rank.failed)
            ),
        )
        for rank in ended
    ]
    result = aggregator.aggregate(outputs)
    assert result is not None
    assert result.kv_connector_output is not None
    return result.kv_connector_output


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_a_request_is_over_when_both_ranks_have_said_so(site: Hosts, fails: int | None) -> None:
    sources = [packed(), packed()]
    decode = site.decode(empty_like(packed()), empty_like(packed()))
    ranks = [site.prefill(sources[rank], rank=rank, tp=2, policy="contain") for rank in range(2)]
    if fails is not None:
        decode.engines[fails].fail_read()
    decode.begin(load("a", [9]))
    step = prefill_step(announced("a", decode.endpoint, [1]))
    aggregator = KVOutputAggregator(2)

    run_step(ranks[0], step, NAMES)
    first = decode.wait("a!", rank=0)
    output = aggregate(aggregator, [first, Ended()])
    assert (output.finished_recving, output.failed_recving) == (None, set())

    run_step(ranks[1], step, NAMES)
    second = decode.wait("a!", rank=1)
    output = aggregate(aggregator, [Ended(), second])
    assert output.finished_recving == {"a!"}
    assert output.failed_recving == ({"a!"} if fails is not None else set())
    for rank in range(2):
        if rank != fails:
            check(sources[rank], decode.caches[rank], {9: 1}, {})
    output = aggregate(aggregator, [worker.ended() for worker in decode.workers])
    assert (output.finished_recving, output.failed_recving) == (None, set())


def test_a_replicated_cache_is_handed_over_between_unequal_sizes(site: Hosts) -> None:
    source = with_indexer()  # the same on every rank
    decode = site.decode(empty_like(source))
    ranks = [site.prefill(source, rank=rank, tp=2) for rank in range(2)]
    decode.begin(load("a", [9, 3, 12], [8, 2, 11]))
    step = prefill_step(announced("a", decode.endpoint, [1, 2, 4], [5, 6, 7]))
    run_step(ranks[0], step, NAMES)
    ranks[0]._sender.drain()
    assert decode.workers[0].ended() == Ended()  # one of two contributors
    run_step(ranks[1], step, NAMES)
    assert decode.wait("a!") == Ended(all={"a!"})
    check(source, decode.caches[0], {9: 1, 3: 2, 12: 4}, {8: 5, 2: 6, 11: 7})


def test_four_ranks_feed_two(site: Hosts) -> None:
    source = packed()
    decode = site.decode(empty_like(source), empty_like(source))
    ranks = [site.prefill(source, rank=rank, tp=4) for rank in range(4)]
    decode.begin(load("a", [9, 3]))
    for prefill in ranks:
        run_step(prefill, prefill_step(announced("a", decode.endpoint, [1, 2])), NAMES)
    for rank in range(2):
        assert decode.wait("a!", rank=rank) == Ended(all={"a!"})
        check(source, decode.caches[rank], {9: 1, 3: 2}, {})


def test_heads_that_are_split_over_ranks_are_refused_at_unequal_sizes(site: Hosts) -> None:
    # Two heads on Decode's only rank, one on each of Prefill's.
    target: Caches = {name: torch.full((2, BLOCKS, 4, 2, 3), CANARY) for name in NAMES}
    decode = site.decode(target)
    ranks = [
        site.prefill({name: filled(2, BLOCKS, 4, 1, 3) for name in NAMES}, rank=rank, tp=2)
        for rank in range(2)
    ]
    for rank, prefill in enumerate(ranks):
        decode.begin(load(f"a{rank}", [9 + rank]))
        prefill.begin(prefill_step(announced(f"a{rank}", decode.endpoint, [1])))
        prefill.written(NAMES[0])
        with pytest.raises(LayerSendError, match="--tensor-parallel-size"):
            prefill._sender.drain()
        assert decode.wait(f"a{rank}!").failed == {f"a{rank}!"}
    assert all(bool((t == CANARY).all()) for name in NAMES for t in tensors_of(target[name]))
