"""The gate in front of an engine: who may start, who waits, and which version made which token.

`close` and `open` are called by the front as its replica table says; requests go through `admit`. The gate never
guesses a version: labels of tokens come from the rank that made them, the label of the gate from the front (I3).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.replica.replies import ReplyPiece, RunningReply, Wanted
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected, Unavailable
from updater.core.policy import InFlight


class AdmissionController(ABC):
    """Who may start, who waits, and which version made which token. Lives on one event loop; starts shut.

    `close` and `open` come as the replica table says; labels of tokens come from the engine (I3). `mixed`: tokens
    refused because they would have mixed versions: must stay 0. `stale`: whether new requests find cached blocks of
    before the last switch (`cache=keep`).
    """

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits or Limits()
        self._queue = WaitQueue(self._limits)
        self._changed = asyncio.Event()  # fewer requests are left
        self.mixed = 0
        self.stale = False

    @property
    def version(self) -> str:
        """Label of what is served."""
        return self._queue.version

    @property
    def is_open(self) -> bool:
        return self._queue.is_open

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    @abstractmethod
    def in_flight(self) -> int: ...

    @abstractmethod
    def close(self, mode: InFlight, pending: str) -> tuple[int, int]:
        """Shut. `pending`: label that may be published next. Returns how many requests were aborted and requeued."""

    async def quiesce(self, mode: InFlight, deadline_s: float) -> None:
        """Until the engine holds no request that the mode does not keep. Raises Aborted (`quiesce_timeout`)."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._left(mode):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            message = f"{self._left(mode)} requests still ran after {deadline_s:.1f} s of {mode.value}"
            raise Aborted(Failure("quiesce_timeout", message), live_version=self.version or None) from None

    @abstractmethod
    def _left(self, mode: InFlight) -> int:
        """Requests that have to leave the engine before it is quiet."""

    @abstractmethod
    def before_switch(self, version: str) -> None:
        """The engine is about to run on `version`: end what asked for exactly another one."""

    @abstractmethod
    def open(self, version: str) -> None:
        """Serve `version`: those that wait come in."""

    @abstractmethod
    def break_down(self, failure: Failure) -> None:
        """The engine is gone or in doubt: all requests are told, none is let in any more."""

    def mend(self) -> None:
        """An audit found the replica in order again; shut until `open`."""
        self._queue.mend()


class RequestEngine(Protocol):
    """What the gate needs of the ranks. Both have sent when they return: the caller's order is the rank's."""

    def submit(self, request: GenerateRequest) -> asyncio.Future[Any]:
        """Done when the engine has taken the request; else it raises LiveweightsError and no event will come."""

    def cancel(self, request_id: str) -> None:
        """No caller waits for an answer: the end of the request comes as a token event."""


