"""What watchers of an update are told, when, and what is kept for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from updater.coordinator.watching import SHUT_PHASES, WATCH_LIMIT, EventLog
from updater.core.fleet.state import Phase
from updater.testing.fronts import settle
from updater.testing.service import LocalService


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


class Watcher:
    """Reads a log to its end. `heard`: names of events."""

    def __init__(self, log: EventLog) -> None:
        self.heard: list[str] = []
        self._log, self._position = log, log.join()
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._log.after(self._position, 60.0):
            assert event is not None
            self.heard.append(event.name)
        self._log.leave()


@pytest.mark.case("F52")
def test_nothing_is_told_between_pause_and_reopening_and_all_phases_afterwards() -> None:
    async def main() -> None:
        log = EventLog()
        watchers = [Watcher(log) for _ in range(20)]
        log.tell("before", {})  # woken, but they run only when the pause has begun
        log.enter(Phase.PAUSING)
        for number, phase in enumerate(sorted(SHUT_PHASES)):
            log.enter(phase)
            log.tell(f"phase {number}", {})
            log.tell("progress", {})
            await settle()
        assert [watcher.heard for watcher in watchers] == [[]] * 20
        log.enter(Phase.DISCARDING)
        log.end()
        await asyncio.gather(*(watcher.reading for watcher in watchers))
        phases = ["before", *(f"phase {number}" for number in range(len(SHUT_PHASES)))]
        assert [watcher.heard for watcher in watchers] == [phases] * 20
        assert log.watchers == 0

    run(main())


@pytest.mark.case("F52")
def test_a_watcher_costs_no_memory_and_is_cut_off_when_it_fell_behind() -> None:
    async def main() -> None:
        log = EventLog()
        log.tell("progress", {})
        slow, quick = log.join(), Watcher(log)
        for _ in range(WATCH_LIMIT):
            log.tell("progress", {})
            await asyncio.sleep(0)
        assert log.kept == WATCH_LIMIT
        assert len([event async for event in _until(log, slow, WATCH_LIMIT)]) == WATCH_LIMIT
        log.tell("progress", {})
        log.end()
        assert log.kept == WATCH_LIMIT
        assert [event async for event in log.after(slow, 60.0)] == []
        await quick.reading
        assert len(quick.heard) == WATCH_LIMIT + 1

    run(main())


async def _until(log: EventLog, position: int, count: int) -> Any:
    reading = log.after(position, 60.0)
    for _ in range(count):
        yield await anext(reading)


def test_a_quiet_time_is_told_as_such() -> None:
    async def main() -> None:
        log = EventLog()
        heard = 0
        async for event in log.after(log.join(), 0.0):
            assert event is None
            heard += 1
            if heard == 2:
                log.end()
        assert heard == 2

    run(main())


@pytest.mark.case("F52")
def test_an_event_is_made_into_text_once_and_not_within_the_pause(tmp_path: Path) -> None:
    """Of a whole coordinator: what its watchers have heard when the last front is asked to resume."""

    async def main() -> None:
        async with LocalService(tmp_path) as service:
            front, other = await service.join("one", "two")
            front.hold["stage"] = asyncio.Event()
            await service.begin(7)
            log = service.coordinator.updates.find("0-7").events
            watchers = [Watcher(log) for _ in range(3)]
            front.hold["resume"] = asyncio.Event()
            front.hold.pop("stage").set()
            await settle()
            assert front.asked("resume") == other.asked("resume") == 1
            within = [list(watcher.heard) for watcher in watchers]
            assert all("receipt" not in heard for heard in within)
            assert [heard.count("phase") for heard in within] == [1, 1, 1]  # verifying
            front.hold.pop("resume").set()
            await asyncio.gather(*(watcher.reading for watcher in watchers))
            assert [watcher.heard.count("phase") for watcher in watchers] == [7, 7, 7]
            assert [watcher.heard[-1] for watcher in watchers] == ["receipt"] * 3

    run(main())
