"""Doubles of what a trainer meets: a coordinator over real HTTP on loopback, and a sender that keeps what it is given.

The coordinator answers what it is told to and keeps what it was asked. Both are for tests without a fleet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Lock, Thread
from typing import Any

import torch

from transports.buckets import Bucket, Plans, StreamPlan
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.protocol.events import event_text

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
    `answers`: what answers a POST whose path ends with the key, in place of the usual; it may return None for that.
    `bodies` and `paths`: what was asked. A pushed stream is in staging at once, for one replica of two ranks, until it
    is sealed, aborted, or a test lets it `end`.
    """

    def __init__(self) -> None:
        self.live: str | None = "0-6"
        self.needed: list[str] | None = []
        self.problem: tuple[int, dict[str, Any]] | None = None
        self.answers: dict[str, Callable[[], tuple[int, dict[str, Any]] | None]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.uploads: dict[str, str] = {}
        self.replicas: list[str] = []  # urls
        self.dtypes: dict[str, str] = {}  # that the fleet holds
        self.url = ""
        self.state: dict[str, Any] = {}
        self._changed = Condition()
        self._closed = False

    def begin(self, body: dict[str, Any]) -> None:
        source = body.get("source")
        seats = [{"replica": "r0", "incarnation": "i0", "first": 0, "ranks": 2}]
        self.state = {
            "id": body.get("id", "0-7"),  # the default that a coordinator finds
            "serial": 4,
            "kind": "update",
            "version": "0-7",
            "phase": "planning" if source is None else "staging",
            "attempt": 1,
            "lease_left_s": body.get("lease_s"),
            "phases_ms": {},
            "offer": None if source is None else {**source, "seats": seats},
            "receipt": None,
        }
        if source is None:
            self.end("committed")

    def end(
        self, outcome: str, code: str | None = None, *, causes: Sequence[Mapping[str, Any]] = (), **failure: Any
    ) -> None:
        """The update ends as `outcome`, with one failure if there is a `code`. `causes`: failures that come first."""
        with self._changed:
            failures = [*causes, *([{"code": code, "message": "", **failure}] if code else [])]
            reason = failures[0]["code"] if failures else None
            receipt = RECEIPT | {"id": self.state["id"], "outcome": outcome, "reason": reason, "failures": failures}
            if self.state["receipt"] is None:
                self.state |= {"phase": "ended", "offer": None, "receipt": receipt}
            self._changed.notify_all()

    def enter(self, phase: str) -> None:
        """The update goes on to `phase`."""
        with self._changed:
            self.state |= {"phase": phase, "phases_ms": {**self.state["phases_ms"], phase: 1.0}}
            self._changed.notify_all()

    def answer(self, method: str, path: str, query: str) -> tuple[int, dict[str, Any]]:
        """Status and document."""
        if method == "POST" and self.problem is not None:
            return self.problem
        if method == "POST":
            return self._posted(path, query)
        version = {"version": self.live, "digest": "", "manifest_digest": "", "since": None, "epoch": 1}
        fleet: dict[str, Any] = {"fleet": "f", "epoch": 1, "phase": "idle", "live_version": self.live, "update": None}
        fleet |= {"rollback_to": "0-5", "members": [{"url": url} for url in self.replicas]}
        fleet |= {} if self.needed is None else {"sources_needed": self.needed}
        known: dict[str, dict[str, Any]] = {
            "/v1/version": version | {"rollback_to": "0-5"},
            "/v1/fleet": fleet,
            "/v1/fleet/dtypes": {"fingerprint": "f" * 64, "dtypes": self.dtypes, "replicas": ["r0"]},
            "/v1/history": {"receipts": [RECEIPT]},
        }
        if self.state and path == f"/v1/updates/{self.state['id']}":
            return 200, self.state
        return (200, known[path]) if path in known else (404, {})

    def _posted(self, path: str, query: str) -> tuple[int, dict[str, Any]]:
        verb = path.rpartition("/")[2]
        if (answer := self.answers.get(verb, lambda: None)()) is not None:
            return answer
        if verb == "updates":
            self.begin(self.bodies[-1])
        elif self.state and self.state["receipt"] is not None and verb in ("renew", "seal", "commit", "abort"):
            return 409, {"code": "wrong_phase", "failures": [{"code": "wrong_phase", "message": "it ended"}]}
        elif verb == "seal" and self.bodies[0].get("policy", {}).get("commit") == "manual":
            self.enter("ready")
        elif verb in ("seal", "commit"):
            self.end("committed")
        elif verb == "abort":
            self.end("aborted", "client_abort", causes=self.bodies[-1].get("failures", []))
        return 200, RECEIPT if "wait=true" in query or path == "/v1/rollback" else self.state

    def told(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of the update, until it has ended."""
        seen: list[str] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.state["phase"] not in seen[-1:], 60)
                state = dict(self.state)
            seen.append(state["phase"])
            yield "phase", {**state, "receipt": None}
            if state["receipt"] is not None:
                yield "receipt", state["receipt"]
            if self._closed or state["receipt"] is not None:
                return

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
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            server.shutdown()
            thread.join()
            server.server_close()


class RecordingSender:
    """A `StreamSender` without receivers: it keeps every byte, and goes wrong where it is told to.

    `fail`: raised when the bucket of this number is sent. `block`: the bucket whose sending lasts until
    `abort` is called; `blocked` is set meanwhile. As with any sender, an abort with nothing under way voids the offer
    before it.
    """

    kind = "broadcast"
    address = "127.0.0.1:1"

    def __init__(self, fail: tuple[int, Aborted] | None = None, block: int | None = None) -> None:
        self.fail, self.block = fail, block
        self.session = "s0"
        self.offer: StreamOffer | None = None
        self.plan: StreamPlan | None = None
        self.buckets: list[Bucket] = []
        self.bytes: dict[str, bytearray] = {}  # tensor -> what was sent of it, row-major
        self.ends: list[bool] = []  # `normal` of every finish
        self.aborts: list[str] = []
        self.blocked, self._stop = Event(), Event()
        self.most_held = 0  # bytes of buffers that were out at once
        self.closed = False
        self._held: dict[int, torch.Tensor] = {}
        self._under_way = False
        self._lock = Lock()

    def open(self, offer: StreamOffer, plans: Plans, deadline_s: float) -> None:
        plan = plans if isinstance(plans, StreamPlan) else plans[0]
        with self._lock:
            if offer.session != self.session:
                raise Aborted(Failure("client_abort", "the session of this offer has been ended"))
            self.offer, self.plan, self._under_way = offer, plan, True
            self._stop.clear()

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        self._held[bucket.index] = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        self.most_held = max(self.most_held, sum(buffer.numel() for buffer in self._held.values()))
        return self._held[bucket.index]

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        if self.fail is not None and bucket.index == self.fail[0]:
            raise self.fail[1]
        if bucket.index == self.block:
            self.blocked.set()
            if not self._stop.wait(60):
                raise AssertionError("the sender was not stopped")
        if self._stop.is_set():
            raise Aborted(Failure("client_abort", self.aborts[-1]))
        buffer = self._held.pop(bucket.index).numpy().tobytes()
        for chunk in bucket.chunks:
            self.bytes.setdefault(chunk.name, bytearray()).extend(buffer[chunk.offset : chunk.offset + chunk.nbytes])
        self.buckets.append(bucket)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        self.ends.append(normal)
        self._held.clear()
        self._under_way = False
        if not normal:
            self.session = f"s{len(self.ends)}"

    def abort(self, reason: str) -> None:
        with self._lock:
            self.aborts.append(reason)
            if not self._under_way:
                self.session = f"{self.session}.{len(self.aborts)}"
            self._stop.set()

    def close(self) -> None:
        self.closed = True


def _handler(owner: FakeCoordinator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/events"):
                owner.paths.append(self.path)
                self.send_response(200)
                self.end_headers()
                for name, data in owner.told():
                    self.wfile.write(event_text(data, name).encode())
            else:
                self.respond()

        def do_PUT(self) -> None:
            owner.uploads[self.path] = self.rfile.read(int(self.headers["content-length"])).decode()
            self.reply(201, b"{}")

        def do_POST(self) -> None:
            length = int(self.headers["content-length"] or 0)
            owner.bodies.append(json.loads(self.rfile.read(length) or b"{}"))
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
