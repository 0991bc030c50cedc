"""Rendezvous that nobody waits for: a 4xx, one line in the log, nothing kept."""

import asyncio
import logging
import time

import pytest

from rd2h.wire import Advertisement
from tests.proxy.world import World, error_of, story, until, world

pytestmark = pytest.mark.slow


def advertisement(request_id: str) -> bytes:
    return Advertisement(
        request_id=request_id, remote_engine_id="d", remote_host="127.0.0.1", remote_port=1,
        remote_tp_size=1, remote_pcp_size=1, remote_dcp_size=1, remote_cached_tokens=0,
    ).to_json()  # fmt: skip


async def refused(w: World, body: bytes, status: int, code: str) -> None:
    response = await w.client.post("/v1/metaserver", content=body)
    assert response.status_code == status
    assert error_of(response)["code"] == code


def refusals(caplog: pytest.LogCaptureFixture) -> int:
    return sum("refused a rendezvous" in record.message for record in caplog.records)


@story
async def test_unknown_malformed_and_too_large(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with world() as w:
        await refused(w, advertisement("cmpl-nobody-0"), 404, "rendezvous_unknown")
        await refused(w, b"{}", 400, "rendezvous_malformed")
        await refused(w, b"\xff", 400, "rendezvous_malformed")
        await refused(w, b"x" * (1 << 17), 413, "body_too_large")
        assert refusals(caplog) == 4
        # After junk, a good one works.
        assert (await w.completion()).status_code == 200
        await w.idle()


@story
async def test_a_duplicate_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with world(batch_wait=60.0) as w:
        w.d.posts = 2
        assert (await w.completion(prompt=["a", "b"])).status_code == 200
        assert sorted(status for _, status in w.d.posted) == [200, 200, 409, 409]
        assert refusals(caplog) == 2
        assert len(w.p.seen) == 1
        await w.idle()


@story
async def test_a_late_one_is_told_from_an_unknown_one(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w:
        w.d.posts = 0
        headers = {"x-request-id": "mine"}
        request = asyncio.create_task(w.client.post("/v1/completions", json={"model": "m",
            "prompt": ["a", "b"], "n": 2}, headers=headers))  # fmt: skip
        await until(lambda: w.d.active == 1, "D works")
        assert len(w.services.registry) == 4
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await w.idle()
        for ext_id in (f"0_cmpl-{w.d.seen[0].id}-0", f"cmpl-{w.d.seen[0].id}-1"):
            await refused(w, advertisement(ext_id), 410, "rendezvous_late")
        assert refusals(caplog) == 2
        w.assert_idle()


@story
async def test_a_flood_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w:
        started = time.monotonic()
        for _ in range(200):
            await w.client.post("/v1/metaserver", content=b"{}")
        # 20 at once, then 5 a second.
        assert 20 <= refusals(caplog) <= 21 + 5 * (time.monotonic() - started)
        text = w.services.metrics.text()
        assert b'rd2h_proxy_rendezvous_total{result="malformed"} 200.0' in text


@story
async def test_what_is_posted_cannot_forge_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as w:
        await refused(w, advertisement("x\nforged" + "y" * 60_000), 404, "rendezvous_unknown")
        [line] = [r.getMessage() for r in caplog.records if "refused a" in r.getMessage()]
        assert "\n" not in line
        assert len(line) < 500


@story
async def test_only_post() -> None:
    async with world() as w:
        assert (await w.client.get("/v1/metaserver")).status_code == 405
