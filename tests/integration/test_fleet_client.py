"""What a front says on its own, said to a real coordinator: joining, asking who the member is, leaving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from engine_adapter.replica.fleet_client import FleetClient
from updater.core.participant import FrontState
from updater.core.replica.machine import status
from updater.server.routes import create_app
from updater.testing.fronts import SimulatedFront, settle
from updater.testing.service import LocalService


class Wire(httpx.AsyncBaseTransport):
    """To the coordinator and back. `cut`: nothing arrives; `answer`: what something in
    between says instead; `asked`: methods that were sent.
    """

    def __init__(self, service: LocalService) -> None:
        self._way = httpx.ASGITransport(create_app(service.coordinator), raise_app_exceptions=False)
        self.cut = False
        self.asked: list[str] = []
        self.answer: httpx.Response | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.method)
        if self.cut:
            raise httpx.ConnectError("cut")
        if self.answer is not None:
            return self.answer
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


@pytest.mark.case("F24")
def test_a_front_that_goes_on_asking_says_each_reason_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        await service.join("one")
        asking = client(wire, service.fleet.add("one", url="http://elsewhere.test"))
        registering = asyncio.create_task(asking.register(asyncio.Event()))
        while len(wire.asked) < 3:
            await settle()
        wire.cut = True
        while len(wire.asked) < 4:
            await settle()
        registering.cancel()
        await asking.close()

    with caplog.at_level(logging.WARNING, "liveweights.front"):
        run(tmp_path, scenario)
    said = [record.getMessage() for record in caplog.records]
    assert [sum(code in text for text in said) for code in ("replica_id_taken", "unreachable")] == [1, 1]


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


async def claimed(asking: FleetClient, front: SimulatedFront) -> str:
    """What the front is told, or nothing."""
    said = await asking.claim(status(front.state, 0.0))
    return said.claim.value if said is not None else ""


@pytest.mark.case("F12")
def test_only_a_removal_is_called_one(tmp_path: Path) -> None:
    """Neither silence nor an answer of another kind says anything; a process that was replaced is gone for good."""

    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        await joined(asking, front)
        assert await claimed(asking, front) == "member"
        wire.cut = True
        assert await claimed(asking, front) == ""
        wire.cut = False
        for status_code, body in ((404, b"not found"), (404, b"{}"), (200, b"{}"), (502, b"<html>"), (200, b"[]")):
            wire.answer = httpx.Response(status_code, content=body)
            assert await claimed(asking, front) == ""
        wire.answer = None
        other = service.fleet.add("one", url="http://elsewhere.test")
        gone = await service.http.delete("/v1/fleet/replicas/one?confirm_dead=true")
        assert gone.status_code == 204
        assert await claimed(asking, front) == "removed"
        body = {"replica": other.replica, "url": other.url}
        assert (await service.post("/v1/fleet/replicas", body)).status_code == 201
        assert await claimed(asking, front) == "removed"
        assert await claimed(client(wire, other), other) == "member"
        await asking.leave(5.0)
        assert await members(service) == [other.state.incarnation]
        await asking.close()

    run(tmp_path, scenario)


@pytest.mark.case("F12")
def test_who_was_removed_is_known_to_the_next_life_of_the_coordinator(tmp_path: Path) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        front = service.fleet.add("one")
        asking = client(wire, front)
        await joined(asking, front)
        await service.http.delete("/v1/fleet/replicas/one?confirm_dead=true")
        await service.crash()
        assert await claimed(asking, front) == ""
        async with LocalService(tmp_path, fleet=service.fleet, clock=service.clock) as again:
            assert await claimed(client(Wire(again), front), front) == "removed"
        await asking.close()

    run(tmp_path, scenario)


@pytest.mark.case("F10", "F09")
def test_a_coordinator_that_recovers_or_does_not_know_shuts_no_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(service: LocalService, wire: Wire) -> None:
        front, mate = service.fleet.add("one"), service.fleet.add("two")
        asking, also = client(wire, front), client(wire, mate)
        await joined(asking, front)
        await joined(also, mate)
        recovering = LocalService(tmp_path / "other", fleet=service.fleet, clock=service.clock)
        assert await claimed(client(Wire(recovering), front), front) == ""
        async with recovering as emptied:
            for each in (front, mate, front):
                assert await claimed(client(Wire(emptied), each), each) == "unknown"
            errors = [record for record in caplog.records if record.levelname == "ERROR"]
            assert len(errors) == 1  # whichever front calls, the hold is one
            ready = await emptied.get("/readyz")
            assert (ready.status_code, ready.json()["code"]) == (503, "adopt_needed")
            fleet = (await emptied.get("/v1/fleet")).json()
            assert fleet["hold"]["hint"]
            assert {each["url"] for each in fleet["strangers"]} == {front.url, mate.url}
            fresh = emptied.fleet.add("fresh")
            refused = await emptied.post("/v1/fleet/replicas", {"replica": "fresh", "url": fresh.url})
            assert refused.json()["code"] == "adopt_needed"
        await asking.close()
        await also.close()

    run(tmp_path, scenario)
