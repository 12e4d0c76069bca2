"""How far a staging is: the members are asked while it runs, so that a long one can be watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from updater.coordinator.clock import Clock
from updater.coordinator.membership import Directory

#: Seconds between two rounds. A staging that is shorter is never asked about.
EVERY_S = 0.5


class ProgressPoll:
    """`replicas`: who takes part. `tell(serial, done, total)` hears the sums over them.

    Nothing is decided here, and a member that does not answer is not counted as missing: that is the probe's business.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        status_s: float,
        replicas: Callable[[], Iterable[str]],
        tell: Callable[[int, int, int], None],
    ) -> None:
        self._directory, self._clock, self._status_s = directory, clock, status_s
        self._replicas, self._tell = replicas, tell
        self._task: asyncio.Task[None] | None = None

    def begin(self, serial: int) -> None:
        self.end()
        self._task = asyncio.get_running_loop().create_task(self._run(serial))

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, serial: int) -> None:
        while True:
            await self._clock.sleep(EVERY_S)
            reached = [self._directory.participant(replica) for replica in self._replicas()]
            asked = [self._directory.ask(each, self._status_s) for each in reached if each is not None]
            said = [answer.progress for answer in await asyncio.gather(*asked) if answer is not None]
            mine = [each for each in said if each is not None and each.serial == serial]
            if mine:
                self._tell(serial, sum(each.done for each in mine), sum(each.total for each in mine))
