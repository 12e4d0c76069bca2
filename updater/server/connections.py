"""Bounds on the connections of our own servers, so that callers without a name cannot use up the descriptors.

A connection waits in the lobby until a whole request of it has come, and again between two requests. The lobby is
bounded in number (the one that waited longest is closed) and in time. Requests that run are bounded too, except those
of the fleet: what coordinator and fronts say to one another always finds room. A connection that has shown the admin
token, or the key of a front, waits outside the lobby.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from updater.server.guard import CONNECTION

#: Connections that the kernel keeps until they are accepted.
BACKLOG = 1024
#: Accepted in one go: the lobby closes what is too much only afterwards.
_ACCEPT = 16
_log = logging.getLogger("liveweights.http")
FLEET_PATHS = ("/participant/v1/", "/v1/fleet/")


@dataclass(frozen=True, slots=True)
class Bounds:
    """`lobby`: connections without a whole request. `running`: of those with one, which are not the fleet's. `first_s`:
    until the head of the first request has come."""

    lobby: int = 256
    running: int = 1 << 20
    first_s: float = 10.0

    @classmethod
    def of_process(cls) -> Bounds:
        """From the limit of descriptors: an eighth for the lobby, and three eighths for files and the fleet's own."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return cls()
        lobby = max(8, min(256, soft // 8))
        return cls(lobby, max(8, soft - lobby - max(32, min(1024, soft * 3 // 8))))


class Lobby:
    """The connections of one server. For one event loop."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds.of_process()
        self._waiting: dict[ServerConnection, None] = {}  # the longest first
        self._running: set[ServerConnection] = set()
        self._said = False

    def enter(self, connection: ServerConnection) -> None:
        self._running.discard(connection)
        if connection in self._waiting:
            return
        self._waiting[connection] = None
        while len(self._waiting) > self.bounds.lobby:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.drop()
            if not self._said:
                self._said = True
                _log.warning("more than %d connections without a request: the oldest are closed", self.bounds.lobby)

    def called(self, connection: ServerConnection) -> None:
        """A whole request of it is there."""
        self._waiting.pop(connection, None)

    def leave(self, connection: ServerConnection) -> None:
        self._waiting.pop(connection, None)
        self._running.discard(connection)

    def admit(self, connection: ServerConnection, *, fleet: bool) -> bool:
        """Whether a request of this connection may run."""
        if fleet:
            self._running.discard(connection)
            return True
        if connection not in self._running and len(self._running) >= self.bounds.running:
            return False
        self._running.add(connection)
        return True


class ServerConnection(H11Protocol):
    """One connection. `lobby` is that of the server."""

    lobby: Lobby
    _known = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.app: Any = _Named(self.app, self)
        self._wait(self.lobby.bounds.first_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.lobby.leave(self)
        super().connection_lost(exc)

    def admit(self, path: str, *, fleet: bool) -> bool:
        """Whether a request may run. `fleet`: it has shown what only the fleet, or its operator, has."""
        if fleet:
            self._known = True
            self.lobby.leave(self)
        return self.lobby.admit(self, fleet=fleet or path.startswith(FLEET_PATHS))

    def drop(self) -> None:
        self._stop_timer()
        self.transport.abort()

    def _look(self) -> None:
        """After every change: does it wait for a request, or run one?"""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._timer is None:
                self._wait(self.timeout_keep_alive + self.lobby.bounds.first_s)
            return
        self._stop_timer()
        if not cycle.more_body:
            self.lobby.called(self)

    def _wait(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.drop)
        if self._known:
            self.lobby.leave(self)
        else:
            self.lobby.enter(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Named:
    """The app, told which connection a request came over."""

    def __init__(self, app: ASGIApp, connection: ServerConnection) -> None:
        self._app, self._connection = app, connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, CONNECTION: self._connection}, receive, send)


def listen(host: str, port: int) -> socket.socket:
    """A socket for a `BoundedServer`. Raises OSError for an address that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio does not see TCP and leaves Nagle on: 40 ms for every answer in two parts.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host} port {port}: {error.strerror or error}") from None
    listener.set_inheritable(False)
    return listener


class BoundedServer(uvicorn.Server):
    """uvicorn over sockets that listen already, with bounds on their connections. Signals are left to its caller.

    `end_s`: how long its end waits for requests that run. `keep_alive_s`: between two requests of a connection.
    """

    def __init__(self, app: ASGIApp, *, end_s: int, keep_alive_s: int = 5, bounds: Bounds | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=type("ServerConnection", (ServerConnection,), {"lobby": Lobby(bounds)}),
            backlog=_ACCEPT,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=end_s,
            timeout_keep_alive=keep_alive_s,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)
