"""What the end-to-end tests share: prompts, right answers, and sites of real vLLM servers.

A *site* is one or more Prefill servers, one Decode server, and a proxy for each Prefill server
(an idle one costs nothing, and each test says by its proxy who computes). Each Decode server runs
the tampering connector, so that one and the same server shows what is right and what is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Literal

import httpx

from serving.checkpoint import Shape
from serving.client import Answer, Client, Prompt
from serving.launcher import Launcher
from serving.metrics import Metrics
from serving.ports import free_ports
from serving.servers import KvTransfer, ProxyServer, Server, VllmOptions, VllmServer, stop_all
from tests.serving.logs import watched
from tests.serving.orders import Orders
from tests.serving.waiting import eventually

__all__ = [
    "SIZES",
    "TOKENS",
    "Decode",
    "Prompts",
    "Reference",
    "Site",
    "attended",
    "decode_server",
    "prefill_server",
    "proxy_of",
    "tokens_of",
    "until_ready",
]

SIZES = (1, 15, 16, 17, 127, 128, 129, 900)
"""Prompt lengths around the ends of a block of 16 (MLA on CPU) and one of 128 (attention)."""

TOKENS = 12
"""Tokens that are compared."""


class Prompts:
    """Random prompts that no other test has: engines keep the blocks of what they have seen."""

    def __init__(self, test: str, vocabulary: int) -> None:
        self._random = Random(zlib.crc32(test.encode()))
        self._vocabulary = vocabulary

    def __call__(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(length)]

    def of(self, lengths: Sequence[int]) -> list[list[int]]:
        """One of each length."""
        return [self(length) for length in lengths]


class Reference:
    """The right answers: those of a single server without any connector."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, prompt: Prompt, max_tokens: int = TOKENS) -> tuple[int, ...]:
        """The answer to a prompt."""
        key = tuple(prompt), max_tokens
        if key not in self._known:
            self._known[key] = self._client.complete(prompt, max_tokens).tokens
        return self._known[key]

    def all(self, prompts: Sequence[Prompt], max_tokens: int = TOKENS) -> list[tuple[int, ...]]:
        """The answers to several prompts."""
        return [self.tokens(prompt, max_tokens) for prompt in prompts]


@dataclass(frozen=True)
class _Counts:
    """What a Decode server has counted."""

    received: int
    failed: int
    read: int
    external: int

    @classmethod
    def of(cls, metrics: Metrics) -> _Counts:
        return cls(
            received=int(metrics.value("vllm:rd2h_requests_received_total")),
            failed=int(metrics.value("vllm:rd2h_requests_failed_total")),
            read=int(metrics.value("vllm:rd2h_bytes_read_total")),
            external=metrics.external_tokens,
        )

    def __sub__(self, before: _Counts) -> _Counts:
        return _Counts(
            self.received - before.received,
            self.failed - before.failed,
            self.read - before.read,
            self.external - before.external,
        )


