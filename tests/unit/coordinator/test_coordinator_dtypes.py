"""What a fleet says that it holds, and an update that was rounded by something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from updater.coordinator.members.models import dtypes_of
from updater.core.errors import Unavailable
from updater.testing.fronts import settle
from updater.testing.service import LocalService

pytestmark = pytest.mark.case("F26")
DTYPES = "/v1/fleet/dtypes"


def run(folder: Path, scenario: Callable[[LocalService], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LocalService(folder) as service:
            await scenario(service)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_update_says_what_it_was_rounded_by(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        assert (await service.get(DTYPES)).json()["code"] == "no_members"
        one, _ = await service.join("one", "two")
        said = (await service.get(DTYPES)).json()
        assert (said["dtypes"], said["replicas"]) == (dict(one.dtypes), ["one", "two"])
        done = await service.push(7, dtypes=said["fingerprint"])
        assert done.json()["outcome"] == "committed"
        other = await service.push(8, dtypes="0" * 64)
        assert (other.status_code, other.json()["code"], other.json()["retryable"]) == (409, "dtypes_changed", True)
        repeated = await service.push(7, dtypes=said["fingerprint"])
        assert repeated.json()["serial"] == done.json()["serial"]

    run(tmp_path, scenario)


def test_replicas_that_differ_are_named_and_one_that_joins_in_between_ends_the_update(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        said = (await service.get(DTYPES)).json()
        two = service.fleet.add("two", "start")
        two.dtypes = (("layers.#.w", "F16"), ("packed", ""))
        await service.post("/v1/fleet/replicas", {"replica": "two", "url": two.url})
        await settle()
        refused = await service.get(DTYPES)
        assert (refused.status_code, refused.json()["code"]) == (422, "tensor_dtype")
        assert [(each["replica"], each["tensor"]) for each in refused.json()["failures"]] == [("two", "layers.#.w")]
        late = await service.push(7, dtypes=said["fingerprint"])
        assert (late.json()["code"], late.json()["retryable"]) == ("dtypes_changed", True)

    run(tmp_path, scenario)


def test_who_has_not_said_it_yet_is_named() -> None:
    with pytest.raises(Unavailable) as caught:
        dtypes_of({"one": None})
    assert caught.value.code == "no_members"
