"""The gate in front of an engine that labels tokens by itself: an adapter sends every call of the engine through it.

A call waits until its replica serves a version that it accepts; what the engine then says of versions is noted in the
reply that the call belongs to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from engine_adapter.hosted.call import EngineCall
from engine_adapter.hosted.replies import CallPart, EngineOutput, Reply, current_reply
from engine_adapter.replica.admission import AdmissionController, Limits
from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.core.policy import CachePolicy, InFlight

#: So many versions and namespaces are remembered: a reply that more updates went through is old enough to be asked for
#: again, and only what was served last, or just before, can be served again under its name.
_REMEMBERED = 64
#: Begins the call at the engine.
Begin = Callable[[], AsyncGenerator[Any, None]]


@dataclass(slots=True, eq=False)
class _Ticket:
    """One call that the engine works on."""

    request_id: str
    reply: Reply
    version: str  # at dispatch
    call: EngineCall | None = None
    spans: bool = False  # whether it may go through a switch of versions
    ending: bool = False  # the engine was told to end it
    for_update: bool = False  # by an update


class HostedGate(AdmissionController):
    """`abort`: ends a request at the engine; what it made so far is answered. `read`: what one output says."""

    def __init__(
        self,
        abort: Callable[[str], Awaitable[None]],
        read: Callable[[Any], EngineOutput],
        limits: Limits | None = None,
    ) -> None:
        super().__init__(limits)
        self._abort, self._read = abort, read
        self._running: set[_Ticket] = set()
        self._aborting: set[asyncio.Future[None]] = set()
        self._namespaces = Namespaces()
        self._label = ""  # of what the engine computes with
        self._goes_on = False  # whether requests live through the switch that is under way
        self._open_to: tuple[str, ...] = ()  # versions whose unfinished replies may go on under this one

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def namespace(self) -> str:
        """Goes into the key of every block that new requests cache."""
        return self._namespaces.current

    # --- calls of the engine's routes

    def gated(self, request_id: str, sequences: int, begin: Begin) -> AsyncGenerator[Any, None]:
        """The engine's outputs of one call, which begins once it is let in. `sequences`: so many it asks for."""
        reply = current_reply.get() or Reply()
        return self._run(request_id, reply, reply.part(request_id, sequences), begin)

    async def _run(self, request_id: str, reply: Reply, part: CallPart, begin: Begin) -> AsyncGenerator[Any, None]:
        try:
            await self._queue.enter(reply.wanted)
            self._check_whole(reply)
            generation = begin()
        except LiveweightsError as error:
            reply.failure = error
            raise
        part.stale = self.stale
        ticket = _Ticket(request_id, reply, self.version)
        ticket.call = EngineCall(generation, partial(self._note, ticket, part), partial(self._over, ticket))
        self._running.add(ticket)
        async with aclosing(ticket.call.read()) as outputs:
            async for output in outputs:
                yield output

    def _check_whole(self, reply: Reply) -> None:
        """A reply of several calls (prompts, steps of a beam search) is of one version, as a reply of one call is.

        Raises Unavailable (`aborted_by_update`).
        """
        reply.version = reply.version or self.version
        if reply.version != self.version and (reply.is_beam_search or reply.version not in self._open_to):
            message = f"a reply that {reply.version} began would go on with {self.version}"
            raise Unavailable(Failure("aborted_by_update", message), live_version=self.version)

    def _over(self, ticket: _Ticket) -> None:
        self._running.discard(ticket)
        self._changed.set()

    def _note(self, ticket: _Ticket, part: CallPart, said: Any) -> None:
        """Raises Unavailable for what must not be answered as if nothing were wrong: a reply that mixes versions
        without leave, and one without anything in it.
        """
        output = self._read(said)
        part.take(output, ticket.version)
        if not output.finished:
            if ticket.ending:
                self._end(ticket)  # it was told before the engine knew the request
            return
        if not ticket.spans and part.versions - {ticket.version}:
            self.mixed += 1
            self._fail(ticket, "internal", f"tokens of {sorted(part.versions)} in a reply of {ticket.version!r}")
        if output.sequences is not None:
            ticket.reply.ended_by_update |= ticket.for_update and output.aborted
        elif ticket.for_update and output.empty:
            self._fail(ticket, "aborted_by_update", "an update ended it")
        elif self._label and ticket.version != self._label:
            self._fail(ticket, "aborted_by_update", f"{ticket.version} or {self._label} may have computed it")

    def _fail(self, ticket: _Ticket, code: str, message: str) -> None:
        ticket.reply.failure = Unavailable(Failure(code, message), live_version=self.version or None)
        raise ticket.reply.failure

    # --- the front

    def close(self, mode: InFlight, pending: str) -> tuple[int, int]:
        self._queue.close(pending)
        self._goes_on = mode in (InFlight.KEEP, InFlight.RECOMPUTE)
        for ticket in self._running:
            if self._goes_on:
                ticket.spans = True
            elif ticket.call is not None:
                ticket.call.detach()  # whether the engine has ended it must not depend on who reads the reply
        if mode is InFlight.ABORT:
            for ticket in self._running:
                self._end_for_update(ticket)
        running = len(self._running)
        return (running if mode is InFlight.ABORT else 0, running if mode is InFlight.RECOMPUTE else 0)

    def _left(self, mode: InFlight) -> int:
        return 0 if mode in (InFlight.KEEP, InFlight.RECOMPUTE) else len(self._running)

    def before_switch(self, version: str) -> None:
        for ticket in self._running:
            if not ticket.reply.wanted.accepts(version):
                self._end_for_update(ticket)

    def relabelled(self, version: str, digest: str, cache: CachePolicy) -> None:
        """Where bytes and labels change: so does the namespace of new blocks, unless the policy keeps it."""
        self._label = version
        keep = cache is CachePolicy.KEEP
        self._namespaces.switch(f"{version}:{digest}", keep=keep, shared=self._goes_on)
        self.stale = keep

    def open(self, version: str) -> None:
        before = self.version
        if self._queue.open(version):
            if version != before:
                self._open_to = (*self._open_to, before)[-_REMEMBERED:] if self._goes_on else ()
            self._goes_on = False
            self.before_switch(version)
            self._queue.wake()

    def break_down(self, failure: Failure) -> None:
        self._queue.break_down(failure)
        for ticket in self._running:
            ticket.reply.failure = Unavailable(failure)
            self._end(ticket)
        self._queue.wake()

    def _end_for_update(self, ticket: _Ticket) -> None:
        ticket.for_update = True
        self._end(ticket)

    def _end(self, ticket: _Ticket) -> None:
        """It is over at the engine soon, with what it has made until then."""
        ticket.ending = True
        task = asyncio.ensure_future(self._abort(ticket.request_id))
        self._aborting.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._aborting.discard(task)
        if not task.cancelled():
            task.exception()  # an engine that is gone has ended the request, too


class Namespaces:
    """`current`: of new requests; empty until something is served."""

    def __init__(self) -> None:
        self.current = ""
        self._mixed: deque[str] = deque(maxlen=_REMEMBERED)

    def switch(self, name: str, *, keep: bool, shared: bool) -> None:
        """Another version, or the same one again, is about to be served. `name`: of its blocks, equal on every replica.

        `keep`: its requests go on in the namespace of what was served before. `shared`: requests that were in flight
        do. Either leaves blocks there that the version of that name did not make, so it is never entered again.
        """
        if self.current and (keep or shared):
            self._mixed.append(self.current)
        if not keep:
            self.current = f"{name}:{uuid4().hex}" if name in self._mixed else name
