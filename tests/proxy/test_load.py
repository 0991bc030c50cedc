"""Many at once: 200 streams, and 2,000 clients that leave at random points."""

import asyncio
import json
import random

import pytest

from tests.proxy.world import COMPLETION, World, story, until, world

pytestmark = pytest.mark.slow

STREAMS = 200
CANCELS = 2000


@story
async def test_200_streams_at_once() -> None:
    async with world(prefills=2, decodes=2) as w:
        for d in w.pair.decodes:
            # No stream can end before all have begun.
            d.permits = asyncio.Semaphore(0)
            d.tokens = 5

        async def stream(number: int) -> list[str]:
            body = COMPLETION | {"prompt": f"prompt {number}", "stream": True}
            async with w.client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                return [line[6:] async for line in response.aiter_lines() if line]

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(number)) for number in range(STREAMS)]
            await until(
                lambda: (
                    sum(p.seen[-1].finished for p in w.pair.prefills if p.seen) == 2
                    and sum(len(p.seen) for p in w.pair.prefills) == STREAMS
                ),
                "every prompt is computed",
                60,
            )
            assert len(w.services.in_flight) == STREAMS
            assert [e.load for e in w.services.decode.engines] == [STREAMS // 2] * 2
            for d in w.pair.decodes:
                for _ in range(STREAMS * 5):
                    assert d.permits is not None
                    d.permits.release()
        whole = [*(f'{{"text": "0:{i}"}}' for i in range(5)), "[DONE]"]
        assert all(task.result() == whole for task in streams)
        assert sum(len(d.seen) for d in w.pair.decodes) == STREAMS
        await w.idle()


@pytest.mark.parametrize("seed", [1])
@story
async def test_2000_clients_that_leave_at_random_points(seed: int) -> None:
    rng = random.Random(seed)
    async with world(prefills=2, decodes=2, batch_wait=0.01, linger=0.2) as w:
        for d in w.pair.decodes:
            d.capacity = 24
        tasks_before = len(asyncio.all_tasks())
        limit = asyncio.Semaphore(32)
        left = 0

        async def visit() -> None:
            nonlocal left
            async with limit:
                early = await leave_early(w, rng)
                left += early

        async with asyncio.TaskGroup() as group:
            for _ in range(CANCELS):
                group.create_task(visit())
        await w.idle()
        # Some were quick enough to get all; most left at every possible point before that.
        assert left > CANCELS // 2
        assert sum(len(d.seen) for d in w.pair.decodes) > CANCELS // 4
        assert sum(seen.aborted for d in w.pair.decodes for seen in d.seen) > CANCELS // 20
        # The engines never noticed: all are in, and the next request is served.
        assert w.services.prefill.up == w.services.decode.up == 2
        assert (await w.completion()).status_code == 200
        await until(
            lambda: len(asyncio.all_tasks()) <= tasks_before + connections(w) * 2,
            "no task of a request is left",
        )
        await w.idle()


def connections(w: World) -> int:
    """Open connections: uvicorn may have a task for each."""
    servers = [w.proxy, *(e._server for e in w.pair.engines)]
    return sum(len(s.server_state.connections) for s in servers if s is not None)


async def leave_early(w: World, rng: random.Random) -> bool:
    """Send a request and close the connection somewhere on the way; whether it was early."""
    body: dict[str, object] = COMPLETION | {"stream": rng.random() < 0.5}
    if rng.random() < 0.3:
        body |= {"prompt": ["a", "b", "c"], "n": rng.choice([1, 2])}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(data) + data
    reader, writer = await asyncio.open_connection("127.0.0.1", w.proxy.port)
    try:
        kind = rng.random()
        if kind < 0.1:
            writer.write(request[: rng.randrange(len(request))])
            await writer.drain()
            return True
        writer.write(request)
        await writer.drain()
        if kind < 0.7:
            # After a time between none and about as long as a request takes.
            await asyncio.sleep(rng.random() ** 2 * 0.5)
            return not reader.at_eof()
        # After some bytes of the answer.
        wanted = rng.randrange(1, 600)
        got = b""
        while len(got) < wanted:
            chunk = await reader.read(wanted - len(got))
            if not chunk:
                break
            got += chunk
        return not reader.at_eof()
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # RST, as a client that is killed
        writer.close()
