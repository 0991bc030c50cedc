"""A client that leaves in the middle of its hand-off takes nothing from anybody."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serving.client import MODEL, Prompt
from serving.servers import Server
from tests.serving.waiting import eventually
from tests.serving.world import TOKENS, Prompts, Site

pytestmark = pytest.mark.slow


@contextmanager
def asking(server: Server, prompt: Prompt) -> Iterator[socket.socket]:
    """Ask for a completion, and hang up at the end of the block at the latest."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall((head + body).encode())
        yield connection


def left(site: Site, name: str) -> float:
    """Clients of a proxy that have left."""
    metrics = site.client(name).metrics()
    return metrics.value("rd2h_proxy_requests_total", status="499")


@pytest.mark.parametrize("name", ["whole", "chunks"])
def test_blocks_of_a_client_that_left_serve_others(
    llama: Site, prompts: Prompts, name: str
) -> None:
    decode, orders = llama.decode, llama.decode.orders
    gone, others = prompts(900), prompts.of((900,) * 4)
    before = left(llama, name)
    with orders.hold(after=2):
        with asking(llama.proxies[name], gone):
            orders.wait_held()
        eventually(lambda: left(llama, name) > before, "the proxy has seen the client leave")
        eventually(lambda: not decode.waiting, "Decode has ended the request")
        # A read into these blocks goes on: nobody may have them yet, and nobody is stopped.
        here = decode.client.complete_all(others[:3], TOKENS)
        assert decode.used_blocks == decode.blocks([gone])
    assert [answer.tokens for answer in here] == llama.reference.all(others[:3])
    decode.until_idle()
    # Now they need every block that Decode has.
    fresh = prompts.of((1000, 1000, 1000, 1000))
    assert decode.blocks(fresh) == decode.client.metrics().blocks - 1
    with decode.receives(*fresh):
        answers = llama.client(name).complete_all(fresh, TOKENS)
    assert [answer.tokens for answer in answers] == llama.reference.all(fresh)
    # What was received in part is not taken for the prompt.
    with decode.receives(gone):
        tokens = llama.client(name).complete(gone, TOKENS).tokens
    assert tokens == llama.reference.tokens(gone)


def test_a_client_that_left_does_not_stop_those_behind_it(llama: Site, prompts: Prompts) -> None:
    decode, orders = llama.decode, llama.decode.orders
    several = prompts.of((700, 300))
    for _ in range(3):
        with orders.hold(), asking(llama.proxies["chunks"], prompts(800)):
            orders.wait_held()
    decode.until_idle()
    with decode.receives(*several):
        answers = llama.client("chunks").complete_all(several, TOKENS)
    assert [answer.tokens for answer in answers] == llama.reference.all(several)
