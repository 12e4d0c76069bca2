"""The HTTP side of a real coordinator, with simulated fronts: sessions, tokens, odd messages, versions."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from updater.core.errors import Failure
from updater.server.connections import listen
from updater.server.routes import create_app
from updater.server.security import ConfigurationError, Tokens
from updater.settings import Settings
from updater.testing.fronts import digest_of, settle
from updater.testing.service import LocalService

ADMIN, INFERENCE = "admin-token-0123", "inference-token-0123"
Scenario = Callable[[LocalService], Awaitable[None]]


def run(folder: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with LocalService(folder, **settings) as service:
            await scenario(service)

    asyncio.run(asyncio.wait_for(main(), 120))


def routes(service: LocalService) -> list[tuple[str, str]]:
    """Every (method, path) of the app, placeholders filled in."""
    app = create_app(service.coordinator)
    found = []
    for route in app.routes:
        if isinstance(route, APIRoute):
            path = route.path.format(update_id="0-7", digest="0" * 64, replica="one")
            found += [(method, path) for method in sorted(route.methods)]
    return found


@pytest.mark.case("B144")
def test_both_callers_are_answered_and_one_proceeds(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        paths = [service.checkpoint(f"v{step}") for step in (8, 9)]
        bodies = [{"path": path, "version": step} for path, step in zip(paths, (8, 9), strict=True)]
        answers = await asyncio.gather(*(service.post("/v1/updates?wait=true", body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        refused = next(answer for answer in answers if answer.status_code == 409).json()
        winner = next(answer for answer in answers if answer.status_code == 200).json()
        assert refused["code"] == "busy"
        assert refused["active"] == winner["id"]
        # The same while the first one is shut.
        front.hold["pause"] = asyncio.Event()
        first = asyncio.create_task(service.push(10))
        await settle()
        second = await service.push(11)
        assert (second.status_code, second.json()["active"]) == (409, "0-10")
        front.hold["pause"].set()
        assert (await first).status_code == 200

    run(tmp_path, scenario)


@pytest.mark.case("B146")
def test_the_same_key_is_the_same_session(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        body = {"path": service.checkpoint("v7"), "version": 7}
        first = await service.post("/v1/updates", {**body, "id": "a"})
        second = await service.post("/v1/updates", {**body, "id": "a"})
        other = await service.post("/v1/updates", {**body, "id": "b"})
        assert (first.status_code, second.status_code) == (202, 202)
        assert first.json()["serial"] == second.json()["serial"]
        assert (other.status_code, other.json()["code"]) == (409, "busy")
        front.hold["stage"].set()
        await settle()
        assert front.asked("stage") == 1

    run(tmp_path, scenario)


@pytest.mark.case("B147")
def test_after_a_failure_the_next_update_starts(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        for verb in ("plan", "stage", "verify", "pause"):
            front.fail[verb] = deque([Failure("rank_failed", "in the middle")])
            assert (await service.push(7)).status_code == 424
        await service.begin(7, policy={"commit": "manual"})
        assert (await service.post("/v1/updates/0-7.5/abort")).status_code == 202
        await settle()
        assert (await service.push(7)).status_code == 200

    run(tmp_path, scenario)


class _Marker:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.case("B151")
@pytest.mark.parametrize("encoding", ["raw", "base64"])
def test_nothing_is_unpickled(tmp_path: Path, encoding: str) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(_Marker(marker))
    text = base64.b64encode(bomb).decode()
    payload = bomb if encoding == "raw" else text.encode()

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        body = {"path": service.checkpoint("v7"), "version": 7}
        for method, path in routes(service):
            for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
                answer = await service.http.request(method, path, content=payload, headers={"content-type": kind})
                reads_no_body = method in ("GET", "DELETE") or path.endswith(("/seal", "/renew", "/commit", "/abort"))
                assert 400 <= answer.status_code < 500 or reads_no_body
        fields = ("path", "version", "source", "id", "manifest", "policy", "base_version", "adapter", "lease_s")
        for field in fields:
            answer = await service.post("/v1/updates", {**body, field: text})
            assert 400 <= answer.status_code < 500, field
        nested = {"manifest": {"tensors": text}}, {"source": {"kind": text}, "path": None}, {"policy": {"cache": text}}
        for change in nested:
            assert 400 <= (await service.post("/v1/updates", {**body, **change})).status_code < 500
        assert not marker.exists()
        pickle.loads(bomb)  # the payload is real
        assert marker.exists()

    run(tmp_path, scenario)


@pytest.mark.case("B153")
def test_loopback_by_default_and_no_public_bind_without_a_token(tmp_path: Path) -> None:
    listener = listen(Settings(state=tmp_path).host, 0)
    try:
        assert listener.getsockname()[0] == "127.0.0.1"
    finally:
        listener.close()
    for host in ("0.0.0.0", "::", socket.gethostname() + ".example"):
        with pytest.raises(ConfigurationError):
            Settings(state=tmp_path, host=host)
        Settings(state=tmp_path, host=host, tokens=Tokens(ADMIN))

    async def scenario(service: LocalService) -> None:
        service.http.headers.pop("authorization")
        assert (await service.post("/v1/updates", {"path": "/x", "version": 7})).status_code == 401

    run(tmp_path, scenario, tokens=Tokens(ADMIN))


@pytest.mark.case("B155")
def test_tokens_are_in_no_answer_and_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(7)
        seen = []
        for method, path in [*routes(service), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing")]:
            for token in (ADMIN, INFERENCE, "wrong-token-0123"):
                answer = await service.http.request(
                    method, path, content=b"{", headers={"authorization": f"Bearer {token}"}
                )
                seen.append(answer.text + json.dumps(dict(answer.headers)))
        assert len(seen) > 50
        for token in (ADMIN, INFERENCE, "wrong-token-0123"):
            assert not [text for text in seen if token in text]
            assert token not in caplog.text
        assert ADMIN not in repr(service.settings)

    run(tmp_path, scenario, tokens=Tokens(ADMIN, INFERENCE))


@pytest.mark.case("B156")
def test_every_path_but_the_health_paths_needs_a_token(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        service.http.headers.pop("authorization")
        tried = 0
        for _, path in [*routes(service), ("GET", "/participant/v1/pause")]:
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                for spelled in (path, f"/{path}", f"{path}/", path.upper(), f"{path}%2f", f"/v1/..{path}", f"{path}/."):
                    url = httpx.URL(f"http://x{spelled}")
                    if url.path in ("/healthz", "/readyz"):  # the client has resolved the dots itself
                        continue
                    answer = await service.http.request(method, url)
                    assert answer.status_code in (401, 404, 405), (method, spelled)
                    tried += 1
        assert tried > 500
        assert (await service.get("/healthz")).status_code == 200
        assert (await service.get("/readyz")).status_code == 200

    run(tmp_path, scenario, tokens=Tokens(ADMIN))


@pytest.mark.case("B157")
def test_admission_is_open_again_after_every_outcome(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        step = 0
        for verb in ("plan", "stage", "verify", "pause", "install", "invalidate"):
            step += 1
            two.fail[verb] = deque([Failure("rank_failed", "as planned")])
            await service.push(step)
            assert one.serving is not None
            assert one.serving == two.serving == await service.live()
        await service.begin(step + 1, policy={"commit": "manual"})
        await service.advance(61)
        assert one.serving == two.serving == await service.live()
        assert (await service.push(step + 2)).status_code == 200
        assert one.serving == two.serving == f"0-{step + 2}"

    run(tmp_path, scenario)


@pytest.mark.case("B159")
@pytest.mark.parametrize(
    "body",
    [
        b'{"path": "/x", "version": 7, "source": {"kind": "carrier-pigeon"}}',
        b'{"path": 7, "version": 7}',
        b'{"path": "/x", "version": [7]}',
        b'{"path": "/x", "version": {"run": {}, "step": []}}',
        b'{"path": "/x", "version": NaN}',
        b'{"path": "/x", "version": 1e999}',
        b'{"path": "/x", "version": 7, "policy": []}',
        b'{"path": "\\ud800", "version": 7}',
        b"[" * (3 << 20),
        b'{"manifest":' * 100_000,
        b"null",
        b"",
        b"\x00\xff",
    ],
    ids=range(13),
)
def test_odd_messages_are_refused_and_the_service_goes_on(tmp_path: Path, body: bytes) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        for path in ("/v1/updates", "/v1/rollback", "/v1/fleet/replicas", "/v1/fleet/adopt"):
            answer = await service.http.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, (path, answer.text)
            assert answer.json()["code"] != "internal"
        for path in ("/v1/updates/0-7/explode", "/v1/unknown"):
            assert (await service.post(path, {})).status_code == 404
        huge = await service.http.post("/v1/updates", content=b"[" * (10 << 20))
        assert huge.status_code == 413
        assert (await service.push(7)).status_code == 200
        assert front.serving == "0-7"

    run(tmp_path, scenario)


@pytest.mark.case("B161")
def test_the_decision_comes_after_the_acknowledgement_of_every_engine(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.hold["pause"] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await service.advance(0.5)
        assert (one.asked("install"), two.asked("install")) == (0, 0)
        assert (await service.get("/v1/fleet")).json()["phase"] == "pausing"
        two.hold["pause"].set()
        assert (await pushed).status_code == 200
        for front in (one, two):
            verbs = [verb for verb, _ in front.calls if verb in ("pause", "install", "invalidate", "resume")]
            assert verbs == ["pause", "install", "invalidate", "resume"]

    run(tmp_path, scenario)


@pytest.mark.case("B163")
def test_three_replicas_and_the_third_refuses_at_commit(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        fronts = await service.join("one", "two", "three")
        await service.push(7)
        fronts[2].fail["install"] = deque([Failure("rank_failed", "as planned")])
        receipt = (await service.push(8)).json()["receipt"]
        assert receipt["outcome"] == "rolled_back"
        assert {member["replica"]: member["live_version"] for member in receipt["members"]} == dict.fromkeys(
            ("one", "two", "three"), "0-7"
        )
        assert {front.serving for front in fronts} == {"0-7"}
        assert {front.state.live.digest for front in fronts} == {digest_of("v7")}

    run(tmp_path, scenario)


@pytest.mark.case("B164")
def test_every_replica_gets_the_version(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        fronts = await service.join("one", "two")
        await service.push(8)
        assert {(front.state.live.version, front.state.live.digest) for front in fronts} == {("0-8", digest_of("v8"))}
        members = (await service.get("/v1/fleet")).json()["members"]
        assert {(member["live_version"], member["live_digest"]) for member in members} == {("0-8", digest_of("v8"))}

    run(tmp_path, scenario)


@pytest.mark.case("B169")
def test_a_label_is_not_published_without_its_bytes(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        front.fail["stage"] = deque([Failure("read_failed", "a later chunk")])
        await service.begin(8, policy={"commit": "manual"})
        for finish in ("seal", "commit"):
            answer = await service.post(f"/v1/updates/0-8/{finish}")
            assert (answer.status_code, answer.json()["code"]) == (409, "wrong_phase")
        assert (await service.live(), front.serving) == ("0-7", "0-7")

    run(tmp_path, scenario)


@pytest.mark.case("B172")
def test_the_counter_of_a_new_trainer_does_not_go_back(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(57)
        refused = await service.push(1)
        assert (refused.status_code, refused.json()["code"]) == (412, "stale_version")
        assert refused.json()["live_version"] == "0-57"
        opened = await service.push(1, policy={"new_run": True})
        assert opened.json()["version"] == "1-1"
        receipts = (await service.get("/v1/history")).json()["receipts"]
        assert [receipt["version"] for receipt in receipts] == ["1-1", "0-57"]

    run(tmp_path, scenario)


@pytest.mark.case("B177")
def test_the_same_path_with_other_bytes_is_another_version(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        path = service.checkpoint("latest", "first")
        await service.post("/v1/updates?wait=true", {"path": path, "version": 8})
        service.checkpoint("latest", "second")
        answer = await service.post("/v1/updates?wait=true", {"path": path, "version": 9})
        assert answer.json()["observed"] == {"one": digest_of("second")}
        assert front.state.live.digest == digest_of("second")

    run(tmp_path, scenario)
