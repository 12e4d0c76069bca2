"""Settings, the listening socket, and the parts of the service that no scenario reaches."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from updater.coordinator.updates import PhaseTimer
from updater.core.fleet.state import Phase
from updater.core.policy import Policy
from updater.core.version import Version
from updater.protocol.api import PolicyBody, UpdateRequest
from updater.server.connections import listen
from updater.server.metrics import Metrics
from updater.server.routes import create_app
from updater.settings import Settings
from updater.testing.service import LocalService

ROUTES = {
    "POST /v1/updates",
    "GET /v1/updates/{update_id}",
    "GET /v1/updates/{update_id}/events",
    "POST /v1/updates/{update_id}/renew",
    "POST /v1/updates/{update_id}/seal",
    "POST /v1/updates/{update_id}/commit",
    "POST /v1/updates/{update_id}/abort",
    "POST /v1/rollback",
    "PUT /v1/manifests/{digest}",
    "GET /v1/manifests/{digest}",
    "GET /v1/version",
    "GET /v1/fleet",
    "GET /v1/fleet/dtypes",
    "GET /v1/fleet/model",
    "GET /v1/history",
    "POST /v1/fleet/replicas",
    "GET /v1/fleet/replicas/{replica}",
    "POST /v1/fleet/replicas/{replica}/claim",
    "DELETE /v1/fleet/replicas/{replica}",
    "POST /v1/fleet/adopt",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
}


def test_the_routes_are_those_of_the_protocol(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path) as service:
            app = create_app(service.coordinator)
            found = {
                f"{method} {route.path}"
                for route in app.routes
                if isinstance(route, APIRoute)
                for method in route.methods
            }
            assert found == ROUTES
            described = (await service.get("/openapi.json")).json()["paths"]
            assert {f"{method.upper()} {path}" for path, methods in described.items() for method in methods} == ROUTES

    asyncio.run(main())


def test_the_socket_says_that_it_is_tcp(tmp_path: Path) -> None:
    """Otherwise asyncio leaves Nagle on, and every answer takes 40 ms."""
    settings = Settings(state=tmp_path)
    listener = listen(settings.host, 0)
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
        with pytest.raises(OSError):
            listen(settings.host, listener.getsockname()[1])


def test_roots_are_resolved_and_default_to_the_state_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert Settings(state=tmp_path / "link").allowed_roots == (tmp_path / "real" / "checkpoints",)
    assert Settings(state=tmp_path, roots=(tmp_path / "link",)).allowed_roots == (tmp_path / "real",)


def test_the_defaults_of_the_api_are_those_of_the_core() -> None:
    body = PolicyBody().model_dump()
    core = {name: getattr(Policy(), name) for name in Policy.__slots__}
    core |= {name: list(core[name]) for name in ("allow_narrowing", "allow_suspicious", "allow_config")}
    core["layouts"] = dict(core["layouts"])
    assert body == core


def test_a_request_needs_exactly_one_source() -> None:
    assert UpdateRequest.model_validate({"version": 7, "path": "/x"}).disk_path == "/x"
    assert UpdateRequest.model_validate({"version": 7, "source": {"path": "/y"}}).disk_path == "/y"
    for body in ({"version": 7}, {"version": 7, "path": "/x", "source": {"path": "/x"}}):
        with pytest.raises(ValueError):
            UpdateRequest.model_validate(body)


def test_a_timeline_adds_up_what_comes_again() -> None:
    line = PhaseTimer(0.0)
    for phase, now in ((Phase.PAUSING, 1.0), (Phase.REOPENING, 3.0), (Phase.READY, 4.0), (Phase.PAUSING, 6.0)):
        line.enter(phase, now)
    line.enter(Phase.DECIDING, 7.0)
    assert line.phases_ms(7.5) == {"pausing": 3000, "reopening": 1000, "ready": 2000, "deciding": 500}
    line.leave(8.0)
    pause = line.pause()
    assert pause is not None
    assert (pause.quiesce_ms, pause.decide_ms, pause.restore_ms) == (3000, 1000, 1000)
    assert (pause.pause_ms, pause.closed_ms) == (2000, 5000)
    assert PhaseTimer(0.0).pause() is None


def test_gauges_follow_what_is_live() -> None:
    metrics = Metrics()
    first = metrics.render(Version(0, 57), ["open", "open", "lost"]).decode().splitlines()
    assert 'liveweights_members{state="open"} 2.0' in first
    second = metrics.render(Version(1, 1), ["open"]).decode()
    assert 'liveweights_live_version{run="1"} 1.0' in second
    assert 'run="0"' not in second
    assert 'state="lost"' not in second
