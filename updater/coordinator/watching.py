"""What the clients of `/v1/updates/{id}/events` are shown of one update, and when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from updater.core.fleet.state import Phase
from updater.protocol.events import event_text

#: Events of one update that are kept: what a watcher may fall behind before it is cut off.
WATCH_LIMIT = 1000
#: Fronts are shut in these phases, or about to be: the time of the others is the clients' too.
SHUT_PHASES = frozenset(
    {
        Phase.PAUSING,
        Phase.DECIDING,
        Phase.INSTALLING,
        Phase.INVALIDATING,
        Phase.PUBLISHING,
        Phase.RESUMING,
        Phase.RESTORING,
        Phase.REOPENING,
    }
)


@dataclass(frozen=True)
class WatchedEvent:
    """`data`: made into text when the first watcher reads it, and only once."""

    name: str
    data: BaseModel | Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """As it stands in an event stream."""
        data = self.data.model_dump(mode="json") if isinstance(self.data, BaseModel) else self.data
        return event_text(data, self.name)


class EventLog:
    """The events of one update, kept once for any number of watchers: the last `WATCH_LIMIT`.

    In `SHUT_PHASES` no watcher is woken and no progress is kept: however many watch, a pause costs the same. What was
    told meanwhile (phases) is read when the fronts are open again. Lives on one event loop.
    """

    def __init__(self) -> None:
        self.watchers = 0
        self._events: deque[WatchedEvent] = deque(maxlen=WATCH_LIMIT)
        self._told = 0  # events so far; the newest is `_events[-1]`
        self._held = self._ended = False
        self._news = asyncio.Event()

    @property
    def kept(self) -> int:
        """Events in memory."""
        return len(self._events)

    def join(self) -> int:
        """One watcher more, who is to call `leave`. Returns where its reading begins."""
        self.watchers += 1
        return self._told

    def leave(self) -> None:
        self.watchers -= 1

    def tell(self, name: str, data: BaseModel | Mapping[str, Any]) -> None:
        """Nothing is kept if no client watches."""
        if not self.watchers or (self._held and name == "progress"):
            return
        self._events.append(WatchedEvent(name, data))
        self._told += 1
        self._wake()

    def enter(self, phase: Phase) -> None:
        """The update is in `phase` from now on."""
        self._held = phase in SHUT_PHASES
        self._wake()

    def end(self) -> None:
        """Nothing more will be told: watchers read what there is, and end."""
        self._ended, self._held = True, False
        self._wake()

    def _wake(self) -> None:
        if not self._held:
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def after(self, position: int, quiet_s: float) -> AsyncIterator[WatchedEvent | None]:
        """What was told since `position`, until the end, or until more was told than is kept. None: `quiet_s` went by
        without an event.
        """
        while True:
            behind = self._told - position
            if self._held or not behind:
                if self._ended:
                    return
                try:
                    await asyncio.wait_for(self._news.wait(), quiet_s)
                except TimeoutError:
                    yield None
            elif behind > len(self._events):
                return
            else:
                yield self._events[-behind]
                position += 1
