"""What Prefill gets wrong fails one layer before its first byte, and hurts nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rd2h.decode import Outcome
from rd2h.wire import (
    LayerMetadata,
    MfMeta,
    MfMetaAck,
    ReadDone,
    ReadFailed,
    ReadReadyBatch,
    ReadRequest,
    encode,
)
from tests.transfer.caches import UNTOUCHED, Cache, Shape
from tests.transfer.ranks import Decode, Log, Site, make_site
from tests.transfer.scripted import ScriptedPrefill

GOOD = Shape(indexer=24, lic8=4)


@pytest.fixture
def site() -> Iterator[Site]:
    with make_site() as made:
        yield made


def answer_of(
    decode: Decode, prefill: ScriptedPrefill, message: ReadReadyBatch, *ext_ids: str
) -> str:
    """Announce what cannot be right; check that only it failed, and return the reason."""
    for ext_id in ext_ids:
        decode.register(ext_id, [1, 2, 3], [4, 5, 6])
    decode.register("fine", [7], [8])
    answer = prefill.ask(message)
    assert isinstance(answer, ReadFailed)
    assert decode.cache.untouched()
    for finished in decode.wait(*ext_ids):
        assert (finished.outcome, finished.reason) == (Outcome.FAILED, answer.error)
    fine = ReadReadyBatch(1, "layer.1", [ReadRequest("fine", [3], [3])], ["fine"])
    assert prefill.ask(fine) == ReadDone(1)
    decode.wait_done("fine")
    assert decode.cache.untouched(["layer.0"])
    return answer.error


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        (Shape(main=(64,), indexer=24, lic8=4), ["number of main KV tensors", "1", "2"]),
        (Shape(main=(64, 32), indexer=24, lic8=4), ["main 1 tensor", "32", "16"]),
        (Shape(main=(128, 16), indexer=24, lic8=4, scale=2), ["main 0 tensor", "2 x 64", "64"]),
        (Shape(), ["indexer tensor", "prefill no", "decode yes"]),
        (Shape(indexer=12, lic8=4), ["indexer tensor", "12", "24"]),
        (Shape(indexer=24), ["scale tensor", "prefill no", "decode yes"]),
        (Shape(indexer=24, lic8=8), ["scale tensor", "8", "4"]),
    ],
    ids=[
        "tensor count",
        "bytes",
        "kernel blocks",
        "indexer",
        "indexer bytes",
        "scale",
        "scale bytes",
    ],
)
def test_layouts_that_differ(site: Site, theirs: Shape, values: list[str]) -> None:
    decode = site.decode({"layer.0": GOOD, "layer.1": GOOD})
    cache = Cache({"layer.0": theirs, "layer.1": GOOD})
    prefill = site.scripted_prefill(decode.endpoint)
    prefill.greet(site.engine(cache).session, cache)
    message = ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1], [1])], ["a"])
    reason = answer_of(decode, prefill, message, "a")
    for word in ["layer.0", *values]:
        assert word in reason


@pytest.mark.parametrize(
    ("requests", "values"),
    [
        ([ReadRequest("a", [1, 2], [], 2)], ["request a", "2 blocks", "position 2", "past the 3"]),
        ([ReadRequest("a", [], [1], 0, 9)], ["indexer", "request a", "position 9", "past the 3"]),
        ([ReadRequest("b", [1], [])], ["request b", "destination block id 99", "32 blocks"]),
        ([ReadRequest("b", [], [1])], ["indexer", "request b", "id 77", "32 blocks"]),
        (
            [ReadRequest("a", [1], []), ReadRequest("c", [2], [])],
            ["destination block id 1 would be written twice", "request a", "request c"],
        ),
        ([ReadRequest("a", [1, 2], []), ReadRequest("a", [3], [], 1)], ["twice", "request a"]),
        ([ReadRequest("a", [2**63], [])], ["request a", str(2**63), "address space"]),
        ([ReadRequest("a", [1, 5000], [])], ["requests a", "not inside", "regions"]),
        ([ReadRequest("a", [], [1, 5000])], ["requests a", "not inside", "regions"]),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit(site: Site, requests: list[ReadRequest], values: list[str]) -> None:
    shapes = {"layer.0": GOOD, "layer.1": GOOD}
    decode, cache = site.decode(shapes), Cache(shapes)
    prefill = site.scripted_prefill(decode.endpoint)
    prefill.greet(site.engine(cache).session, cache)
    decode.register("b", [99], [77])
    decode.register("c", [1], [2])
    message = ReadReadyBatch(0, "layer.0", requests, [])
    reason = (
        answer_of(decode, prefill, message, "a")
        if requests[0].ext_id == "a"
        else (answer_of(decode, prefill, message))
    )
    for word in ["layer.0", *values]:
        assert word in reason


def test_member_outside_its_group_is_no_message_and_gets_nothing(site: Site) -> None:
    shapes = {"layer.0": GOOD, "layer.1": GOOD}
    decode, cache = site.decode(shapes), Cache(shapes)
    prefill = site.scripted_prefill(decode.endpoint)
    prefill.greet(site.engine(cache).session, cache)
    decode.register("a", [1], [1])
    good = encode(ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1], [])], ["a"], 0, 1))
    assert good[-2:] == b"\x00\x01"
    with Log() as log:
        prefill.say(good[:-2] + b"\x02\x02", good)
        assert prefill.hear() == ReadDone(0)
    assert len(log.lines) == 1
    assert "$[5]" in log.lines[0]
    decode.wait_done("a")


@pytest.mark.parametrize(
    ("metadata", "values"),
    [
        (LayerMetadata([1, 2], [64, 0]), ["main 1", "at least 1"]),
        (LayerMetadata([1, 2**64 - 1], [64, 16]), ["main 1", "address"]),
        (LayerMetadata([1] * 9, [64] * 9), ["9 tensors", "leave 7"]),
    ],
)
def test_metadata_that_describes_no_layer(
    site: Site, metadata: LayerMetadata, values: list[str]
) -> None:
    decode = site.decode({"layer.0": GOOD, "layer.1": GOOD})
    cache = Cache({"layer.1": GOOD})
    prefill = site.scripted_prefill(decode.endpoint)
    layers = {"layer.0": metadata, "layer.1": cache.layouts["layer.1"].to_wire()}
    prefill.say(MfMeta(site.engine(cache).session, layers))
    assert prefill.hear() == MfMetaAck()
    message = ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1], [])])
    reason = answer_of(decode, prefill, message, "a")
    for word in ["layer.0", *values]:
        assert word in reason


@pytest.mark.parametrize("theirs", [True, False])
def test_layer_that_only_one_side_has(site: Site, theirs: bool) -> None:
    both, more = {"layer.1": GOOD}, {"layer.1": GOOD, "layer.9": GOOD}
    decode, cache = site.decode(both if theirs else more), Cache(more if theirs else both)
    prefill = site.scripted_prefill(decode.endpoint)
    prefill.greet(site.engine(cache).session, cache)
    decode.register("a", [1], [1])
    answer = prefill.ask(ReadReadyBatch(9, "layer.9", [ReadRequest("a", [1], [1])]))
    assert isinstance(answer, ReadFailed)
    assert "layer.9" in answer.error
    assert ("no cache on Decode" if theirs else "not in Prefill's metadata") in answer.error
    assert decode.wait("a")[0].outcome is Outcome.FAILED


def test_session_that_makes_no_sense(site: Site) -> None:
    shapes = {"layer.0": GOOD, "layer.1": GOOD}
    decode, cache = site.decode(shapes), Cache(shapes)
    bad, good = (site.scripted_prefill(decode.endpoint) for _ in range(2))
    bad.greet("no session" * 1000, cache)
    good.greet(site.engine(cache).session, cache)
    decode.register("a", [1], [1])
    answer = bad.ask(ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1], [1])]))
    assert isinstance(answer, ReadFailed)
    assert "requests a" in answer.error
    assert len(answer.error) < 1000
    assert decode.cache.untouched()
    decode.register("b", [1], [1])
    message = ReadReadyBatch(0, "layer.0", [ReadRequest("b", [1], [1])], ["b"])
    assert good.ask(message) == ReadDone(0)
    decode.wait_done("b")
    assert not decode.cache.untouched()
    assert (decode.cache.tensors["layer.1"][0] == UNTOUCHED).all()


def test_contributors_that_disagree_about_their_number(site: Site) -> None:
    shapes = {"layer.0": GOOD, "layer.1": GOOD}
    decode = site.decode(shapes)
    prefills = []
    for _ in range(2):
        cache = Cache(shapes)
        prefill = site.scripted_prefill(decode.endpoint)
        prefill.greet(site.engine(cache).session, cache)
        prefills.append(prefill)
    decode.register("a", [1], [1])
    for member, (prefill, ratio) in enumerate(zip(prefills, (2, 4), strict=True)):
        message = ReadReadyBatch(0, "layer.0", [ReadRequest("a", [1], [])], [], member, ratio)
        assert prefill.ask(message) == ReadDone(0)
    (finished,) = decode.wait("a")
    assert finished.outcome is Outcome.FAILED
    assert "2 ranks" in finished.reason
    assert "4 do" in finished.reason
