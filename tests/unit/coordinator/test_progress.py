"""How far a staging is, as clients see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from updater.coordinator.members.directory import EVERY_S
from updater.core.participant import Progress
from updater.testing.fronts import settle
from updater.testing.service import LocalService


def test_a_long_staging_is_shown_and_a_status_without_one_says_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path) as service:
            one, two = await service.join("one", "two")
            one.hold["stage"] = two.hold["stage"] = asyncio.Event()
            begun = (await service.begin(7)).json()
            assert (begun["progress"], begun["serial"] > 0) == (None, True)
            told: asyncio.Queue[tuple[str, dict[str, object]] | None] = asyncio.Queue()
            service.coordinator.updates.find("0-7").watchers.add(told)
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] is None
            one.progress, two.progress = (Progress(begun["serial"], done, 100) for done in (30, 45))
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] == {"done": 75, "total": 200}
            two.progress = Progress(begun["serial"] + 1, 99, 100)  # of another update: not counted
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] == {"done": 30, "total": 100}
            said = [told.get_nowait() for _ in range(told.qsize())]
            assert said == [
                ("progress", {"phase": "staging", "done": 75, "total": 200}),
                ("progress", {"phase": "staging", "done": 30, "total": 100}),
            ]
            one.hold.pop("stage").set()
            two.hold.pop("stage")
            await settle()
            state = (await service.get("/v1/updates/0-7")).json()
            assert (state["receipt"]["outcome"], state["progress"]) == ("committed", None)
            await service.advance(5 * EVERY_S)
            assert [item for item in iter_all(told) if item and item[0] == "progress" and "done" in item[1]] == []

    async def bounded() -> None:
        await asyncio.wait_for(main(), 120)

    asyncio.run(bounded())


def iter_all(queue: asyncio.Queue[tuple[str, dict[str, object]] | None]) -> list[tuple[str, dict[str, object]] | None]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
