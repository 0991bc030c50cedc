"""rd2h beside one of vLLM's own storing connectors, in one engine.

The storing connector writes a prompt's whole blocks to disk, and reads them in the next request
with that prompt. Nobody has a prefix cache, so what is not computed on Prefill can only have come
from there, and what Decode answers with can only have come from Prefill.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.checkpoint import LLAMA
from serving.client import Client
from serving.launcher import Launcher
from serving.ports import free_ports
from serving.servers import (
    KvTransfer,
    ProxyServer,
    Server,
    VllmOptions,
    VllmServer,
    start_all,
    stop_all,
)
from tests.serving.waiting import eventually
from tests.serving.world import TOKENS, Prompts, Reference

pytestmark = pytest.mark.slow

BLOCK = 128
SIZE = 300
WHOLE = 256
"""Tokens of a prompt of `SIZE` that are stored: its whole blocks."""


def both(role: str, storage: Path, order: Callable[[list[object]], object]) -> KvTransfer:
    """rd2h and the storing connector, in the order that ``order`` puts them in."""
    assert role in ("kv_producer", "kv_consumer")
    connectors: list[object] = [
        {
            "kv_connector": "SfaRemoteD2HConnector",
            "kv_connector_module_path": "rd2h.connector",
            "kv_role": role,
            "kv_port": free_ports(),
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    ]
    order(connectors)
    return KvTransfer(
        connector="Rd2hMultiConnector",
        module="rd2h.connector",
        role="kv_producer" if role == "kv_producer" else "kv_consumer",
        extra={"connectors": connectors},
    )


@dataclass
class Engines:
    """Prefill with both connectors; Decode with rd2h alone, and with both.

    Attributes:
        stored: Where Prefill's storing connector writes to.
    """

    stored: Path
    prefill: VllmServer
    decode: dict[str, VllmServer]
    proxies: dict[str, ProxyServer]

    def files(self) -> list[Path]:
        return sorted(self.stored.rglob("*.safetensors"))

    def counted(self, server: VllmServer) -> tuple[int, int]:
        """Requests that rd2h has received, and tokens that any connector has given."""
        with server.client() as client:
            metrics = client.metrics()
        return int(metrics.value("vllm:rd2h_requests_received_total")), metrics.external_tokens


@pytest.fixture(scope="module")
def engines(launcher: Launcher, single: VllmServer, folder: Path) -> Iterator[Engines]:
    stored = folder / "stored-by-prefill"
    options = VllmOptions(
        model=single.options.model, block_size=BLOCK, blocks=33, prefix_caching=False
    )

    def server(name: str, transfer: KvTransfer) -> VllmServer:
        return VllmServer(launcher, replace(options, kv_transfer=transfer), name, folder)

    # The storing one first: whatever the order, rd2h's gates shut before it hears of a layer.
    prefill = server("multi-prefill", both("kv_producer", stored, list.reverse))
    plain = KvTransfer(
        connector="SfaRemoteD2HConnector",
        module="rd2h.connector",
        role="kv_consumer",
        port=free_ports(),
    )
    decode = {
        "alone": server("multi-decode", plain),
        "both": server(
            "multi-decode-both", both("kv_consumer", folder / "stored-by-decode", lambda _: None)
        ),
    }
    proxies = {
        name: ProxyServer(launcher, [prefill.url], [one.url], folder, name=f"multi-proxy-{name}")
        for name, one in decode.items()
    }
    servers: list[Server] = [prefill, *decode.values(), *proxies.values()]
    try:
        start_all(servers)
        yield Engines(stored, prefill, decode, proxies)
    finally:
        stop_all(servers)


def ask(engines: Engines, decode: str, prompt: list[int]) -> tuple[int, ...]:
    """The answer through a proxy, with proof that rd2h handed the whole prompt over."""
    server = engines.decode[decode]
    received, given = engines.counted(server)
    with engines.proxies[decode].client() as client:
        tokens = client.complete(prompt, TOKENS).tokens
    wanted = received + 1, given + len(prompt)
    eventually(lambda: engines.counted(server) == wanted, f"{wanted} in {server.name}")
    return tokens


@pytest.mark.parametrize("decode", ["alone", "both"])
def test_what_one_stores_the_other_hands_over(
    engines: Engines, reference: Reference, prompts: Prompts, decode: str
) -> None:
    prompt = prompts(SIZE)
    files = set(engines.files())
    given = engines.counted(engines.prefill)[1]
    assert ask(engines, decode, prompt) == reference.tokens(prompt)
    stored = [file for file in engines.files() if file not in files]
    assert len(stored) == LLAMA.layers
    assert all(load_file(file)["kv_cache"].shape[0] == WHOLE for file in stored)
    assert engines.counted(engines.prefill)[1] == given, "loaded, though nothing was stored"

    # The second time Prefill computes the last tokens only, and hands over what it has loaded.
    assert ask(engines, decode, prompt) == reference.tokens(prompt)
    eventually(
        lambda: engines.counted(engines.prefill)[1] == given + WHOLE,
        f"{engines.prefill.name} has loaded {WHOLE} tokens",
    )
    assert set(engines.files()) == files | set(stored)


def test_decode_gets_the_very_bytes_that_were_stored(
    engines: Engines, reference: Reference, prompts: Prompts
) -> None:
    prompt = prompts(SIZE)
    files = set(engines.files())
    assert ask(engines, "alone", prompt) == reference.tokens(prompt)
    for file in set(engines.files()) - files:
        save_file({"kv_cache": torch.zeros_like(load_file(file)["kv_cache"])}, file)
    assert ask(engines, "alone", prompt) != reference.tokens(prompt)


@pytest.mark.parametrize("size", [1, 15, 128, 900])
def test_prompts_of_any_size_give_the_right_tokens(
    engines: Engines, reference: Reference, prompts: Prompts, size: int
) -> None:
    prompt = prompts(size)
    with engines.proxies["both"].client() as client:
        for _ in range(2):
            assert client.complete(prompt, TOKENS).tokens == reference.tokens(prompt)


def test_many_requests_at_once_while_others_are_loaded(
    engines: Engines, reference: Reference, prompts: Prompts
) -> None:
    known = prompts.of((300, 513, 700))
    with engines.proxies["alone"].client() as client:
        client.complete_all(known, TOKENS)
        several = [*known, *prompts.of((64, 900, 257)), *known]
        answers = client.complete_all(several, TOKENS, at_once=9)
    assert [answer.tokens for answer in answers] == reference.all(several)


def test_both_connectors_are_counted_and_logged(engines: Engines) -> None:
    with engines.prefill.client() as client:
        assert _announced(client) > 0
    eventually(
        lambda: re.search(
            r"KV Transfer metrics: SfaRemoteD2HConnector=\{'layers_announced'",
            engines.prefill.log.read_text(errors="replace"),
        ),
        f"{engines.prefill.name} has logged what rd2h has announced",
        30,
    )


def _announced(client: Client) -> float:
    return client.metrics().value("vllm:rd2h_layers_announced_total")