@dataclass
class Decode:
    """A Decode server, and the orders that its connector follows.

    Attributes:
        server: The server.
        orders: To its connector.
        shape: Of the model.
        block_size: Tokens in a block.
        client: A client of the server itself: what is asked here is computed here.
    """

    server: VllmServer
    orders: Orders
    shape: Shape
    block_size: int
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.server.client()

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.shape.kv_bytes_per_token * self.block_size // self.shape.layers

    @property
    def endpoint(self) -> str:
        """Where its first rank listens for Prefill."""
        assert self.server.options.kv_transfer is not None
        return f"tcp://127.0.0.1:{self.server.options.kv_transfer.port}"

    def blocks(self, prompts: Sequence[Prompt]) -> int:
        """Blocks that prompts take."""
        return sum(-(-len(prompt) // self.block_size) for prompt in prompts)

    @contextmanager
    def receives(self, *prompts: Prompt, cached: int = 0) -> Iterator[None]:
        """Prove that this server computes none of these prompts, but gets all of them.

        Args:
            prompts: What it gets within the block; nothing else may go on.
            cached: Tokens, in whole blocks, that it has in its own cache.
        """
        before = _Counts.of(self.client.metrics())
        yield
        # Of what it has received, vLLM computes the last token again; of one token that is all.
        tokens = sum(len(prompt) for prompt in prompts if len(prompt) > 1) - cached
        blocks = self.blocks(prompts) - cached // self.block_size
        expected = _Counts(
            received=len(prompts),
            failed=0,
            read=blocks * self.layer_block_bytes * self.shape.layers,
            external=tokens,
        )
        self._grown(before, expected)

    @contextmanager
    def fails(self, requests: int = 1) -> Iterator[None]:
        """Prove that hand-offs to this server fail within the block."""
        before = _Counts.of(self.client.metrics()).failed
        yield
        eventually(
            lambda: _Counts.of(self.client.metrics()).failed == before + requests,
            f"{self.server.name} has counted {requests} failed request(s)",
        )

    @property
    def used_blocks(self) -> int:
        """Blocks in use at this moment."""
        return self._at_this_moment().used_blocks

    @property
    def waiting(self) -> int:
        """Requests that wait for their prompt at this moment."""
        return self._at_this_moment().waiting

    def until_idle(self) -> None:
        """Wait until every block is free again."""
        eventually(lambda: not self.used_blocks, f"all blocks of {self.server.name} are free")

    def _at_this_moment(self) -> Metrics:
        # The engine writes its gauges when it has computed something: let it.
        self.client.complete([1], 1)
        return self.client.metrics()

    def _grown(self, before: _Counts, expected: _Counts) -> None:
        # The answer may be here before the engine's last step is counted.
        seen: list[_Counts] = []

        def enough() -> bool:
            seen.append(_Counts.of(self.client.metrics()) - before)
            last = seen[-1]
            return last.received >= expected.received and last.external >= expected.external

        eventually(enough, f"{self.server.name} has received {expected.received} request(s)", 30)
        assert seen[-1] == expected


@dataclass
class Site:
    """Servers that belong together.

    Attributes:
        decode: The Decode server.
        prefill: Prefill servers, by what is special about them.
        proxies: The proxy before each of these and the Decode server.
        reference: The right answers.
        others: Further servers that belong to it.
    """

    decode: Decode
    prefill: Mapping[str, VllmServer]
    proxies: Mapping[str, ProxyServer]
    reference: Reference
    others: Sequence[Server] = ()
    clients: dict[Server, Client] = field(default_factory=dict)

    def client(self, name: str = "whole") -> Client:
        """A client of a proxy."""
        return self._client(self.proxies[name])

    def prefill_client(self, name: str = "whole") -> Client:
        """A client of a Prefill server itself."""
        return self._client(self.prefill[name])

    def prefill_metrics(self, name: str = "whole") -> Metrics:
        """What a Prefill server has counted."""
        return self.prefill_client(name).metrics()

    @property
    def servers(self) -> list[Server]:
        """All servers."""
        return [
            *self.others,
            self.decode.server,
            *self.prefill.values(),
            *self.proxies.values(),
        ]

    def close(self) -> None:
        """Stop the servers."""
        for client in (self.decode.client, *self.clients.values()):
            client.close()
        stop_all(self.servers)

    def _client(self, server: Server) -> Client:
        if server not in self.clients:
            self.clients[server] = server.client()
        return self.clients[server]


def prefill_server(
    launcher: Launcher,
    options: VllmOptions,
    name: str,
    folder: Path,
    extra: Mapping[str, object] | None = None,
) -> VllmServer:
    """A Prefill server with rd2h's connector."""
    transfer = KvTransfer(
        connector="SfaRemoteD2HConnector",
        module="rd2h.connector",
        role="kv_producer",
        port=free_ports(options.tensor_parallel),
        extra=extra or {},
    )
    return VllmServer(launcher, replace(options, kv_transfer=transfer), name, folder)


def decode_server(
    launcher: Launcher,
    options: VllmOptions,
    name: str,
    folder: Path,
    shape: Shape,
    *,
    on_load_failure: Literal["recompute", "fail"] = "fail",
    extra: Mapping[str, object] | None = None,
) -> Decode:
    """A Decode server with the tampering connector."""
    orders = Orders(folder / f"{name}.orders")
    transfer = KvTransfer(
        connector="TamperingConnector",
        module="tests.serving.tampering",
        role="kv_consumer",
        port=free_ports(options.tensor_parallel),
        on_load_failure=on_load_failure,
        extra=extra or {},
    )
    options = replace(
        options,
        kv_transfer=transfer,
        environment={**options.environment, **orders.environment},
    )
    assert options.block_size is not None
    server = VllmServer(launcher, options, name, folder)
    return Decode(server, orders, shape, options.block_size)


def proxy_of(
    launcher: Launcher, prefill: VllmServer, decode: Sequence[Decode], name: str, folder: Path
) -> ProxyServer:
    """A proxy before one Prefill server."""
    urls = [one.server.url for one in decode]
    return ProxyServer(launcher, [prefill.url], urls, folder, name=name)


@contextmanager
def attended(*sites: Site) -> Iterator[None]:
    """Watch the logs of started sites, and stop them at the end."""
    servers = list(dict.fromkeys(server for site in sites for server in site.servers))
    try:
        with watched(servers):
            yield
    finally:
        for site in sites:
            site.close()


def until_ready(proxy: ProxyServer) -> None:
    """Wait until a proxy has found its engines again."""
    with httpx.Client(trust_env=False) as client:
        eventually(
            lambda: client.get(f"{proxy.url}{proxy.ready_path}").status_code == 200,
            f"{proxy.name} is ready",
        )


def tokens_of(answer: Answer) -> list[tuple[int, ...]]:
    """The tokens of all choices, in the order of prompts."""
    return [choice.tokens for choice in sorted(answer.choices, key=lambda choice: choice.index)]
