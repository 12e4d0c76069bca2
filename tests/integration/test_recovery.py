"""A coordinator that dies in any phase, and what the next one makes of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from updater.coordinator.journal.journal import Journal
from updater.core.errors import Failure
from updater.core.fleet.effects import Record
from updater.core.fleet.lineage import ADOPTION
from updater.settings import Deadlines
from updater.testing.fronts import ManualClock, SimulatedFleet, SimulatedFront, digest_of, settle
from updater.testing.service import LocalService

DEADLINES = Deadlines(shutdown_s=1.0, status_s=1.0, retry_first_s=0.01)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(), 120)

    asyncio.run(bounded())


class World:
    """One folder and one fleet that outlive the coordinators."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.fleet = SimulatedFleet(self.clock)

    def service(self, open_journal: Callable[[Path, str], Journal] = Journal) -> LocalService:
        return LocalService(
            self.folder, fleet=self.fleet, clock=self.clock, deadlines=DEADLINES, open_journal=open_journal
        )

    async def seven_is_live(self, service: LocalService) -> list[SimulatedFront]:
        fronts = await service.join("one", "two")
        assert (await service.push(7)).status_code == 200
        return fronts


#: held verb -> what is live in the end. From `decided` on, going on needs every member's word that it installed.
PHASES = {
    "plan": "0-7",
    "stage": "0-7",
    "verify": "0-7",
    "pause": "0-7",
    "install": "0-8",
    "invalidate": "0-8",
    "resume": "0-8",
}


@pytest.mark.parametrize("held", PHASES)
@pytest.mark.parametrize("on", ["one", "both"])
def test_the_fleet_ends_on_one_version_and_the_client_can_ask_which(tmp_path: Path, held: str, on: str) -> None:
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        fronts = await world.seven_is_live(first)
        held_on = fronts if on == "both" else fronts[:1]
        for front in held_on:
            front.hold[held] = asyncio.Event()
        await first.begin(8)
        await first.crash()
        for front in held_on:
            front.hold.pop(held).set()
        await settle()
        async with world.service() as second:
            await second.advance(10)
            expected = PHASES[held]
            assert await second.live() == expected
            assert [front.serving for front in fronts] == [expected] * 2
            assert [front.state.live.digest for front in fronts] == [digest_of(f"v{expected[-1]}")] * 2
            receipt = (await second.get("/v1/updates/0-8")).json()["receipt"]
            assert receipt["outcome"] == ("committed" if expected == "0-8" else "aborted")
            assert receipt["live_version"] == expected
            if receipt["outcome"] != "committed":
                assert receipt["reason"] == "coordinator_restarted"
            voted = held not in ("plan", "stage", "verify")
            proof, observed = ("structure_only", dict.fromkeys(("one", "two"), digest_of("v8"))) if voted else ("", {})
            assert (receipt["proof"], receipt["observed"]) == (proof, observed)
            assert (receipt["bytes_read"] > 0, receipt["tensors"] > 0, receipt["install"] == "flip") == (voted,) * 3
            assert ("staging" in receipt["phases_ms"]) == voted
            assert receipt["warnings"]
            assert [front.state.plan for front in fronts] == [None, None]
            assert (await second.push(9)).status_code == 200
            assert [front.serving for front in fronts] == ["0-9", "0-9"]

    run(main)


def test_an_installation_that_is_not_finished_everywhere_is_taken_back(tmp_path: Path) -> None:
    """I8: `decided` alone goes forward only if every member says that it installed."""
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        one, two = await world.seven_is_live(first)
        two.hold["install"] = asyncio.Event()
        await first.begin(8)
        assert (one.state.state, two.state.state) == ("installed", "installing")
        await first.crash()
        async with world.service() as second:
            two.hold.pop("install").set()
            await second.advance(10)
            assert (one.serving, two.serving) == ("0-7", "0-7")
            receipt = (await second.get("/v1/updates/0-8")).json()["receipt"]
            assert (receipt["outcome"], receipt["reason"]) == ("rolled_back", "coordinator_restarted")
            stale = await second.push(8, id="again")
            assert stale.json()["code"] == "stale_version"

    run(main)


