"""The coordinator end to end over its HTTP face, with simulated fronts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from updater.testing_fronts import digest_of
from updater.testing_service import LocalService

Scenario = Callable[[LocalService], Awaitable[None]]


def run(folder: Path, scenario: Scenario, **settings: object) -> None:
    async def main() -> None:
        async with LocalService(folder, **settings) as service:  # type: ignore[arg-type]
            await scenario(service)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_path_and_a_version_are_enough(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        assert (await service.get("/readyz")).status_code == 503
        one, two = await service.join("one", "two")
        assert (one.serving, two.serving) == ("start", "start")
        assert (await service.get("/readyz")).status_code == 200
        answer = await service.push(7)
        assert answer.status_code == 200, answer.text
        receipt = answer.json()
        assert (receipt["id"], receipt["kind"], receipt["outcome"]) == ("0-7", "update", "committed")
        assert (receipt["version"], receipt["live_version"], receipt["rollback_to"]) == ("0-7", "0-7", "start")
        assert receipt["observed"] == {"one": digest_of("v7"), "two": digest_of("v7")}
        assert receipt["proof"] == "structure_only"
        assert receipt["bytes_read"] == 4
        assert [(member["replica"], member["state"], member["live_version"]) for member in receipt["members"]] == [
            ("one", "open", "0-7"),
            ("two", "open", "0-7"),
        ]
        assert (one.serving, two.serving) == ("0-7", "0-7")
        version = (await service.get("/v1/version")).json()
        assert (version["version"], version["digest"]) == ("0-7", digest_of("v7"))

    run(tmp_path, scenario)
