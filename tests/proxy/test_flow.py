"""One request's life, when all goes well."""

import asyncio
import json
from typing import Any

import pytest

from tests.proxy.world import CHAT, COMPLETION, events, story, world


@story
async def test_a_completion_goes_to_d_then_to_p_once() -> None:
    async with world() as w:
        response = await w.completion(prompt="hello", seed=7)
        assert response.status_code == 200
        assert response.json() == {"choices": ["0:0", "0:1", "0:2"]}
        [d], [p] = w.d.seen, w.p.seen
        metaserver = w.services.metaservers[w.d.url]
        sent = COMPLETION | {"seed": 7}
        assert d.body == sent | {
            "kv_transfer_params": {"do_remote_prefill": True, "metaserver": metaserver}
        }
        assert metaserver == f"http://127.0.0.1:{w.proxy.port}/v1/metaserver"
        params = p.body.pop("kv_transfer_params")
        assert p.body == sent | {"max_tokens": 1, "stream": False}
        assert params["request_id"] == f"cmpl-{d.id}-0"
        assert params["do_remote_decode"] is True
        assert params["do_remote_prefill"] is False
        assert params["remote_port"] == w.d.port
        assert "batch_kv_transfer_params" not in params
        assert p.id == d.id
        await w.idle()


@story
async def test_a_chat_goes_the_same_way() -> None:
    async with world() as w:
        response = await w.chat(max_completion_tokens=9, min_tokens=4)
        assert response.json() == {"choices": ["0:0", "0:1", "0:2"]}
        [d], [p] = w.d.seen, w.p.seen
        assert d.body["max_completion_tokens"] == 9
        assert d.body["min_tokens"] == 4
        assert p.body["max_tokens"] == p.body["max_completion_tokens"] == 1
        assert "min_tokens" not in p.body
        assert p.body["kv_transfer_params"]["request_id"] == f"chatcmpl-{d.id}"
        await w.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@story
async def test_a_stream_comes_as_it_is_made(path: str) -> None:
    async with world() as w:
        permits = w.d.permits = asyncio.Semaphore(0)
        base = COMPLETION if path == "/v1/completions" else CHAT
        body = base | {"stream": True, "stream_options": {"include_usage": True}}
        request = w.client.build_request("POST", path, json=body)
        sending = asyncio.create_task(w.client.send(request, stream=True))
        permits.release()
        response = await sending
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        for token in range(3):
            # The token after this one does not exist yet.
            assert await anext(lines) == f'data: {{"text": "0:{token}"}}'
            assert await anext(lines) == ""
            permits.release()
        assert [line async for line in lines] == ["data: [DONE]", ""]
        assert "stream_options" not in w.p.seen[0].body
        await w.idle()


pytestmark = pytest.mark.slow

PROMPTS: list[tuple[Any, int]] = [
    ("text", 1),
    ([1, 2, 3], 1),
    (["one"], 1),
    (["one", "two", "three"], 3),
    ([[1, 2], [3]], 2),
]


