"""A metaserver over real HTTP, with what a test needs to see and to hold up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.transfer.caches import PATIENCE, eventually

__all__ = ["Metaserver", "metaserver", "unused_url"]


class Metaserver:
    """What was posted, and what is answered.

    Attributes:
        bodies: The JSON objects, in the order in which they came.
        status: Of every answer.
        answering: Answers wait for it.
    """

    def __init__(self, port: int = 0) -> None:
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append(json.loads(body))
                outer.answering.wait(10 * PATIENCE)  # longer than any test waits
                try:
                    self.send_response(outer.status)
                    self.send_header("content-length", "2")
                    self.end_headers()
                    self.wfile.write(b"{}")
                except OSError:
                    pass  # who posted has gone

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: object, client_address: object) -> None:
                del request, client_address  # a connection that was cut

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/metaserver"

    @property
    def ids(self) -> list[object]:
        return [body["request_id"] for body in self.bodies]

    def wait_for(self, *ext_ids: str) -> None:
        """Wait until these were posted, and check that nothing else was."""
        eventually(lambda: len(self.bodies) >= len(ext_ids), f"{ext_ids} at the metaserver")
        assert sorted(map(str, self.ids)) == sorted(ext_ids)

    def close(self) -> None:
        self.answering.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)


@contextmanager
def metaserver(port: int = 0) -> Iterator[Metaserver]:
    server = Metaserver(port)
    try:
        yield server
    finally:
        server.close()


def unused_url() -> tuple[str, int]:
    """A URL on this host, and its port, on which nobody listens."""
    with metaserver() as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    return f"http://127.0.0.1:{port}/v1/metaserver", port
