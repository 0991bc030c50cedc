"""Engines that are killed or restarted, at moments that the tests choose.

One Prefill server, and two Decode servers that differ in what vLLM does with a request whose
prompt could not be loaded. Every test leaves all of them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from serving.checkpoint import LLAMA
from serving.client import RequestFailedError
from serving.launcher import Launcher
from serving.servers import Server, VllmOptions, VllmServer, start_all
from tests.serving.metaserver import metaserver
from tests.serving.waiting import eventually
from tests.serving.world import (
    TOKENS,
    Decode,
    Prompts,
    Reference,
    Site,
    attended,
    decode_server,
    prefill_server,
    proxy_of,
    until_ready,
)

pytestmark = pytest.mark.slow

IDLE = 12.0
"""Seconds after which Decode gives up a request that it hears nothing of. Nothing here is that
slow by itself, and one test waits for it."""

ONE_STEP, STEPS = 200, 900
"""Prompts that Prefill computes in one step, and in several."""


PREFILL_DIES = (
    r"receiver\.py:\d+\] request \S+ failed: ",
    r"sockets\.py:\d+\] Traceback",  # of the read, in a warning
    r"failed with an internal error during generation",  # what vLLM says of its answer
)
"""Lines in Decode's log that say so."""


@dataclass
class Faults:
    """The servers; each site has the same Prefill server.

    Attributes:
        fail: The Decode server of this site fails a request that it cannot load.
        recompute: That of this site computes it.
    """

    fail: Site
    recompute: Site

    @property
    def prefill(self) -> VllmServer:
        """The Prefill server."""
        return self.fail.prefill["whole"]

    def restart_prefill(self) -> None:
        """Start the killed Prefill server again, and wait until the proxies have found it."""
        self.prefill.start()
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until the proxies have found all engines."""
        for site in (self.fail, self.recompute):
            until_ready(site.proxies["whole"])


@pytest.fixture(scope="module")
def started(launcher: Launcher, folder: Path, single: VllmServer) -> Iterator[Faults]:
    options = VllmOptions(model=single.options.model, block_size=128, blocks=33)
    chunks = VllmOptions(model=single.options.model, block_size=128, step_tokens=256)
    contain = {"prefill_failure_policy": "contain"}
    prefill = prefill_server(launcher, chunks, "faults-prefill", folder, contain)
    sites = []
    single.wait_ready()
    with single.client() as client:
        reference = Reference(client)
        for policy in ("fail", "recompute"):
            decode = decode_server(
                launcher,
                options,
                f"{policy}-decode",
                folder,
                LLAMA,
                on_load_failure=policy,
                extra={"idle_timeout": IDLE},
            )
            proxy = proxy_of(launcher, prefill, [decode], f"{policy}-proxy", folder)
            sites.append(Site(decode, {"whole": prefill}, {"whole": proxy}, reference))
        servers: list[Server] = list(dict.fromkeys(s for site in sites for s in site.servers))
        start_all(servers)
        with attended(*sites):
            yield Faults(*sites)


@pytest.fixture
def faults(started: Faults) -> Iterator[Faults]:
    """All servers, which a test leaves up and at rest."""
    yield started
    for site in (started.fail, started.recompute):
        site.decode.until_idle()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that wait while the test goes on."""
    with ThreadPoolExecutor(6) as pool:
        yield pool


def answered(site: Site) -> float:
    """Answers of Prefill that the proxy has got."""
    return site.client().metrics().value("rd2h_proxy_prefill_seconds_count")


def in_flight(site: Site) -> float:
    """Requests that the proxy has at Prefill."""
    return site.client().metrics().value("rd2h_proxy_engine_requests", role="prefill")


def hands_over(site: Site, prompts: Prompts, size: int = STEPS) -> None:
    """Prove that a hand-off works."""
    prompt = prompts(size)
    with site.decode.receives(prompt):
        tokens = site.client().complete(prompt, TOKENS).tokens
    assert tokens == site.reference.tokens(prompt)


def answers_itself(decode: Decode, reference: Reference, prompts: Prompts) -> None:
    """Prove that a Decode server lives and has sound blocks, without Prefill."""
    several = prompts.of((STEPS,) * 4)  # all the blocks that it has
    answers = decode.client.complete_all(several, TOKENS)
    assert [answer.tokens for answer in answers] == reference.all(several)


def test_a_killed_prefill_fails_the_request_and_nothing_else(
    faults: Faults, prompts: Prompts, pool: ThreadPoolExecutor, expected_errors: list[str]
) -> None:
    expected_errors += PREFILL_DIES
    site, decode = faults.fail, faults.fail.decode
    hands_over(site, prompts)
    before = answered(site)
    with decode.fails(), decode.orders.hold(after=1):
        request = pool.submit(site.client().complete, prompts(ONE_STEP), TOKENS)
        decode.orders.wait_held()
        eventually(lambda: answered(site) > before, "Prefill has answered")
        faults.prefill.kill()
        decode.orders.release()
        with pytest.raises(RequestFailedError) as failed:
            request.result()
    assert failed.value.status == 500
    assert decode.server.alive
    answers_itself(decode, site.reference, prompts)
    faults.restart_prefill()
    hands_over(site, prompts)


