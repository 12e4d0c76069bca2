"""Connections that say nothing, over real sockets: closed in time and in number, while the fleet is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from updater.server import guard as http
from updater.server.connections import BoundedServer, Bounds, listen
from updater.server.security import FrontKeys, Tokens, front_key

pytestmark = pytest.mark.case("F40")
ADMIN, INFERENCE = "admin-token-1234", "inference-token-1234"
URL = "http://127.0.0.1:1"
LONG_S = 600.0


class World:
    """A server with three routes; `hold` answers when it is told to."""

    def __init__(self, tokens: Tokens) -> None:
        self.go, self.begun = asyncio.Event(), asyncio.Semaphore(0)
        self.app = FastAPI()
        self.port = 0

        async def hold() -> str:
            self.begun.release()
            await self.go.wait()
            return "held"

        async def quick() -> str:
            return "quick"

        self.app.get("/v1/hold")(hold)
        for path in ("/healthz", "/v1/quick", "/participant/v1/status", "/v1/fleet/replicas"):
            self.app.get(path)(quick)
        keys = FrontKeys.of(tokens, "r", URL)
        paths = frozenset({"/v1/hold", "/v1/quick"})
        http.install(self.app, tokens=tokens, inference_paths=paths, keys=keys)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, path: str, token: str = "", over: object = None) -> int:
        """The status of one request; the connection stays open."""
        reader, writer = over if over is not None else await self.connect()  # type: ignore[misc]
        bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{bearer}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        return int(head.split()[1])


def run(
    bounds: Bounds, main: Callable[[World], Awaitable[None]], tokens: Tokens | None = None, keep_alive: int = 600
) -> None:
    @asynccontextmanager
    async def serving() -> AsyncIterator[World]:
        world = World(tokens or Tokens())
        server = BoundedServer(world.app, end_s=5, keep_alive_s=keep_alive, bounds=bounds)
        listener = listen("127.0.0.1", 0)
        world.port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield world
        finally:
            world.go.set()
            server.should_exit = True
            await task
            listener.close()

    async def bounded() -> None:
        async with serving() as world:
            await main(world)

    asyncio.run(asyncio.wait_for(bounded(), 100))


async def closed(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET /v1/quick HTTP/1.1\r\nHost: 127", b"GET"])
def test_a_connection_without_a_whole_head_ends_at_its_deadline(said: bytes) -> None:
    async def main(world: World) -> None:
        reader, writer = await world.connect()
        writer.write(said)
        assert await closed(reader)

    run(Bounds(lobby=100, running=100, first_s=0.1), main)


def test_half_a_second_request_ends_too() -> None:
    async def main(world: World) -> None:
        reader, writer = line = await world.connect()
        assert await world.ask("/v1/quick", over=line) == 200
        writer.write(b"GET /v1/quick HTTP/1.1\r\n")
        assert await closed(reader)

    run(Bounds(lobby=100, running=100, first_s=0.1), main, keep_alive=1)


def test_a_request_that_runs_for_longer_than_the_deadline_goes_on() -> None:
    async def main(world: World) -> None:
        asking = asyncio.create_task(world.ask("/v1/hold"))
        await world.begun.acquire()
        idle, _ = await world.connect()
        assert await closed(idle)  # the deadline of a connection that came later is over
        world.go.set()
        assert await asking == 200

    run(Bounds(lobby=100, running=100, first_s=0.1), main)


def test_of_too_many_the_one_that_waited_longest_is_closed_and_a_request_gets_through() -> None:
    async def main(world: World) -> None:
        idle = [await world.connect() for _ in range(50)]
        assert await world.ask("/v1/quick") == 200
        assert all([await closed(reader) for reader, _ in idle[:45]])
        # One that has shown no token waits like all others after its answer.
        spoke = await world.connect()
        assert await world.ask("/healthz", over=spoke) == 200
        more = [await world.connect() for _ in range(8)]
        assert await closed(spoke[0])
        for _, writer in (*idle, *more):
            writer.close()

    run(Bounds(lobby=4, running=100, first_s=LONG_S), main)


def test_who_has_shown_the_token_or_a_key_is_not_closed_by_strangers() -> None:
    async def main(world: World) -> None:
        operator, coordinator, client = [await world.connect() for _ in range(3)]
        key = front_key(ADMIN, "r", URL)
        assert await world.ask("/v1/quick", ADMIN, operator) == 200
        assert await world.ask("/participant/v1/status", key, coordinator) == 200
        assert await world.ask("/v1/quick", INFERENCE, client) == 200
        idle = [await world.connect() for _ in range(20)]
        assert await closed(client[0])
        assert await closed(idle[0][0])
        assert await world.ask("/v1/quick", ADMIN, operator) == 200
        assert await world.ask("/participant/v1/status", key, coordinator) == 200

    run(Bounds(lobby=4, running=100, first_s=LONG_S), main, Tokens(ADMIN, INFERENCE))


@pytest.mark.parametrize("tokens", [Tokens(), Tokens(ADMIN, INFERENCE)], ids=["open", "tokens"])
def test_the_fleet_finds_room_where_clients_do_not(tokens: Tokens) -> None:
    async def main(world: World) -> None:
        mine = INFERENCE if tokens.configured else ""
        running = [asyncio.create_task(world.ask("/v1/hold", mine)) for _ in range(3)]
        for _ in running:
            await world.begun.acquire()
        assert await world.ask("/v1/quick", mine) == 503
        assert await world.ask("/healthz") == 200
        key = front_key(ADMIN, "r", URL) if tokens.configured else ""
        assert await world.ask("/participant/v1/status", key) == 200
        assert await world.ask("/v1/fleet/replicas", ADMIN if tokens.configured else "") == 200
        world.go.set()
        assert await asyncio.gather(*running) == [200] * 3
        assert await world.ask("/v1/quick", mine) == 200

    run(Bounds(lobby=20, running=3, first_s=LONG_S), main, tokens)


def test_bounds_leave_descriptors_for_the_fleet() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit in (64, 256, 1024, 4096):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            bounds = Bounds.of_process()
            assert bounds.lobby + bounds.running + 32 <= limit
            assert bounds.lobby >= 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