class Gate(AdmissionController):
    """Admission of one replica. Lives on one event loop; starts shut."""

    def __init__(self, engine: RequestEngine, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._engine = engine
        self._running: dict[str, RunningReply] = {}  # by engine id
        self._ending: set[str] = set()  # cancelled by us, not yet let go of by the engine
        self._parked: list[RunningReply] = []
        self._ids = itertools.count(1)

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._parked)

    def next_id(self) -> str:
        return f"r{next(self._ids)}"

    async def admit(self, request: GenerateRequest, wanted: Wanted) -> RunningReply:
        """Start the request now or when the gate opens.

        Raises Unavailable (`shut`, `queue_full`) or Rejected (`version_not_served`, retryable), nothing started.
        """
        await self._queue.enter(wanted)
        running = RunningReply(request, wanted, self.version)
        taken = self._submit(running, request)
        try:
            async with asyncio.timeout(self._limits.submit_s):
                await asyncio.shield(taken)
        except TimeoutError:
            self.give_up(running)
            raise Unavailable(Failure("phase_timeout", "the engine did not take the request", rank=0)) from None
        except LiveweightsError:
            self._drop(request.request_id)
            raise
        except asyncio.CancelledError:
            self.give_up(running)
            raise
        return running

    def _submit(self, running: RunningReply, request: GenerateRequest) -> asyncio.Future[Any]:
        """Sent when this returns. A refusal frees the id: no event of it will come."""

        def settled(done: asyncio.Future[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is None:
                return
            self._ending.discard(request.request_id)
            self._drop(request.request_id)
            failure = error.failures[0] if isinstance(error, LiveweightsError) else Failure("internal", str(error))
            running.hand_out(ReplyPiece((), "error", failure))

        if not running.spans:
            running.stale = self.stale
        self._running[request.request_id] = running
        taken = self._engine.submit(request)
        taken.add_done_callback(settled)
        return taken

    def give_up(self, running: RunningReply) -> None:
        """Its client is gone, or it may not go on: it ends here, and soon at the engine."""
        running.hand_out(ReplyPiece((), "abort"))
        if running in self._parked:
            self._parked.remove(running)
        if self._running.pop(running.engine_id, None) is not None:
            self._ending.add(running.engine_id)
            self._engine.cancel(running.engine_id)
        self._changed.set()

    def on_tokens(self, event: TokenEvent) -> None:
        """What rank 0 made."""
        running = self._running.get(event.request_id)
        if running is None:
            if event.finish_reason is not None:
                self._ending.discard(event.request_id)
                self._changed.set()
            return
        if not running.spans:
            running.cached_tokens = event.cached_tokens
        if not running.take(event.tokens, event.version):
            self.mixed += len(event.tokens)
            self._mixed(running, event)
        elif event.finish_reason is None:
            running.hand_out(ReplyPiece(event.tokens))
        else:
            self._finished(running, event)

    def _mixed(self, running: RunningReply, event: TokenEvent) -> None:
        """Never answered as if nothing were wrong: the reply ends before the token that does not belong."""
        message = f"a token of {event.version!r} in a reply of {running.version!r}"
        running.hand_out(ReplyPiece((), "error", Failure("internal", message)))
        self._drop(running.engine_id)
        if event.finish_reason is None:
            self._ending.add(event.request_id)
            self._engine.cancel(event.request_id)

    def _finished(self, running: RunningReply, event: TokenEvent) -> None:
        self._drop(running.engine_id)
        if running.requeue and event.finish_reason == "abort":
            if event.tokens:
                running.hand_out(ReplyPiece(event.tokens))
            self._go_on(running)
            return
        failure = Failure("rank_failed", event.error or "the engine failed", rank=0)
        broken = event.finish_reason == "error"
        running.hand_out(ReplyPiece(event.tokens, event.finish_reason, failure if broken else None))

    def _go_on(self, running: RunningReply) -> None:
        """The engine has let go of a request that recompute stopped: it waits for the gate, or goes on at once."""
        running.requeue = False
        if len(running.tokens) >= running.request.max_tokens:
            running.hand_out(ReplyPiece((), "length"))
        elif not self._queue.is_open:
            self._parked.append(running)
        elif not running.wanted.accepts(self.version):
            running.ended_by_update = True
            running.hand_out(ReplyPiece((), "abort"))
        else:
            if not running.spans:
                running.version = self.version
            self._submit(running, running.continuation())

    def _drop(self, engine_id: str) -> None:
        self._running.pop(engine_id, None)
        self._changed.set()

    def close(self, mode: InFlight, pending: str) -> tuple[int, int]:
        self._queue.close(pending)
        if mode is InFlight.KEEP:
            for running in self._running.values():
                running.next_version = pending
        if mode in (InFlight.DRAIN, InFlight.KEEP):
            return (0, 0)
        for running in self._running.values():
            running.requeue = mode is InFlight.RECOMPUTE
            running.ended_by_update = not running.requeue
            if running.requeue:
                running.next_version = pending
            self._engine.cancel(running.engine_id)
        count = len(self._running)
        return (0, count) if mode is InFlight.RECOMPUTE else (count, 0)

    def _left(self, mode: InFlight) -> int:
        return len(self._ending) + (0 if mode is InFlight.KEEP else len(self._running))

    def before_switch(self, version: str) -> None:
        for running in [*self._running.values(), *self._parked]:
            if not running.wanted.accepts(version):
                running.ended_by_update = True
                self.give_up(running)

    def open(self, version: str) -> None:
        """Serve `version`. Requests that recompute stopped go on, then those that wait come in."""
        if not self._queue.open(version):
            return
        self.before_switch(version)
        for running in self._running.values():
            if running.next_version != version:
                running.next_version = None
        parked, self._parked = self._parked, []
        for running in parked:
            if running.next_version != version:
                running.next_version = None
            self._go_on(running)
        self._queue.wake()

    def break_down(self, failure: Failure) -> None:
        """What still runs at the engine is told to end, and `quiesce` waits for it: a replica that is mended does not
        go on with it.
        """
        self._queue.break_down(failure)
        running_here, self._running = self._running, {}
        for running in [*running_here.values(), *self._parked]:
            running.hand_out(ReplyPiece((), "error", failure))
        self._parked.clear()
        for engine_id in running_here:
            self._ending.add(engine_id)
            self._engine.cancel(engine_id)
        self._changed.set()
        self._queue.wake()


@dataclass(frozen=True, slots=True)
class Limits:
    """`wait_s`: how long a request may wait at a shut gate before its 503. `submit_s`: until the engine took it."""

    max_waiting: int = 256
    wait_s: float = 30.0
    submit_s: float = 30.0


class WaitQueue:
    """Lives on one event loop; starts shut. `version`: label of what is served while it is open."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiters: list[asyncio.Future[None]] = []
        self._pending = ""  # label of the update that has shut it, while that may still be published
        self._broken: Failure | None = None
        self.is_open = False
        self.version = ""

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def enter(self, wanted: Wanted) -> None:
        """Returns when a request may start; the caller starts it before it awaits anything.

        Raises Unavailable (`shut`, `queue_full`) or Rejected (`version_not_served`, retryable).
        """
        end = time.monotonic() + self._limits.wait_s
        queued = False
        while not self._may_start(wanted):
            await self._wait(end, queued)
            queued = True

    def _may_start(self, wanted: Wanted) -> bool:
        """False: wait. Raises what no waiting can mend."""
        if self._broken is not None:
            text = f"the replica is out of service: {self._broken.message}"
            raise Unavailable(Failure("shut", text, hint=self._broken.hint), self._broken)
        if self.is_open and wanted.accepts(self.version):
            return True
        coming = "" if self.is_open else self._pending
        if wanted.particular and not (coming and wanted.accepts(coming)):
            raise Rejected(
                Failure("version_not_served", f"serving {self.version or 'nothing yet'}, coming {coming or 'nothing'}"),
                live_version=self.version or None,
            )
        return False

    async def _wait(self, end: float, queued: bool) -> None:
        """`queued`: it was woken and has to wait on; its place is not given to a newcomer."""
        if not queued and len(self._waiters) >= self._limits.max_waiting:
            raise Unavailable(Failure("queue_full", f"{self._limits.max_waiting} requests wait already"))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await waiter
        except TimeoutError:
            message = f"still shut after {self._limits.wait_s:.1f} s"
            raise Unavailable(Failure("shut", message), live_version=self.version or None) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """Requests that wait look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self, pending: str) -> None:
        """Shut; those that no longer fit what is coming are refused now."""
        self.is_open = False
        self._pending = pending
        self.wake()

    def open(self, version: str) -> bool:
        """Serve `version`, unless it is broken. No request comes in before `wake`."""
        if self._broken is not None:
            return False
        self.version, self._pending, self.is_open = version, "", True
        return True

    def break_down(self, failure: Failure) -> None:
        """Out of service: requests that wait are told by `wake`."""
        self.is_open = False
        self._broken = failure

    def mend(self) -> None:
        """In order again, and shut until `open`."""
        self._broken = None
