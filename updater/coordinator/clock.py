"""Time as the coordinator sees it: injected, so that leases and back-offs can be tested without waiting."""

from __future__ import annotations

import asyncio
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
