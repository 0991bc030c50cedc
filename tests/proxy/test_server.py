"""Shutting down, in the same process; `tests/cli` does it to a real one with real signals."""

import asyncio
import logging
import signal
import socket

import pytest

from rd2h.proxy.config import ConfigError, load
from rd2h.proxy.server import ProxyServer, listen, run
from tests.proxy.world import COMPLETION, check_error, error_of, story, until, world


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finish", "limit", "hurry"])
@pytest.mark.parametrize("stream", [False, True])
@story
async def test_shutdown(how: str, stream: bool) -> None:
    async with world(shutdown_timeout=0.3 if how == "limit" else 60.0) as w:
        w.d.permits = asyncio.Semaphore(1)
        body = COMPLETION | {"stream": stream}
        request = asyncio.create_task(w.client.post("/v1/completions", json=body))
        # The first token is out.
        await until(lambda: bool(w.p.seen) and w.d.permits is not None and w.d.permits.locked())
        w.proxy.handle_exit(signal.SIGTERM, None)
        refused = await w.completion()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
        if how == "finish":
            for _ in range(3):
                w.d.permits.release()
        elif how == "hurry":
            w.proxy.handle_exit(signal.SIGTERM, None)
        response = await request
        if how == "finish":
            assert response.status_code == 200
        elif stream:
            last = response.text.strip().splitlines()[-1].removeprefix("data: ")
            assert check_error(last)["code"] == "shutting_down"
        else:
            assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
        await until(lambda: w.proxy.should_exit, "it stops")
        await w.idle()


def test_a_third_signal_stops_at_once() -> None:
    server = ProxyServer(
        load(None, {"prefill": ["http://p"], "decode": ["http://127.0.0.1:9"], "port": 0})
    )
    for _ in range(2):
        server.handle_exit(signal.SIGTERM, None)
        assert not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    for opened in server.sockets:
        opened.close()


def test_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[list[socket.socket]] = []

    def stand_in(_: ProxyServer, sockets: list[socket.socket]) -> None:
        ran.append(sockets)
        for opened in sockets:
            opened.close()

    monkeypatch.setattr(ProxyServer, "run", stand_in)
    caplog.set_level(logging.INFO)
    run(load(None, {"prefill": ["http://p"], "decode": ["http://127.0.0.1:9"], "port": 0}))
    assert len(ran) == 1
    assert (
        "decode engine http://127.0.0.1:9 is told the metaserver http://127.0.0.1:" in caplog.text
    )
    # Their debug lines would show what passes through.
    assert logging.getLogger("httpcore").getEffectiveLevel() == logging.WARNING


def test_what_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b"):
        listen("a..b", 0)
    with pytest.raises(ConfigError, match="this machine alone"):
        ProxyServer(load(None, {"prefill": ["http://p"], "decode": ["http://10.0.0.1"], "port": 0}))


def test_addresses_that_this_machine_does_not_have_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(family: int, host: str) -> tuple[object, ...]:
        return (family, socket.SOCK_STREAM, 6, "", (host, 0))

    elsewhere = entry(socket.AF_INET, "192.0.2.1")
    found = [elsewhere, entry(250, "127.0.0.1"), entry(socket.AF_INET, "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    [opened] = listen("name", 0)
    host, port = opened.getsockname()
    assert (host, port > 0) == ("127.0.0.1", True)
    # Any other reason counts, though another address could be had.
    opened.listen()
    taken = (*entry(socket.AF_INET, "")[:4], ("127.0.0.1", port))
    found[:] = [elsewhere, taken]
    with pytest.raises(ConfigError, match="in use: give --port"):
        listen("name", port)
    opened.close()
    found[:] = [elsewhere]
    with pytest.raises(ConfigError, match="cannot listen on name port 0: Cannot assign"):
        listen("name", 0)
