"""Engines that behave like vLLM's front, with real HTTP and a KV hand-off that can go wrong.

A P keeps the prompt it has "computed" under the external id that D gave; a D answers only when the
prompt that it got that way is the one that the client sent. So an answer proves that ids, prompts
and addresses were matched right, for every prompt and every child of it.

The ids are vLLM's: ``cmpl-<X-Request-Id>-<i>`` or ``chatcmpl-<X-Request-Id>``, ``<child>_`` before
that with ``n > 1``, and 8 hex digits after it that the connector strips.
"""

import asyncio
import contextlib
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from rd2h.wire import Advertisement, DecodeParams, PrefillParams

# ASGI messages and JSON bodies are dicts of anything.
Json = Any
Scope = Any


@dataclass
class Seen:
    """One request as an engine saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Json]
    finished: bool = False
    aborted: bool = False

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]


class Fabric:
    """What moves KV from P to D: external id to the prompt that P has computed."""

    def __init__(self) -> None:
        self._kv: dict[str, asyncio.Future[Json]] = {}

    def slot(self, ext_id: str) -> asyncio.Future[Json]:
        return self._kv.setdefault(ext_id, asyncio.get_running_loop().create_future())

    def write(self, ext_id: str, prompt: Json) -> None:
        """From P; a D that has gone takes nothing."""
        slot = self._kv.get(ext_id)
        if slot is not None and not slot.done():
            slot.set_result(prompt)

    def forget(self, ext_id: str) -> None:
        self._kv.pop(ext_id, None)

    def __len__(self) -> int:
        return len(self._kv)


class QuietServer(uvicorn.Server):
    """A server that leaves the test's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HangUpError(Exception):
    """The engine hangs up."""


class Engine:
    """One engine. Change its attributes to make it misbehave.

    Attributes:
        status: Answer every generation request with this status instead of serving it.
        answer: The body of that answer.
        refuse_after: Serve this many requests before that.
        healthy: What ``/health`` says.
        gate: Generation requests wait for it before anything else.
        models_gate: The same for the list of models.
        tokens: How many tokens D answers with.
        capacity: How many sequences D admits at once.
        permits: D takes one before each token.
        hang_up_at: Before this token D breaks all its connections.
        half_an_event: It leaves half an event, or half a body, behind then.
        keep_alive: D begins its streams with a comment.
        posts: How often D posts each rendezvous.
    """

    def __init__(self, fabric: Fabric, host: str = "127.0.0.1", port: int = 0) -> None:
        self.fabric = fabric
        self.host = host
        self.port = port
        self.status: int | None = None
        self.answer: bytes | None = None
        self.healthy = True
        self.refuse_after = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.models_gate = asyncio.Event()
        self.models_gate.set()
        self.tokens = 3
        self.capacity = 1024
        self.posts = 1
        self.keep_alive = False
        self.permits: asyncio.Semaphore | None = None
        self.hang_up_at: int | None = None
        self.half_an_event = False
        self.seen: list[Seen] = []
        self.probes = 0
        self.active = 0
        self.posted: list[tuple[str, int]] = []
        self._admission: asyncio.Condition = asyncio.Condition()
        self._admitted = 0
        self._server: QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------- life and death

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        self._client = httpx.AsyncClient(trust_env=False, verify=False, timeout=60, limits=limits)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.host, self.port))
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, access_log=False, lifespan="off",
            ws="none", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = QuietServer(config)
        self._task = asyncio.create_task(self._server._serve([sock]))
        while not self._server.started:
            await asyncio.sleep(0.001)

    def hang_up(self) -> None:
        """Break every connection, as the death of the process would."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self.hang_up()
            self._server.should_exit = self._server.force_exit = True
            await self._task
            await self._client.aclose()
            self._server = self._task = None

    # -------------------------------------------------------------------------------- serving

    async def _app(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/health":
            self.probes += 1
            await self._reply(send, 200 if self.healthy else 503, b"")
            return
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"]}
        if path == "/v1/models":
            self.seen.append(Seen(path, headers, {}))
            await self.models_gate.wait()
            if self.status is not None:
                await self._reply(send, self.status, b"{}")
                return
            await self._reply(send, 200, json.dumps({"object": "list", "data": [self.url]}))
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen = Seen(path, headers, json.loads(body))
        self.seen.append(seen)
        work = asyncio.create_task(self._serve(seen, send))
        gone = asyncio.create_task(self._gone(receive))
        self.active += 1
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            seen.aborted = not work.done()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self.active -= 1
        error = None if work.cancelled() else work.exception()
        if isinstance(error, BaseExceptionGroup) and error.subgroup(HangUpError):
            self.hang_up()
        elif error is not None:
            raise error

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _serve(self, seen: Seen, send: Any) -> None:
        await self.gate.wait()
        if self.status is not None and len(self.seen) > self.refuse_after:
            error = {"error": {"message": f"told to answer {self.status}", "type": "fake"}}
            await self._reply(send, self.status, self.answer or json.dumps(error))
            seen.finished = True
            return
        await self.generate(seen, send)
        seen.finished = True

    async def generate(self, seen: Seen, send: Any) -> None:
        raise NotImplementedError

    async def _reply(self, send: Any, status: int, body: bytes | str) -> None:
        data = body.encode() if isinstance(body, str) else body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"x-engine", self.url.encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    @staticmethod
    def sequences(seen: Seen) -> list[tuple[str, Json]]:
        """External id and prompt of every sequence, from vLLM's internal ids."""
        n = seen.body.get("n") or 1
        if seen.path == "/v1/chat/completions":
            bases = [(f"chatcmpl-{seen.id}", seen.body["messages"])]
        else:
            prompt = seen.body["prompt"]
            single = isinstance(prompt, str) or isinstance(prompt[0], int)
            prompts = [prompt] if single else prompt
            bases = [(f"cmpl-{seen.id}-{i}", item) for i, item in enumerate(prompts)]
        internal = [
            (f"{child}_{base}" if n > 1 else base, prompt)
            for base, prompt in bases
            for child in range(n)
        ]
        internal = [(f"{name}-{secrets.token_hex(4)}", prompt) for name, prompt in internal]
        return [(re.sub(r"-[0-9a-f]{8}\Z", "", name), prompt) for name, prompt in internal]


