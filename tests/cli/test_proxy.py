"""The command as a user runs it: a process of its own."""

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import typer.testing

import rd2h
from rd2h.cli.main import COMMANDS, app, main
from rd2h.cli.proxy import proxy
from rd2h.proxy.config import ConfigError, Options, load
from rd2h.proxy.server import listen
from tests.proxy.vllm import Pair, engines
from tests.proxy.world import COMPLETION, story, until

RD2H = [sys.executable, "-m", "rd2h"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RD2H, *arguments], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {name: run(*name.split(), "--help").stdout for name in ("", "proxy")}


@pytest.mark.slow
def test_help(helps: dict[str, str]) -> None:
    assert "proxy" in helps[""]
    for field in msgspec.structs.fields(Options):
        flag = f"--{field.name.replace('_', '-')}"
        line = next(line for line in helps["proxy"].splitlines() if f" {flag} " in line)
        if field.name == "advertise":
            assert "[default: (derived)]" in line or "[default: derived]" in line, line
        elif field.default is not msgspec.NODEFAULT:
            default = f"{field.default:g}" if isinstance(field.default, float) else field.default
            assert f"{default}]" in line or f"({default})]" in line, line


def test_every_option_has_a_flag() -> None:
    flags = [name for name in inspect.signature(proxy).parameters if name != "config"]
    assert sorted(flags) == sorted(field.name for field in msgspec.structs.fields(Options))


