"""A lean HTTP/1.1 client for the participant contract: one request, one bounded answer, connections kept.

The pause of an update is three rounds of calls, so what a call costs the coordinator's own CPU counts: this client
takes a fifth of what a general one does.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from updater.server.networks import Networks

CONNECT_S = 5.0
_CHUNK = 64 << 10
#: What may go wrong with a socket, or with the words on it.
BROKEN = (OSError, EOFError, UnicodeError, h11.ProtocolError)


class TooLong(Exception):
    """The answer has more bytes than was allowed."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    answering: bool = False  # whether a byte of the current answer has come

    def close(self) -> None:
        self.writer.close()

    def usable(self) -> bool:
        return not self.reader.at_eof() and not self.writer.is_closing()

    async def post(self, target: str, headers: list[tuple[str, str]], body: bytes, limit: int) -> tuple[int, bytes]:
        self.answering = False
        request = h11.Request(method="POST", target=target, headers=[*headers, ("Content-Length", str(len(body)))])
        # One write, so that it is one packet and neither side waits for an acknowledgement in the middle.
        parts = [self.state.send(request), self.state.send(h11.Data(data=body)), self.state.send(h11.EndOfMessage())]
        self.writer.write(b"".join(part for part in parts if part))
        await self.writer.drain()
        self._acknowledge_at_once()
        return await self._answer(limit)

    def _acknowledge_at_once(self) -> None:
        """A server that leaves Nagle on sends the second part of its answer only after the first is acknowledged,
        which the kernel may put off by 40 ms. The switch falls back by itself, so it is set for every request."""
        raw = self.writer.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_QUICKACK"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    async def _answer(self, limit: int) -> tuple[int, bytes]:
        status, answer = 0, bytearray()
        while True:
            event = self.state.next_event()
            if event is h11.NEED_DATA:
                data = await self.reader.read(_CHUNK)
                self.answering = self.answering or bool(data)
                self.state.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer += event.data
                if len(answer) > limit:
                    raise TooLong(f"more than {limit} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(answer)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("the connection ended before the answer")

    def kept(self) -> bool:
        """Make ready for the next request; False if the peer wants to end here."""
        if self.state.our_state is h11.MUST_CLOSE or self.state.their_state is not h11.DONE:
            return False
        self.state.start_next_cycle()
        return self.usable()


class FrontClient:
    """Posts to one server. Safe for concurrent calls: each has a connection to itself.

    Raises `BROKEN` errors, TooLong, ConnectionRefusedError where no process listens; after an error the connection is
    closed. A kept connection that turns out to be closed by the server is replaced once: every verb is idempotent.
    Redirects are not followed. `networks`: where the host's addresses must lie; else AddressBarred.
    """

    def __init__(self, url: str, token: str = "", networks: Networks | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
            raise ValueError(f"not a server's URL: {url[:200]!r}")
        self._networks = networks or Networks()
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = [("Host", parts.netloc), ("Content-Type", "application/json"), ("Accept-Encoding", "identity")]
        if token:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

    async def post(self, target: str, body: bytes, limit: int) -> tuple[int, bytes]:
        """(status, body of at most `limit` bytes)."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable():
                connection.close()
                continue
            try:
                return await self._use(connection, self._path + target, body, limit)
            except BROKEN:
                if connection.answering:
                    raise
                break
        return await self._use(await self._connect(), self._path + target, body, limit)

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_S):
            *others, last = await self._networks.resolve(self._host, self._port)
            for address in others:
                try:
                    return await self._connect_to(address)
                except OSError:
                    continue
            return await self._connect_to(last)

    async def _connect_to(self, address: str) -> _Connection:
        name = self._host if self._tls else None
        return _Connection(
            *await asyncio.open_connection(address, self._port, ssl=self._tls, server_hostname=name, limit=_CHUNK)
        )

    async def _use(self, connection: _Connection, target: str, body: bytes, limit: int) -> tuple[int, bytes]:
        self._busy.add(connection)
        keep = False
        try:
            answer = await connection.post(target, self._headers, body, limit)
            keep = connection.kept()
            return answer
        finally:
            self._busy.discard(connection)
            if keep:
                self._idle.append(connection)
            else:
                connection.close()

    async def close(self) -> None:
        """On return no socket is left."""
        connections, self._idle = [*self._idle, *self._busy], []
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.writer.wait_closed() for connection in connections), return_exceptions=True)