def test_a_killed_prefill_is_made_up_for_with_recompute(
    faults: Faults, prompts: Prompts, pool: ThreadPoolExecutor, expected_errors: list[str]
) -> None:
    expected_errors += PREFILL_DIES
    site, decode = faults.recompute, faults.recompute.decode
    hands_over(site, prompts)
    before, prompt = answered(site), prompts(ONE_STEP)
    with decode.fails(), decode.orders.hold(after=1):
        request = pool.submit(site.client().complete, prompt, TOKENS)
        decode.orders.wait_held()
        eventually(lambda: answered(site) > before, "Prefill has answered")
        faults.prefill.kill()
        decode.orders.release()
        assert request.result().tokens == site.reference.tokens(prompt)
    answers_itself(decode, site.reference, prompts)
    faults.restart_prefill()
    hands_over(site, prompts)


def test_prefill_killed_inside_a_prompt(
    faults: Faults, prompts: Prompts, pool: ThreadPoolExecutor, expected_errors: list[str]
) -> None:
    """Both policies at once, without the proxy; and a request that the proxy ends by itself."""
    expected_errors += PREFILL_DIES
    fail, recompute = faults.fail, faults.recompute
    lost, saved, behind = prompts.of((STEPS, STEPS, STEPS))
    with (
        metaserver() as posts,
        faults.prefill.client() as prefill,
        fail.decode.fails(),
        recompute.decode.fails(),
        fail.decode.orders.hold(),
    ):
        requests = []
        for site, prompt in ((fail, lost), (recompute, saved)):
            ask = site.decode.client.complete
            requests.append(pool.submit(ask, prompt, TOKENS, kv_transfer_params=posts.params))
            pool.submit(prefill.complete, prompt, 1, kv_transfer_params=posts.take())
        # The first step holds 256 tokens, of the first prompt; the next one waits.
        fail.decode.orders.wait_held()
        through_proxy = pool.submit(recompute.client().complete, behind, TOKENS)
        eventually(lambda: in_flight(recompute), "the other prompt is at Prefill")
        faults.prefill.kill()
        fail.decode.orders.release()
        with pytest.raises(RequestFailedError) as failed:
            requests[0].result()
        with pytest.raises(RequestFailedError) as refused:
            through_proxy.result()
        assert requests[1].result().tokens == recompute.reference.tokens(saved)
    assert (failed.value.status, refused.value.status) == (500, 502)
    for site in (fail, recompute):
        answers_itself(site.decode, site.reference, prompts)
    faults.restart_prefill()
    for site in (fail, recompute):
        hands_over(site, prompts)


def test_a_prompt_that_never_comes(
    faults: Faults, prompts: Prompts, pool: ThreadPoolExecutor, expected_errors: list[str]
) -> None:
    """Prefill has died before Decode ever heard of it: only a deadline can tell."""
    expected_errors += PREFILL_DIES
    fail, recompute = faults.fail, faults.recompute
    lost, saved = prompts.of((STEPS, STEPS))
    with metaserver() as posts, fail.decode.fails(), recompute.decode.fails():
        requests = [
            pool.submit(site.decode.client.complete, prompt, kv_transfer_params=posts.params)
            for site, prompt in ((fail, lost), (recompute, saved))
        ]
        posts.take()
        posts.take()
        with pytest.raises(RequestFailedError) as failed:
            requests[0].result()
        assert requests[1].result().tokens == recompute.reference.tokens(saved)
    assert failed.value.status == 500
    for site in (fail, recompute):
        hands_over(site, prompts)


def test_a_restarted_decode_is_handed_prompts_again(faults: Faults, prompts: Prompts) -> None:
    site = faults.fail
    hands_over(site, prompts)
    site.decode.server.restart()
    faults.until_ready()
    hands_over(site, prompts)
    hands_over(faults.recompute, prompts)


def test_a_killed_decode_takes_nobody_with_it(
    faults: Faults, prompts: Prompts, pool: ThreadPoolExecutor, expected_errors: list[str]
) -> None:
    dying, other = faults.fail, faults.recompute
    expected_errors.append(f"could not be handed over to {dying.decode.endpoint}: ")
    hands_over(dying, prompts)
    hands_over(other, prompts)
    prompt = prompts(STEPS)
    with dying.decode.orders.hold():
        doomed = pool.submit(dying.client().complete, prompts(STEPS), TOKENS)
        # Prefill is in the middle of that prompt, and waits.
        dying.decode.orders.wait_held()
        with other.decode.receives(prompt):
            request = pool.submit(other.client().complete, prompt, TOKENS)
            eventually(lambda: in_flight(other), "the other prompt is at Prefill")
            dying.decode.server.kill()
            assert request.result().tokens == other.reference.tokens(prompt)
        with pytest.raises((RequestFailedError, httpx.TransportError)):
            doomed.result()
    assert faults.prefill.alive
    hands_over(other, prompts)
    dying.decode.server.start()
    faults.until_ready()
    hands_over(dying, prompts)
    hands_over(other, prompts)
