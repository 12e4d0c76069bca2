"""What people see of a fleet: every member under its own state, why it does not serve, and what would end that."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from updater.coordinator.members.directory import MemberDirectory, MemberHandle
from updater.core.errors import Failure
from updater.core.participant import FrontState, FrontStatus, Spare, SpareState
from updater.protocol.manifest import Manifest, TensorEntry
from updater.testing.fronts import ManualClock, settle
from updater.testing.service import LocalService


async def members(service: LocalService) -> dict[str, Any]:
    return {each["replica"]: each for each in (await service.get("/v1/fleet")).json()["members"]}


async def ask_in(service: LocalService, name: str, start: str = "start", **said: Any) -> dict[str, Any]:
    """Start a front that says this of itself, and let it join; the answer."""
    front = service.fleet.add(name, start)
    for field, value in said.items():
        setattr(front, field, value)
    answer = await service.post("/v1/fleet/replicas", {"replica": name, "url": front.url})
    await settle()
    return {"status": answer.status_code, **answer.json()}


MANIFEST = json.loads(Manifest((TensorEntry("w", "F32", (2,), ""),)).to_json())


@pytest.mark.case("F16")
@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 3), (1,), (-1, 0)])
def test_a_join_with_odd_numbers_of_ranks_is_refused_and_names_them(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            answer = await ask_in(service, "one", ranks=ranks)
            assert (answer["status"], answer["code"]) == (400, "bad_request")
            assert str(list(ranks)) in answer["detail"]
            assert [each["replica"] for each in answer["failures"]] == ["one"]
            assert "from 0" in answer["hint"]
            assert await members(service) == {}

    asyncio.run(main())


@pytest.mark.case("F16")
def test_ranks_are_as_many_as_the_status_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            for ranks in ((0, 1), ()):  # a simulated front has one
                answer = await ask_in(service, "one", ranks=ranks)
                assert (answer["status"], answer["code"]) == (400, "bad_request")
                assert [(each["replica"], bool(each["hint"])) for each in answer["failures"]] == [("one", True)]

    asyncio.run(main())


@pytest.mark.case("F16")
def test_who_answers_has_to_be_who_was_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            front = service.fleet.add("one", "start")
            answer = (await service.post("/v1/fleet/replicas", {"replica": "two", "url": front.url})).json()
            assert (answer["code"], answer["failures"][0]["replica"]) == ("bad_request", "two")
            silent = await service.post("/v1/fleet/replicas", {"replica": "one", "url": "http://nowhere"})
            assert (silent.status_code, silent.json()["code"]) == (503, "unreachable")
            assert silent.json()["failures"][0]["replica"] == "one"
            assert await members(service) == {}

    asyncio.run(main())


@pytest.mark.case("F17")
def test_a_restarted_coordinator_knows_engine_model_and_ranks_after_its_first_probe(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as first:
            await first.join("one")
            before = (await members(first))["one"]
            await first.crash()
            async with LocalService(tmp_path, fleet=first.fleet, clock=first.clock) as second:
                after = (await members(second))["one"]
                assert before["ranks"]
                for field in ("engine", "model", "ranks"):
                    assert after[field] == before[field]

    asyncio.run(main())


@pytest.mark.case("F17")
def test_a_description_that_did_not_come_is_asked_for_again_and_one_that_came_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as first:
            one, two, silent = await first.join("one", "two", "three")
            await first.crash()
            one.lose_answer.append("describe")
            silent.lose_call.extend(["status"] * 100)
            before = [front.asked("describe") for front in (one, two, silent)]
            async with LocalService(tmp_path, fleet=first.fleet, clock=first.clock) as second:
                await second.advance(10)
                shown = {name: each["engine"] for name, each in (await members(second)).items()}
                assert shown == {"one": "simulated", "two": "simulated", "three": ""}
                asked = [front.asked("describe") for front in (one, two, silent)]
                assert [now - then for now, then in zip(asked, before, strict=True)] == [2, 1, 0]

    asyncio.run(main())


@pytest.mark.case("F17")
@pytest.mark.parametrize("restarted", [False, True])
def test_broken_is_not_quarantined_and_has_its_own_cure(tmp_path: Path, restarted: bool) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as first:
            _one, two = await first.join("one", "two")
            two.die(Failure("rank_died", "gone", rank=0))
            await first.advance(5)
            service = LocalService(tmp_path, fleet=first.fleet, clock=first.clock) if restarted else first
            if restarted:
                await first.crash()
                await service.__aenter__()
            seen = (await members(service))["two"]
            assert seen["state"] == "broken"
            assert "restart" in seen["hint"]
            assert [failure["code"] for failure in seen["failures"]] == ["rank_died"]
            assert not (await members(service))["one"]["hint"]
            if restarted:
                await service.__aexit__(None, None, None)

    asyncio.run(main())


@pytest.mark.case("F24")
def test_a_joiner_with_other_weights_and_nothing_to_read_them_from_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            (one,) = await service.join("one")
            await ask_in(service, "two", start="other weights")
            await service.advance(5)
            seen = (await members(service))["two"]
            assert seen["state"] == "joining"
            (failure,) = seen["failures"]
            assert (failure["code"], failure["replica"]) == ("no_source", "two")
            assert failure["hint"]
            # No replica serves: then it is what /readyz has to say.
            one.die(Failure("rank_died", "gone"))
            await service.advance(5)
            problem = (await service.get("/readyz")).json()
            assert "no_source" in [each["code"] for each in problem["failures"]]

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    said = [record for record in caplog.records if "no_source" in record.getMessage()]
    assert len(said) == 1  # once, not at every probe


@pytest.mark.case("F24")
def test_a_joiner_whose_catch_up_failed_says_what_failed(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            await service.join("one")
            assert (await service.push(7)).status_code == 200
            (service.root / "v7").write_text("other bytes under the same name")
            await ask_in(service, "two")
            await service.advance(5)
            seen = (await members(service))["two"]
            (catch_up, *_) = (await service.get("/v1/history")).json()["receipts"]
            assert catch_up["kind"] == "catch_up"
            assert seen["failures"][0]["code"] == catch_up["reason"]

    asyncio.run(main())


@pytest.mark.case("F24")
def test_a_replica_that_cannot_start_is_listed_with_the_reason_as_long_as_it_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    why = Failure("placement_refused", "its bytes are not those of its folder", tensor="w", hint="load them")

    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            answer = await ask_in(service, "one", cannot_start=why)
            assert (answer["code"], answer["hint"]) == (why.code, why.hint)
            (refused,) = (await service.get("/v1/fleet")).json()["refused"]
            assert (refused["code"], refused["replica"], refused["hint"]) == (why.code, "one", why.hint)
            assert why.code in [each["code"] for each in (await service.get("/readyz")).json()["failures"]]
            await service.advance(5)
            await ask_in(service, "one")
            assert (await service.get("/v1/fleet")).json()["refused"] == []
            assert (await service.get("/readyz")).status_code == 200

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    assert [record for record in caplog.records if why.code in record.getMessage()]


@pytest.mark.case("F24")
def test_a_replica_that_may_not_join_is_listed_with_the_reason_until_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            await ask_in(service, "one", config_hash="v2:a")
            answer = await ask_in(service, "two", config_hash="v2:b")
            assert answer["code"] == "config_mismatch"
            (refused,) = (await service.get("/v1/fleet")).json()["refused"]
            assert (refused["code"], refused["replica"]) == ("config_mismatch", "two")
            await ask_in(service, "two", config_hash="v2:a")
            assert (await service.get("/v1/fleet")).json()["refused"] == []
            await ask_in(service, "three", config_hash="v2:b")
            await service.advance(120)  # it stopped asking
            assert (await service.get("/v1/fleet")).json()["refused"] == []

    asyncio.run(main())


@pytest.mark.case("F18")
def test_the_receipt_of_a_stream_names_who_has_no_way_to_catch_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            _one, two = await service.join("one", "two")
            two.die(Failure("rank_died", "gone", rank=0))
            await service.advance(5)
            source = {"kind": "shared_memory", "address": service.checkpoint("sent"), "session": "s"}
            begun = await service.post("/v1/updates", {"source": source, "version": 1, "id": "s", "manifest": MANIFEST})
            assert begun.status_code == 202, begun.text
            await settle()
            await service.post("/v1/updates/s/seal", {})
            await settle()
            receipt = (await service.get("/v1/updates/s")).json()["receipt"]
            assert receipt["outcome"] == "committed"
            assert [text for text in receipt["warnings"] if "two" in text]
            # From disk it can catch up: no warning.
            disk = (await service.push(2)).json()
            assert not [text for text in disk["warnings"] if "two" in text]

    asyncio.run(main())


class Slow(ManualClock):
    """A machine whose clock is hours behind."""

    def wall(self) -> float:
        return super().wall() - 7200.0


@pytest.mark.case("F62")
def test_a_right_time_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as first:
            await first.join("one")
            assert (await first.push(7)).status_code == 200
            await first.advance(1)
            await first.crash()
        async with LocalService(tmp_path, fleet=first.fleet, clock=first.clock) as second:
            assert (await second.push(8)).status_code == 200

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    assert not [record for record in caplog.records if "clock" in record.getMessage()]


@pytest.mark.case("F62")
def test_history_stays_ordered_when_the_next_clock_is_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as first:
            await first.join("one")
            assert (await first.push(7)).status_code == 200
            began = await first.begin(8, policy={"commit": "manual"})
            assert began.status_code == 202
            await first.crash()
        async with LocalService(tmp_path, fleet=first.fleet, clock=Slow()) as second:
            for step in (9, 10):
                assert (await second.push(step)).status_code == 200
            receipts = (await second.get("/v1/history")).json()["receipts"]
            newest_first = [each["version"] for each in receipts]
            assert newest_first[:2] == ["0-10", "0-9"]
            for newer, older in itertools.pairwise(receipts):
                assert newer["started_at"] >= older["started_at"]
                assert newer["ended_at"] >= older["ended_at"]
            assert all(each["ended_at"] >= each["started_at"] and each["update_ms"] >= 0 for each in receipts)
            assert (await second.get("/v1/version")).json()["since"] >= receipts[-1]["ended_at"]

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    assert [record for record in caplog.records if "clock" in record.getMessage()]


@pytest.mark.case("F61")
def test_the_lower_of_two_owners_of_one_epoch_says_once_that_there_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            (front,) = await service.join("one")
            led = front.state.owner
            for _ in range(2):
                front.state = replace(front.state, owner=f"~{led}")
                await service.advance(2)
                assert front.state.owner == led
            assert (await service.push(3)).status_code == 200

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    (said,) = [record for record in caplog.records if "copy" in record.getMessage()]
    assert said.levelno == logging.WARNING


@pytest.mark.case("F61")
@pytest.mark.parametrize(("rival", "warnings"), [("~", 1), ("", 0), ("!", 0)])
def test_an_owner_that_led_first_says_once_that_another_asked_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rival: str, warnings: int
) -> None:
    """Owner ids are digits and letters: `~` is higher than any of them and `!` is lower."""

    async def main() -> None:
        async with LocalService(tmp_path, new_fleet=True) as service:
            (front,) = await service.join("one")
            front.state = replace(front.state, rival=rival)
            await service.advance(5)

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        asyncio.run(main())
    assert len([record for record in caplog.records if "copy" in record.getMessage()]) == warnings


@pytest.mark.case("F14")
def test_a_new_journal_is_a_warning_and_an_old_one_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[int]:
        said = []
        for _ in range(2):
            caplog.clear()
            async with LocalService(tmp_path, new_fleet=True):
                said.append(len([each for each in caplog.records if "journal" in each.getMessage()]))
        return said

    with caplog.at_level(logging.WARNING, "liveweights.coordinator"):
        assert asyncio.run(main()) == [1, 0]


class AskedInTheMiddle:
    """A front that was asked while it installed; its answer is on its way until `arrived`."""

    url = "http://one"

    def __init__(self, answer: FrontStatus) -> None:
        self.answer, self.arrived = answer, asyncio.Event()

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        await self.arrived.wait()
        return self.answer

    async def close(self) -> None: ...


def test_an_answer_from_before_it_was_open_is_not_shown_after_it() -> None:
    async def main() -> None:
        status = FrontStatus(
            "one", "one1", "fleet", 1, 4, 1, FrontState.INVALIDATED, "0-2", "new", Spare(SpareState.UNKNOWN)
        )
        directory, participant = MemberDirectory(), AskedInTheMiddle(status)
        contact = MemberHandle(participant, status=status, missed=1)
        directory.put("one", contact)
        asking = asyncio.create_task(directory.ask_all(["one"], 60))
        await settle()
        directory.now_serves("one", "0-2", "new")
        participant.arrived.set()
        assert (await asking)["one"] == status
        assert contact.status is not None
        assert (contact.status.state, contact.missed) == (FrontState.OPEN, 0)
        await directory.ask_all(["one"], 60)  # nothing in between: shown as it is
        assert contact.status.state is FrontState.INVALIDATED

    asyncio.run(main())
