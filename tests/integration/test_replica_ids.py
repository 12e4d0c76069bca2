"""One id, two processes: who is the member, who may leave for it, and when a silent one is believed to be gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from updater.core.participant import FrontState
from updater.testing.fronts import SimulatedFront, settle
from updater.testing.service import LocalService

PROBE_S = 2.0  # of the default deadlines


def run(folder: Path, scenario: Callable[[LocalService], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LocalService(folder) as service:
            await scenario(service)

    asyncio.run(asyncio.wait_for(main(), 120))


async def ask(service: LocalService, front: SimulatedFront) -> tuple[int, str]:
    answer = await service.post("/v1/fleet/replicas", {"replica": front.replica, "url": front.url})
    await settle()
    return answer.status_code, answer.json().get("code", "")


async def leave(service: LocalService, front: SimulatedFront) -> httpx.Response:
    """As a front that stops says it."""
    incarnation = front.state.incarnation
    return await service.http.delete(f"/v1/fleet/replicas/{front.replica}?confirm_dead=true&incarnation={incarnation}")


def test_only_the_process_that_is_the_member_takes_the_membership_along(tmp_path: Path) -> None:
    """I1: a member that serves must not fall out of the fleet because a namesake stopped."""

    async def scenario(service: LocalService) -> None:
        (member,) = await service.join("one")
        namesake = service.fleet.add("one", url="http://elsewhere.test")
        assert await ask(service, namesake) == (409, "replica_id_taken")
        refused = await leave(service, namesake)
        assert (refused.status_code, refused.json()["code"]) == (409, "replica_id_taken")
        assert (await service.push(7)).status_code == 200
        assert member.serving == "0-7"
        assert (await leave(service, member)).status_code == 204
        assert (await service.get("/v1/fleet")).json()["members"] == []
        assert (await leave(service, member)).status_code == 404

    run(tmp_path, scenario)


def test_an_operator_removes_without_an_incarnation(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        gone = await service.http.delete("/v1/fleet/replicas/one?confirm_dead=true")
        assert gone.status_code == 204
        assert (await service.get("/v1/fleet")).json()["members"] == []

    run(tmp_path, scenario)


def test_a_member_that_stands_still_is_not_replaced_before_it_is_lost(tmp_path: Path) -> None:
    """I9: one answer that did not come proves nothing."""

    async def scenario(service: LocalService) -> None:
        (member,) = await service.join("one")
        member.deaf = True
        other = service.fleet.add("one", url="http://elsewhere.test")
        for misses in range(service.settings.deadlines.lost_after):
            assert await ask(service, other) == (409, "replica_id_taken"), misses
            await service.advance(PROBE_S)
        assert await ask(service, other) == (201, "")
        assert other.state.state is FrontState.OPEN

    run(tmp_path, scenario)


def test_another_process_at_the_address_of_the_member_is_believed_at_once(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (member,) = await service.join("one")
        member.restart()
        assert await ask(service, member) == (201, "")

    run(tmp_path, scenario)


def test_a_front_can_ask_who_is_the_member_under_its_id(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (member,) = await service.join("one")
        answer = await service.get("/v1/fleet/replicas/one")
        assert (answer.status_code, answer.json()["incarnation"]) == (200, member.state.incarnation)
        nobody = await service.get("/v1/fleet/replicas/two")
        assert (nobody.status_code, nobody.json()["code"]) == (404, "not_found")

    run(tmp_path, scenario)
