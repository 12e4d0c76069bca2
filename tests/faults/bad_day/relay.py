"""The network between two processes, in this process: one TCP relay per link, which can be made to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class Mode(StrEnum):
    """What a link does to what passes.

    `open`: passes it on. `drop`: nothing arrives while this lasts, then all of it does, late. `delay`: every piece
    comes late. `half_open`: the far side is gone and the near side is not told. `reset`: both sides are cut off, and
    cannot come back. `lose_answers`: requests arrive, and their answers break the connection.
    """

    OPEN = "open"
    DROP = "drop"
    DELAY = "delay"
    HALF_OPEN = "half_open"
    RESET = "reset"
    LOSE_ANSWERS = "lose_answers"


BAD = tuple(mode for mode in Mode if mode is not Mode.OPEN)


@dataclass(eq=False)
class _Pair:
    """One connection: the near side dialled, the far side was dialled for it. `cut`: the far side is gone."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self, *, near: bool = True) -> None:
        for writer in (self.far, self.near if near else None):
            if writer is not None:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()


class Link:
    """`address`: what the near side dials; `target`: (host, port) of the far side. Made by `Network.link`."""

    def __init__(self, name: str, target: tuple[str, int]) -> None:
        self.name, self.target = name, target
        self.mode, self.latency_s, self.late_s = Mode.OPEN, 0.0, 0.3
        self.port = 0
        self._pairs: set[_Pair] = set()
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def turn(self, mode: Mode) -> None:
        async with self._changed:
            before, self.mode = self.mode, mode
            self._changed.notify_all()
        for pair in list(self._pairs):
            if mode is Mode.RESET or (before is Mode.HALF_OPEN and mode is Mode.OPEN):
                pair.abort()
            elif mode is Mode.HALF_OPEN:
                pair.cut.set()
                pair.abort(near=False)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair(writer)
        self._pairs.add(pair)
        try:
            await self._serve(pair, reader)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _serve(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        if self.mode is Mode.RESET:
            return
        if self.mode is Mode.HALF_OPEN:
            pair.cut.set()
        else:
            await self._passable()
        if pair.cut.is_set():
            await reader.read(-1)  # swallowed until the near side gives up, or the link is mended
            return
        far_reader, pair.far = await asyncio.open_connection(*self.target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(pair, reader, pair.far, answers=False))
                group.create_task(self._pump(pair, far_reader, pair.near, answers=True))
        except* OSError:
            pass

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while True:
            try:
                data = await reader.read(_CHUNK)
            except OSError:
                data = b""
            if pair.cut.is_set():
                if not answers:
                    await reader.read(-1)
                return
            await self._passable()
            if pair.cut.is_set():
                return
            if data and answers and self.mode is Mode.LOSE_ANSWERS:
                pair.abort()
                return
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            late = self.late_s if self.mode is Mode.DELAY else self.latency_s
            if late:
                await asyncio.sleep(late)
            writer.write(data)
            await writer.drain()

    async def _passable(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.mode is not Mode.DROP)


class Network:
    """All links, on an event loop of their own in a thread of this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bad-day-network", daemon=True)
        self._thread.start()
        self.links: dict[str, Link] = {}

    def link(self, name: str, target: tuple[str, int], host: str = "127.0.0.1", port: int = 0) -> Link:
        async def make() -> Link:
            made = Link(name, target)
            await made.listen(host, port)
            return made

        self.links[name] = asyncio.run_coroutine_threadsafe(make(), self._loop).result(30)
        return self.links[name]

    def turn(self, name: str, mode: Mode) -> None:
        asyncio.run_coroutine_threadsafe(self.links[name].turn(mode), self._loop).result(30)

    def slow(self, latency_s: float) -> None:
        """Every piece of every link takes so long: the phases of an update become long enough to be hit."""
        for link in self.links.values():
            link.latency_s = latency_s

    def mend(self) -> None:
        for name, link in self.links.items():
            if link.mode is not Mode.OPEN:
                self.turn(name, Mode.OPEN)

    def close(self) -> None:
        async def end() -> None:
            for link in self.links.values():
                await link.close()
            ours = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in ours:
                task.cancel()
            await asyncio.gather(*ours, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
