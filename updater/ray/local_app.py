"""An ASGI app called in its own process, and the thread that its event loop lives on.

For faces that are not sockets: whatever carries a request hands it over as a `LocalCall`, and the routes, schemas and
problem documents are the ones that HTTP has.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread that lives as long as the process.

    The thread of this loop is the parent of what is forked on it until the process ends: a kernel that ties a child's
    life to its parent means the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """From any thread. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, what: Callable[[], object]) -> None:
        """From any thread; no caller waits for it."""
        self._loop.call_soon_threadsafe(what)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another event loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.submit(work))


@dataclass(frozen=True, slots=True)
class LocalCall:
    """`target`: path and query as in a request line, percent-encoded. `token` opens the app's guard."""

    method: str
    target: str
    body: bytes = b""
    token: str = ""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def scope(self) -> Scope:
        path, _, query = self.target.partition("?")
        headers = [(b"content-type", b"application/json")]
        if self.token:
            headers.append((b"authorization", f"Bearer {self.token}".encode()))
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    status: int
    body: bytes


async def call(app: ASGIApp, request: LocalCall) -> LocalAnswer:
    """The whole answer. Cancelling it is the client going away."""
    status, parts = 500, []
    async with aclosing(stream(app, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, int):
                status = piece
            else:
                parts.append(piece)
    return LocalAnswer(status, b"".join(parts))


async def stream(app: ASGIApp, request: LocalCall) -> AsyncGenerator[int | bytes, None]:
    """The status, then the body as it is made. Leaving early is the client going away: the app is told and ended."""
    exchange = _Exchange(request.body)
    running = asyncio.ensure_future(app(request.scope(), exchange.receive, exchange.send))
    running.add_done_callback(lambda _done: exchange.sent.put_nowait(None))
    answered = False
    try:
        while (message := await exchange.sent.get()) is not None:
            if message["type"] == "http.response.start":
                answered = True
                yield int(message["status"])
            elif message["type"] == "http.response.body" and message.get("body"):
                yield bytes(message["body"])
    finally:
        exchange.gone.set()
        running.cancel()
        (error,) = await asyncio.gather(running, return_exceptions=True)
    if not answered:
        raise RuntimeError("the app did not answer") from error


class _Exchange:
    """What an app receives and sends."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.gone = asyncio.Event()
        self.sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.put_nowait(message)


class LocalApp:
    """An app on a `LoopThread`, for callers on other event loops. `token` opens the app: its callers may do all."""

    def __init__(self, app: ASGIApp, loop: LoopThread, token: str = "") -> None:
        self._app, self._loop, self._token = app, loop, token

    async def ask(self, method: str, target: str, text: str = "") -> dict[str, Any]:
        """`{"status", "text"}`."""
        answer = await self._loop.run(call(self._app, self._call(method, target, text)))
        return {"status": answer.status, "text": answer.body.decode()}

    async def verb(self, method: str, target: str, body: Any = None) -> dict[str, Any]:
        """`{"status", "body"}`, with the body as JSON-ready values: of another status than 2xx a problem document."""
        answer = await self.ask(method, target, "" if body is None else json.dumps(body))
        return {"status": answer["status"], "body": json.loads(answer["text"]) if answer["text"] else None}

    async def stream(self, method: str, target: str, text: str = "") -> AsyncGenerator[int | str, None]:
        """The status, then the body as it is made."""
        pieces = stream(self._app, self._call(method, target, text))
        try:
            while (piece := await self._loop.run(_next(pieces))) is not None:
                yield piece if isinstance(piece, int) else piece.decode()
        finally:
            self._loop.submit(pieces.aclose())

    def _call(self, method: str, target: str, text: str) -> LocalCall:
        return LocalCall(method, target, text.encode(), self._token)


async def _next(pieces: AsyncGenerator[int | bytes, None]) -> int | bytes | None:
    return await anext(pieces, None)
