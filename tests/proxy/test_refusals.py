"""What the proxy refuses by itself, as OpenAI error objects, and what it never says."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest

from rd2h.proxy.errors import ProxyError
from rd2h.proxy.transport import Headers, for_engine
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
        assert response.headers["allow"] == "POST"


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


@pytest.mark.parametrize("blank", [b" ", b"\t", b" \t "])
@story
async def test_blanks_after_a_header_are_no_part_of_it(blank: bytes) -> None:
    # Some servers leave them to the application, and no client may send them.
    sent = for_engine([(b"Authorization", b"Bearer secret" + blank)], "id")
    assert (b"authorization", b"Bearer secret") in sent
    body = json.dumps(COMPLETION).encode()
    async with world() as w:
        assert w.proxy.config.http == "h11"
        reader, writer = await asyncio.open_connection("127.0.0.1", w.proxy.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: "
            b"Bearer secret%s\r\ncontent-length: %d\r\n\r\n%s" % (blank, len(body), body)
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        for engine in w.pair.engines:
            assert [s.headers["authorization"] for s in engine.seen] == ["Bearer secret"]
        await w.idle()


@story
async def test_a_header_that_cannot_be_sent_is_the_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(headers: Headers, request_id: str | None = None) -> list[tuple[bytes, bytes]]:
        return [*for_engine(headers, request_id), (b"authorization", b"Bearer secret\x0b ")]

    caplog.set_level(logging.DEBUG)
    # As `run` does: its debug lines show the exception, and that shows the value.
    caplog.set_level(logging.WARNING, "httpcore")
    async with world(decodes=2, prefills=2) as w:
        for module in ("prefill", "decode"):
            with monkeypatch.context() as patch:
                patch.setattr(f"rd2h.proxy.{module}.for_engine", spoilt)
                response = await w.completion()
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")
            assert "secret" not in response.text
            await w.idle()
        # The one of D is of the request that P could not be sent.
        assert [sum(len(e.seen) for e in s) for s in (w.pair.prefills, w.pair.decodes)] == [0, 1]
        monkeypatch.setattr("rd2h.proxy.app.for_engine", spoilt)
        response = await w.client.get("/v1/models")
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")
        with pytest.raises(ProxyError):
            await w.services.transport.send("GET", w.d.url, "/", spoilt([]))
        for pool in (w.services.prefill, w.services.decode):
            assert [(e.up, e.failures) for e in pool.engines] == [(True, 0)] * 2
        assert "retries_total{" not in w.services.metrics.text().decode()
        assert "secret" not in (await w.client.get("/status")).text
    assert "secret" not in caplog.text


@story
async def test_engines_are_asked_not_to_compress_what_they_generate() -> None:
    async with world() as w:
        accepted = {"accept-encoding": "gzip"}
        await w.client.post("/v1/completions", json=COMPLETION, headers=accepted)
        await w.client.get("/v1/models", headers=accepted)
        assert [s.headers["accept-encoding"] for s in w.p.seen] == ["identity"]
        assert [s.headers["accept-encoding"] for s in w.d.seen] == ["identity", "gzip"]


@story
async def test_the_time_to_the_first_byte_is_that_of_answers_of_d() -> None:
    async with world() as w:
        w.p.status = 400
        assert (await w.completion()).status_code == 400
        assert (await w.client.post("/v1/completions", content=b"{")).status_code == 400
        await w.idle()
        assert b"first_byte_seconds_count{" not in w.services.metrics.text()
        w.p.status = None
        assert (await w.completion()).status_code == 200
        await w.idle()
        count = b'first_byte_seconds_count{endpoint="/v1/completions"} 1.0'
        assert count in w.services.metrics.text()
