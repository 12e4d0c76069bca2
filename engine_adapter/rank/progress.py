"""How far a rank's staging is, told now and then: often enough for a person, too seldom to cost anything."""

from __future__ import annotations

from collections.abc import Callable

#: Seconds between two words.
EVERY_S = 0.25


class Meter:
    """Called with increments of bytes, one call at a time. `tell` hears the sum."""

    def __init__(self, tell: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._done, self._last = 0, clock()

    def __call__(self, count: int) -> None:
        self._done += count
        now = self._clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._tell(self._done)
