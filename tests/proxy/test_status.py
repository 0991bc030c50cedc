"""`/status` as JSON and as a page, and `/metrics`; the page in a real browser."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rd2h.proxy.errors import ErrorKind
from rd2h.proxy.page import page
from rd2h.proxy.status import EngineStatus, RequestStatus, Status
from tests.proxy.world import World, story, until, world

DOCS = Path(__file__).parents[2] / "docs" / "proxy.md"


@asynccontextmanager
async def busy() -> AsyncIterator[World]:
    """One request that waits for its rendezvous, one that P works on, one engine that is out."""
    async with world(prefills=2, decodes=1) as w:
        await w.pair.prefills[1].stop()
        w.services.failed(w.services.prefill.engines[1], "ConnectError: <refused>", down=True)
        w.p.gate.clear()
        tasks = [asyncio.create_task(w.completion(prompt=[1] * 7))]
        await until(lambda: w.p.active == 1, "P works")
        w.d.posts = 0
        headers = {"x-request-id": "job-9"}
        body = {"model": "m", "messages": [], "n": 2}
        tasks.append(
            asyncio.create_task(w.client.post("/v1/chat/completions", json=body, headers=headers))
        )
        await until(lambda: w.d.active == 2, "D works on both")
        try:
            yield w
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@story
async def test_json() -> None:
    async with busy() as w:
        by_query = await w.client.get("/status?format=json")
        by_accept = await w.client.get("/status", headers={"accept": "application/json"})
        assert by_query.headers["content-type"] == "application/json"
        status = by_accept.json()
        assert status.keys() == by_query.json().keys()
        p1, p2, d = status["engines"]
        assert (p1["role"], p1["up"], p1["load"], p1["requests"]) == ("prefill", True, 7, 1)
        assert (p2["up"], p2["last_error"] != "") == (False, True)
        assert (d["role"], d["load"], d["requests"]) == ("decode", 3, 2)
        assert d["metaserver"].endswith("/v1/metaserver")
        assert status["requests_in_flight"] == 2
        assert status["rendezvous_waiting"] == 2
        first, second = status["requests"]
        assert (first["stage"], first["rendezvous"]) == ("prefill", 1)
        assert first["prefill"] == [w.p.url]
        assert second["id"].startswith("job-9-")
        assert second["stage"] == "waiting for the rendezvous"
        assert (second["rendezvous"], second["rendezvous_expected"]) == (0, 2)
        assert status["ready"] is True


@pytest.mark.slow
@story
async def test_metrics() -> None:
    async with busy() as w:
        response = await w.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = response.text.splitlines()
        assert "rd2h_proxy_requests_in_flight 2.0" in lines
        assert "rd2h_proxy_rendezvous_waiting 2.0" in lines
        assert f'rd2h_proxy_engine_load{{engine="{w.p.url}",role="prefill"}} 7.0' in lines
        w.p.gate.set()
        await until(lambda: len(w.services.in_flight) == 1, "the first one is served")
        text = (await w.client.get("/metrics")).text
        for line in (
            'rd2h_proxy_requests_total{endpoint="/v1/completions",status="200"} 1.0',
            'rd2h_proxy_dispatches_total{kind="whole"} 1.0',
            'rd2h_proxy_rendezvous_total{result="accepted"} 1.0',
            'rd2h_proxy_request_seconds_count{endpoint="/v1/completions"} 1.0',
            'rd2h_proxy_first_byte_seconds_count{endpoint="/v1/completions"} 1.0',
            "rd2h_proxy_rendezvous_seconds_count 1.0",
            "rd2h_proxy_prefill_seconds_count 1.0",
        ):
            assert line in text.splitlines(), line
        documented = DOCS.read_text()
        names = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
        assert len(names) > 12
        for name in names:
            if not name.endswith("_created"):
                assert f"`{name}`" in documented, name


def test_every_error_is_documented() -> None:
    documented = DOCS.read_text()
    for kind in ErrorKind:
        assert f"| `{kind.code}` | {kind.status} |" in documented, kind


def test_the_page_escapes_everything() -> None:
    evil = '<img src=x onerror="alert(1)">'
    engine = EngineStatus(
        role="decode", url=evil, up=False, load=1, requests=1, failures=1, last_error=evil,
        next_probe_seconds=3.0, metaserver=evil,
    )  # fmt: skip
    request = RequestStatus(
        id=evil, endpoint=evil, stage=evil, age_seconds=61, decode=evil, prefill=[evil],
        rendezvous=0, rendezvous_expected=1,
    )  # fmt: skip
    status = Status(
        version=evil, uptime_seconds=4000, ready=False, draining=True, engines=[engine],
        requests_in_flight=3, rendezvous_waiting=1, rendezvous_registered=1, requests=[request],
    )  # fmt: skip
    html = page(status)
    assert "<img" not in html
    assert "and 2 more" in html
    assert "1 min 1 s" in html
    assert "1 h 6 min" in html
    assert "shutting down" in html


class Browser:
    """Headless Chromium through its driver; a missing one is a failure, not a skip."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        assert chromium, "Chromium is not installed: apt-get install chromium"
        assert driver, "its driver is not installed: apt-get install chromium-driver"
        options = Options()
        options.binary_location = chromium
        for argument in (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--window-size=1280,900", f"--user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = webdriver.Chrome(options=options, service=Service(driver))

    def text(self, selector: str) -> str:
        text: str = self.driver.find_element("css selector", selector).text
        return text

    def rows(self, table: str) -> list[list[str]]:
        script = """return [...document.querySelectorAll(arguments[0] + " tbody tr")]
            .map(row => [...row.cells].map(cell => cell.innerText.trim()))"""
        rows: list[list[str]] = self.driver.execute_script(script, table)
        return rows

    def wait(self, script: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30).until(lambda d: d.execute_script(f"return {script}"))


def look(w: World, profile: Path, finish: threading.Event) -> None:
    """What somebody sees who opens the page; runs in a thread beside the event loop."""
    browser = Browser(profile)
    try:
        browser.driver.get(f"http://127.0.0.1:{w.proxy.port}/status")
        assert browser.driver.title == "rd2h proxy"
        assert browser.text("#state") == "ready"
        engines = browser.rows("#engines")
        assert [row[0] for row in engines] == ["prefill", "prefill", "decode"]
        assert [row[1] for row in engines] == [e.url for e in w.pair.engines]
        assert engines[0][2:5] == ["in", "7 tokens", "1"]
        assert engines[1][2].startswith("out, probed in")
        assert engines[2][3] == "3 sequences"
        first, second = browser.rows("#requests")
        assert first[2] == "prefill"
        assert second[0].startswith("job-9-")
        assert second[1:3] == ["/v1/chat/completions", "waiting for the rendezvous"]
        assert second[4] == "0 of 2"
        assert browser.text("#in-flight") == "2"
        assert browser.text("#waiting") == "2"
        # Nothing sticks out of the window, and the style is applied (its hash is right).
        assert browser.driver.execute_script(
            "return document.documentElement.scrollWidth <= window.innerWidth"
        )
        assert (
            browser.driver.execute_script(
                "return getComputedStyle(document.querySelector('table')).borderCollapse"
            )
            == "collapse"
        )
        # It refreshes itself without a reload.
        browser.driver.execute_script("window.same = true")
        finish.set()
        browser.wait("document.querySelectorAll('#requests tbody tr').length === 1")
        assert browser.text("#in-flight") == "1"
        assert browser.driver.execute_script("return window.same")
        problems = [e for e in browser.driver.get_log("browser") if "favicon" not in e["message"]]
        assert problems == []
        # And loads nothing from anywhere else.
        requested = {
            message["params"]["request"]["url"]
            for entry in browser.driver.get_log("performance")
            if (message := json.loads(entry["message"])["message"])["method"]
            == "Network.requestWillBeSent"
        }
        ours = f"http://127.0.0.1:{w.proxy.port}/"
        assert requested
        assert all(url.startswith((ours, "data:", "chrome:")) for url in requested), requested
    finally:
        browser.driver.quit()


@pytest.mark.slow
@story
async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    async with busy() as w:
        finish = threading.Event()
        looking = asyncio.create_task(asyncio.to_thread(look, w, tmp_path / "profile", finish))
        await until(lambda: finish.is_set() or looking.done(), "the page was read", 90)
        w.p.gate.set()
        await looking


def test_chromium_is_here() -> None:
    """So that a machine without it fails here with a plain word."""
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed: apt-get install chromium chromium-driver"
    version = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True)
    assert "Chromium" in version.stdout


