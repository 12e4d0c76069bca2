"""The rank processes of one replica, as the front sees them: start, call all, learn of deaths, stop.

A rank's death is learned from the kernel (`waitpid`), never from a collective that hangs (hazard 15).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapter.base import EngineSpec, TokenEvent
from engine_adapter.rank.channel import FrontChannel
from engine_adapter.rank.control_messages import ENGINE_FAILED, Staged, StopEngine
from engine_adapter.rank.messages import Hello
from engine_adapter.replica.calls import RankCalls, RankLine
from updater.core.errors import Failure


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What to start. `logs`: folder for one log file per rank, or None to share the front's stderr."""

    factory: str
    model: str
    size: int
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    logs: Path | None = None
    start_s: float = 120.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """One child process and the line to it. `ends`: done once the process has ended."""

    process: asyncio.subprocess.Process
    line: RankLine
    reader: asyncio.Task[None]
    ends: asyncio.Task[None]


class RankPool(RankCalls):
    """All ranks of one replica, as processes that it starts."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        on_tokens: Callable[[TokenEvent], None],
        on_death: Callable[[Failure], None],
        on_staged: Callable[[int, Staged], None] = lambda _rank, _staged: None,
    ) -> None:
        super().__init__(on_tokens=on_tokens, on_staged=on_staged, on_death=on_death)
        self.settings = settings
        self._ranks: list[_Rank] = []
        self._rendezvous: int | None = None  # descriptor of the file where ranks meet

    @property
    def size(self) -> int:
        return self.settings.size

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    async def start(self) -> tuple[Hello, ...]:
        """Start every rank and load the model. Raises Aborted, and has then stopped what it started."""
        # In memory, and reached through this process: however it ends, nothing is left on a disk.
        self._rendezvous = os.memfd_create("liveweights-rendezvous")
        rendezvous = f"/proc/{os.getpid()}/fd/{self._rendezvous}"
        settings = self.settings
        try:
            for rank in range(settings.size):
                await self._spawn(rank)
            spec = EngineSpec(0, settings.size, settings.model, rendezvous, dict(settings.options))
            return await self.build(settings.factory, spec, deadline_s=settings.start_s)
        except BaseException:
            await self.stop(0.0)
            raise

    def tell_first(self, verb: str, request: Any) -> asyncio.Future[Any]:
        """To rank 0 alone: requests are submitted and cancelled there. Sent when this returns; no deadline."""
        return self.tell(self.lines[0], verb, request)

    async def stop(self, deadline_s: float) -> None:
        """Ask, wait, then kill. On return no rank process is left."""
        self.stopping = True
        self.tell_all("stop", StopEngine(deadline_s))
        ends = [rank.ends for rank in self._ranks]
        if ends:
            _, late = await asyncio.wait(ends, timeout=deadline_s)
            for rank in self._ranks:
                _kill(rank.process)
            if late:
                await asyncio.wait(late)
        for rank in self._ranks:
            rank.line.channel.close()
            rank.reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rank.reader
        if self._rendezvous is not None:
            os.close(self._rendezvous)
            self._rendezvous = None

    async def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = await self._launch(number, theirs.fileno())
        line = RankLine(number, await FrontChannel.over(ours))
        reader = asyncio.create_task(self._read(process, line), name=f"rank {number}")
        ends = asyncio.create_task(self._watch(process, line), name=f"end of rank {number}")
        self._ranks.append(_Rank(process, line, reader, ends))
        self.lines.append(line)

    async def _launch(self, number: int, fd: int) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "engine_adapter.rank.main", "--fd", str(fd), "--parent", str(os.getpid())]
        logs = self.settings.logs
        with contextlib.ExitStack() as held:
            log: Any = 2
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                log = held.enter_context((logs / f"rank-{number}.log").open("ab"))
            return await asyncio.create_subprocess_exec(
                *command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def _watch(self, process: asyncio.subprocess.Process, line: RankLine) -> None:
        status = await process.wait()
        self.died(line, "its engine failed" if status == ENGINE_FAILED else f"its process ended with status {status}")

    async def _read(self, process: asyncio.subprocess.Process, line: RankLine) -> None:
        """A channel that was closed says nothing here: the end of the process tells the rest."""
        broken = await self.read(line)
        if broken:
            self.died(line, f"its channel broke: {broken}")
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """One that has ended: nothing."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