@pytest.mark.parametrize(("prompt", "count"), PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
@story
async def test_every_prompt_and_child_finds_its_own_kv(prompt: Any, count: int, n: int) -> None:
    """The fake D answers only when P computed the right prompt for that very sequence."""
    async with world(batch_wait=60.0) as w:
        response = await w.completion(prompt=prompt, n=n)
        assert response.status_code == 200
        assert len(response.json()["choices"]) == 3 * count * n
        [p] = w.p.seen
        assert p.body["prompt"] == prompt
        assert p.body["n"] == n
        params = p.body["kv_transfer_params"]
        if count * n == 1:
            assert "batch_kv_transfer_params" not in params
        else:
            bases = [f"cmpl-{p.id}-{i}" for i in range(count)]
            ids = bases if n == 1 else [f"{c}_{b}" for b in bases for c in range(n)]
            batch = params["batch_kv_transfer_params"]
            assert sorted(batch) == sorted(ids)
            assert all(entry["request_id"] == key for key, entry in batch.items())
        await w.idle()


@story
async def test_a_chat_with_children() -> None:
    async with world(batch_wait=60.0) as w:
        response = await w.chat(n=2)
        assert len(response.json()["choices"]) == 6
        [p] = w.p.seen
        assert p.body["n"] == 2
        batch = p.body["kv_transfer_params"]["batch_kv_transfer_params"]
        assert sorted(batch) == [f"0_chatcmpl-{p.id}", f"1_chatcmpl-{p.id}"]
        await w.idle()


@pytest.mark.parametrize(("prompt", "n"), [([f"p{i}" for i in range(5)], 1), (["a", "b"], 3)])
@story
async def test_a_list_that_d_cannot_admit_at_once_is_sent_in_parts(prompt: Any, n: int) -> None:
    async with world(batch_wait=0.05) as w:
        w.d.capacity = 2
        response = await w.completion(prompt=prompt, n=n)
        assert response.status_code == 200
        assert len(response.json()["choices"]) == 3 * len(prompt) * n
        assert len(w.p.seen) >= 3
        # Every sequence was sent once, under the id that D knows.
        sent = [
            entry["request_id"]
            for p in w.p.seen
            for entry in p.body["kv_transfer_params"]["batch_kv_transfer_params"].values()
        ]
        assert len(sent) == len(set(sent)) == len(prompt) * n
        assert len({p.id for p in w.p.seen}) == len(w.p.seen)
        await w.idle()


@story
async def test_children_of_a_chat_are_sent_in_parts() -> None:
    async with world(batch_wait=0.05) as w:
        w.d.capacity = 2
        response = await w.chat(n=5)
        assert len(response.json()["choices"]) == 15
        assert sum(p.body["n"] for p in w.p.seen) == 5
        await w.idle()


@story
async def test_the_client_id_is_kept_and_made_unique() -> None:
    async with world() as w:
        headers = {"x-request-id": "job-7"}
        for _ in range(2):
            r = await w.client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert r.headers.get_list("x-request-id") == ["job-7"]
        first, second = (seen.id for seen in w.d.seen)
        assert first != second
        assert first.startswith("job-7-")
        assert second.startswith("job-7-")
        # An id that could be mischief is not passed on.
        headers = {"x-request-id": "<script>"}
        r = await w.client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert r.headers["x-request-id"] == w.d.seen[-1].id
        assert "script" not in w.d.seen[-1].id


@story
async def test_headers_are_passed_through_but_not_those_of_the_connection() -> None:
    async with world() as w:
        headers = {
            "authorization": "Bearer secret",
            "traceparent": "00-abc",
            "connection": "keep-alive, x-private",
            "x-private": "hop",
            "te": "trailers",
            "accept-encoding": "br",
        }
        response = await w.client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert response.status_code == 200
        assert response.headers["x-engine"] == w.d.url
        assert "server" not in response.headers
        assert len(response.headers.get_list("content-length")) == 1
        for seen in (w.d.seen[0], w.p.seen[0]):
            assert seen.headers["authorization"] == "Bearer secret"
            assert seen.headers["traceparent"] == "00-abc"
            assert seen.headers["accept-encoding"] == "identity"
            assert seen.headers["content-type"] == "application/json"
            assert "x-private" not in seen.headers
            assert "te" not in seen.headers
            assert seen.headers["host"] in (w.d.url[7:], w.p.url[7:])


@story
async def test_numbers_reach_the_engines_as_they_were_written() -> None:
    async with world() as w:
        text = '{"model": "m", "prompt": "x", "seed": 123456789012345678901, "temperature": 0.10}'
        await w.client.post("/v1/completions", content=text)
        assert w.d.seen[0].body["seed"] == w.p.seen[0].body["seed"] == 123456789012345678901


@story
async def test_a_client_cannot_choose_where_d_posts() -> None:
    async with world() as w:
        own = {"do_remote_prefill": True, "metaserver": "http://evil.example"}
        response = await w.completion(kv_transfer_params=own)
        assert response.status_code == 200
        assert "evil" not in json.dumps([w.d.seen[0].body, w.p.seen[0].body])


@story
async def test_a_d_that_needs_no_p_just_answers() -> None:
    """vLLM runs a beam search without a KV connector; and a D may have a prompt already."""
    async with world() as w:
        w.d.status, w.d.answer = 200, b'{"choices": []}'
        assert (await w.completion(use_beam_search=True)).json() == {"choices": []}
        assert "kv_transfer_params" not in w.d.seen[0].body
        assert (await w.completion()).json() == {"choices": []}
        assert w.p.seen == []
        await w.idle()


@story
async def test_p_may_answer_after_d_is_done() -> None:
    async with world(linger=60.0) as w:
        w.p.gate.clear()
        request = asyncio.create_task(w.completion())
        while not w.p.seen:
            await asyncio.sleep(0.002)
        # P's work is done, its answer is not out yet.
        w.pair.fabric.write(f"cmpl-{w.d.seen[0].id}-0", "hello")
        assert (await request).status_code == 200
        assert w.services.decode.engines[0].load == 0
        assert w.services.prefill.engines[0].requests == 1
        w.p.gate.set()
        await w.idle()
        assert w.p.seen[0].finished
        assert not w.p.seen[0].aborted


@story
async def test_ipv6() -> None:
    async with world(host="::1") as w:
        assert w.services.metaservers[w.d.url].startswith("http://[::1]:")
        assert (await w.completion()).status_code == 200
        async with w.client.stream(
            "POST", "/v1/completions", json=COMPLETION | {"stream": True}
        ) as r:
            assert (await events(r.aiter_lines()))[-1] == "[DONE]"
