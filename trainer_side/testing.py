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
    """Answers like a coordinator on which every update commits.

    `live` and `needed` are what `/v1/version` and `/v1/fleet` say; `problem`, once set, is the answer to every POST.
    `bodies` and `paths`: what was asked.
    """

    def __init__(self) -> None:
        self.live: str | None = "0-6"
        self.needed: list[str] | None = []
        self.problem: tuple[int, dict[str, Any]] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""

    @property
    def begun(self) -> dict[str, Any]:
        """The state that a POST without `wait` is answered with."""
        return {
            "id": self.bodies[0]["id"],
            "serial": 4,
            "kind": "update",
            "version": "0-7",
            "phase": "planning",
            "attempt": 1,
            "lease_left_s": None,
            "phases_ms": {},
            "receipt": None,
        }

    def answer(self, method: str, path: str, query: str) -> tuple[int, dict[str, Any]]:
        """Status and document."""
        if method == "POST":
            return self.problem or (200, RECEIPT if "wait=true" in query else self.begun)
        version = {"version": self.live, "digest": "", "manifest_digest": "", "since": None, "epoch": 1}
        fleet = {"fleet": "f", "epoch": 1, "phase": "idle", "live_version": self.live, "update": None, "members": []}
        needed = {} if self.needed is None else {"sources_needed": self.needed}
        known: dict[str, dict[str, Any]] = {
            "/v1/version": version | {"rollback_to": "0-5"},
            "/v1/fleet": fleet | {"rollback_to": "0-5"} | needed,
            "/v1/history": {"receipts": [RECEIPT]},
        }
        return (200, known[path]) if path in known else (404, {})

    @contextmanager
    def serving(self) -> Iterator[FakeCoordinator]:
        """On a free port of loopback, in a thread of its own; `url` says where."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(owner: FakeCoordinator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/events"):
                owner.paths.append(self.path)
                self.reply(200, b'event: phase\ndata: {"phase": "staging"}\n\n')
            else:
                self.respond()

        def do_POST(self) -> None:
            owner.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.respond()

        def respond(self) -> None:
            path, _, query = self.path.partition("?")
            owner.paths.append(path)
            status, document = owner.answer(self.command, path, query)
            self.reply(status, json.dumps(document).encode())

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_args: Any) -> None:
            pass

    return Handler
