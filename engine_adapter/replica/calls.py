"""Calls from a front to all ranks of its replica, over one channel each, however the ranks were started.

A verb goes to all ranks at once; what each answers, refuses or leaves undone by its death comes back as one result.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine_adapter.base import EngineSpec, TokenEvent
from engine_adapter.rank.channel import ChannelClosed, ChannelError, Frame, FrameKind, FrontChannel
from engine_adapter.rank.control_messages import CALLS, Build, CancelStaging, Staged, Tokens
from engine_adapter.rank.messages import Hello, Refused
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
        on_staged: Callable[[int, Staged], None] = lambda _rank, _staged: None,
        on_death: Callable[[Failure], None] = lambda _failure: None,
    ) -> None:
        self.lines: list[RankLine] = []
        self.hellos: tuple[Hello, ...] = ()
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

    async def build(self, factory: str, spec: EngineSpec, *, deadline_s: float) -> tuple[Hello, ...]:
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
                    for event in wire.decode(Tokens, frame.body).events:
                        self._on_tokens(event)
                elif frame.header.verb == "staged":
                    self._on_staged(line.rank, wire.decode(Staged, frame.body))
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
