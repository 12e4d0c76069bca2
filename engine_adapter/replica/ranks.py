"""The ranks of one replica, as the front sees them: call all of them over one channel each; start, watch and stop those
that are processes of its own.

A verb goes to all ranks at once; what each answers, refuses or leaves undone by its death comes back as one result.
A process's death is learned from the kernel (`waitpid`), never from a collective that hangs (hazard 15).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.rank.channel import (
    CALLS,
    ENGINE_FAILED,
    Build,
    BytesStaged,
    CancelRequest,
    CancelStaging,
    ChannelClosed,
    ChannelError,
    Frame,
    FrameKind,
    FrontChannel,
    StopEngine,
)
from engine_adapter.rank.messages import RankHello, RankRefused
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol import wire

#: Verbs that a rank can be told to give up.
_CANCELLABLE = frozenset({"plan", "stage", "verify", "check_previous"})
#: How long the other ranks may take to notice that a staging verb was cancelled.
_CANCEL_GRACE_S = 10.0


class RankLine:
    """One rank's channel and its open calls."""

    def __init__(self, rank: int, channel: FrontChannel) -> None:
        self.rank = rank
        self.channel = channel
        self.death: Failure | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def call(self, number: int, verb: str, request: Any) -> asyncio.Future[Any]:
        """The reply comes as the future's result; a refusal or a death as Aborted."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.death is not None:
            future.set_exception(Aborted(self.death))
            return future
        self._calls[number] = future
        try:
            self.channel.send(Frame.of(FrameKind.CALL, number, verb, request))
        except ChannelClosed:
            pass  # the death that follows fails the future
        except ChannelError as error:
            del self._calls[number]
            future.set_exception(Aborted(Failure("body_too_large", str(error), rank=self.rank)))
        return future

    def answered(self, frame: Frame) -> None:
        future = self._calls.pop(frame.header.id, None)
        if future is None or future.done():
            return  # its caller stopped waiting
        try:
            if frame.header.kind is FrameKind.REFUSED:
                refused = wire.decode(RankRefused, frame.body)
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
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(Aborted(failure))
        return True


class RankCalls:
    """All ranks of one replica, whatever started them. `lines`, `hellos`: in rank order, once all are there.

    `on_tokens`, `on_staged`: what ranks say unasked; `on_death`: of a rank that died before `stopping` was set. Lives
    on one event loop.
    """

    def __init__(
        self,
        *,
        on_tokens: Callable[[TokenEvent], None] = lambda _event: None,
        on_staged: Callable[[int, BytesStaged], None] = lambda _rank, _staged: None,
        on_death: Callable[[Failure], None] = lambda _failure: None,
    ) -> None:
        self.lines: list[RankLine] = []
        self.hellos: tuple[RankHello, ...] = ()
        self.stopping = False
        self._on_tokens = on_tokens
        self._on_staged = on_staged
        self._on_death = on_death
        self._numbers = itertools.count(1)

    @property
    def death(self) -> Failure | None:
        """Of the first rank that died, if one did."""
        return next((line.death for line in self.lines if line.death is not None), None)

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        """The same request (or one per rank, as a list) to all ranks at once; the replies in rank order.

        Raises Aborted with every failure, in the order in which ranks reported them. After the first refusal the
        others are still awaited within the deadline, so that no rank is left in the middle of something; a death
        ends the wait at once, since the others may hang in a collective with it.
        """
        requests = request if isinstance(request, list) else [request] * len(self.lines)
        calls = [line.call(next(self._numbers), verb, one) for line, one in zip(self.lines, requests, strict=True)]
        try:
            failures = await self._gather(verb, requests, calls, deadline_s)
        finally:
            for call in calls:
                call.cancel()  # of those still open: no caller waits for them any more
        if failures:
            raise Aborted(*failures)
        return [call.result() for call in calls]

    async def build(self, factory: str, spec: EngineSpec, *, deadline_s: float) -> tuple[RankHello, ...]:
        """Every rank makes its engine and loads the model. `spec`: of rank 0. Raises Aborted."""
        builds = [Build(factory, replace(spec, rank=rank)) for rank in range(spec.size)]
        self.hellos = tuple(await RankCalls.call(self, "build", builds, deadline_s=deadline_s))
        return self.hellos

    def tell(self, line: RankLine, verb: str, request: Any) -> asyncio.Future[Any]:
        """To one rank alone. Sent when this returns; no deadline."""
        return line.call(next(self._numbers), verb, request)

    def tell_all(self, verb: str, request: Any) -> None:
        """To all, and no caller waits for the answers."""
        for line in self.lines:
            self.tell(line, verb, request).add_done_callback(forget)

    def cancel_staging(self, serial: int) -> None:
        """Tell every rank to give up what it stages for `serial`; the calls themselves then end as refused."""
        self.tell_all("cancel_staging", CancelStaging(serial))

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

    async def read(self, line: RankLine) -> str:
        """Hand out what the rank says until its channel ends; why it broke, or empty if it was closed."""
        try:
            while True:
                frame = await line.channel.receive()
                if frame.header.kind is not FrameKind.EVENT:
                    line.answered(frame)
                elif frame.header.verb == "tokens":
                    self._on_tokens(wire.decode(TokenEvent, frame.body))
                elif frame.header.verb == "staged":
                    self._on_staged(line.rank, wire.decode(BytesStaged, frame.body))
        except ChannelClosed:
            return ""
        except (ChannelError, wire.WireError) as error:
            return str(error)

    def died(self, line: RankLine, why: str) -> None:
        """Its open calls end; again: nothing."""
        failure = Failure("rank_died", why, rank=line.rank)
        if line.die(failure) and not self.stopping:
            self._on_death(failure)


def _failures(call: asyncio.Future[Any]) -> tuple[Failure, ...]:
    error = call.exception()
    if error is None:
        return ()
    if isinstance(error, LiveweightsError):
        return error.failures
    raise error


def forget(call: asyncio.Future[Any]) -> None:
    """No caller waits for this answer; looking at it keeps asyncio quiet."""
    if not call.cancelled():
        call.exception()


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
        on_staged: Callable[[int, BytesStaged], None] = lambda _rank, _staged: None,
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

    async def start(self) -> tuple[RankHello, ...]:
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

    def submit(self, request: GenerateRequest) -> asyncio.Future[Any]:
        """See `admission.RequestEngine`."""
        return self.tell_first("submit", request)

    def cancel(self, request_id: str) -> None:
        """See `admission.RequestEngine`."""
        self.tell_first("cancel_request", CancelRequest(request_id)).add_done_callback(forget)

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
