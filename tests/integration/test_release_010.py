"""A fleet of 0.1.0 under a coordinator of this release: its journal, its manifests and what its fronts say.

`tests/releases/0.1.0` was recorded from that release: a toy fleet `prod` of two replicas, `one` with one rank and `two`
with two, that published 0-1 and 0-2. Paths were shortened.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.replica.fleet_client import FleetClient
from updater.coordinator.journal.journal import Journal
from updater.coordinator.members.participants import Participant, Refusal
from updater.core.errors import Failure
from updater.core.participant import MESSAGES
from updater.core.replica.state import started
from updater.protocol import wire
from updater.protocol.manifest import Manifest
from updater.testing.fronts import ManualClock, SimulatedFleet, SimulatedFront, settle
from updater.testing.service import LocalService

RECORDED = Path(__file__).parents[1] / "releases" / "0.1.0"
MESSAGES_010: dict[str, Any] = json.loads((RECORDED / "messages.json").read_text())
URLS = {"one": "http://127.0.0.1:18801", "two": "http://127.0.0.1:18802"}
#: `lead` is a word that 0.1.0 does not know: it refuses it without an effect.
HARMLESS = {"status", "describe", "lead"}
LIVE = MESSAGES_010["one.status"]["live_digest"]

pytestmark = pytest.mark.case("F60")


class Front010:
    """A front of 0.1.0, by what it was recorded to say. `asked`: every verb that reached it."""

    def __init__(self, replica: str) -> None:
        self.replica, self.url = replica, URLS[replica]
        self.asked: list[str] = []

    async def call(self, verb: str, _request: Any, _timeout_s: float) -> Any:
        self.asked.append(verb)
        said = MESSAGES_010.get(f"{self.replica}.{verb}")
        if verb not in ("describe", "status"):
            raise Refusal((Failure("not_found", f"no verb {verb!r}"),))
        return wire.decode(MESSAGES[verb][1], json.dumps(said))

    async def close(self) -> None:
        pass


class Mixed(SimulatedFleet):
    """Fronts of 0.1.0 until they are replaced by new ones at the same address."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.old = {name: Front010(name) for name in URLS}

    def replace(self, name: str) -> SimulatedFront:
        """Restarted on the new release, on a checkpoint of what is live."""
        del self.old[name]
        front = self.add(name, url=URLS[name])
        front.state = started(name, f"new {name}", "start", LIVE, ranks=1)
        return front

    def make(self, replica: str, url: str) -> Participant:
        old = next((front for front in self.old.values() if front.url == url), None)
        return old or super().make(replica, url)


def state_of_010(folder: Path, changed: Mapping[str, str] | None = None) -> Path:
    """The state folder as 0.1.0 left it. `changed`: recorded paths and addresses, and what stands in their place."""
    recorded = (RECORDED / "journal.sql").read_text()
    for old, new in (changed or {}).items():
        recorded = recorded.replace(old, new)
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(recorded)
    shutil.copytree(RECORDED / "manifests", folder / "manifests")
    return folder


def run(folder: Path, scenario: Callable[[LocalService, Mixed], Awaitable[None]]) -> None:
    async def main() -> None:
        state_of_010(folder / "state")
        clock = ManualClock()
        fleet = Mixed(clock)
        async with LocalService(folder, fleet=fleet, clock=clock, name="prod") as service:
            await scenario(service, fleet)

    asyncio.run(asyncio.wait_for(main(), 120))


async def members(service: LocalService) -> dict[str, Any]:
    return {each["replica"]: each for each in (await service.get("/v1/fleet")).json()["members"]}


def test_its_journal_and_manifests_are_read_whole(tmp_path: Path) -> None:
    journal = Journal(state_of_010(tmp_path / "state"), "prod")
    assert journal.identity() == "prod"
    assert [member.replica for member in journal.members()] == ["one", "two"]
    last = journal.records()[-1]
    assert (str(last.version), last.digest) == ("0-2", LIVE)
    assert Manifest.from_json(last.manifest).digest == last.manifest_digest
    names = sorted(path.stem for path in (RECORDED / "manifests").iterdir())
    assert (
        sorted({Manifest.from_json(record.manifest).digest for record in journal.records() if record.manifest}) == names
    )
    assert Manifest.from_json((RECORDED / "liveweights.manifest.json").read_text()).has_digests
    assert {request.id for request in journal.requests()} >= {"0-1", "0-2"}


@pytest.mark.parametrize("name", list(URLS))
@pytest.mark.parametrize("verb", ["describe", "status"])
def test_what_its_fronts_say_is_understood(name: str, verb: str) -> None:
    said = MESSAGES_010[f"{name}.{verb}"]
    message = wire.decode(MESSAGES[verb][1], json.dumps(said))
    assert wire.plain(message).items() >= {key: value for key, value in said.items() if key != "status"}.items()


def test_its_fronts_serve_on_are_named_and_block_until_each_is_replaced(tmp_path: Path) -> None:
    async def scenario(service: LocalService, fleet: Mixed) -> None:
        old = dict(fleet.old)
        for _ in range(5):
            await service.advance(2)
        seen = await members(service)
        for name in URLS:
            assert (seen[name]["state"], seen[name]["live_version"]) == ("open", "0-2")
            assert [failure["code"] for failure in seen[name]["failures"]] == ["release_mismatch"]
            assert seen[name]["failures"][0]["hint"]
            assert set(old[name].asked) <= HARMLESS
        assert await service.live() == "0-2"
        refused = await service.push(3)
        assert refused.status_code == 409
        assert {each["code"] for each in refused.json()["failures"]} == {"release_mismatch"}
        # It asks to be taken back, as 0.1.0 does every few seconds.
        again = await service.post("/v1/fleet/replicas", {"replica": "one", "url": URLS["one"]})
        assert again.status_code in (201, 409)
        assert set(old["one"].asked) <= HARMLESS

        for done, name in enumerate(URLS, 1):
            front = fleet.replace(name)
            await service.advance(10)  # the process before is noticed to be gone
            joined = await service.post("/v1/fleet/replicas", {"replica": name, "url": front.url})
            assert joined.status_code == 201, joined.text
            await settle()
            assert front.serving == "0-2"
            blocked = (await service.push(3)).status_code
            assert blocked == (409 if done == 1 else 200)
        assert await service.live() == "0-3"

    run(tmp_path, scenario)


def test_another_replica_of_010_may_not_join(tmp_path: Path) -> None:
    async def scenario(service: LocalService, fleet: Mixed) -> None:
        await service.post("/v1/fleet/replicas", {"replica": "two", "url": URLS["two"]})
        answer = await service.http.delete("/v1/fleet/replicas/two?confirm_dead=true")
        assert answer.status_code in (200, 204)
        joining = await service.post("/v1/fleet/replicas", {"replica": "two", "url": URLS["two"]})
        assert joining.json()["code"] == "release_mismatch"

    run(tmp_path, scenario)


def test_a_replica_names_a_coordinator_of_010() -> None:
    async def main() -> None:
        answer = httpx.Response(201, json=MESSAGES_010["GET /v1/fleet/replicas/one"])
        transport = httpx.MockTransport(lambda _request: answer)
        client = FleetClient("http://127.0.0.1", "one", URLS["one"], lambda: "i", transport=transport)
        admitted = asyncio.Event()
        registering = asyncio.create_task(client.register(admitted))
        while client.obstacle is None:
            await settle(1)
        admitted.set()
        await registering
        why = client.obstacle
        assert why is not None
        assert why.code == "release_mismatch"
        assert why.hint

    asyncio.run(asyncio.wait_for(main(), 60))
