"""What a front says on its own, said to a real coordinator: joining, asking who the member is, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from engine_adapter.replica.fleet_client import FleetClient
from updater.core.participant import FrontState
from updater.service.app import create_app
from updater.testing.fronts import SimulatedFront, settle
from updater.testing.service import LocalService


class Wire(httpx.AsyncBaseTransport):
    """To the coordinator and back. `cut`: nothing arrives; `asked`: methods that were sent."""

    def __init__(self, service: LocalService) -> None:
        self._way = httpx.ASGITransport(create_app(service.coordinator), raise_app_exceptions=False)
        self.cut = False
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.method)
        if self.cut:
            raise httpx.ConnectError("cut")
        return await self._way.handle_async_request(request)


def client(wire: Wire, front: SimulatedFront) -> FleetClient:
    def mine() -> str:
        return front.state.incarnation

    return FleetClient("http://127.0.0.1", front.replica, front.url, mine, transport=wire)


def run(folder: Path, scenario: Callable[[LocalService, Wire], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LocalService(folder) as service:
            await scenario(service, Wire(service))

    asyncio.run(asyncio.wait_for(main(), 120))


async def joined(asking: FleetClient, front: SimulatedFront) -> asyncio.Event:
    """Registers until the coordinator admitted it. Returns what says so."""
    admitted = asyncio.Event()
    registering = asyncio.create_task(asking.register(admitted))
    while front.state.state is not FrontState.OPEN:
        await settle()
    admitted.set()
    await registering
    return admitted


async def members(service: LocalService) -> list[str]:
    return [member["incarnation"] for member in (await service.get("/v1/fleet")).json()["members"]]


async def watched(wire: Wire, watching: asyncio.Task[object], times: int) -> bool:
    """Whether the watch ended within so many further questions."""
    before = len(wire.asked)
    while len(wire.asked) < before + times and not watching.done():
        await settle(1)
    return watching.done()


def test_a_front_joins_and_takes_its_membership_along(tmp_path: Path) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        await joined(asking, front)
        assert await members(service) == [front.state.incarnation]
        await asking.leave(5.0)
        assert await members(service) == []
        await asking.close()

    run(tmp_path, scenario)


def test_a_front_that_never_asked_or_was_refused_has_nothing_to_leave(tmp_path: Path) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        (member,) = await service.join("one")
        namesake = service.fleet.add("one", url="http://elsewhere.test")
        asking = client(wire, namesake)
        await asking.leave(5.0)
        registering = asyncio.create_task(asking.register(asyncio.Event()))
        while not wire.asked:
            await settle()
        await settle()
        registering.cancel()
        await asking.leave(5.0)
        assert set(wire.asked) == {"POST"}
        assert await members(service) == [member.state.incarnation]
        await asking.close()

    run(tmp_path, scenario)


def test_a_front_whose_admission_was_not_heard_of_leaves_all_the_same(tmp_path: Path) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        (front,) = await service.join("one")
        asking = client(wire, front)
        wire.cut = True
        registering = asyncio.create_task(asking.register(asyncio.Event()))
        while not wire.asked:
            await settle()
        registering.cancel()
        wire.cut = False
        await asking.leave(5.0)
        assert await members(service) == []
        await asking.close()

    run(tmp_path, scenario)


def test_a_front_that_was_replaced_and_does_not_know_it_leaves_the_other_alone(tmp_path: Path) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        await joined(asking, front)
        await service.http.delete("/v1/fleet/replicas/one?confirm_dead=true")
        other = service.fleet.add("one", url="http://elsewhere.test")
        body = {"replica": other.replica, "url": other.url}
        assert (await service.post("/v1/fleet/replicas", body)).status_code == 201
        await asking.leave(5.0)
        assert await members(service) == [other.state.incarnation]
        await asking.close()

    run(tmp_path, scenario)


def test_only_another_incarnation_ends_the_watch(tmp_path: Path) -> None:
    """Neither silence nor a coordinator that lost its memory shuts a fleet that serves."""

    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        admitted = await joined(asking, front)
        watching: asyncio.Task[object] = asyncio.create_task(asking.watch(0.0, admitted))
        assert not await watched(wire, watching, 3)
        wire.cut = True
        assert not await watched(wire, watching, 3)
        wire.cut = False
        gone = await service.http.delete("/v1/fleet/replicas/one?confirm_dead=true")
        assert gone.status_code == 204
        assert not await watched(wire, watching, 3)
        other = service.fleet.add("one", url="http://elsewhere.test")
        body = {"replica": other.replica, "url": other.url}
        assert (await service.post("/v1/fleet/replicas", body)).status_code == 201
        assert await watched(wire, watching, 5)
        assert getattr(watching.result(), "code", "") == "replica_fenced"
        await asking.leave(5.0)
        assert await members(service) == [other.state.incarnation]
        await asking.close()

    run(tmp_path, scenario)


def test_what_a_readmitted_front_was_before_is_not_another_process(tmp_path: Path) -> None:
    """It asks to be admitted as a new incarnation, and the coordinator knows it for a moment as the old one."""

    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        admitted = await joined(asking, front)
        front.restart()
        watching: asyncio.Task[object] = asyncio.create_task(asking.watch(0.0, admitted))
        assert not await watched(wire, watching, 3)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asking.close()

    run(tmp_path, scenario)
