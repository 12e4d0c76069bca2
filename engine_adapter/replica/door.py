"""The door of a replica: open or shut, on which version, and who waits before it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from engine_adapter.replica.replies import Wanted
from updater.core.errors import Failure, Rejected, Unavailable


@dataclass(frozen=True, slots=True)
class Limits:
    """`wait_s`: how long a request may wait at a shut gate before its 503. `submit_s`: until the engine took it."""

    max_waiting: int = 256
    wait_s: float = 30.0
    submit_s: float = 30.0


class Door:
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