class Prefill(Engine):
    """P: computes prompts and writes them to whichever D its parameters name."""

    async def generate(self, seen: Seen, send: Any) -> None:
        body = seen.body
        assert body["max_tokens"] == 1
        assert body.get("max_completion_tokens", 1) == 1
        assert body["stream"] is False
        assert "stream_options" not in body
        assert "min_tokens" not in body
        params = PrefillParams.from_params(body["kv_transfer_params"])
        for ext_id, prompt in self.sequences(seen):
            mine = params.batch_kv_transfer_params
            entry = mine[ext_id] if mine else params
            assert mine or ext_id == entry.request_id
            self.fabric.write(entry.request_id, prompt)
        await self._reply(send, 200, json.dumps({"id": seen.id, "choices": []}))


class Decode(Engine):
    """D: admits sequences, posts a rendezvous for each, waits for its KV, answers tokens."""

    async def generate(self, seen: Seen, send: Any) -> None:
        params = DecodeParams.from_params(seen.body["kv_transfer_params"])
        assert params.do_remote_prefill
        out: asyncio.Queue[str | None] = asyncio.Queue()
        sequences = self.sequences(seen)
        async with asyncio.TaskGroup() as group:
            for index, (ext_id, prompt) in enumerate(sequences):
                group.create_task(self._sequence(params.metaserver, ext_id, index, prompt, out))
            if seen.body.get("stream"):
                await self._stream(len(sequences), out, send)
            else:
                await self._whole(len(sequences), out, send)

    async def _sequence(
        self, metaserver: str, ext_id: str, index: int, prompt: Json, out: "asyncio.Queue[Any]"
    ) -> None:
        async with self._admission:
            await self._admission.wait_for(lambda: self._admitted < self.capacity)
            self._admitted += 1
        try:
            slot = self.fabric.slot(ext_id)
            for _ in range(self.posts):
                await self._post(metaserver, ext_id)
            kv = await slot
            assert kv == prompt, f"the KV of {ext_id} is of another prompt"
            for token in range(self.tokens):
                if self.permits is not None:
                    await self.permits.acquire()
                await out.put(f"{index}:{token}")
                await asyncio.sleep(0)
        finally:
            self.fabric.forget(ext_id)
            async with self._admission:
                self._admitted -= 1
                self._admission.notify_all()
        await out.put(None)

    async def _post(self, metaserver: str, ext_id: str) -> None:
        advertisement = Advertisement(
            request_id=ext_id, remote_engine_id="d", remote_host=self.host,
            remote_port=self.port, remote_tp_size=1, remote_pcp_size=1, remote_dcp_size=1,
            remote_cached_tokens=0,
        )  # fmt: skip
        response = await self._client.post(metaserver, content=advertisement.to_json())
        self.posted.append((ext_id, response.status_code))

    async def _tokens(self, sequences: int, out: "asyncio.Queue[Any]") -> AsyncIterator[str]:
        count = 0
        while sequences:
            token = await out.get()
            if token is None:
                sequences -= 1
                continue
            if self.hang_up_at == count:
                raise HangUpError
            yield token
            count += 1

    async def _stream(self, sequences: int, out: "asyncio.Queue[Any]", send: Any) -> None:
        # As Starlette does: the status goes out before the first token.
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        if self.keep_alive:
            await write(b": keep-alive\n\n")
        try:
            async for token in self._tokens(sequences, out):
                await write(f'data: {{"text": "{token}"}}\n\n'.encode())
        except HangUpError:
            if self.half_an_event:
                await write(b'data: {"text": "ha')
                # Let it leave this machine before the connection breaks.
                await asyncio.sleep(0.05)
            raise
        await write(b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})

    async def _whole(self, sequences: int, out: "asyncio.Queue[Any]", send: Any) -> None:
        try:
            texts = sorted([token async for token in self._tokens(sequences, out)])
        except HangUpError:
            if self.half_an_event:
                headers = [(b"content-type", b"application/json"), (b"content-length", b"99")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                half = {"type": "http.response.body", "body": b'{"cho', "more_body": True}
                await send(half)
                await asyncio.sleep(0.05)
            raise
        await self._reply(send, 200, json.dumps({"choices": texts}))


@dataclass
class Pair:
    """Engines of both sides, on one fabric."""

    fabric: Fabric
    prefills: list[Prefill]
    decodes: list[Decode]
    stopped: list[Engine] = field(default_factory=list)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, *self.decodes]


@asynccontextmanager
async def engines(prefills: int, decodes: int, host: str = "127.0.0.1") -> AsyncIterator[Pair]:
    fabric = Fabric()
    pair = Pair(
        fabric,
        [Prefill(fabric, host) for _ in range(prefills)],
        [Decode(fabric, host) for _ in range(decodes)],
    )
    try:
        for engine in pair.engines:
            await engine.start()
        yield pair
    finally:
        await asyncio.gather(*(engine.stop() for engine in pair.engines))
