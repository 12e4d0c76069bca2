"""A coordinator that answers what it is told to and keeps what it was asked, over real HTTP on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

#: A committed update, as the API answers it.
RECEIPT: dict[str, Any] = {
    "id": "u",
    "serial": 4,
    "kind": "update",
    "outcome": "committed",
    "reason": None,
    "failures": [],
    "version": "0-7",
    "live_version": "0-7",
    "rollback_to": "0-6",
    "manifest_digest": "",
    "observed": {},
    "proof": "digests",
    "install": "flip",
    "bytes_read": 10,
    "tensors": 2,
    "tensors_changed": 1,
    "warnings": [],
    "attempts": 1,
    "phases_ms": {},
    "pause": None,
    "update_ms": 5.0,
    "pause_share": None,
    "members": [],
    "started_at": 1.0,
    "ended_at": 2.0,
}


class FakeCoordinator:
    """`live` and `needed` are what `/v1/version` and `/v1/fleet` say; every POST is answered with `RECEIPT`."""

    def __init__(self) -> None:
        self.live: str | None = "0-6"
        self.needed: list[str] | None = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, path: str) -> dict[str, Any]:
        if path == "/v1/version":
            return {
                "version": self.live,
                "digest": "",
                "manifest_digest": "",
                "since": None,
                "rollback_to": None,
                "epoch": 1,
            }
        if path == "/v1/fleet":
            return {} if self.needed is None else {"sources_needed": self.needed}
        return RECEIPT

    @contextmanager
    def serving(self) -> Iterator[FakeCoordinator]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(owner.answer(self.path))

            def do_POST(self) -> None:
                owner.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.reply(owner.answer(self.path))

            def reply(self, document: dict[str, Any]) -> None:
                text = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
