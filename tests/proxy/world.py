"""A proxy between engines, all with real HTTP on loopback, in one event loop."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import httpx

from rd2h.proxy.config import load
from rd2h.proxy.server import ProxyServer
from rd2h.proxy.services import Services
from tests.proxy.vllm import Decode, Pair, Prefill, QuietServer, engines

P = ParamSpec("P")

COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 3}
GAUGES = {
    f"rd2h_proxy_{name}"
    for name in ("engine_load", "engine_requests", "requests_in_flight", "rendezvous_waiting")
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def story(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run an async test in a loop of its own, with a limit that no healthy run comes near."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            async with asyncio.timeout(300):
                await test(*args, **kwargs)

        asyncio.run(limited())

    # pytest looks at the wrapped function for its fixtures; it must not take it for a coroutine.
    return run


async def until(condition: Callable[[], bool], what: str = "", seconds: float = 60.0) -> None:
    """Wait for something that will come; fail when it does not."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"did not come true in {seconds} s: {what}") from None


class QuietProxy(QuietServer, ProxyServer):
    """A proxy that leaves the test's signal handlers alone."""


@dataclass
class World:
    """Everything that a test may look at."""

    pair: Pair
    proxy: ProxyServer
    client: httpx.AsyncClient

    @property
    def services(self) -> Services:
        return self.proxy.services

    @property
    def p(self) -> Prefill:
        return self.pair.prefills[0]

    @property
    def d(self) -> Decode:
        return self.pair.decodes[0]

    async def completion(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=COMPLETION | fields)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=CHAT | fields)

    def assert_idle(self) -> None:
        """Every counter is back at zero."""
        services = self.services
        assert not services.in_flight
        assert len(services.registry) == services.registry.waiting == 0
        for pool in (services.prefill, services.decode):
            assert [(e.load, e.requests) for e in pool.engines] == [(0, 0)] * len(pool.engines)
        for line in services.metrics.text().decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in GAUGES:
                assert line.endswith(" 0.0"), line

    async def idle(self) -> None:
        """Wait until nothing is going on anywhere, then check that nothing is left."""
        await until(lambda: not self.services.in_flight, "no request in flight")
        self.assert_idle()
        await until(lambda: all(e.active == 0 for e in self.pair.engines), "engines at rest")
        await until(lambda: len(self.pair.fabric) == 0, "no KV slot left")


@asynccontextmanager
async def world(
    prefills: int = 1, decodes: int = 1, *, host: str = "127.0.0.1", **options: object
) -> AsyncIterator[World]:
    async with engines(prefills, decodes, host) as pair:
        given = {
            "prefill": [e.url for e in pair.prefills],
            "decode": [e.url for e in pair.decodes],
            "host": host,
            "port": 0,
            "backoff": 0.02,
            "backoff_max": 0.1,
            "probe_interval": 600.0,
            "probe_timeout": 60.0,
        }
        async with proxy(given | options) as server:
            base = server.services.options.base_url(server.port)
            timeout = httpx.Timeout(60)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
            services = server.services
            await until(lambda: services.prefill.up == prefills, "all Ps are in")
            await until(lambda: services.decode.up == decodes, "all Ds are in")
            async with httpx.AsyncClient(
                base_url=base, timeout=timeout, limits=limits, trust_env=False, verify=False
            ) as client:
                yield World(pair, server, client)


@asynccontextmanager
async def proxy(options: dict[str, object]) -> AsyncIterator[ProxyServer]:
    server = QuietProxy(load(None, options))
    task = asyncio.create_task(server._serve(server.sockets))
    try:
        await until(lambda: server.started or task.done(), "the proxy listens")
        yield server
    finally:
        server.should_exit = True
        await task


async def events(lines: AsyncIterator[str]) -> list[str]:
    """The data of every event of a stream."""
    return [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object of an answer, checked for its form."""
    assert response.headers["content-type"] == "application/json"
    return check_error(response.content)


def check_error(text: bytes | str) -> dict[str, Any]:
    content = json.loads(text)
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
