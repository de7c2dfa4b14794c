"""A small stand-in for the API, for what the real one does not do on request: odd answers, cut streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

JOB = {"id": "job_1", "type": "ask", "state": "queued", "model": "m", "attempt": 1}


class Request(BaseHTTPRequestHandler):
    answer: ClassVar[Callable[[Any], None]]

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()

    def reply(self, status: int, body: Any, content_type: str = "application/json", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: str) -> None:
        self.reply(200, body, "text/event-stream")

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def fake_api(answer: Callable[[Request], None]) -> Iterator[str]:
    """The URL of a server that answers every request with `answer`."""
    handler = type("Handler", (Request,), {"answer": answer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sse(seq: int, type: str, data: dict[str, Any] | None = None) -> str:
    return f"id: {seq}\nevent: {type}\ndata: {json.dumps(data or {})}\n\n"