@pytest.mark.slow
def test_help_needs_typer_alone() -> None:
    code = (
        "import sys, runpy; sys.argv = ['rd2h', '--help']\n"
        "try: runpy.run_module('rd2h', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "wanted = {'starlette', 'uvicorn', 'httpx', 'prometheus_client', 'yaml', 'msgspec',\n"
        "          'numpy', 'zmq', 'torch', 'vllm'}\n"
        "print(sorted(wanted & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow
def test_the_proxy_imports_no_torch_vllm_or_zmq() -> None:
    code = "import sys, rd2h.proxy.server; print({'torch', 'vllm', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_version_and_commands() -> None:
    runner = typer.testing.CliRunner()
    assert runner.invoke(app, ["--version"]).stdout == f"rd2h {rd2h.__version__}\n"
    assert proxy in COMMANDS
    assert runner.invoke(app, ["nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prefill engine: give --prefill URL"),
        (["--prefill", "http://p:1"], "no decode engine"),
        (["--prefill", "p", "--decode", "http://d"], "--prefill 'p': give a URL"),
        (
            ["--prefill", "http://p", "--decode", "http://d", "--advertise", "0.0.0.0"],
            "--advertise 0.0.0.0",
        ),
        (["--prefill", "http://p", "--decode", "http://10.1.2.3"], "cannot reach the metaserver"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: cannot be read"),
    ],
)
def test_what_is_refused_is_one_line(arguments: list[str], message: str) -> None:
    result = typer.testing.CliRunner().invoke(app, ["proxy", "--port", "0", *arguments])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("rd2h proxy: ")
    assert message in line


def test_a_port_that_is_taken() -> None:
    [taken] = listen("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with taken, pytest.raises(ConfigError, match=r"Address already in use: give --port another"):
        listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen on 192\\.0"):
        listen("192.0.2.1", 0)


def test_an_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Callable[[], None]:
        def fail() -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return fail

    monkeypatch.setattr(sys, "argv", ["rd2h", "proxy"])
    monkeypatch.setattr("rd2h.cli.main.app", missing("uvicorn"))
    with pytest.raises(SystemExit):
        main()
    assert "pip install 'rd2h[proxy]'" in capsys.readouterr().err
    monkeypatch.setattr("rd2h.cli.main.app", missing("rd2h.bug"))
    with pytest.raises(ModuleNotFoundError):
        main()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "localhost"])
def test_listening(host: str) -> None:
    sockets = listen(host, 0)
    try:
        assert len({opened.getsockname()[1] for opened in sockets}) == 1
        port = sockets[0].getsockname()[1]
        for opened in sockets:
            opened.listen()
        if host == "::":
            import socket

            # IPv4 clients are welcome too.
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    finally:
        for opened in sockets:
            opened.close()


# --------------------------------------------------------------------------- a running process


class Process:
    """``rd2h proxy`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    async def url(self) -> str:
        await until(lambda: any("listening on" in x for x in self.lines), "it listens", 60)
        line = next(x for x in self.lines if "listening on" in x)
        return line.partition("listening on ")[2]

    async def ended(self) -> int:
        status = await asyncio.wait_for(self.process.wait(), 60)
        await self._reading
        return status


@asynccontextmanager
async def running(pair: Pair, *more: str) -> AsyncIterator[Process]:
    flags = [word for p in pair.prefills for word in ("--prefill", p.url)]
    flags += [word for d in pair.decodes for word in ("--decode", d.url)]
    process = await asyncio.create_subprocess_exec(
        *RD2H, "proxy", "--port", "0", *flags, *more,
        stderr=asyncio.subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    running = Process(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()


@pytest.mark.slow
@story
async def test_it_serves_and_lets_requests_finish_after_sigterm() -> None:
    async with engines(1, 1) as pair, running(pair) as process:
        url = await process.url()
        [d] = pair.decodes
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            await ready(client)
            # Not even its rendezvous is in when the signal comes.
            d.gate.clear()
            request = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await until(lambda: d.active == 1, "D has it")
            process.process.send_signal(signal.SIGTERM)
            await until(lambda: any("1 in flight" in x for x in process.lines), "it drains")
            refused = await client.post("/v1/completions", json=COMPLETION)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"] == "1"
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            d.gate.set()
            response = await request
            assert response.status_code == 200
            assert len(response.json()["choices"]) == 3
        assert await process.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a limit", "a second signal"])
@story
async def test_a_request_that_does_not_finish_is_cancelled(how: str) -> None:
    limit = "0.2" if how == "a limit" else "60"
    async with engines(1, 1) as pair, running(pair, "--shutdown-timeout", limit) as process:
        url = await process.url()
        [d] = pair.decodes
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            await ready(client)
            d.gate.clear()
            request = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await until(lambda: d.active == 1, "D has it")
            process.process.send_signal(signal.SIGTERM)
            await until(lambda: any("1 in flight" in x for x in process.lines), "it drains")
            if how != "a limit":
                process.process.send_signal(signal.SIGTERM)
            response = await request
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
        assert await process.ended() == 0
        await until(lambda: d.active == 0, "D's request is cancelled")
        assert d.seen[0].aborted


@pytest.mark.slow
@story
async def test_a_file_and_every_address_of_the_machine(tmp_path: Path) -> None:
    async with engines(1, 1) as pair:
        path = tmp_path / "proxy.toml"
        path.write_text(
            f'prefill = ["{pair.prefills[0].url}"]\ndecode = ["{pair.decodes[0].url}"]\n'
            'host = "0.0.0.0"\n'
        )
        nothing = Pair(pair.fabric, [], [])
        async with running(nothing, "--config", str(path), "--log-level", "debug") as process:
            url = await process.url()
            port = url.rpartition(":")[2]
            base = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
                await ready(client)
                headers = {"authorization": "Bearer sk-secret"}
                r = await client.post("/v1/completions", json=COMPLETION, headers=headers)
                assert r.status_code == 200
            told = pair.decodes[0].seen[0].body["kv_transfer_params"]["metaserver"]
            assert told == f"http://127.0.0.1:{port}/v1/metaserver"
            process.process.send_signal(signal.SIGINT)
            assert await process.ended() == 0
            assert any(re.search(r"/v1/completions 200 in \d", line) for line in process.lines)
            assert not any("sk-secret" in line for line in process.lines)


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.02)


def test_options_of_a_file_are_those_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('prefill = ["http://p"]\ndecode = ["http://d"]\nhost = "[::1]"\n')
    assert load(path, {}).host == "::1"
