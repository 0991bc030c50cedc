"""The worked examples show every byte of a golden frame, once and in order."""

from pathlib import Path

import msgspec
import pytest

from codegen.annotate import annotate
from codegen.golden import Golden, example_of, load_golden
from codegen.schema import load_schema

ROOT = Path(__file__).parents[2]
GOLDEN = load_golden(ROOT / "tests" / "compat" / "golden")
CONTROL = load_schema(ROOT / "schemas" / "control.toml")


@pytest.mark.parametrize("frame", GOLDEN, ids=lambda f: f"v{f.protocol_version}-{f.name}")
def test_the_runs_are_the_payload(frame: Golden) -> None:
    runs = list(annotate(CONTROL, CONTROL.record(frame.message), frame.payload))
    assert b"".join(run.data for run in runs) == frame.payload
    assert all(run.data and run.text for run in runs)


def test_long_forms_are_taken_apart_too() -> None:
    names = [f"layer.{index}" for index in range(20)]
    layer = {"base_addrs": [2**64 - 1] * 20, "block_len": [300] * 20}
    layers = msgspec.msgpack.encode(dict.fromkeys(names, layer))
    payload = msgspec.msgpack.encode((b"mf_meta", "s" * 300, layers))
    runs = list(annotate(CONTROL, CONTROL.record("MfMeta"), payload))
    assert b"".join(run.data for run in runs) == payload
    assert sum("key: str of" in run.text for run in runs) == 20


def test_the_example_of_a_message_is_of_its_newest_version() -> None:
    example = example_of("ReadReadyBatch", GOLDEN)
    assert example is not None
    assert (example.protocol_version, example.name) == (3, "read_ready.one_request_first_layer")
    assert example_of("Nobody", GOLDEN) is None
