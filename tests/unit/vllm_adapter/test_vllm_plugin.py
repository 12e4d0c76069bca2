"""The routes that the endpoint plugin adds to a vLLM server, under a guard of their own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine_adapter.replica.app import ReplicaApp
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.plugin import LiveweightsPlugin
from engine_adapter.vllm.settings import PREFIX, VllmSettings
from updater.server.security import Tokens, front_key

ADMIN, INFERENCE = "admin-token-1234", "inference-token-1234"
URL = f"http://127.0.0.1:8000{PREFIX}"


def plugin(tokens: Tokens) -> FastAPI:
    """Of a replica whose ranks still load."""

    async def abort(_request_id: str) -> None:
        pass

    app, made = FastAPI(), LiveweightsPlugin()
    made.attach_router(app)
    replica: Any = SimpleNamespace(settings=VllmSettings(replica="r", url=URL, tokens=tokens))
    replica.face = ReplicaApp("r", VllmGate(abort))
    made._replica = replica
    return app


def ask(app: FastAPI, path: str, token: str = "", **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            headers |= options.pop("headers", {})
            return await client.request(options.pop("method", "POST"), path, headers=headers, **options)

    return asyncio.run(run())


@pytest.mark.case("F42")
def test_a_front_in_vllm_has_a_guard_and_a_path_of_its_own() -> None:
    app = plugin(Tokens(ADMIN, INFERENCE))
    status, readmit = f"{PREFIX}/participant/v1/status", f"{PREFIX}/replica/v1/readmit"
    mine, other = front_key(ADMIN, "r", URL), front_key(ADMIN, "s", URL)
    # 503: it got past the guard, to a front that is not there yet.
    assert [ask(app, status, token, json={}).status_code for token in (mine, ADMIN, other, "")] == [503, 503, 401, 401]
    assert [ask(app, readmit, token, json={}).status_code for token in (mine, ADMIN, INFERENCE)] == [401, 503, 403]
    assert ask(app, "/v1/liveweights/participant/v1/status", ADMIN, json={}).status_code == 404


@pytest.mark.case("F42")
def test_why_it_is_not_ready_is_for_the_admin_scope() -> None:
    app = plugin(Tokens(ADMIN))
    texts = [
        ask(app, "/readyz", token, method="GET").json()["failures"][0]["message"] for token in ("", INFERENCE, ADMIN)
    ]
    assert [bool(text) for text in texts] == [False, False, True]


@pytest.mark.case("F41")
def test_pages_from_elsewhere_reach_no_route_of_ours() -> None:
    app = plugin(Tokens())
    release = f"{PREFIX}/replica/v1/release"
    plain = {"content-type": "text/plain"}
    assert ask(app, release, json={"to": "live"}).status_code == 503
    assert ask(app, release, content=b'{"to": "live"}', headers=plain).status_code == 415
    assert ask(app, release, json={"to": "live"}, headers={"origin": "http://evil.example"}).status_code == 403
    assert ask(app, f"{PREFIX}/version", method="GET", headers={"host": "evil.example:8000"}).status_code == 403
