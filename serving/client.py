"""A small typed client of vLLM's completions and metrics, and of the proxy in front of it.

Prompts and answers are token ids: the checkpoints have no tokenizer. Any thread may use a client.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self

import httpx
import msgspec

from serving.metrics import Metrics

__all__ = ["MODEL", "Answer", "Choice", "Chunk", "Client", "Prompt", "RequestFailedError"]

# The name under which every server here serves its model.
MODEL = "m"
Prompt = Sequence[int]
# No request of a test takes longer, unless something is stuck.
REQUEST_SECONDS = 180.0


class RequestFailedError(RuntimeError):
    """A server answered with an error.

    Attributes:
        status: HTTP status; 200 if the error came in a stream that had begun.
        body: What the server said.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body


class Choice(msgspec.Struct, frozen=True):
    """One sequence of an answer.

    Attributes:
        index: Position of its prompt times ``n``, plus its number among the ``n``.
        token_ids: The tokens, without the prompt.
        finish_reason: ``length``, ``stop``, ``abort``, ``error``; None in a chunk that is not the
            last one.
    """

    index: int
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens; empty if there are none."""
        return self.token_ids or ()


class Answer(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        id: ``cmpl-`` and the request's ``X-Request-Id``.
        choices: One for each prompt and each of its ``n``.
        kv_transfer_params: What a connector hands back, as NixlConnector's P does for D.
    """

    id: str
    choices: tuple[Choice, ...]
    kv_transfer_params: dict[str, object] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first choice."""
        return self.choices[0].tokens


class _Event(msgspec.Struct, frozen=True):
    """One event of a stream: a part of an answer, or an error."""

    choices: tuple[Choice, ...] = ()
    error: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class Chunk:
    """One part of a streamed answer.

    Attributes:
        choice: The sequence and its new tokens.
        seconds: Since the request was sent.
    """

    choice: Choice
    seconds: float


class Client:
    """A client of one server.

    Args:
        url: Base URL of the server.
        seconds: Longest wait for bytes of an answer.
    """

    def __init__(self, url: str, seconds: float = REQUEST_SECONDS) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._http = httpx.Client(
            base_url=url, timeout=httpx.Timeout(seconds), limits=limits, trust_env=False
        )
        self._answer = msgspec.json.Decoder(Answer)
        self._event = msgspec.json.Decoder(_Event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def complete(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_tokens: int = 12,
        *,
        n: int = 1,
        request_id: str | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
        **fields: object,
    ) -> Answer:
        """A greedy completion of exactly ``max_tokens`` tokens.

        Args:
            prompt: Token ids, or several prompts.
            max_tokens: Tokens to generate for each.
            n: Sequences for each prompt.
            request_id: The ``X-Request-Id`` header.
            kv_transfer_params: For the engine's connector.
            fields: Further fields of the request.

        Raises:
            RequestFailedError: The server answered with an error.
            httpx.TransportError: There was no whole answer.
        """
        body = _body(prompt, max_tokens, n, kv_transfer_params, fields)
        response = self._http.post("/v1/completions", json=body, headers=_headers(request_id))
        if response.status_code != 200:
            raise RequestFailedError(response.status_code, response.text)
        return self._answer.decode(response.content)

    def complete_all(
        self, prompts: Sequence[Prompt], max_tokens: int = 12, *, at_once: int = 8
    ) -> list[Answer]:
        """A request for each prompt, ``at_once`` of them at a time; raises what `complete` does."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    @contextmanager
    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_tokens: int = 12,
        *,
        n: int = 1,
        request_id: str | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
        **fields: object,
    ) -> Iterator[Iterator[Chunk]]:
        """The chunks of a streamed completion; leaving the block early breaks the connection.

        Arguments are those of `complete`.

        Raises:
            RequestFailedError: The server answered with an error, or ended the stream with one.
            httpx.TransportError: The connection broke.
        """
        body = _body(prompt, max_tokens, n, kv_transfer_params, {**fields, "stream": True})
        start = perf_counter()
        with self._http.stream(
            "POST", "/v1/completions", json=body, headers=_headers(request_id)
        ) as response:
            if response.status_code != 200:
                raise RequestFailedError(response.status_code, response.read().decode())
            yield self._chunks(response, start)

    def metrics(self) -> Metrics:
        """What the server counts at this moment.

        Raises:
            RequestFailedError: It has no metrics.
        """
        response = self._http.get("/metrics")
        if response.status_code != 200:
            raise RequestFailedError(response.status_code, response.text)
        return Metrics(response.text)

    def _chunks(self, response: httpx.Response, start: float) -> Iterator[Chunk]:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            seconds = perf_counter() - start
            event = self._event.decode(line.removeprefix("data: ").encode())
            if bytes(event.error):
                raise RequestFailedError(response.status_code, bytes(event.error).decode())
            for choice in event.choices:
                yield Chunk(choice, seconds)


def _headers(request_id: str | None) -> dict[str, str]:
    return {} if request_id is None else {"X-Request-Id": request_id}


def _body(
    prompt: Prompt | Sequence[Prompt],
    max_tokens: int,
    n: int,
    kv_transfer_params: Mapping[str, object] | None,
    fields: Mapping[str, object],
) -> dict[str, object]:
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "n": n,
        "temperature": 0,
        "ignore_eos": True,
        # There is no text: without this an answer would be empty.
        "return_token_ids": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    return {**body, **fields}
