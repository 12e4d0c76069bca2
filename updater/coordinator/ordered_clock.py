"""Time stamps that never go back, whatever the machine's clock does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from updater.coordinator.clock import Clock, Timer

_log = logging.getLogger("liveweights.coordinator")


class OrderedClock:
    """A clock whose `stamp` is for what history keeps: no stamp lies before an earlier one, also of a former life.

    `wall` is the machine's, for what is compared with the times of files.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._newest = clock, 0.0

    def begin_after(self, newest: float) -> None:
        """`newest`: the last stamp in the journal, Unix seconds."""
        behind = newest - self._clock.wall()
        if behind > 0:
            _log.warning(
                "this machine's clock is %.1f s behind the newest entry of the journal: until it has caught up,"
                " what is recorded has the time of that entry. Set the clock right",
                behind,
            )
        self._newest = max(self._newest, newest)

    def stamp(self) -> float:
        self._newest = max(self._newest, self._clock.wall())
        return self._newest

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        return self._clock.call_later(seconds, call)

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
