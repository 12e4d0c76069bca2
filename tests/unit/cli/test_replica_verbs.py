"""`liveweights readmit` and `release` against a replica's face over a front whose ranks are played by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import uvicorn
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from engine_adapter.replica.admission import Gate
from engine_adapter.replica.app import ReplicaApp, add_operator_routes
from engine_adapter.replica.front import Front, Identity
from engine_adapter.testing.requests import HandEngine, HandWork
from updater.cli.main import app
from updater.cli.steps import Exit
from updater.core.errors import Failure
from updater.core.participant import FrontState
from updater.core.replica.state import AuditFailed, Held, started
from updater.protocol import problems
from updater.server import guard as http
from updater.server.security import ADMIN_ENV, Tokens

TOKEN = "a-token-of-at-least-sixteen-bytes"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@dataclass
class Replica:
    url: str
    front: Front
    work: HandWork


@contextmanager
def replica(tokens: Tokens | None = None) -> Iterator[Replica]:
    """Quarantined by an audit, served from a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        work, gate = HandWork(), Gate(HandEngine())
        front = Front(started("r0", "i", "0-3", "d3"), Identity("", "model", ()), work, gate)
        front.feed(AuditFailed(Held("0-3", "d3"), Failure("tensor_digest", "no", rank=1)))
        face = ReplicaApp("r0", gate)
        face.front = front
        web = FastAPI()
        add_operator_routes(web, face)
        http.install(web, tokens=tokens or Tokens(), inference_paths=frozenset(), body_limits={})
        server = uvicorn.Server(uvicorn.Config(web, log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            yield Replica(f"http://127.0.0.1:{listening.getsockname()[1]}", front, work)
        finally:
            server.should_exit = True
            thread.join(120)


def test_readmit_proves_and_joins() -> None:
    with replica() as one:
        done = run("readmit", one.url, "--json")
        assert done.exit_code == Exit.OK
        told = json.loads(done.stdout)
        assert (told["state"], told["live_version"], told["released"]) == ("joining", "0-3", None)
        assert one.work.calls == ["readmit 0-3"]
        assert run("readmit", one.url, "--json").exit_code == Exit.REFUSED


def test_what_a_readmission_finds_is_an_error() -> None:
    with replica() as one:
        one.work.fail["readmit 0-3"] = problems.error_of(
            424, {"failures": [{"code": "tensor_digest", "message": "no"}]}
        )
        done = run("readmit", one.url, "--json")
        assert done.exit_code == Exit.REFUSED
        assert one.front.state.state is FrontState.QUARANTINED


def test_release_is_refused_where_nothing_is_installed_and_needs_a_side() -> None:
    with replica() as one:
        assert run("release", one.url, "--to", "live").exit_code == Exit.REFUSED
        assert run("release", one.url).exit_code == Exit.USAGE
        assert run("release", one.url, "--to", "sideways").exit_code == Exit.USAGE
        assert one.work.calls == []


def test_operator_verbs_are_for_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    with replica(Tokens(admin=TOKEN)) as one:
        monkeypatch.delenv(ADMIN_ENV, raising=False)
        assert run("readmit", one.url).exit_code == Exit.UNAUTHORIZED
        assert one.work.calls == []
        monkeypatch.setenv(ADMIN_ENV, TOKEN)
        assert run("readmit", one.url).exit_code == Exit.OK


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert run("release", f"http://127.0.0.1:{port}", "--to", "live").exit_code == Exit.UNAVAILABLE