@pytest.mark.slow
@story
async def test_stages() -> None:
    async with world(batch_wait=600.0) as w:
        [w.d.permits, w.d.capacity] = [asyncio.Semaphore(0), 1]
        several = asyncio.create_task(w.completion(prompt=["a", "b"]))
        await until(lambda: w.d.posted != [], "one of two is posted")
        # It waits for the other one, and is seen.
        [request] = (await w.client.get("/status?format=json")).json()["requests"]
        assert (request["rendezvous"], request["rendezvous_expected"]) == (1, 2)
        several.cancel()
        await asyncio.gather(several, return_exceptions=True)
        await w.idle()
        one = asyncio.create_task(w.completion())
        await until(lambda: w.p.seen != [] and w.p.seen[-1].finished, "P is done")
        await until(lambda: [e.stage for e in w.services.in_flight] == ["decode"], "D decodes")
        for _ in range(3):
            w.d.permits.release()
        assert (await one).status_code == 200
        await w.idle()
    # A part that is sent while D answers earlier ones does not hide that it answers.
    async with world(batch_wait=0.01) as w:
        [w.d.permits, w.d.capacity] = [asyncio.Semaphore(1), 1]
        several = asyncio.create_task(w.completion(prompt=["a", "b"], stream=True))
        await until(lambda: [e.stage for e in w.services.in_flight] == ["answering"], "D answers")
        for _ in range(2):
            w.d.permits.release()
        await until(lambda: len(w.p.seen) == 2 and w.p.seen[1].finished, "the other part is sent")
        await until(lambda: w.services.prefill.engines[0].requests == 0, "P is done")
        assert [e.stage for e in w.services.in_flight] == ["answering"]
        for _ in range(3):
            w.d.permits.release()
        assert (await several).status_code == 200
        await w.idle()
