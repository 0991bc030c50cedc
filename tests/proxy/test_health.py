"""Which engine is chosen, and how engines go out and come in."""

import asyncio
import socket

import pytest

from tests.proxy.world import error_of, story, until, world

pytestmark = pytest.mark.slow


@story
async def test_p_is_chosen_by_prompt_tokens() -> None:
    async with world(prefills=2) as w:
        for p in w.pair.prefills:
            p.gate.clear()
        sent = []
        for count, prompt in enumerate([[1] * 100, [2] * 30, [3] * 30, [4] * 30, [5] * 30], 1):
            sent.append(asyncio.create_task(w.completion(prompt=prompt)))
            while sum(p.active for p in w.pair.prefills) < count:
                await asyncio.sleep(0.002)
        # 100 on one; 30 + 30 + 30 on the other, and the next: 120 against 100.
        assert [len(p.seen) for p in w.pair.prefills] == [1, 4]
        assert [e.load for e in w.services.prefill.engines] == [100, 120]
        for p in w.pair.prefills:
            p.gate.set()
        await asyncio.gather(*sent)
        await w.idle()


@story
async def test_d_is_chosen_by_active_requests_and_ties_are_rotated() -> None:
    async with world(decodes=3) as w:
        for _ in range(6):
            await w.completion()
        assert [len(d.seen) for d in w.pair.decodes] == [2, 2, 2]
        first = w.d
        first.gate.clear()
        held = asyncio.create_task(w.completion(prompt=["a", "b"]))
        await until(lambda: first.active == 1, "the first D is busy")
        assert w.services.decode.engines[0].load == 2
        for _ in range(4):
            await w.completion()
        assert [len(d.seen) for d in w.pair.decodes] == [3, 4, 4]
        first.gate.set()
        await held
        await w.idle()


@story
async def test_an_engine_comes_in_when_it_starts() -> None:
    async with world() as w:
        port = w.d.port
        await w.d.stop()
        assert (await w.completion()).status_code == 502
        response = await w.client.get("/ready")
        assert response.status_code == 503
        assert response.json()["decode"] == {"up": 0, "total": 1}
        assert (await w.client.get("/health")).json() == {"status": "ok"}
        w.d.port = port
        await w.d.start()
        await until(lambda: w.services.decode.up == 1, "D is in")
        response = await w.client.get("/ready")
        assert response.status_code == 200
        assert response.json()["ready"] is True
        assert (await w.completion()).status_code == 200


@story
async def test_errors_in_a_row_take_an_engine_out_until_a_probe() -> None:
    async with world(prefills=2, failures=2, backoff=0.05, backoff_max=0.05) as w:
        bad = w.p
        bad.status = 500
        probes = bad.probes
        for _ in range(6):
            assert (await w.completion()).status_code == 200
        assert len(bad.seen) >= 2
        bad.status = None
        await until(lambda: w.services.prefill.up == 2, "it is in again")
        assert bad.probes > probes


@story
async def test_a_sick_engine_is_found_by_its_probe() -> None:
    async with world(decodes=2, probe_interval=0.05) as w:
        w.d.healthy = False
        await until(lambda: w.services.decode.up == 1, "it is out")
        assert "503" in w.services.decode.engines[0].last_error
        before = len(w.d.seen)
        for _ in range(3):
            assert (await w.completion()).status_code == 200
        assert len(w.d.seen) == before
        w.d.healthy = True
        await until(lambda: w.services.decode.up == 2, "it is in")


@story
async def test_models_are_passed_through() -> None:
    async with world(decodes=2) as w:
        first, second = w.pair.decodes
        response = await w.client.get("/v1/models", headers={"authorization": "Bearer x"})
        assert response.json() == {"object": "list", "data": [first.url]}
        assert first.seen[0].headers["authorization"] == "Bearer x"
        first.status = second.status = 401
        assert (await w.client.get("/v1/models")).status_code == 401
        first.status = 500
        second.status = None
        for _ in range(2):
            assert (await w.client.get("/v1/models")).json()["data"] == [second.url]
        await second.stop()
        response = await w.client.get("/v1/models")
        assert response.status_code == 502
        assert error_of(response)["code"] == "decode_unavailable"


@story
async def test_a_d_that_hangs_does_not_hold_the_list_of_models() -> None:
    async with world(decodes=2, probe_timeout=2.0) as w:
        w.d.models_gate.clear()
        for _ in range(2):
            response = await w.client.get("/v1/models")
            assert response.json()["data"] == [w.pair.decodes[1].url]


@story
async def test_no_connection_waits_for_acknowledgements() -> None:
    """Nagle's algorithm would hold every answer back for 40 ms."""
    async with world() as w:
        await w.client.get("/health")
        [connection] = [
            c for c in w.proxy.server_state.connections if c.transport.get_extra_info("socket")
        ]
        opened = connection.transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
