"""Ways to serve a prompt with two vLLM servers, for `benchmarks.serving`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Protocol, Self
from uuid import uuid4

from rd2h.wire import Advertisement, DecodeParams
from serving.client import Answer, Client
from serving.servers import Server

__all__ = ["HandOff", "Nixl", "Rd2hDirect", "Rd2hProxy", "Single", "Timing"]


@dataclass(frozen=True)
class Timing:
    """One request as its client saw it.

    Attributes:
        first_token: Seconds from sending the request until the first token.
        tokens: The answer.
    """

    first_token: float
    tokens: tuple[int, ...]


class HandOff(Protocol):
    """A way to serve a prompt. Any thread may call; several at a time.

    Attributes:
        name: What the report calls it.
        servers: The vLLM servers that it takes.
    """

    name: ClassVar[str]
    servers: Sequence[Server]

    def turn(self) -> AbstractContextManager[None]:
        """A context in which it is used; between two of them it may not load the machine."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Serve one prompt.

        Raises:
            RequestFailedError: A server refused it.
        """


class _Quiet:
    """A hand-off whose servers do nothing when nobody asks them anything."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers

    def turn(self) -> AbstractContextManager[None]:
        """Nothing needs to be stopped between two turns."""
        return nullcontext()


class Single(_Quiet):
    """No hand-off: one server does all."""

    name: ClassVar[str] = "one server"

    def __init__(self, server: Server, client: Client) -> None:
        super().__init__([server])
        self._client = client

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Serve one prompt."""
        return _stream(self._client, prompt, max_tokens, perf_counter())


class Nixl:
    """vLLM's NixlConnector, driven as its own proxy example does: P first, then D pulls.

    UCX's threads keep a core busy when there is nothing to do, which would be charged to the others
    here; so its servers are stopped (SIGSTOP) when it is not their turn.
    """

    name: ClassVar[str] = "NixlConnector"
    _TO_PREFILL: ClassVar[Mapping[str, object]] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }

    def __init__(self, servers: Sequence[Server], prefill: Client, decode: Client) -> None:
        self.servers = servers
        self._prefill = prefill
        self._decode = decode

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let its servers go on; they have been stopped, or are from now on."""
        for server in self.servers:
            server.thaw()
        try:
            yield
        finally:
            for server in self.servers:
                server.freeze()

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Serve one prompt."""
        start = perf_counter()
        answer = self._prefill.complete(prompt, 1, kv_transfer_params=self._TO_PREFILL)
        return _stream(self._decode, prompt, max_tokens, start, answer.kv_transfer_params)


class Rd2hProxy(_Quiet):
    """rd2h behind its proxy."""

    name: ClassVar[str] = "rd2h, proxy"

    def __init__(self, servers: Sequence[Server], proxy: Client) -> None:
        super().__init__(servers)
        self._proxy = proxy

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Serve one prompt."""
        return _stream(self._proxy, prompt, max_tokens, perf_counter())


class Rd2hDirect(_Quiet):
    """rd2h without its proxy: this process is the metaserver. A context manager."""

    name: ClassVar[str] = "rd2h, direct"

    def __init__(self, servers: Sequence[Server], prefill: Client, decode: Client) -> None:
        super().__init__(servers)
        self._prefill = prefill
        self._decode = decode
        self._lock = threading.Lock()
        self._prompts: dict[str, Sequence[int]] = {}
        self._answers: dict[str, Future[Answer]] = {}
        self._pool = ThreadPoolExecutor(32)
        self._metaserver = _Metaserver(("127.0.0.1", 0), _Handler)
        self._metaserver.owner = self
        self._url = f"http://127.0.0.1:{self._metaserver.server_port}/v1/metaserver"
        self._thread = threading.Thread(target=self._metaserver.serve_forever, name="metaserver")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metaserver.shutdown()
        self._thread.join()
        self._metaserver.server_close()
        self._pool.shutdown()

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Serve one prompt."""
        start = perf_counter()
        request_id = uuid4().hex
        ext_id = f"cmpl-{request_id}-0"
        with self._lock:
            self._prompts[ext_id] = prompt
        params = DecodeParams(do_remote_prefill=True, metaserver=self._url).to_params()
        timing = _stream(self._decode, prompt, max_tokens, start, params, request_id)
        with self._lock:
            answer = self._answers.pop(ext_id)
        answer.result()
        return timing

    def dispatch(self, advertisement: Advertisement) -> None:
        """Send a prompt to P; a thread of the metaserver calls it."""
        ext_id = advertisement.request_id
        with self._lock:
            self._answers[ext_id] = self._pool.submit(
                self._prefill.complete,
                self._prompts.pop(ext_id),
                1,
                request_id=ext_id.removeprefix("cmpl-").removesuffix("-0"),
                kv_transfer_params=advertisement.to_params(),
            )


class _Metaserver(ThreadingHTTPServer):
    owner: Rd2hDirect


class _Handler(BaseHTTPRequestHandler):
    server: _Metaserver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a rendezvous, and answer before P does."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.owner.dispatch(Advertisement.from_json(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


def _stream(
    client: Client,
    prompt: Sequence[int],
    max_tokens: int,
    start: float,
    params: Mapping[str, object] | None = None,
    request_id: str | None = None,
) -> Timing:
    """Stream an answer; ``start`` is when the request began, by `perf_counter`."""
    first_token = 0.0
    tokens: list[int] = []
    with client.stream(
        prompt, max_tokens, kv_transfer_params=params, request_id=request_id
    ) as chunks:
        for chunk in chunks:
            if chunk.choice.tokens and not tokens:
                first_token = perf_counter() - start
            tokens.extend(chunk.choice.tokens)
    return Timing(first_token, tuple(tokens))
