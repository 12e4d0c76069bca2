"""The rank processes of one replica, as the front sees them: start, call all, learn of deaths, stop.

A rank's death is learned from the kernel (a pid descriptor), never from a collective that hangs (hazards 4.15).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapter.base import EngineSpec, TokenEvent
from engine_adapter.rank.channel import ChannelClosed, ChannelError, Frame, FrameKind, FrontChannel
from engine_adapter.rank.control_messages import CALLS, ENGINE_FAILED, Build, CancelStaging, Staged, StopEngine, Tokens
from engine_adapter.rank.messages import Hello, Refused
from updater import wire
from updater.core.errors import Aborted, Failure, LiveweightsError

#: Verbs that a rank can be told to give up.
_CANCELLABLE = frozenset({"plan", "stage", "verify", "check_previous"})
#: How long the other ranks may take to notice that a staging verb was cancelled.
_CANCEL_GRACE_S = 10.0


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
    """One child process, its channel and its open calls."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], channel: FrontChannel) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.death: Failure | None = None
        self.gone = asyncio.Event()
        self.reader: asyncio.Task[None] | None = None

    def call(self, number: int, verb: str, request: Any) -> asyncio.Future[Any]:
        """The reply comes as the future's result; a refusal or a death as Aborted."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.death is not None:
            future.set_exception(Aborted(self.death))
            return future
        self.calls[number] = future
        try:
            self.channel.send(Frame.of(FrameKind.CALL, number, verb, request))
        except ChannelClosed:
            pass  # the death that follows fails the future
        except ChannelError as error:
            del self.calls[number]
            future.set_exception(Aborted(Failure("body_too_large", str(error), rank=self.rank)))
        return future

    def answered(self, frame: Frame) -> None:
        future = self.calls.pop(frame.header.id, None)
        if future is None or future.done():
            return  # its caller stopped waiting
        try:
            if frame.header.kind is FrameKind.REFUSED:
                refused = wire.decode(Refused, frame.body)
                future.set_exception(Aborted(*(f.at(rank=self.rank) for f in refused.failures)))
            else:
                future.set_result(wire.decode(CALLS[frame.header.verb][1], frame.body))
        except (wire.WireError, KeyError) as error:
            future.set_exception(Aborted(Failure("rank_failed", f"unreadable answer: {error}", rank=self.rank)))

    def die(self, failure: Failure) -> bool:
        """True the first time."""
        if self.death is not None:
            return False
        self.death = failure
        calls, self.calls = self.calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(Aborted(failure))
        return True


class RankPool:
    """All ranks of one replica. Lives on one event loop."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        on_tokens: Callable[[TokenEvent], None],
        on_death: Callable[[Failure], None],
        on_staged: Callable[[int, Staged], None] = lambda _rank, _staged: None,
    ) -> None:
        self.settings = settings
        self.hellos: tuple[Hello, ...] = ()
        self._on_tokens = on_tokens
        self._on_death = on_death
        self._on_staged = on_staged
        self._ranks: list[_Rank] = []
        self._numbers = itertools.count(1)
        self._stopping = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def size(self) -> int:
        return self.settings.size

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    @property
    def death(self) -> Failure | None:
        """Of the first rank that died, if one did."""
        return next((rank.death for rank in self._ranks if rank.death is not None), None)

    async def start(self) -> tuple[Hello, ...]:
        """Start every rank and load the model. Raises Aborted, and has then stopped what it started."""
        self._folder = tempfile.TemporaryDirectory(prefix="liveweights-ranks-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        settings = self.settings
        try:
            for rank in range(settings.size):
                self._ranks.append(await self._spawn(rank))
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

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        """The same request (or one per rank, as a list) to all ranks at once; the replies in rank order.

        Raises Aborted with every failure, in the order in which ranks reported them. After the first refusal the
        others are still awaited within the deadline, so that no rank is left in the middle of something; a death
        ends the wait at once, since the others may hang in a collective with it.
        """
        requests = request if isinstance(request, list) else [request] * self.size
        calls = [rank.call(next(self._numbers), verb, one) for rank, one in zip(self._ranks, requests, strict=True)]
        try:
            failures = await self._gather(verb, requests, calls, deadline_s)
        finally:
            for call in calls:
                call.cancel()  # of those still open: nobody waits for them any more
        if failures:
            raise Aborted(*failures)
        return [call.result() for call in calls]

    def tell_first(self, verb: str, request: Any) -> asyncio.Future[Any]:
        """To rank 0 alone: requests are submitted and cancelled there. Sent when this returns; no deadline."""
        return self._ranks[0].call(next(self._numbers), verb, request)

    async def _gather(
        self, verb: str, requests: Sequence[Any], calls: Sequence[asyncio.Future[Any]], deadline_s: float
    ) -> list[Failure]:
        """What went wrong on any rank. What a rank says only because we stopped it for another's sake is left out."""
        end = time.monotonic() + deadline_s
        failures: list[Failure] = []
        pending = set(calls)
        stopped = False  # by us, for a failure that came first
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, end - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                failures += [
                    Failure("phase_timeout", f"no answer to {verb} in {deadline_s:.1f} s", rank=rank)
                    for rank, call in enumerate(calls)
                    if call in pending
                ]
                self._cancel(verb, requests)
                break
            new = [failure for call in calls if call in done for failure in _failures(call)]
            failures += [failure for failure in new if not (stopped and failure.code == "client_abort")]
            if failures and not stopped and verb in _CANCELLABLE:
                stopped = True
                self._cancel(verb, requests)
                end = min(end, time.monotonic() + _CANCEL_GRACE_S)
            if any(failure.code == "rank_died" for failure in failures):
                break
        return failures

    def _cancel(self, verb: str, requests: Sequence[Any]) -> None:
        if verb in _CANCELLABLE:
            self.cancel_staging(requests[0].serial)

    def cancel_staging(self, serial: int) -> None:
        """Tell every rank to give up what it stages for `serial`; the calls themselves then end as refused."""
        for rank in self._ranks:
            rank.call(next(self._numbers), "cancel_staging", CancelStaging(serial)).add_done_callback(_forget)

    async def stop(self, deadline_s: float) -> None:
        """Ask, wait, then kill. On return no rank process is left."""
        self._stopping = True
        for rank in self._ranks:
            rank.call(next(self._numbers), "stop", StopEngine(deadline_s)).add_done_callback(_forget)
        waits = [asyncio.ensure_future(rank.gone.wait()) for rank in self._ranks]
        if waits:
            _, late = await asyncio.wait(waits, timeout=deadline_s)
            for rank in self._ranks:
                if not rank.gone.is_set():
                    rank.process.send_signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late)
        for rank in self._ranks:
            rank.channel.close()
            if rank.reader is not None:
                rank.reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rank.reader
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _spawn(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = self._launch(number, theirs.fileno())
        rank = _Rank(number, process, await FrontChannel.over(ours))
        rank.reader = asyncio.create_task(self._read(rank), name=f"rank {number}")
        self._watch(rank)
        return rank

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
            self._died(rank, why)
            rank.gone.set()

        loop.add_reader(descriptor, ended)

    async def _read(self, rank: _Rank) -> None:
        try:
            while True:
                frame = await rank.channel.receive()
                if frame.header.kind is not FrameKind.EVENT:
                    rank.answered(frame)
                elif frame.header.verb == "tokens":
                    for event in wire.decode(Tokens, frame.body).events:
                        self._on_tokens(event)
                elif frame.header.verb == "staged":
                    self._on_staged(rank.rank, wire.decode(Staged, frame.body))
        except ChannelClosed:
            return  # the pid descriptor tells the rest
        except (ChannelError, wire.WireError) as error:
            self._died(rank, f"its channel broke: {error}")
            rank.process.send_signal(signal.SIGKILL)

    def _died(self, rank: _Rank, why: str) -> None:
        failure = Failure("rank_died", why, rank=rank.rank)
        if rank.die(failure) and not self._stopping:
            self._on_death(failure)


def _failures(call: asyncio.Future[Any]) -> tuple[Failure, ...]:
    error = call.exception()
    if error is None:
        return ()
    if isinstance(error, LiveweightsError):
        return error.failures
    raise error


def _forget(call: asyncio.Future[Any]) -> None:
    """Nobody waits for this answer; looking at it keeps asyncio quiet."""
    if not call.cancelled():
        call.exception()
