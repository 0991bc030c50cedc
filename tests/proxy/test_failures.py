"""One request's life, when something goes wrong: who is told, who is tried, what is left."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.proxy.vllm import Engine
from tests.proxy.world import COMPLETION, World, check_error, error_of, story, until, world

pytestmark = pytest.mark.slow

STREAM = COMPLETION | {"stream": True}


async def read_stream(w: World, body: dict[str, object] = STREAM) -> list[str]:
    async with w.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line]


def generations(engine: Engine) -> int:
    return len(engine.seen)


# ------------------------------------------------------------------------------ the client leaves


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["rendezvous", "prefill", "decode"])
@story
async def test_a_client_that_leaves_cancels_d_and_p(where: str, stream: bool) -> None:
    async with world() as w:
        if where == "rendezvous":
            w.d.posts = 0
        elif where == "prefill":
            w.p.gate.clear()
        else:
            w.d.permits = asyncio.Semaphore(1)
        request = asyncio.create_task(w.completion(stream=stream))
        if where == "prefill":
            await until(lambda: w.p.active == 1, "P works")
        elif where == "decode":
            await until(lambda: bool(w.p.seen and w.p.seen[0].finished), "P is done")
        else:
            await until(lambda: w.d.active == 1, "D works")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await w.idle()
        assert w.d.seen[0].aborted
        if where == "prefill":
            assert w.p.seen[0].aborted
        assert b'status="499"' in w.services.metrics.text()


@story
async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    async with world() as w:
        _, writer = await asyncio.open_connection("127.0.0.1", w.proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        await writer.drain()
        await until(lambda: len(w.services.in_flight) == 1, "it is in flight")
        writer.close()
        await w.idle()
        assert w.d.seen == []


# ---------------------------------------------------------------------------------------- P fails


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@story
async def test_what_p_refuses_is_passed_on_and_not_retried(status: int) -> None:
    async with world(prefills=2) as w:
        for p in w.pair.prefills:
            p.status = status
        response = await w.completion()
        assert response.status_code == status
        assert response.json()["error"]["message"] == f"told to answer {status}"
        assert sum(map(generations, w.pair.prefills)) == 1
        await w.idle()
        assert w.d.seen[0].aborted
        assert w.services.prefill.up == 2


@pytest.mark.parametrize("how", ["500", "503", "dies", "gone", "hangs"])
@story
async def test_another_p_takes_over(how: str) -> None:
    async with world(prefills=2, prefill_timeout=2.0 if how == "hangs" else 600.0) as w:
        first = w.p
        if how == "dies":
            first.gate.clear()
        elif how == "gone":
            await first.stop()
        elif how == "hangs":
            first.gate.clear()
        else:
            first.status = int(how)
        request = asyncio.create_task(w.completion())
        if how == "dies":
            await until(lambda: first.active == 1, "the first P works")
            first.hang_up()
        response = await request
        assert response.status_code == 200
        assert generations(w.pair.prefills[1]) == 1
        assert generations(w.d) == 1
        await w.idle()
        assert b'rd2h_proxy_retries_total{role="prefill"} 1.0' in w.services.metrics.text()


@pytest.mark.parametrize("how", ["500", "gone"])
@pytest.mark.parametrize("stream", [False, True])
@story
async def test_without_any_p_the_client_gets_502(how: str, stream: bool) -> None:
    async with world(prefills=2) as w:
        for p in w.pair.prefills:
            if how == "gone":
                await p.stop()
            else:
                p.status = 500
        response = await w.completion(stream=stream)
        assert response.status_code == 502
        error = error_of(response)
        assert error["code"] == "prefill_unavailable"
        assert error["type"] == "server_error"
        await w.idle()
        assert w.d.seen[0].aborted
        if how == "500":
            assert [generations(p) for p in w.pair.prefills] == [1, 1]
            return
        # Now they are known to be out: D is not even asked.
        response = await w.completion()
        assert (response.status_code, error_of(response)["code"]) == (502, "prefill_unavailable")
        assert generations(w.d) == 1


@story
async def test_after_the_deadline_no_other_p_is_tried() -> None:
    async with world(prefills=2, prefill_deadline=0.01) as w:
        for p in w.pair.prefills:
            p.status = 500
            p.gate.clear()
        request = asyncio.create_task(w.completion())
        await until(lambda: sum(p.active for p in w.pair.prefills) == 1, "one P works")
        await asyncio.sleep(0.02)
        for p in w.pair.prefills:
            p.gate.set()
        assert (await request).status_code == 502
        assert sum(map(generations, w.pair.prefills)) == 1
        await w.idle()


@story
async def test_a_p_that_hangs_is_given_up() -> None:
    async with world(prefill_timeout=0.05) as w:
        w.p.gate.clear()
        response = await w.completion()
        assert response.status_code == 504
        assert error_of(response)["code"] == "prefill_timeout"
        await w.idle()
        assert w.p.seen[0].aborted


@story
async def test_a_p_that_fails_when_d_is_answering_changes_nothing() -> None:
    async with world() as w:
        w.p.gate.clear()
        w.p.status = 500
        permits = w.d.permits = asyncio.Semaphore(1)
        reading = asyncio.create_task(read_stream(w))
        await until(lambda: w.p.active == 1, "P works")
        w.pair.fabric.write(f"cmpl-{w.d.seen[0].id}-0", "hello")
        await until(lambda: [e.stage for e in w.services.in_flight] == ["answering"], "D answers")
        w.p.gate.set()
        await until(lambda: w.p.active == 0, "P has failed")
        permits.release()
        permits.release()
        assert (await reading)[-1] == "data: [DONE]"
        await w.idle()


@pytest.mark.parametrize("status", [400, 500])
@story
async def test_a_part_that_p_fails_ends_the_stream_with_an_error(status: int) -> None:
    async with world(batch_wait=0.01) as w:
        w.d.capacity = 1
        w.p.status, w.p.refuse_after = status, 1
        w.d.permits = asyncio.Semaphore(1)
        body = STREAM | {"prompt": ["a", "b"]}
        async with w.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == 'data: {"text": "0:0"}'
            # The second prompt is admitted when the first one is through.
            w.d.permits.release()
            w.d.permits.release()
            rest = [line async for line in lines if line]
        assert check_error(rest[-1].removeprefix("data: "))["code"] == "prefill_unavailable"
        await w.idle()
        assert w.d.seen[0].aborted


# ---------------------------------------------------------------------------------------- D fails


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["500", "gone", "dies early", "dies late", "never asks"])
@story
async def test_another_d_takes_over(how: str, stream: bool) -> None:
    async with world(decodes=2, rendezvous_timeout=2.0 if how == "never asks" else 300.0) as w:
        first, second = w.pair.decodes
        if how == "500":
            first.status = 500
        elif how == "gone":
            await first.stop()
        elif how == "dies early":
            first.gate.clear()
        elif how == "dies late":
            first.hang_up_at = 0
        else:
            first.posts = 0
        request = asyncio.create_task(w.completion(stream=stream))
        if how == "dies early":
            await until(lambda: first.active == 1, "the first D works")
            first.hang_up()
        response = await request
        assert response.status_code == 200
        assert ("[DONE]" in response.text) is stream
        assert generations(second) == 1
        await w.idle()
        # Each attempt has ids of its own; P is asked once for each D that asked.
        if first.seen:
            assert first.seen[0].id != second.seen[0].id
        assert generations(w.p) == (2 if how == "dies late" else 1)
        assert w.p.seen[-1].id == second.seen[0].id


@story
async def test_the_last_answer_of_a_d_is_passed_on_when_there_is_no_other() -> None:
    async with world(decodes=2) as w:
        for d in w.pair.decodes:
            d.status = 500
        response = await w.completion()
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "told to answer 500"
        assert list(map(generations, w.pair.decodes)) == [1, 1]
        await w.idle()


@story
async def test_only_so_many_engines_are_tried() -> None:
    async with world(decodes=3, attempts=2) as w:
        for d in w.pair.decodes:
            d.status = 500
        assert (await w.completion()).status_code == 500
        assert sum(map(generations, w.pair.decodes)) == 2


@story
async def test_without_any_d_the_client_gets_502() -> None:
    async with world() as w:
        await w.d.stop()
        for _ in range(2):
            response = await w.completion()
            assert response.status_code == 502
            assert error_of(response)["code"] == "decode_unavailable"
        await w.idle()


@pytest.mark.parametrize("status", [400, 404, 422])
@story
async def test_what_d_refuses_is_passed_on(status: int) -> None:
    async with world(decodes=2) as w:
        for d in w.pair.decodes:
            d.status = status
        response = await w.completion(stream=True)
        assert response.status_code == status
        assert response.json()["error"]["message"] == f"told to answer {status}"
        assert sum(map(generations, w.pair.decodes)) == 1
        assert generations(w.p) == 0
        await w.idle()


@pytest.mark.parametrize("half", [False, True])
@story
async def test_a_d_that_dies_in_a_stream_ends_it_with_an_error(half: bool) -> None:
    async with world(decodes=2) as w:
        for d in w.pair.decodes:
            d.hang_up_at, d.half_an_event = 2, half
        lines = await read_stream(w)
        assert lines[:2] == ['data: {"text": "0:0"}', 'data: {"text": "0:1"}']
        [last] = lines[2:]
        error = check_error(last.removeprefix("data: "))
        assert error["code"] == "decode_broken"
        # Nothing is ever replayed.
        assert sum(map(generations, w.pair.decodes)) == 1
        await w.idle()
        assert b"rd2h_proxy_stream_errors_total" in w.services.metrics.text()


@story
async def test_a_d_that_dies_in_a_whole_answer() -> None:
    async with world(decodes=2) as w:
        for d in w.pair.decodes:
            d.hang_up_at, d.half_an_event = 0, True
        response = await w.completion()
        assert response.status_code == 502
        assert error_of(response)["code"] == "decode_broken"
        assert sum(map(generations, w.pair.decodes)) == 1
        await w.idle()


@story
async def test_a_d_that_never_asks_is_given_up() -> None:
    async with world(rendezvous_timeout=1.0) as w:
        w.d.posts = 0
        w.d.keep_alive = True
        # A comment is passed on at once, so the error comes as an event.
        [comment, last] = await read_stream(w)
        assert comment == ": keep-alive"
        assert check_error(last.removeprefix("data: "))["code"] == "rendezvous_timeout"
        response = await w.completion()
        assert response.status_code == 504
        assert "none of 1 rendezvous" in error_of(response)["message"]
        await w.idle()


@story
async def test_a_request_ends_in_time() -> None:
    async with world(request_timeout=2.0) as w:
        w.p.gate.clear()
        response = await w.completion()
        assert response.status_code == 504
        error = error_of(response)
        assert error["code"] == "request_timeout"
        assert "prefill" in error["message"]
        w.p.gate.set()
        w.d.permits = asyncio.Semaphore(1)
        lines = await read_stream(w)
        assert lines[0] == 'data: {"text": "0:0"}'
        assert check_error(lines[-1].removeprefix("data: "))["code"] == "request_timeout"
        await w.idle()


@story
async def test_the_health_of_an_engine_that_hangs_up_is_probed_at_once() -> None:
    async with world() as w:
        w.d.hang_up_at = 0
        probes = w.d.probes
        assert (await w.completion()).status_code == 502
        await until(lambda: w.services.decode.up == 1, "it is in again")
        assert w.d.probes > probes
        w.d.hang_up_at = None
        assert (await w.completion()).status_code == 200


@story
async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rd2h.proxy.generation.FAIL_SECONDS", 0.5)

    async def flood(_: int, __: object) -> AsyncIterator[str]:
        while True:
            yield "x" * 100_000
            await asyncio.sleep(0)

    async with world(request_timeout=1.0) as w:
        monkeypatch.setattr(w.d, "_tokens", flood)
        _, writer = await asyncio.open_connection("127.0.0.1", w.proxy.port, limit=1024)
        body = json.dumps(STREAM).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: len(w.services.in_flight) == 1, "it is in flight")
        await until(lambda: w.d.seen != [] and w.d.seen[0].aborted, "D's request is cancelled")
        # The client is being told, and the request is in the list for as long as that takes.
        assert len(w.services.in_flight) == 1
        await until(lambda: not w.services.in_flight, "it is over", 10)
        assert b'requests_total{endpoint="/v1/completions",status="200"} 1.0' in (
            w.services.metrics.text()
        )
        await until(lambda: not w.proxy.server_state.tasks, "uvicorn is done with it", 10)
        writer.transport.abort()


@story
async def test_one_failure_after_many_at_once_does_not_take_it_out() -> None:
    async with world() as w:
        w.d.permits = asyncio.Semaphore(0)
        requests = [asyncio.create_task(w.completion(stream=True)) for _ in range(10)]
        await until(lambda: len(w.p.seen) == 10 and all(s.finished for s in w.p.seen))
        w.d.hang_up()
        await asyncio.gather(*requests)
        await until(lambda: w.services.decode.up == 1, "it is in again")
        w.d.permits = None
        w.d.status = 500
        assert (await w.completion()).status_code == 500
        assert w.services.decode.up == 1
        await w.idle()
