"""The rendezvous: strict about types, tolerant of unknown keys, round-trip to vLLM's dicts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rd2h.wire import (
    Advertisement,
    DecodeParams,
    MalformedMessageError,
    PrefillParams,
    UnencodableMessageError,
    WireError,
)

ROOT = Path(__file__).parents[2]

ADVERTISEMENT: dict[str, object] = {
    "request_id": "cmpl-a-0",
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_engine_id": "engine-7",
    "remote_host": "10.0.0.2",
    "remote_port": 20000,
    "remote_tp_size": 2,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 128,
}
DECODE: dict[str, object] = {
    "do_remote_prefill": True,
    "metaserver": "http://10.0.0.9/v1/metaserver",
}
BATCH: dict[str, object] = ADVERTISEMENT | {
    "batch_kv_transfer_params": {
        "cmpl-a-0": ADVERTISEMENT,
        "cmpl-a-1": ADVERTISEMENT | {"request_id": "cmpl-a-1"},
    }
}

Params = type[DecodeParams] | type[Advertisement] | type[PrefillParams]
SAMPLES: list[tuple[Params, dict[str, object]]] = [
    (DecodeParams, DECODE),
    (DecodeParams, DECODE | {"do_remote_prefill": False}),
    (Advertisement, ADVERTISEMENT),
    (PrefillParams, ADVERTISEMENT),
    (PrefillParams, BATCH),
]
by_sample = pytest.mark.parametrize(("params", "sample"), SAMPLES)


@by_sample
def test_a_dict_is_read_and_written_as_it_was(params: Params, sample: dict[str, object]) -> None:
    assert params.from_params(sample).to_params() == sample


@by_sample
def test_a_body_is_read_and_written_as_it_was(params: Params, sample: dict[str, object]) -> None:
    read = params.from_json(json.dumps(sample))
    assert json.loads(read.to_json()) == sample
    assert params.from_json(read.to_json()) == read


@by_sample
def test_keys_of_somebody_else_are_ignored(params: Params, sample: dict[str, object]) -> None:
    assert params.from_params(sample | {"other": {"deep": [None]}}) == params.from_params(sample)


def test_written_dicts_are_not_shared() -> None:
    read = PrefillParams.from_params(BATCH)
    read.to_params()["request_id"] = "changed"
    assert read.to_params() == BATCH


def test_the_batch_map_is_typed() -> None:
    read = PrefillParams.from_params(BATCH)
    assert read.batch_kv_transfer_params["cmpl-a-1"].request_id == "cmpl-a-1"
    assert PrefillParams.from_params(ADVERTISEMENT).batch_kv_transfer_params == {}


def test_what_is_always_so_need_not_be_said() -> None:
    said = {k: v for k, v in ADVERTISEMENT.items() if not k.startswith("do_")}
    assert Advertisement.from_params(said).to_params() == ADVERTISEMENT


@pytest.mark.parametrize("key", [key for key in ADVERTISEMENT if not key.startswith("do_")])
def test_a_missing_key_is_named(key: str) -> None:
    params = {k: v for k, v in ADVERTISEMENT.items() if k != key}
    with pytest.raises(MalformedMessageError, match=f"missing required field `{key}`"):
        Advertisement.from_params(params)


@pytest.mark.parametrize(
    ("changed", "path", "reason"),
    [
        ({"remote_port": "20000"}, "$.remote_port", "Expected `int`, got `str`"),
        ({"remote_port": 20000.0}, "$.remote_port", "Expected `int`, got `float`"),
        ({"remote_port": True}, "$.remote_port", "Expected `int`, got `bool`"),
        ({"remote_port": 0}, "$.remote_port", "`int` >= 1"),
        ({"remote_port": 65536}, "$.remote_port", "`int` <= 65535"),
        ({"remote_tp_size": 0}, "$.remote_tp_size", "`int` >= 1"),
        ({"remote_cached_tokens": -1}, "$.remote_cached_tokens", "`int` >= 0"),
        ({"remote_cached_tokens": 2**53}, "$.remote_cached_tokens", "`int` <= 9007199254740991"),
        ({"remote_host": None}, "$.remote_host", "Expected `str`, got `null`"),
        ({"request_id": 7}, "$.request_id", "Expected `str`, got `int`"),
        ({"do_remote_decode": 1}, "$.do_remote_decode", "Expected `bool`, got `int`"),
        ({"do_remote_decode": False}, "$.do_remote_decode", "must be true"),
        ({"do_remote_prefill": True}, "$.do_remote_prefill", "must be false"),
        ({"batch_kv_transfer_params": []}, "$.batch_kv_transfer_params", "Expected `object`"),
        (
            {"batch_kv_transfer_params": {"b": ADVERTISEMENT | {"remote_port": "1"}}},
            '$.batch_kv_transfer_params["b"].remote_port',
            "Expected `int`, got `str`",
        ),
        (
            {"batch_kv_transfer_params": {"b": ADVERTISEMENT | {"do_remote_decode": False}}},
            '$.batch_kv_transfer_params["b"].do_remote_decode',
            "must be true",
        ),
    ],
)
def test_a_wrong_value_is_named(changed: dict[str, object], path: str, reason: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        PrefillParams.from_params(ADVERTISEMENT | changed)
    assert caught.value.path == path
    assert reason in caught.value.reason


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"text"', b"\xff", "[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: str | bytes) -> None:
    with pytest.raises(MalformedMessageError):
        DecodeParams.from_json(body)


@pytest.mark.parametrize("params", [None, [], "text", 7])
def test_params_that_are_no_object_are_refused(params: Any) -> None:
    """Any: vLLM carries whatever a client put into the request."""
    with pytest.raises(MalformedMessageError):
        DecodeParams.from_params(params)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"remote_port": "1"}, "$.remote_port"),
        ({"remote_port": 65536}, "$.remote_port"),
        ({"do_remote_decode": False}, "$.do_remote_decode"),
        ({"remote_host": object()}, "$"),
        ({"remote_host": "\ud800"}, "$"),
    ],
)
def test_a_bug_on_this_side_fails_here(changed: dict[str, Any], path: str) -> None:
    fields: dict[str, Any] = ADVERTISEMENT | changed
    with pytest.raises(UnencodableMessageError) as caught:
        Advertisement(**fields).to_params()
    assert caught.value.path == path


# --------------------------------------------------------------------------------- JSON Schema

SCHEMA = json.loads((ROOT / "docs" / "rendezvous.schema.json").read_text())


@cache
def validator(params: Params) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA | {"$ref": f"#/$defs/{params.__name__}"})


@by_sample
def test_the_json_schema_takes_what_we_write(params: Params, sample: dict[str, object]) -> None:
    validator(params).validate(params.from_params(sample).to_params())


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 70_000),
    # JSON Schema calls 1.0 an integer; we do not, on purpose. Leave such floats out.
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda f: not f.is_integer()),
    st.text(max_size=3),
    st.just({}),
    st.just([]),
    st.just({"b": ADVERTISEMENT}),
    st.just({"b": DECODE}),
)


@by_sample
@given(data=st.data())
def test_the_json_schema_and_the_reader_agree(
    params: Params, sample: dict[str, object], data: st.DataObject
) -> None:
    keys = st.sampled_from([*sample, "batch_kv_transfer_params", "unknown"])
    altered = sample | data.draw(st.dictionaries(keys, values, max_size=3))
    for key in data.draw(st.lists(keys, max_size=2)):
        altered.pop(key, None)
    try:
        params.from_params(altered)
        accepted = True
    except WireError:
        accepted = False
    assert validator(params).is_valid(altered) is accepted
