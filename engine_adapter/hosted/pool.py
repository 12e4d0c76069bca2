"""Workers of a foreign server as the ranks of a replica: each connects to the front's Unix socket and speaks the rank
protocol.

Verbs that stop, label, clear or let go the engine are done by `EngineControl` beside the ranks; all others go to the
ranks alone. A worker's death is learned from the kernel, which closes its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine_adapter.base import EngineSpec
from engine_adapter.rank.channel import BytesStaged, ChannelClosed, ChannelError, FrontChannel
from engine_adapter.rank.messages import CacheTier, RankHello, RankInvalidate, RankInvalidateReply
from engine_adapter.replica.ranks import RankCalls, RankLine
from updater.core.errors import Aborted, Failure
from updater.core.policy import CachePolicy
from updater.protocol import wire

_HELLO_S = 30.0
#: Why an engine is not paused for an update.
ASLEEP = Failure("replica_asleep", "the engine sleeps, or another caller paused it: wake it first")


class EngineControl(Protocol):
    """The engine as a whole, through its own server. Each raises Aborted."""

    async def attach(self, address: str, token: str, deadline_s: float) -> None:
        """Every worker connects to `address` and shows `token`."""

    async def pause(self, number: int, deadline_s: float) -> bool:
        """The scheduler stops between two steps, and every rank notes where it stands. False, and nothing was touched:
        the engine sleeps, or another caller has paused it.
        """

    async def resume(self, deadline_s: float) -> None:
        """Let the engine go on, if it was stopped here."""

    async def label(self, version: str, deadline_s: float) -> None:
        """Tokens made from here on carry `version`."""

    async def reset_caches(self, deadline_s: float) -> dict[str, bool]:
        """While paused: every tier -> really empty."""

    async def reset_encodings(self, deadline_s: float) -> dict[str, bool]:
        """The tiers whose keys name an input alone, so that no namespace keeps versions apart in them."""


@dataclass(frozen=True, slots=True)
class Attach:
    """First frame of a worker on the front's socket. `token`: what the front told it by the engine's own channel."""

    token: str
    rank: int
    size: int
    pid: int


class AttachedPool(RankCalls):
    """`options`: of the engine, for every rank. `relabelled(version, digest, policy)`: hears at the point where label
    and bytes change (I3); the policy is that of the update, or RESET where the bytes stay."""

    def __init__(
        self,
        control: EngineControl,
        model: str,
        size: int,
        options: Mapping[str, str | int | float | bool] | None = None,
        *,
        on_death: Callable[[Failure], None],
        on_staged: Callable[[int, BytesStaged], None],
        relabelled: Callable[[str, str, CachePolicy], None],
    ) -> None:
        super().__init__(on_staged=on_staged, on_death=on_death)
        self._control, self._model, self._size = control, model, size
        self._options = dict(options or {})
        self._relabelled = relabelled
        self._readers: list[asyncio.Task[None]] = []
        self._pauses = itertools.count(1)

    async def start(self, deadline_s: float) -> tuple[RankHello, ...]:
        """All workers attached, their placements recorded and their spares allocated. Raises Aborted."""
        lines = await self._attached(deadline_s)
        self.lines.extend(lines)
        self._readers = [asyncio.create_task(self._read(line), name=f"rank {line.rank}") for line in lines]
        spec = EngineSpec(0, self._size, self._model, "", self._options)
        return await self.build("", spec, deadline_s=deadline_s)

    async def _attached(self, deadline_s: float) -> list[RankLine]:
        token = secrets.token_hex(32)
        arrived: asyncio.Queue[tuple[Attach, FrontChannel]] = asyncio.Queue()
        found: list[tuple[Attach, FrontChannel]] = []

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            attach = await _introduced(reader, writer, token)
            if attach is None:
                writer.close()
            else:
                arrived.put_nowait((attach, FrontChannel(reader, writer)))

        # An abstract address: no file, so none is left by a process that is killed here. Who comes is asked for the
        # token and looked at by the kernel's word on who it is.
        address = f"\0liveweights-{secrets.token_hex(16)}"
        server = await asyncio.start_unix_server(greet, address)
        try:
            await self._control.attach(address, token, deadline_s)
            async with asyncio.timeout(_HELLO_S):
                while len(found) < self._size:
                    found.append(await arrived.get())
            return _lines(found)
        except TimeoutError:
            await _part(found, arrived)
            raise Aborted(Failure("rank_failed", "not every worker connected to the front")) from None
        except BaseException:
            await _part(found, arrived)
            raise
        finally:
            server.close()

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        """See `RankCalls.call`; verbs about the engine as a whole take the engine client's part with them."""
        match verb:
            case "pause":
                return await self._pause(request, deadline_s)
            case "start" | "label":
                return await self._label(verb, request, CachePolicy.RESET, deadline_s)
            case "install":
                return await self._label(verb, request, request.cache, deadline_s)
            case "restore":
                return await self._label(verb, request, CachePolicy.RESET, deadline_s)
            case "invalidate":
                return await self._invalidate(request, deadline_s)
            case "resume":
                replies = await super().call(verb, request, deadline_s=deadline_s)
                await self._control.resume(deadline_s)
                return replies
        return await super().call(verb, request, deadline_s=deadline_s)

    async def _pause(self, request: Any, deadline_s: float) -> list[Any]:
        """Raises Aborted (`replica_asleep`) where the engine's memory may not be there."""
        if not await self._control.pause(next(self._pauses), deadline_s):
            raise Aborted(ASLEEP)
        return await super().call("pause", request, deadline_s=deadline_s)

    async def _label(self, verb: str, request: Any, cache: CachePolicy, deadline_s: float) -> list[Any]:
        """Ranks first: a label that no client may read yet does no harm, one that is ahead of its bytes would."""
        replies = await super().call(verb, request, deadline_s=deadline_s)
        await self._control.label(request.version, deadline_s)
        self._relabelled(request.version, request.digest, cache)
        return replies

    async def _invalidate(self, request: RankInvalidate, deadline_s: float) -> list[Any]:
        replies: list[RankInvalidateReply] = await super().call("invalidate", request, deadline_s=deadline_s)
        if request.cache is CachePolicy.KEEP:
            return replies
        resets = request.cache is CachePolicy.RESET
        cleared = await (self._control.reset_caches if resets else self._control.reset_encodings)(deadline_s)
        tiers = tuple(CacheTier(name, done) for name, done in cleared.items())
        return [replace(replies[0], tiers=replies[0].tiers + tiers), *replies[1:]]

    async def stop(self) -> None:
        """Let the workers go; their own server ends them."""
        self.stopping = True
        for line in self.lines:
            line.channel.close()
            await line.channel.wait_closed()
        for reader in self._readers:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, line: RankLine) -> None:
        broken = await self.read(line)
        self.died(line, f"its channel broke: {broken}" if broken else "its worker process ended")


