"""What a coordinator shows to a front, where it lets itself be sent, and who is told why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from updater.coordinator.coordinator import Coordinator
from updater.core.errors import Failure, Unavailable
from updater.core.participant import FrontState
from updater.server import guard as http
from updater.server.networks import AddressBarred, Networks
from updater.server.routes import create_app
from updater.server.security import ConfigurationError, FrontKeys, Tokens, announced, front_key
from updater.settings import Settings
from updater.testing.fronts import ManualClock, SimulatedFront, front_app
from updater.testing.service import DEADLINES

pytestmark = pytest.mark.case("F42")
ADMIN, INFERENCE = "admin-token-1234", "inference-token-1234"
BOTH = Tokens(ADMIN, INFERENCE)


class Stranger:
    """A server that keeps every byte that it is sent, and refuses all of it."""

    def __init__(self) -> None:
        self.heard = b""
        self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.heard += await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


@asynccontextmanager
async def coordinator(folder: Path, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """A real one that calls its fronts over sockets."""
    made = Coordinator(Settings(state=folder, tokens=BOTH, deadlines=DEADLINES, **settings))  # type: ignore[arg-type]
    await made.start()
    transport = httpx.ASGITransport(create_app(made), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {ADMIN}"}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            yield client
    finally:
        await made.close()


def test_a_join_with_any_url_does_not_learn_the_admin_token(tmp_path: Path) -> None:
    async def main() -> None:
        stranger = Stranger()
        async with stranger.listening() as url, coordinator(tmp_path) as client:
            answer = await client.post("/v1/fleet/replicas", json={"replica": "r", "url": url})
            assert answer.status_code == 503
            assert ADMIN.encode() not in stranger.heard
            # What it did learn opens itself and nothing else.
            key = front_key(ADMIN, "r", url)
            assert f"Bearer {key}".encode() in stranger.heard
            assert not FrontKeys.of(BOTH, "r", "http://127.0.0.1:1").open("/participant/v1/status", key.encode())
            assert not FrontKeys.of(BOTH, "s", url).open("/participant/v1/status", key.encode())

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_coordinator_with_an_empty_journal_still_has_the_key_of_every_front() -> None:
    url = "http://127.0.0.1:8800"
    assert front_key(ADMIN, "r", url) == front_key(ADMIN, "r", url)
    assert FrontKeys.of(BOTH, "r", url).open("/participant/v1/pause", front_key(ADMIN, "r", url).encode())
    assert front_key("", "r", url) == ""
    assert not FrontKeys.of(Tokens(), "r", url).open("/participant/v1/pause", b"")
    assert ADMIN not in repr(FrontKeys.of(BOTH, "r", url))
    assert front_key(ADMIN, "r", url) not in repr(FrontKeys.of(BOTH, "r", url))


def test_a_key_opens_the_participant_contract_of_its_front_and_no_operator_verb() -> None:
    front = SimulatedFront("r", ManualClock())
    app = front_app(front, BOTH, FrontKeys.of(BOTH, "r", front.url))
    added: list[str] = []

    @app.post("/replica/v1/readmit")
    async def readmit() -> None:
        added.append("called")

    async def ask(path: str, token: str) -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post(path, json={}, headers={"Authorization": f"Bearer {token}"})).status_code

    async def main() -> None:
        mine, other = front_key(ADMIN, "r", front.url), front_key(ADMIN, "r", front.url + "0")
        status, readmit = "/participant/v1/status", "/replica/v1/readmit"
        assert [await ask(status, token) for token in (mine, ADMIN, other, INFERENCE)] == [200, 200, 401, 403]
        assert [await ask(readmit, token) for token in (mine, other, INFERENCE)] == [401, 401, 403]
        assert added == []
        assert await ask(readmit, ADMIN) == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://Host:80/", "http://host", True),
        ("https://host:443/a/", "https://host/a", True),
        ("http://[::1]:8800", "http://[::1]:8800/", True),
        ("http://host:8080", "http://host:8081", False),
        ("http://host", "https://host", False),
        ("http://host/a", "http://host/b", False),
        ("http://host/?a", "http://host", False),
        ("http://a@host", "http://host", False),
        ("ray://a@b", "ray://a@c", False),
        ("http://host:port", "http://host", False),
    ],
)
def test_one_address_has_one_spelling(one: str, other: str, same: bool) -> None:
    assert (announced(one) == announced(other)) is same


METADATA = ("169.254.169.254", "fe80::1", "fd00:ec2::254", "100.100.100.200", "::ffff:169.254.169.254", "224.0.0.1")
NEAR, FAR = ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"), ("10.1.2.3", "8.8.8.8", "2001:db8::1")


@pytest.mark.parametrize(
    ("bound", "texts", "allowed", "refused"),
    [
        ("127.0.0.1", (), NEAR, (*FAR, *METADATA, "64:ff9b::a01:203")),
        ("localhost", (), NEAR, FAR),
        ("0.0.0.0", (), (*NEAR, *FAR), (*METADATA, "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1")),
        ("10.0.0.1", ("10.0.0.0/8", "::1/128"), ("10.1.2.3", "::1"), ("127.0.0.1", "8.8.8.8", *METADATA)),
        ("127.0.0.1", ("0.0.0.0/0",), ("10.1.2.3", "127.0.0.1"), ("169.254.169.254", "2001:db8::1")),
    ],
)
def test_where_a_replica_may_join_from(
    bound: str, texts: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    networks = Networks.of(bound, texts)
    assert [each for each in (*allowed, *refused) if networks.allows(each)] == list(allowed)


def test_a_name_is_judged_by_the_addresses_it_has() -> None:
    assert set(asyncio.run(Networks(loopback_only=True).resolve("localhost", 80))) <= {"127.0.0.1", "::1"}
    with pytest.raises(AddressBarred):
        asyncio.run(Networks.of("127.0.0.1", ("10.0.0.0/8",)).resolve("localhost", 80))


def test_what_is_no_network_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Settings(state=tmp_path, allow_networks=("10.0.0.1/8",))


def test_a_join_from_elsewhere_is_refused_and_not_called(tmp_path: Path) -> None:
    async def main() -> None:
        stranger = Stranger()
        async with stranger.listening() as url, coordinator(tmp_path, allow_networks=("10.0.0.0/8",)) as client:
            for spelled in (url, url.replace("127.0.0.1", "localhost")):
                answer = await client.post("/v1/fleet/replicas", json={"replica": "r", "url": spelled})
                assert (answer.status_code, answer.json()["code"]) == (403, "address_refused")
                assert "--allow-network" in answer.json()["failures"][0]["hint"]
            assert stranger.connections == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_front_with_another_token_says_what_both_need(tmp_path: Path) -> None:
    async def main() -> None:
        front = SimulatedFront("r", ManualClock())
        assert front.state.state is FrontState.JOINING
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = front_app(front, Tokens("another-token-1"), FrontKeys.of(Tokens("another-token-1"), "r", url))
        server, serving = _serve(app, listener)
        try:
            async with coordinator(tmp_path) as client:
                answer = await client.post("/v1/fleet/replicas", json={"replica": "r", "url": url})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert "LIVEWEIGHTS_ADMIN_TOKEN" in answer.json()["failures"][0]["hint"]
        finally:
            server.should_exit = True
            await serving
            listener.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def _serve(app: FastAPI, listener: socket.socket) -> tuple[uvicorn.Server, asyncio.Task[None]]:

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    return server, asyncio.create_task(server.serve(sockets=[listener]))


SECRET = "10.9.8.7 port 22 refused"


@pytest.mark.parametrize(
    ("path", "token", "texts"),
    [
        ("/readyz", "", False),
        ("/readyz", INFERENCE, False),
        ("/readyz", ADMIN, True),
        ("/v1/inside", INFERENCE, False),
        ("/v1/inside", ADMIN, True),
        ("/v1/own", INFERENCE, True),
        ("/v1/admin", ADMIN, True),
    ],
)
def test_texts_are_for_the_admin_scope_and_others_get_codes(path: str, token: str, texts: bool) -> None:
    app = FastAPI()

    async def inside() -> None:
        raise Unavailable(Failure("shut", SECRET, hint=SECRET, file=SECRET), live_version="0-1")

    async def own() -> None:
        raise http.Rejected(Failure("bad_request", SECRET))

    for route in ("/readyz", "/v1/inside", "/v1/admin"):
        app.get(route)(inside)
    app.get("/v1/own")(own)
    http.install(app, tokens=BOTH, inference_paths=frozenset({"/v1/inside", "/v1/own"}))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.get(path, headers={"Authorization": f"Bearer {token}"} if token else {})

    answer = asyncio.run(main())
    assert (SECRET in answer.text) is texts
    assert answer.json()["code"] in ("shut", "bad_request")
    assert answer.json()["failures"][0]["code"] == answer.json()["code"]
    assert len(answer.content) == int(answer.headers["content-length"])
