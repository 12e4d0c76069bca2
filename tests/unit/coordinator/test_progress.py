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
            events = service.coordinator.updates.find("0-7").events
            position = events.join()
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] is None
            one.progress, two.progress = (Progress(begun["serial"], done, 100) for done in (30, 45))
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] == {"done": 75, "total": 200}
            two.progress = Progress(begun["serial"] + 1, 99, 100)  # of another update: not counted
            await service.advance(EVERY_S)
            assert (await service.get("/v1/updates/0-7")).json()["progress"] == {"done": 30, "total": 100}
            one.hold.pop("stage").set()
            two.hold.pop("stage")
            await settle()
            state = (await service.get("/v1/updates/0-7")).json()
            assert (state["receipt"]["outcome"], state["progress"]) == ("committed", None)
            await service.advance(5 * EVERY_S)
            told = [event async for event in events.after(position, 9.0) if event is not None]
            assert [event.data for event in told if event.name == "progress" and "replica" not in event.text] == [
                {"phase": "staging", "done": 75, "total": 200},
                {"phase": "staging", "done": 30, "total": 100},
            ]

    async def bounded() -> None:
        await asyncio.wait_for(main(), 120)

    asyncio.run(bounded())
