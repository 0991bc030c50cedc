"""Servers start, answer by the whole of their prompt, and leave nothing behind.

The tests of answers are the control of every other one here: they prove that a wrong cache would
show.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import httpx
import pytest

from serving.client import Client, RequestFailedError
from serving.launcher import Launcher, ServingError, group_members
from serving.servers import ProxyServer, VllmOptions, VllmServer, start_all, stop_all
from serving.shapes import LLAMA

pytestmark = pytest.mark.slow


def prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(LLAMA.vocabulary) for _ in range(length)]


@pytest.fixture
def client(single: VllmServer) -> Iterator[Client]:
    single.wait_ready()
    with single.client() as client:
        yield client


@pytest.mark.parametrize("length", [5, 50, 300, 900])
def test_an_answer_hangs_on_every_part_of_its_prompt(client: Client, length: int) -> None:
    asked = prompt(length, length)
    answers = {client.complete(asked, 24).tokens}
    # One token in a hundred; less than any block holds.
    width = max(1, length // 100)
    for start in (0, length // 3, length // 2, length - 1 - width, length - width):
        other = list(asked)
        other[start : start + width] = prompt(-1, width)
        answers.add(client.complete(other, 24).tokens)
    assert len(answers) == 6


def test_answers_are_no_stutter(client: Client) -> None:
    answers = [client.complete(prompt(seed, 64)).tokens for seed in range(8)]
    assert len(set(answers)) == 8
    assert all(len(answer) == 12 for answer in answers)
    different = [len(set(answer)) for answer in answers]
    assert min(different) >= 4
    assert sum(different) / len(different) >= 8


def test_company_does_not_change_an_answer(client: Client) -> None:
    prompts = [prompt(seed, 20 * seed) for seed in range(1, 17)]
    alone = [client.complete(one).tokens for one in prompts]
    assert [answer.tokens for answer in client.complete_all(prompts, at_once=16)] == alone
    assert [choice.tokens for choice in client.complete(prompts).choices] == alone


def test_a_stream_has_the_tokens_of_the_answer(client: Client) -> None:
    asked = prompt(3, 40)
    with client.stream(asked, 6, request_id="mine") as chunks:
        seen = list(chunks)
    assert sum((chunk.choice.tokens for chunk in seen), ()) == client.complete(asked, 6).tokens
    assert [chunk.choice.finish_reason for chunk in seen][-1] == "length"
    times = [chunk.seconds for chunk in seen]
    assert times == sorted(times)


def test_the_request_id_is_the_callers(client: Client) -> None:
    assert client.complete([1, 2], 1, request_id="mine").id == "cmpl-mine"


def test_a_refusal_is_an_error(client: Client) -> None:
    with pytest.raises(RequestFailedError, match="maximum context length") as refused:
        client.complete(prompt(1, 3000))
    assert refused.value.status == 400


def test_what_a_server_counts(client: Client) -> None:
    before = client.metrics()
    asked = prompt(before.computed_tokens, 300)
    client.complete(asked, 2)
    client.complete(asked, 2)
    after = client.metrics()
    assert after.cached_tokens - before.cached_tokens == 256
    assert after.computed_tokens - before.computed_tokens == 300 + 44
    assert after.finished["length"] - before.finished["length"] == 2
    assert after.used_blocks == 0


def test_stop_kill_and_start_again(launcher: Launcher, single: VllmServer, folder: Path) -> None:
    asked = prompt(4, 30)
    with VllmServer(launcher, VllmOptions(model=single.options.model), "again", folder) as server:
        with server.client() as client:
            answer = client.complete(asked).tokens
            first = server.pids
            assert len(first) >= 3
            assert server.stop()
            assert not server.alive
            assert not server.pids
            with pytest.raises(httpx.TransportError):
                client.complete(asked)
            server.start()
            assert client.complete(asked).tokens == answer
            second = server.pids
            assert not set(first) & set(second)
            server.kill()
            assert not server.pids
            server.restart()
            assert client.complete(asked).tokens == answer
        with pytest.raises(ServingError, match="runs already"):
            server.launch()
    assert not server.pids


def test_a_frozen_server_thaws(launcher: Launcher, single: VllmServer, folder: Path) -> None:
    with (
        VllmServer(launcher, VllmOptions(model=single.options.model), "frozen", folder) as server,
        Client(server.url, seconds=1) as impatient,
        server.client() as patient,
    ):
        server.freeze()
        with pytest.raises(httpx.ReadTimeout):
            impatient.complete([1, 2, 3])
        server.thaw()
        assert patient.complete([1, 2, 3]).tokens
        server.freeze()
        assert server.stop()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param(
            VllmOptions(model=Path("/no/such/model")), "/no/such/model", id="no checkpoint"
        ),
        pytest.param(["--no-such-option"], "no-such-option", id="no such option"),
        pytest.param(["--max-model-len=9999"], "max_model_len", id="impossible option"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    options: VllmOptions | Sequence[str],
    reason: str,
    launcher: Launcher,
    single: VllmServer,
    folder: Path,
) -> None:
    launcher.wait_ready(120)
    if not isinstance(options, VllmOptions):
        options = VllmOptions(model=single.options.model, arguments=options)
    server = VllmServer(launcher, options, f"broken{len(reason)}", folder)
    start = time.monotonic()
    with pytest.raises(ServingError, match=f"(?s)ended with status [12] .*{reason}"):
        server.start()
    # It takes a fraction; the rest is for a busy machine.
    assert time.monotonic() - start < 60
    assert not server.pids


def test_a_server_that_is_late_is_killed(
    launcher: Launcher, single: VllmServer, folder: Path
) -> None:
    server = VllmServer(launcher, VllmOptions(model=single.options.model), "late", folder)
    with pytest.raises(ServingError, match=r"late was not ready in 0\.1 s"):
        server.start(0.1)
    assert not server.pids


def test_one_that_fails_takes_the_others_with_it(
    launcher: Launcher, single: VllmServer, folder: Path
) -> None:
    servers = [
        VllmServer(launcher, VllmOptions(model=model), name, folder)
        for name, model in (("fine", single.options.model), ("lost", Path("/no/such/model")))
    ]
    with pytest.raises(ServingError, match="lost ended"):
        start_all(servers)
    assert not [server.pids for server in servers if server.pids]


def test_a_proxy_waits_for_its_engines(
    launcher: Launcher, single: VllmServer, folder: Path
) -> None:
    single.wait_ready()
    proxy = ProxyServer(launcher, [single.url], [single.url], folder, name="a-proxy")
    start_all([proxy])
    with proxy.client() as client:
        assert client.metrics().value("rd2h_proxy_ready") == 1
    stop_all([proxy])
    assert not proxy.pids


OWNER = """
import sys, time
from pathlib import Path
from serving.launcher import Launcher
folder = Path(sys.argv[1])
launcher = Launcher(folder / "orphans-nursery.log")
server = launcher.launch("http.server", ["--bind=127.0.0.1", "0"], folder / "orphan.log")
print(server.pid, flush=True)
time.sleep(600)
"""


def test_no_server_outlives_its_owner(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        assert group_members(server)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while group_members(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
