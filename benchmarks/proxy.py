"""What the proxy adds: to a request that is not streamed, and to each streamed chunk.

Three processes on one machine: a server that answers at once and asks for its prompt as a Decode
engine does (it is the Prefill engine too), the proxy as a user runs it, and this client. Requests
through the proxy and to the server itself alternate, so that whatever else the machine does hits
both alike.

Run it with ``python -m benchmarks.proxy``.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rd2h.wire import Advertisement

PROMPT = list(range(1000))
# The server sends a chunk, then waits this long: as an engine with an easy life would.
CHUNK_SECONDS = 0.005


class Server:
    """Both engines in one: real HTTP, no work.

    A request with ``do_remote_prefill`` posts its rendezvous and waits for the dispatch, as D does;
    one without is the direct call, which has nothing to wait for.
    """

    def __init__(self) -> None:
        self._kv: dict[str, asyncio.Event] = {}
        self._client = httpx.AsyncClient(trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await self._answer(send, b"{}")
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = json.loads(body)
        params = request.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self._kv[params["request_id"]].set()
            await self._answer(send, b'{"choices": []}')
            return
        if params.get("do_remote_prefill"):
            headers = dict(scope["headers"])
            ext_id = f"cmpl-{headers[b'x-request-id'].decode()}-0"
            event = self._kv[ext_id] = asyncio.Event()
            advertisement = Advertisement(
                request_id=ext_id, remote_engine_id="d", remote_host="127.0.0.1", remote_port=1,
                remote_tp_size=1, remote_pcp_size=1, remote_dcp_size=1, remote_cached_tokens=0,
            )  # fmt: skip
            await self._client.post(params["metaserver"], content=advertisement.to_json())
            await event.wait()
            del self._kv[ext_id]
        if request.get("stream"):
            await self._stream(send, request["max_tokens"])
        else:
            await self._answer(send, b'{"choices": [{"text": "hello"}]}')

    async def _answer(self, send: Any, body: bytes) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any, chunks: int) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(chunks):
            # One clock for all processes of a machine.
            data = f"data: {time.monotonic_ns()}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(CHUNK_SECONDS)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def whole(client: httpx.AsyncClient, url: str) -> float:
    """Seconds that one request takes that is not streamed."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
    start = time.perf_counter()
    response = await client.post(f"{url}/v1/completions", json=body)
    elapsed = time.perf_counter() - start
    response.raise_for_status()
    return elapsed


async def stream(client: httpx.AsyncClient, url: str, chunks: int) -> list[float]:
    """Seconds from the server's writing to our reading, for each chunk of a stream."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": chunks, "stream": True}
    delays = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            now = time.monotonic_ns()
            if line.startswith("data: ") and line != "data: [DONE]":
                delays.append((now - int(line[6:])) / 1e9)
    assert len(delays) == chunks
    # The first one waits for the connection's first bytes; it belongs to the request.
    return delays[1:]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def process(*arguments: str, pattern: bytes) -> AsyncIterator[tuple[str, int]]:
    """A child process: its URL, from the line of its output that has ``pattern``, and its pid."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert child.stdout is not None
    output = child.stdout
    seen = b""
    while True:
        line = await asyncio.wait_for(output.readline(), 30)
        seen += line
        if not line:
            raise RuntimeError(f"{arguments} ended: {seen.decode()}")
        if pattern in line:
            break

    async def swallow() -> None:
        while await output.read(1 << 16):
            pass

    swallowing = asyncio.create_task(swallow())
    try:
        yield line.decode().split()[-1], child.pid
    finally:
        child.terminate()
        await child.wait()
        await swallowing


async def serve() -> None:
    """The server process."""
    config = uvicorn.Config(
        Server(), port=0, interface="asgi3", lifespan="off", ws="none", log_level="warning"
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"serving on http://127.0.0.1:{port}", flush=True)
    await task


def report(name: str, direct: list[float], proxied: list[float]) -> str:
    """One line of figures, in milliseconds."""
    d, p = statistics.median(direct) * 1e3, statistics.median(proxied) * 1e3
    d9, p9 = (statistics.quantiles(x, n=10)[-1] * 1e3 for x in (direct, proxied))
    return (
        f"{name:22} direct {d:6.2f} (p90 {d9:6.2f})   proxy {p:6.2f} (p90 {p9:6.2f})   "
        f"added {p - d:6.2f} ms   ratio {p / d:5.2f}   n = {len(direct)}"
    )


async def measure(requests: int, streams: int, chunks: int) -> list[str]:
    """The report."""
    async with process("-m", "benchmarks.proxy", "--serve", pattern=b"serving on") as (server, _):
        arguments = ["-m", "rd2h", "proxy", "--port", "0", "--log-level", "info"]
        arguments += ["--prefill", server, "--decode", server]
        async with (
            process(*arguments, pattern=b"listening on") as (proxy, pid),
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
        ):
            async with asyncio.timeout(30):
                while True:
                    try:
                        if (await client.get(f"{proxy}/ready")).status_code == 200:
                            break
                    except httpx.ConnectError:
                        pass
                    await asyncio.sleep(0.02)
            figures: dict[str, list[float]] = {server: [], proxy: []}
            delays: dict[str, list[float]] = {server: [], proxy: []}
            for url in (server, proxy) * 10:
                await whole(client, url)
            used = cpu_seconds(pid)
            for turn in range(requests):
                for url in (server, proxy) if turn % 2 else (proxy, server):
                    figures[url].append(await whole(client, url))
            used = cpu_seconds(pid) - used
            for turn in range(streams):
                for url in (server, proxy) if turn % 2 else (proxy, server):
                    delays[url] += await stream(client, url, chunks)
    cpu = platform.processor() or platform.machine()
    return [
        f"machine: {os.cpu_count()} cores, {cpu}, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}; milliseconds, medians",
        report("whole request", figures[server], figures[proxy]),
        report("each streamed chunk", delays[server], delays[proxy]),
        f"processor time of the proxy for each whole request: {used / requests * 1e3:.2f} ms",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=300, help="pairs of whole requests")
    parser.add_argument("--streams", type=int, default=10, help="pairs of streams")
    parser.add_argument("--chunks", type=int, default=100, help="chunks of each stream")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    for line in asyncio.run(measure(options.requests, options.streams, options.chunks)):
        print(line)


if __name__ == "__main__":
    main()