@pytest.mark.case("F06")
def test_the_next_coordinator_knows_how_a_source_looked(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        await world.seven_is_live(first)
        await first.crash()
        async with world.service() as second:
            await second.advance(10)
            assert (await second.push(7)).json()["outcome"] == "committed"
            refused = await second.push(7, "written over")
            assert (refused.status_code, refused.json()["code"]) == (412, "stale_version")
            assert refused.json()["failures"][0]["hint"]

    run(main)


class NoFacts(Journal):
    """Cannot write down what a vote settled."""

    def put_facts(self, request_id: str, facts: str) -> None:
        self.put_receipt("no such request", facts)


def test_a_journal_that_fails_before_the_pause_stops_the_coordinator_and_pauses_no_replica(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        first = world.service(NoFacts)
        await first.coordinator.start()
        fronts = await first.join("one", "two")
        answer = await first.push(7)
        assert (answer.status_code, answer.json()["code"]) == (503, "journal_failed")
        assert [failure.code for failure in first.stopped] == ["journal_failed"]
        assert [(front.serving, front.state.state) for front in fronts] == [("start", "open")] * 2
        await first.coordinator.close()
        async with world.service() as second:
            await second.advance(10)
            assert (await second.push(7)).status_code == 200

    run(main)


def test_what_recovery_took_back_is_shown_before_the_next_probe(tmp_path: Path) -> None:
    """`rollback_to` never names what is live, and who reopened is open."""
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        one, two = await world.seven_is_live(first)
        restore = one.hold["restore"] = two.hold["restore"] = asyncio.Event()
        two.fail["install"] = deque([Failure("rank_failed", "as planned")])
        await first.begin(8)
        await first.crash()
        async with world.service() as second:
            assert (await second.get("/v1/fleet")).json()["phase"] == "restoring"
            restore.set()
            await settle()
            assert (one.serving, two.serving) == ("0-7", "0-7")
            version = (await second.get("/v1/version")).json()
            assert (version["version"], version["rollback_to"]) == ("0-7", None)
            fleet = (await second.get("/v1/fleet")).json()
            assert (fleet["phase"], fleet["rollback_to"]) == ("idle", None)
            seen = [(m["state"], m["live_version"], m["live_digest"], m["spare"]) for m in fleet["members"]]
            assert seen == [("open", "0-7", digest_of("v7"), "empty")] * 2

    run(main)


class Dying(Journal):
    """Kills the coordinator right before or right after one record becomes durable."""

    when = ""
    kill: Callable[[], None]

    def append(self, record: Record, at: float) -> None:
        if self.when == f"before {record.kind.value}":
            self.kill()
            return
        super().append(record, at)
        if self.when == f"after {record.kind.value}":
            self.kill()


@pytest.mark.parametrize(
    ("when", "live", "outcome"),
    [
        ("before decided", "0-7", "aborted"),
        ("after decided", "0-7", "rolled_back"),
        ("before published", "0-8", "committed"),
        ("after published", "0-8", "committed"),
    ],
)
def test_around_every_record(tmp_path: Path, when: str, live: str, outcome: str) -> None:
    world = World(tmp_path)

    async def main() -> None:
        first = world.service(Dying)
        await first.coordinator.start()
        fronts = await world.seven_is_live(first)
        journal = first.coordinator._journal
        assert isinstance(journal, Dying)
        journal.when, journal.kill = when, first.coordinator.kill
        await first.begin(8)
        async with world.service() as second:
            await second.advance(10)
            assert await second.live() == live
            assert [front.serving for front in fronts] == [live] * 2
            assert (await second.get("/v1/updates/0-8")).json()["receipt"]["outcome"] == outcome
            version = (await second.get("/v1/version")).json()
            assert version["rollback_to"] == ("0-7" if live == "0-8" else None)

    run(main)


def test_a_published_version_is_never_undone_by_a_member_that_lost_it(tmp_path: Path) -> None:
    """Hazard 2: one has reopened, the coordinator dies, the other restarts with base weights."""
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        one, two = await world.seven_is_live(first)
        two.hold["resume"] = asyncio.Event()
        await first.begin(8)
        assert one.serving == "0-8"
        await first.crash()
        two.restart()
        two.hold.clear()
        async with world.service() as second:
            await second.post("/v1/fleet/replicas", {"replica": "two", "url": two.url})
            await second.advance(30)
            assert await second.live() == "0-8"
            assert (one.serving, two.serving) == ("0-8", "0-8")
            assert two.opened[-1] == "0-8"

    run(main)


def test_a_frozen_coordinator_that_wakes_up_can_decide_nothing(tmp_path: Path) -> None:
    """Hazard 12: the first one sleeps through its replacement, then hears the last pause acknowledgement."""
    world = World(tmp_path)

    async def main() -> None:
        first = world.service()
        await first.coordinator.start()
        one, two = await world.seven_is_live(first)
        two.hold["pause"] = asyncio.Event()
        await first.begin(8)
        async with world.service() as second:
            await second.advance(1)
            two.hold.pop("pause").set()
            await settle()
            await second.advance(60)
            assert await second.live() == "0-7"
            assert (one.serving, two.serving) == ("0-7", "0-7")
            assert (await second.push(9)).status_code == 200
            late = await first.push(10)
            assert late.status_code == 503
            assert late.json()["code"] == "journal_failed"
            assert [failure.code for failure in first.stopped] == ["journal_failed"]
            assert (one.serving, two.serving) == ("0-9", "0-9")
        await first.coordinator.close()

    run(main)


def test_what_was_committed_is_known_after_a_quiet_restart(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        async with world.service() as first:
            fronts = await world.seven_is_live(first)
            receipt = (await first.get("/v1/updates/0-7")).json()["receipt"]
        async with world.service() as second:
            assert (await second.get("/v1/version")).json()["rollback_to"] == "start"
            assert (await second.get("/v1/updates/0-7")).json()["receipt"] == receipt
            assert (await second.get("/readyz")).status_code == 200
            repeated = await second.push(7)
            assert repeated.json() == receipt
            back = await second.post("/v1/rollback?wait=true", {"target": "start", "expected_live": "0-7"})
            assert back.json()["outcome"] == "committed"
            assert [front.serving for front in fronts] == ["start", "start"]
            stale = await second.push(7, id="again")
            assert stale.json()["code"] == "stale_version"

    run(main)


def test_an_empty_journal_needs_an_explicit_adopt(tmp_path: Path) -> None:
    """Hazard 13."""
    world = World(tmp_path)

    async def main() -> None:
        async with world.service() as first:
            fronts = await world.seven_is_live(first)
        elsewhere = LocalService(tmp_path / "elsewhere", fleet=world.fleet, clock=world.clock, deadlines=DEADLINES)
        members = [{"replica": front.replica, "url": front.url} for front in fronts]
        async with elsewhere as second:
            refused = await second.post("/v1/fleet/replicas", members[0])
            assert (refused.status_code, refused.json()["code"]) == (412, "adopt_needed")
            unsure = await second.post("/v1/fleet/adopt", {"members": members, "confirm": False})
            assert unsure.status_code == 400
            adopted = await second.post("/v1/fleet/adopt", {"members": members, "confirm": True})
            assert adopted.status_code == 200, adopted.text
            assert adopted.json()["live_version"] == "0-7"
            # The epoch that fronts hear of is the one that this coordinator owns, above all that they have heard.
            assert adopted.json()["epoch"] == second.coordinator._journal.epoch() == ADOPTION
            assert {front.state.epoch for front in fronts} == {ADOPTION}
            assert adopted.json()["identity"] == fronts[0].state.fleet == second.coordinator._journal.identity()
            assert (await second.push(8)).status_code == 200
            assert [front.serving for front in fronts] == ["0-8", "0-8"]
            again = await second.post("/v1/fleet/adopt", {"members": members, "confirm": True})
            assert (again.status_code, again.json()["code"]) == (409, "wrong_phase")

    run(main)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_history_that_was_cut_is_enough_to_go_on(tmp_path: Path, kept: int) -> None:
    """Twelve updates and two rollbacks with almost nothing kept, each ten followed by a restart."""
    world = World(tmp_path)

    def service() -> LocalService:
        return LocalService(world.folder, fleet=world.fleet, clock=world.clock, deadlines=DEADLINES, history=kept)

    async def main() -> None:
        first = service()
        await first.coordinator.start()
        fronts = await first.join("one", "two")
        for step in range(1, 13):
            assert (await first.push(step)).status_code == 200
            await first.advance(0.01)
        back = {"target": "0-11", "expected_live": "0-12"}
        for _ in range(2):  # to 11 and, the same way, to 12 again
            assert (await first.post("/v1/rollback?wait=true", back)).status_code == 200
            await first.advance(0.01)
            back = {"target": back["expected_live"], "expected_live": back["target"]}
        receipts = (await first.get("/v1/history")).json()["receipts"]
        assert len(receipts) <= 20 * kept
        assert sum(bool(each["members"]) for each in receipts) == kept
        await first.crash()
        async with service() as second:
            await second.advance(10)
            version = (await second.get("/v1/version")).json()
            assert (version["version"], version["rollback_to"]) == ("0-12", "0-11")
            # The id of an old update is still taken, and its version is still behind.
            again = await second.push(12)
            assert (again.status_code, again.json()["outcome"], again.json()["members"]) == (200, "committed", [])
            assert (await second.push(12, id="new")).json()["code"] == "stale_version"
            assert [front.serving for front in fronts] == ["0-12"] * 2
            # A late joiner is brought to what is live: its source is remembered through both rollbacks.
            (late,) = await second.join("three")
            await second.advance(5)
            assert late.serving == "0-12"
            assert (await second.push(13)).status_code == 200

    run(main)
