"""The client of a front: what an answer means, and what no answer means. Against real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from fastapi import FastAPI

from updater.coordinator.members import participants
from updater.coordinator.members.http_client import FrontClient, TooLong
from updater.coordinator.members.participants import HttpParticipant, Refusal, Unreachable
from updater.core.errors import Aborted, Failure
from updater.core.participant import Fence, FenceRequest, FrontStatus, StatusRequest
from updater.protocol.api import JoinBody
from updater.server.guard import problem
from updater.server.security import FrontKeys, Tokens
from updater.testing.fronts import ManualClock, SimulatedFront, front_app

TOKEN = "admin-token-0123"
FENCE = FenceRequest(Fence("default", 1, 1, 1, "wrong"))


def answer(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more))
    return head.encode() + b"\r\n" + body


class Canned:
    """A server that says the next of its answers to every request, and closes after one that is marked."""

    def __init__(self, *answers: bytes, close_after: frozenset[int] = frozenset()) -> None:
        self.answers, self.close_after = list(answers), close_after
        self.requests = self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                number, self.requests = self.requests, self.requests + 1
                writer.write(self.answers[number])
                await writer.drain()
                if number in self.close_after:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def run(self, use: Callable[[HttpParticipant], Awaitable[None]], timeout_s: float = 20) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        client = HttpParticipant("one", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            async with asyncio.timeout(timeout_s):
                await use(client)
        finally:
            await client.close()
            server.close()


@pytest.mark.parametrize("path", ["", "/liveweights/v1"])
def test_a_real_front_over_a_real_socket(path: str) -> None:
    async def main() -> None:
        front = SimulatedFront("one", ManualClock())
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}/"
        tokens = Tokens(TOKEN)
        app = FastAPI()
        app.mount(path, front_app(front, tokens, FrontKeys.of(tokens, "one", url, f"{path}/participant/v1/")))
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        assert JoinBody(replica="one", url=url).url == url
        client, stranger = HttpParticipant("one", url, TOKEN), HttpParticipant("one", url)
        try:
            status = await client.call("status", StatusRequest(), 20)
            assert isinstance(status, FrontStatus)
            assert (status.replica, status.incarnation) == ("one", front.state.incarnation)
            with pytest.raises(Refusal) as refused:
                await client.call("restore", FENCE, 20)
            assert [(failure.code, failure.replica) for failure in refused.value.failures] == [
                ("replica_fenced", "one")
            ]
            with pytest.raises(Refusal) as closed:
                await stranger.call("status", StatusRequest(), 20)
            assert closed.value.failures[0].code == "unauthorized"
            assert TOKEN not in str(refused.value)
            answers = await asyncio.gather(*(client.call("status", StatusRequest(), 20) for _ in range(8)))
            assert len({each.incarnation for each in answers}) == 1
        finally:
            await client.close()
            await stranger.close()
            server.should_exit = True
            await serving
            listener.close()

    asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        client = HttpParticipant("one", f"http://127.0.0.1:{port}")
        with pytest.raises(Unreachable) as silence:
            await client.call("status", StatusRequest(), 20)
        assert silence.value.refused
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "words",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        answer(b"not json"),
        answer(b'{"replica": 7}'),
        answer(b"[" * 100_000),
        answer(b"<html>bad gateway</html>", "502 Bad Gateway"),
        answer(b"{}", "500 Internal Server Error"),
        answer(b'["failures"]', "424 Failed Dependency"),
        answer(b"", "204 No Content"),
        answer(b"", "302 Found", "Location: http://127.0.0.1:1/"),
        b"",
    ],
    ids=range(12),
)
def test_what_cannot_be_read_says_nothing_about_the_replica(words: bytes) -> None:
    server = Canned(words, close_after=frozenset({0}))

    async def use(client: HttpParticipant) -> None:
        with pytest.raises(Unreachable) as silence:
            await client.call("status", StatusRequest(), 20)
        assert not silence.value.refused

    asyncio.run(server.run(use))


def test_an_endless_answer_is_cut_off() -> None:
    server = Canned(answer(b"x" * 10), answer(b"x" * 11), answer(b"x" * (participants.MAX_REPLY + 1)))

    async def use(participant: HttpParticipant) -> None:
        client = FrontClient(participant.url)
        assert await client.post("/x", b"{}", 10) == (200, b"x" * 10)
        with pytest.raises(TooLong):
            await client.post("/x", b"{}", 10)
        await client.close()
        with pytest.raises(Unreachable):
            await participant.call("status", StatusRequest(), 20)

    asyncio.run(server.run(use))


def test_a_late_answer_is_none() -> None:
    """The server has read the request and stays silent."""
    held = asyncio.Event()

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await held.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpParticipant("one", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(Unreachable):
            await client.call("status", StatusRequest(), 0.05)
        held.set()
        await client.close()
        server.close()

    asyncio.run(main())


def test_a_problem_of_ours_is_a_refusal_that_names_the_replica() -> None:
    body = bytes(problem(Aborted(Failure("rank_failed", "no", rank=1))).body)
    server = Canned(answer(body, "424 Failed Dependency"))

    async def use(client: HttpParticipant) -> None:
        with pytest.raises(Refusal) as refused:
            await client.call("status", StatusRequest(), 20)
        assert refused.value.failures == (Failure("rank_failed", "no", replica="one", rank=1),)

    asyncio.run(server.run(use))


def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    ok = answer(b"{}")
    server = Canned(ok, ok, ok, answer(b"{}", "200 OK", "Connection: close"), ok, close_after=frozenset({1, 3}))

    async def use(participant: HttpParticipant) -> None:
        client = FrontClient(participant.url)
        for _ in range(5):
            assert await client.post("/x", b"{}", 100) == (200, b"{}")
        await client.close()

    asyncio.run(server.run(use))
    assert (server.requests, server.connections) == (5, 3)


async def answered_once(listener: socket.socket) -> socket.socket:
    """The connection that came, after one request on it was answered."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    asked = b""
    while not asked.endswith(b"{}"):
        asked += await loop.sock_recv(connection, 1000)
    await loop.sock_sendall(connection, answer(b"{}"))
    return connection


def test_a_connection_that_was_reset_while_nobody_looked_is_replaced() -> None:
    """The loop has not heard of it yet, so the next request fails while it is written."""

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        client = FrontClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(2):
            serving = asyncio.create_task(answered_once(listener))
            assert await client.post("/x", b"{}", 100) == (200, b"{}")
            connection = await serving
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            connection.close()
        await client.close()
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    "url", ["ftp://x", "x", "http://", "http://x:99999", "http://x/?a", "http://x/#a", "http://x:y"]
)
def test_what_is_no_address_of_a_server(url: str) -> None:
    with pytest.raises(ValueError):
        HttpParticipant("one", url)


def test_a_verb_takes_its_own_request() -> None:
    async def main() -> None:
        with pytest.raises(TypeError):
            await HttpParticipant("one", "http://127.0.0.1:1").call("status", FENCE, 1)

    asyncio.run(main())
