"""The rank processes of one replica, as the front sees them: start, call all, learn of deaths, stop.

A rank's death is learned from the kernel (a pid descriptor), never from a collective that hangs (hazard 15).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapter.base import EngineSpec, TokenEvent
from engine_adapter.rank.channel import FrontChannel
from engine_adapter.rank.control_messages import ENGINE_FAILED, Build, Staged, StopEngine
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


class _Rank:
    """One child process and the line to it."""

    def __init__(self, process: subprocess.Popen[bytes], line: RankLine) -> None:
        self.process = process
        self.line = line
        self.gone = asyncio.Event()
        self.reader: asyncio.Task[None] | None = None


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
            builds = [
                Build(
                    settings.factory,
                    EngineSpec(rank, settings.size, settings.model, rendezvous, dict(settings.options)),
                )
                for rank in range(settings.size)
            ]
            self.hellos = tuple(await self.call("build", builds, deadline_s=settings.start_s))
        except BaseException:
            await self.stop(0.0)
            raise
        return self.hellos

    def tell_first(self, verb: str, request: Any) -> asyncio.Future[Any]:
        """To rank 0 alone: requests are submitted and cancelled there. Sent when this returns; no deadline."""
        return self.tell(self.lines[0], verb, request)

    async def stop(self, deadline_s: float) -> None:
        """Ask, wait, then kill. On return no rank process is left."""
        self.stopping = True
        self.tell_all("stop", StopEngine(deadline_s))
        waits = [asyncio.ensure_future(rank.gone.wait()) for rank in self._ranks]
        if waits:
            _, late = await asyncio.wait(waits, timeout=deadline_s)
            for rank in self._ranks:
                if not rank.gone.is_set():
                    rank.process.send_signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late)
        for rank in self._ranks:
            rank.line.channel.close()
            if rank.reader is not None:
                rank.reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rank.reader
        if self._rendezvous is not None:
            os.close(self._rendezvous)
            self._rendezvous = None

    async def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = self._launch(number, theirs.fileno())
        line = RankLine(number, await FrontChannel.over(ours))
        rank = _Rank(process, line)
        self._ranks.append(rank)
        self.lines.append(line)
        rank.reader = asyncio.create_task(self._read(rank), name=f"rank {number}")
        self._watch(rank)

    def _launch(self, number: int, fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "engine_adapter.rank.main", "--fd", str(fd), "--parent", str(os.getpid())]
        logs = self.settings.logs
        if logs is None:
            return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"rank-{number}.log").open("ab") as log:
            return subprocess.Popen(
                command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _watch(self, rank: _Rank) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(rank.process.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            status = rank.process.wait()
            why = "its engine failed" if status == ENGINE_FAILED else f"its process ended with status {status}"
            self.died(rank.line, why)
            rank.gone.set()

        loop.add_reader(descriptor, ended)

    async def _read(self, rank: _Rank) -> None:
        """A channel that was closed says nothing here: the pid descriptor tells the rest."""
        broken = await self.read(rank.line)
        if broken:
            self.died(rank.line, f"its channel broke: {broken}")
            rank.process.send_signal(signal.SIGKILL)
