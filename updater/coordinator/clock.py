"""Time as the coordinator sees it: injected, so that leases and back-offs can be tested without waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None:
        """Never fire. Harmless after it fired."""


class Clock(Protocol):
    """`now` is monotonic seconds from an arbitrary start; `wall` is Unix seconds, for people only."""

    def now(self) -> float: ...

    def wall(self) -> float: ...

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Run `call` once, on the loop, `seconds` from now."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's own time."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, call)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


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