def _lines(found: list[tuple[Attach, FrontChannel]]) -> list[RankLine]:
    """In rank order. Raises Aborted unless every rank is there once."""
    lines = [RankLine(attach.rank, channel) for attach, channel in sorted(found, key=lambda each: each[0].rank)]
    if [line.rank for line in lines] != list(range(len(lines))):
        raise Aborted(Failure("rank_failed", f"the workers call themselves {[line.rank for line in lines]}"))
    return lines


async def _part(found: list[tuple[Attach, FrontChannel]], arrived: asyncio.Queue[tuple[Attach, FrontChannel]]) -> None:
    """No worker is kept that came when not all did (I6)."""
    while not arrived.empty():
        found.append(arrived.get_nowait())
    for _, channel in found:
        channel.close()
        await channel.wait_closed()


async def _introduced(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Attach | None:
    """Who connected, if it is one of our workers."""
    if _peer_uid(writer.get_extra_info("socket")) != os.getuid():
        return None
    try:
        async with asyncio.timeout(_HELLO_S):
            frame = await FrontChannel(reader, writer).receive()
        attach = wire.decode(Attach, frame.body)
    except (TimeoutError, ChannelClosed, ChannelError, wire.WireError):
        return None
    return attach if hmac.compare_digest(attach.token.encode(), token.encode()) else None


def _peer_uid(end: socket.socket) -> int:
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
