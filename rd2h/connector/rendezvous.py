"""Posting D's rendezvous to metaservers, in the background.

One thread of its own runs an event loop with one task for each request that is being posted.
`Metaservers` itself is used from the scheduler's thread only, and never waits.

A post that does not reach its metaserver is repeated, with growing pauses, until it is cancelled:
the request's end does that, and a request that hears nothing from Prefill ends by its idle
deadline. Any HTTP answer counts as delivered: old proxies answer 500 to the extra children of a
prompt list, which they have understood very well.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit

import httpx

from rd2h.texts import text_of
from rd2h.wire.rendezvous import Advertisement

__all__ = ["Metaservers", "check_url"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


def check_url(url: str) -> None:
    """Check that something can be posted to a URL, as far as its text tells.

    Raises:
        ValueError: Nothing can: another attempt would change nothing.
    """
    try:
        parsed = httpx.URL(url)
        host, port = parsed.host, urlsplit(url).port  # httpx takes any number
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"metaserver {url!r} is no URL: {text_of(error)}") from error
    if parsed.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(f"metaserver {url!r} is no http URL")


class Metaservers:
    """Posts rendezvous until they are delivered or not wanted any more.

    Args:
        timeout: Seconds in which a connection must be made and a rendezvous written.
        jitter: Gives a factor for each pause, so that many requests do not come back at once.
    """

    def __init__(
        self, timeout: float, jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.25)
    ) -> None:
        self._timeout = timeout
        self._jitter = jitter
        self._tasks: dict[str, asyncio.Task[None]] = {}  # owned by the loop's thread
        self._client: httpx.AsyncClient | None = None
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rd2h-rendezvous", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """How many rendezvous are not delivered yet; a moment's value."""
        return len(self._tasks)

    def post(self, url: str, advertisement: Advertisement) -> None:
        """Deliver a rendezvous; ``cancel`` with its `request_id` ends the attempt."""
        self._call(self._begin, url, advertisement)

    def cancel(self, ext_id: str) -> None:
        """The request has ended; unknown and delivered ones are ignored."""
        self._call(self._cancel, ext_id)

    def close(self, timeout: float = 5.0) -> None:
        """Give up what is not delivered and end the thread.

        Raises:
            TimeoutError: The thread did not end within ``timeout`` seconds.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"rd2h-rendezvous did not end within {timeout:g} s")

    # ------------------------------------------------------------------- in the loop's thread

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            # As many posts at a time as there are requests; environment proxies are for the
            # world outside, not for the engine's own metaserver. An answer may take as long as
            # the request: there are metaservers that answer when Prefill has, and a second post
            # would have it compute the prompt twice.
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(self._timeout, read=None),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            )
            self._loop.run_forever()
            self._loop.run_until_complete(self._end(self._client))
        finally:
            self._loop.close()

    async def _end(self, client: httpx.AsyncClient) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()

    def _begin(self, url: str, advertisement: Advertisement) -> None:
        self._cancel(advertisement.request_id)
        work: Coroutine[None, None, None] = self._deliver(url, advertisement)
        task = self._loop.create_task(work, name=advertisement.request_id)
        self._tasks[advertisement.request_id] = task
        task.add_done_callback(self._ended)

    def _cancel(self, ext_id: str) -> None:
        if (task := self._tasks.pop(ext_id, None)) is not None:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the rendezvous of request %s has failed: %s", task.get_name(), error)

    async def _deliver(self, url: str, advertisement: Advertisement) -> None:
        assert self._client is not None
        body, ext_id, pause = advertisement.to_json(), advertisement.request_id, _FIRST_PAUSE
        headers = {"content-type": "application/json"}
        while True:
            try:
                answer = await self._client.post(url, content=body, headers=headers)
            except httpx.TransportError as error:
                pause = min(pause * 2, _LONGEST_PAUSE)
                wait = pause * self._jitter()
                logger.warning(
                    "request %s: the metaserver %s was not reached (%s); again in %.1f s",
                    ext_id,
                    url,
                    text_of(error),
                    wait,
                )
                await asyncio.sleep(wait)
            else:
                if answer.is_error:
                    logger.warning(
                        "request %s: the metaserver %s answered %d: %s",
                        ext_id,
                        url,
                        answer.status_code,
                        answer.text[:200],
                    )
                return
