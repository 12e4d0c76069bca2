"""Delivery of the machine's messages: one at a time per replica, tried again until it is answered or superseded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from updater.coordinator.clock import Clock
from updater.coordinator.members.participants import Participant, Refusal, Unreachable
from updater.core.fleet.effects import Send
from updater.core.fleet.events import Event, Refused, Replied
from updater.core.participant import PauseRequest, StageRequest, VerifyRequest
from updater.settings import Deadlines

_log = logging.getLogger("liveweights.outbox")
SLACK_S = 5.0  # how much longer than the front's own deadline we listen


class Outbox:
    """`feed` takes what fronts answer; `unanswered(replica, refused)` hears of every try that was not answered."""

    def __init__(
        self,
        clock: Clock,
        deadlines: Deadlines,
        participant: Callable[[str], Participant | None],
        feed: Callable[[Event], None],
        unanswered: Callable[[str, bool], None],
    ) -> None:
        self._clock, self._deadlines = clock, deadlines
        self._participant, self._feed, self._unanswered = participant, feed, unanswered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dropped: set[asyncio.Task[None]] = set()

    def send(self, send: Send) -> None:
        """Deliver; whatever was on its way to the same replica is no longer tried."""
        self.forget(send.replica)
        self._tasks[send.replica] = asyncio.get_running_loop().create_task(self._deliver(send))

    def forget(self, replica: str) -> None:
        """Stop trying whatever is on its way to this replica."""
        task = self._tasks.pop(replica, None)
        if task is not None and not task.done():
            task.cancel()
            self._dropped.add(task)
            task.add_done_callback(self._dropped.discard)

    def drop(self) -> None:
        """Stop trying everything."""
        for replica in list(self._tasks):
            self.forget(replica)

    async def close(self) -> None:
        """Stop trying everything; on return no task is left."""
        self.drop()
        await asyncio.gather(*self._dropped, return_exceptions=True)

    async def _deliver(self, send: Send) -> None:
        delay = self._deadlines.retry_first_s
        while True:
            event = await self._try(send)
            if event is not None:
                # Feeding may send to the same replica again: this task is over by then and must not be cancelled.
                self._tasks.pop(send.replica, None)
                self._feed(event)
                return
            await self._clock.sleep(delay)
            delay = min(2 * delay, self._deadlines.retry_most_s)

    async def _try(self, send: Send) -> Event | None:
        participant = self._participant(send.replica)
        if participant is None:
            return None
        try:
            reply = await participant.call(send.verb, send.request, self._patience(send.verb, send.request))
        except Refusal as refusal:
            return Refused(send.replica, send.verb, send.fence, refusal.failures)
        except Unreachable as silence:
            self._unanswered(send.replica, silence.refused)
            return None
        except Exception as error:  # the fleet boundary: a fault of ours in one call is no answer, never a dead task
            _log.error("%s to %s: %s: %s", send.verb, send.replica, type(error).__name__, error)
            return None
        return Replied(send.replica, send.verb, send.fence, reply)

    def _patience(self, verb: str, request: Any) -> float:
        """Seconds that one try may take."""
        if isinstance(request, StageRequest | VerifyRequest):
            return request.deadline_s + SLACK_S
        if isinstance(request, PauseRequest):
            return request.quiesce_s + SLACK_S
        by_verb = {
            "plan": self._deadlines.plan_s,
            "join": self._deadlines.join_s,
            "install": self._deadlines.install_s,
            "invalidate": self._deadlines.invalidate_s,
            "restore": self._deadlines.restore_s,
            "resume": self._deadlines.resume_s,
        }
        return by_verb.get(verb, self._deadlines.discard_s)
