"""The proxy's part, for tests that take each step themselves: an HTTP server that D posts to."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from rd2h.wire.rendezvous import Advertisement, DecodeParams
from tests.serving.waiting import PATIENCE

__all__ = ["Metaserver", "metaserver"]


class Metaserver:
    """What Decode has posted.

    Attributes:
        url: Where it posts.
    """

    def __init__(self, url: str, posts: queue.Queue[Advertisement]) -> None:
        self.url = url
        self._posts = posts

    @property
    def params(self) -> dict[str, object]:
        """`kv_transfer_params` of a request that waits for its prompt."""
        return dict(DecodeParams(do_remote_prefill=True, metaserver=self.url).to_params())

    def take(self) -> dict[str, object]:
        """`kv_transfer_params` for Prefill, once Decode has posted."""
        return dict(self._posts.get(timeout=PATIENCE).to_params())


@contextmanager
def metaserver() -> Iterator[Metaserver]:
    """A metaserver that does nothing but collect."""
    posts: queue.Queue[Advertisement] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.put(Advertisement.from_json(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, name="metaserver")
        thread.start()
        try:
            yield Metaserver(f"http://127.0.0.1:{server.server_port}/v1/metaserver", posts)
        finally:
            server.shutdown()
            thread.join()
