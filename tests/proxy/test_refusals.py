"""What the proxy refuses by itself, as OpenAI error objects, and what it never says."""

import json
import logging
from collections.abc import AsyncIterator

import pytest

from tests.proxy.world import COMPLETION, error_of, story, world

pytestmark = pytest.mark.slow

BODIES = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b'{"model": "m", "prompt": "x", "n": }', "invalid_json", None),
    (b"[" * 100_000, "invalid_json", None),
    (b'{"prompt": "x"}', "missing_required_parameter", "model"),
    (b'{"model": null, "prompt": "x"}', "missing_required_parameter", "model"),
    (b'{"model": 7, "prompt": "x"}', "invalid_value", "model"),
    (b'{"model": "m"}', "missing_required_parameter", "prompt"),
    (b'{"model": "m", "prompt": []}', "missing_required_parameter", "prompt"),
    (b'{"model": "m", "prompt": {}}', "invalid_value", "prompt"),
    (b'{"model": "m", "prompt": "x", "n": 0}', "invalid_value", "n"),
    (b'{"model": "m", "prompt": "x", "n": 99999999}', "invalid_value", "n"),
    (b'{"model": "m", "prompt": "x", "stream": "yes"}', "invalid_value", "stream"),
]


@story
async def test_bodies_that_are_refused() -> None:
    async with world() as w:
        for body, code, param in BODIES:
            response = await w.client.post("/v1/completions", content=body)
            assert response.status_code == 400, body
            error = error_of(response)
            assert (error["code"], error["param"]) == (code, param), body
            assert error["type"] == "invalid_request_error"
        response = await w.client.post("/v1/chat/completions", json={"model": "m"})
        assert error_of(response)["param"] == "messages"
        assert w.d.seen == []
        await w.idle()


@pytest.mark.parametrize("chunked", [False, True])
@story
async def test_a_body_that_is_too_large(chunked: bool) -> None:
    async with world(max_body_mib=1) as w:
        body = json.dumps(COMPLETION | {"prompt": "x" * (1 << 20)}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]

        content = pieces() if chunked else body
        response = await w.client.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
        assert w.d.seen == []
        await w.idle()


@story
async def test_paths_and_methods_that_do_not_exist() -> None:
    async with world() as w:
        response = await w.client.post("/v1/embeddings", json={})
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
        response = await w.client.get("/v1/completions")
        assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")


@story
async def test_authorization_is_passed_on_and_never_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "sk-4Xw7secret"
    with caplog.at_level(logging.DEBUG):
        async with world(prefills=2, decodes=2) as w:
            w.client.headers["authorization"] = f"Bearer {secret}"
            w.p.status = 500
            w.d.hang_up_at = 1
            for stream in (False, True):
                for _ in range(3):
                    await w.completion(stream=stream)
            await w.client.post("/v1/completions", content=b"{")
            await w.client.get("/v1/models")
            await w.client.post("/v1/metaserver", content=b"{}")
            seen = [s for engine in w.pair.engines for s in engine.seen]
            assert seen
            assert all(s.headers["authorization"] == f"Bearer {secret}" for s in seen)
            status = (await w.client.get("/status")).text
            metrics = (await w.client.get("/metrics")).text
    out, err = capfd.readouterr()
    # The test's own client and engines live in this process too, and httpcore's debug lines of
    # them are among the records; none of those shows a request's headers.
    for text in (caplog.text, out, err, status, metrics):
        assert secret not in text


@story
async def test_a_bug_of_the_proxy_is_an_error_object_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    async with world() as w:
        monkeypatch.setattr("rd2h.proxy.generation.parse", bug)
        monkeypatch.setattr("rd2h.proxy.app.report", bug)
        for response in (await w.completion(), await w.client.get("/status")):
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"
        assert "ZeroDivisionError" in caplog.text
        w.assert_idle()
