"""What the proxy understands of a body, and what P gets of it."""

import json
from typing import Any

import msgspec
import pytest

from rd2h.proxy.body import Call, Dispatch, Endpoint, parse
from rd2h.wire import Advertisement, PrefillParams


def ad(request_id: str) -> Advertisement:
    return Advertisement(
        request_id=request_id, remote_engine_id="d", remote_host="h", remote_port=1,
        remote_tp_size=1, remote_pcp_size=1, remote_dcp_size=1, remote_cached_tokens=5,
    )  # fmt: skip


def completion(**fields: Any) -> Call:
    body = json.dumps({"model": "m"} | fields).encode()
    return parse(Endpoint.COMPLETIONS, body, 1000)


def chat(**fields: Any) -> Call:
    body = json.dumps({"model": "m", "messages": [{"content": "x"}]} | fields).encode()
    return parse(Endpoint.CHAT, body, 1000)


def body_of(dispatch: Dispatch) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dispatch.body)
    return body


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("x" * 40, [10]),
        ("", [1]),
        ([1, 2, 3], [3]),
        (["x" * 40, "y"], [10, 1]),
        ([[1, 2], [3, 4, 5]], [2, 3]),
        ([[1]], [1]),
    ],
)
def test_prompts_and_their_tokens(prompt: Any, tokens: list[int]) -> None:
    assert [p.tokens for p in completion(prompt=prompt).prompts] == tokens


def test_embeddings_are_numbered_first() -> None:
    call = completion(prompt=["a", "b"], prompt_embeds=["AAAA"])
    assert [p.field for p in call.prompts] == ["prompt_embeds", "prompt", "prompt"]
    ids = call.expected_ids("x")
    assert ids == ["cmpl-x-0", "cmpl-x-1", "cmpl-x-2"]
    part = body_of(call.part("x", 1, [ad("cmpl-x-2"), ad("cmpl-x-0")]))
    assert part["prompt_embeds"] == ["AAAA"]
    assert part["prompt"] == ["b"]
    part = body_of(call.part("x", 2, [ad("cmpl-x-1")]))
    assert part["prompt"] == ["a"]
    assert "prompt_embeds" not in part


def test_the_whole_is_the_original_request() -> None:
    call = completion(prompt=["a", "b"], n=2, stream=True, max_tokens=50, min_tokens=3, seed=1)
    ids = call.expected_ids("x")
    dispatch = call.whole("x", [ad(i) for i in reversed(ids)])
    body = body_of(dispatch)
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "m", "prompt": ["a", "b"], "n": 2, "stream": False, "max_tokens": 1, "seed": 1,
    }  # fmt: skip
    assert dispatch.request_id == "x"
    read = PrefillParams.from_params(params)
    assert sorted(read.batch_kv_transfer_params) == sorted(ids)
    assert read.remote_cached_tokens == 5


def test_a_part_has_ids_of_its_own_that_point_at_those_of_d() -> None:
    call = completion(prompt=["a", "b", "c"], n=2, logprobs=1)
    wanted = ["1_cmpl-x-2", "0_cmpl-x-0", "1_cmpl-x-0"]
    dispatch = call.part("x", 4, [ad(i) for i in wanted])
    assert dispatch.request_id == "x.4"
    body = body_of(dispatch)
    # In the order of the original list; each child is a prompt.
    assert body["prompt"] == ["a", "a", "c"]
    assert "n" not in body
    assert body["logprobs"] == 1
    entries = body["kv_transfer_params"]["batch_kv_transfer_params"]
    assert {key: entry["request_id"] for key, entry in entries.items()} == {
        "cmpl-x.4-0": "0_cmpl-x-0",
        "cmpl-x.4-1": "1_cmpl-x-0",
        "cmpl-x.4-2": "1_cmpl-x-2",
    }


def test_a_part_of_token_lists() -> None:
    call = completion(prompt=[[1, 2], [3]])
    body = body_of(call.part("x", 1, [ad("cmpl-x-1")]))
    assert body["prompt"] == [[3]]


def test_parts_of_a_chat() -> None:
    call = chat(n=3)
    one = body_of(call.part("x", 1, [ad("2_chatcmpl-x")]))
    assert one["n"] == 1
    entries = one["kv_transfer_params"]["batch_kv_transfer_params"]
    assert {k: v["request_id"] for k, v in entries.items()} == {"chatcmpl-x.1": "2_chatcmpl-x"}
    two = body_of(call.part("x", 2, [ad("1_chatcmpl-x"), ad("0_chatcmpl-x")]))
    assert two["n"] == 2
    entries = two["kv_transfer_params"]["batch_kv_transfer_params"]
    assert {k: v["request_id"] for k, v in entries.items()} == {
        "0_chatcmpl-x.2": "0_chatcmpl-x",
        "1_chatcmpl-x.2": "1_chatcmpl-x",
    }


def test_children_of_a_prompt_count_once_on_p() -> None:
    call = completion(prompt=[[1, 2, 3], [4]], n=2)
    ids = call.expected_ids("x")
    assert call.sequences == 4
    assert call.whole("x", [ad(i) for i in ids]).tokens == 4
    assert call.part("x", 1, [ad(i) for i in ids[:3]]).tokens == 4
    assert call.part("x", 1, [ad(i) for i in ids[:2]]).tokens == 3


def test_the_last_of_two_equal_keys_counts_as_in_vllm() -> None:
    call = parse(Endpoint.COMPLETIONS, b'{"model": "m", "prompt": "a", "prompt": ["b", "c"]}', 10)
    assert len(call.prompts) == 2
    assert json.loads(call.decode_body("http://m"))["prompt"] == ["b", "c"]


def test_null_means_left_out() -> None:
    call = completion(prompt="a", n=None, stream=None, prompt_embeds=None, max_tokens=None)
    assert call.n == 1
    assert body_of(call.whole("x", [ad("cmpl-x-0")]))["max_tokens"] == 1


@pytest.mark.parametrize("text", ["[1,2]", "[ \n\t 1, 2]", "[-1,2]", '[7, "x"]'])
def test_a_list_that_begins_with_a_number_is_one_prompt(text: str) -> None:
    body = b'{"model": "m", "prompt": %s}' % text.encode()
    [prompt] = parse(Endpoint.COMPLETIONS, body, 10).prompts
    assert (bytes(prompt.text).decode(), prompt.tokens) == (text, 2)


def test_token_ids_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = msgspec.json.decode
    kinds: list[object] = []

    def decode(text: bytes, *, type: Any = Any) -> Any:
        kinds.append(type)
        return whole(text, type=type)

    monkeypatch.setattr("rd2h.proxy.body.msgspec.json.decode", decode)
    assert completion(prompt=[1] * 1000).sequences == 1
    assert list[msgspec.Raw] not in kinds
    assert completion(prompt=[[1], [2]]).sequences == 2
    assert list[msgspec.Raw] in kinds
