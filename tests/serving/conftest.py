"""Real vLLM servers for the end-to-end tests, started once for all of them.

vLLM must be there: without it these tests fail.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.checkpoint import LLAMA, write_checkpoint
from serving.launcher import Launcher
from serving.servers import VllmOptions, VllmServer, start_all
from tests.serving.logs import LogWatch, running, watched

pytest.register_assert_rewrite("tests.serving.waiting", "tests.serving.world")

from tests.serving.world import (  # noqa: E402 (after what makes its assertions speak)
    Prompts,
    Reference,
    Site,
    attended,
    decode_server,
    prefill_server,
    proxy_of,
)

_TAIL = 60
_WATCH = pytest.StashKey[LogWatch]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and logs."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="package")
def launcher(folder: Path) -> Iterator[Launcher]:
    """Starts servers."""
    if find_spec("vllm") is None:
        pytest.fail("vLLM is not installed; `make setup` does it")
    with Launcher(folder / "nursery.log") as launcher:
        yield launcher


@pytest.fixture(scope="package")
def single(launcher: Launcher, folder: Path) -> Iterator[VllmServer]:
    """One server that does all by itself."""
    model = write_checkpoint(folder / "llama", LLAMA)
    server = VllmServer(launcher, VllmOptions(model=model, block_size=128), "single", folder)
    server.launch()
    with watched([server]):
        yield server
    server.stop()


@pytest.fixture(scope="package")
def reference(single: VllmServer) -> Iterator[Reference]:
    """The single server's answers."""
    single.wait_ready()
    with single.client() as client:
        yield Reference(client)


@pytest.fixture(scope="package")
def started_llama(launcher: Launcher, folder: Path, single: VllmServer) -> Iterator[Site]:
    """A Llama site. Its Prefill servers: ``whole``, and ``chunks`` with a cache that is full soon.

    A block has 128 tokens. Prefill computes 100 of a prompt in a step where it works in chunks,
    so that nearly every chunk ends inside a block, and three prompts of 900 are more than fit.
    """
    options = VllmOptions(model=single.options.model, block_size=128, blocks=33)
    chunks = VllmOptions(
        model=single.options.model,
        block_size=128,
        blocks=1 + 12,
        max_length=1024,
        step_tokens=100,
        # One prompt may take all of a step, several share it.
        arguments=["--long-prefill-token-threshold=40"],
    )
    decode = decode_server(launcher, options, "decode", folder, LLAMA)
    prefill = {
        "whole": prefill_server(launcher, options, "prefill", folder),
        "chunks": prefill_server(launcher, chunks, "chunks", folder),
    }
    proxies = {
        name: proxy_of(launcher, server, [decode], f"{name}-proxy", folder)
        for name, server in prefill.items()
    }
    single.wait_ready()  # launched already
    with single.client() as client:
        site = Site(decode, prefill, proxies, Reference(client))
        start_all(site.servers)
        with attended(site):
            yield site


@pytest.fixture
def llama(started_llama: Site) -> Iterator[Site]:
    """The Llama site, at rest before and after a test."""
    yield started_llama
    started_llama.decode.until_idle()


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """Prompts of this test alone."""
    return Prompts(request.node.nodeid, LLAMA.vocabulary)


@pytest.fixture
def expected_errors() -> list[str]:
    """Patterns of lines with errors that a test provokes."""
    return []


@pytest.fixture(autouse=True)
def quiet_logs(request: pytest.FixtureRequest, expected_errors: list[str]) -> Iterator[None]:
    """No server logs an error that nobody expects."""
    watch = request.node.stash[_WATCH] = LogWatch(running())
    yield
    errors = {
        server.name: lines
        for server in running()
        if (lines := watch.errors(server, expected_errors))
    }
    assert not errors


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the servers have logged during a test that fails."""
    report = yield
    watch = item.stash.get(_WATCH, None)
    if report.failed and watch is not None:
        for server in running():
            if new := watch.new(server).splitlines():
                report.sections.append((f"log of {server.name}", "\n".join(new[-_TAIL:])))
    return report
