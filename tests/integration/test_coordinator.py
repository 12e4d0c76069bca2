"""The coordinator end to end over its HTTP face, with simulated fronts."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from updater.core.errors import Failure
from updater.core.policy import SourceLayout
from updater.protocol.manifest import Manifest, TensorEntry
from updater.testing.fronts import SimulatedFront, digest_of, settle
from updater.testing.service import DEADLINES, LocalService

JSON = {"content-type": "application/json"}

Scenario = Callable[[LocalService], Awaitable[None]]


def run(folder: Path, scenario: Scenario, **settings: object) -> None:
    async def main() -> None:
        async with LocalService(folder, **settings) as service:  # type: ignore[arg-type]
            await scenario(service)

    asyncio.run(asyncio.wait_for(main(), 120))


def code(answer: httpx.Response) -> str:
    found: str = answer.json()["code"]
    return found


def one_failure(front: SimulatedFront, verb: str, failure: str) -> None:
    front.fail[verb] = deque([Failure(failure, "as planned")])


# --- the good path


@pytest.mark.case("B022")
def test_the_fleet_says_which_sources_are_still_needed(tmp_path: Path) -> None:
    """A clean-up on a timer must know what a late joiner, also after a rollback, would be caught up from."""

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        seen = []
        for step in (1, 2, 3):
            assert (await service.push(step)).status_code == 200
            needed = (await service.get("/v1/fleet")).json()["sources_needed"]
            seen.append([Path(path).name for path in needed])
        newest = [names[-1] for names in seen]
        assert len(set(newest)) == 3
        assert seen == [newest[:1], newest[:2], newest[1:]]

    run(tmp_path, scenario)


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
        assert (receipt["bytes_read"], receipt["tensors"], receipt["install"]) == (4, 2, "flip")
        states = [(m["replica"], m["state"], m["live_version"], m["spare_version"]) for m in receipt["members"]]
        assert states == [("one", "open", "0-7", "start"), ("two", "open", "0-7", "start")]
        assert (one.serving, two.serving) == ("0-7", "0-7")
        version = (await service.get("/v1/version")).json()
        assert (version["version"], version["digest"]) == ("0-7", digest_of("v7"))

    run(tmp_path, scenario)


def test_without_waiting_the_answer_is_202_and_says_where_to_look(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        path = service.checkpoint("v7")
        answer = await service.post("/v1/updates", {"path": path, "version": 7})
        assert (answer.status_code, answer.json()["phase"]) == (202, "planning")
        await settle()
        state = (await service.get(answer.headers["location"])).json()
        assert (state["phase"], state["receipt"]["outcome"]) == ("ended", "committed")
        assert set(state["phases_ms"]) >= {"planning", "staging", "verifying", "pausing", "installing", "resuming"}
        assert (await service.get("/v1/updates/nothing")).status_code == 404

    run(tmp_path, scenario)


def test_the_pause_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold = {verb: asyncio.Event() for verb in ("stage", "pause", "install", "invalidate", "resume")}
        pushed = asyncio.create_task(service.push(7))
        for number, verb in enumerate(front.hold, start=1):
            await service.advance(number)
            front.hold[verb].set()
        receipt = (await pushed).json()
        pause = receipt["pause"]
        assert receipt["phases_ms"]["staging"] == 1000
        assert (pause["quiesce_ms"], pause["install_ms"], pause["invalidate_ms"], pause["resume_ms"]) == (
            2000,
            3000,
            4000,
            5000,
        )
        assert (pause["pause_ms"], pause["closed_ms"], receipt["update_ms"]) == (12000, 14000, 15000)
        assert receipt["pause_share"] == pytest.approx(12 / 15)

    run(tmp_path, scenario)


def test_lost_calls_and_answers_are_tried_again(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        verbs = ("plan", "stage", "verify", "pause", "install", "invalidate", "resume")
        front.lose_call.extend(verbs)
        front.lose_answer.extend(verbs)
        pushed = asyncio.create_task(service.push(7))
        await service.advance(5)
        assert (await pushed).json()["outcome"] == "committed"
        assert [front.asked(verb) for verb in verbs] == [2] * len(verbs)
        assert front.opened == ["start", "0-7"]

    run(tmp_path, scenario)


@pytest.mark.case("B174")
def test_rollback_brings_the_kept_copy_back(tmp_path: Path) -> None:
    """Also when the source folder is gone."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        await service.push(8)
        for path in service.root.iterdir():
            path.unlink()
        wrong = await service.post("/v1/rollback?wait=true", {"target": "0-7", "expected_live": "0-9"})
        assert (wrong.status_code, code(wrong)) == (412, "expected_mismatch")
        other = await service.post("/v1/rollback?wait=true", {"target": "0-6", "expected_live": "0-8"})
        assert (other.status_code, code(other)) == (412, "no_rollback")
        answer = await service.post("/v1/rollback?wait=true", {"target": "0-7", "expected_live": "0-8"})
        receipt = answer.json()
        assert (answer.status_code, receipt["kind"], receipt["outcome"]) == (200, "rollback", "committed")
        assert (receipt["live_version"], receipt["rollback_to"]) == ("0-7", "0-8")
        assert front.serving == "0-7"
        assert front.state.live.digest == digest_of("v7")
        again = await service.push(8, "repaired")
        assert (again.status_code, code(again)) == (412, "stale_version")

    run(tmp_path, scenario)


@pytest.mark.case("F22")
@pytest.mark.parametrize("seen", ["source_missing", "shard_missing", "file_truncated"])
@pytest.mark.parametrize(
    ("blind", "again"), [(("one",), True), (("two",), True), (("one", "two"), False)], ids=["first", "second", "both"]
)
def test_what_one_node_does_not_see_yet_is_worth_a_retry(
    tmp_path: Path, seen: str, blind: tuple[str, ...], again: bool
) -> None:
    async def scenario(service: LocalService) -> None:
        fronts = dict(zip(("one", "two"), await service.join("one", "two"), strict=True))
        for name in blind:
            fronts[name].fail["plan"] = deque([Failure(seen, "not here", file="model.safetensors")])
        refused = await service.push(7)
        assert (refused.status_code, code(refused), refused.json()["outcome"]) == (422, seen, "rejected")
        assert refused.json()["retryable"] is refused.json()["receipt"]["retryable"] is again
        assert {each["replica"] for each in refused.json()["failures"]} == set(blind)
        assert (await service.push(7)).json()["outcome"] == "committed"

    run(tmp_path, scenario)


BACK = {"target": "0-7", "expected_live": "0-8"}


@pytest.mark.case("F28")
def test_a_rollback_is_told_how_to_pause_and_when_to_commit(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        await service.push(8)
        late = Failure("quiesce_timeout", "a long request", replica="one")
        front.fail["pause"] = deque([late])
        policy = {"in_flight": "abort", "attempts": 1, "quiesce_s": 5.0, "deadline_s": 20.0, "on_busy": "wait"}
        once = await service.post("/v1/rollback?wait=true", {**BACK, "policy": policy})
        assert (once.status_code, code(once), once.json()["receipt"]["attempts"]) == (424, "quiesce_timeout", 1)
        assert "--in-flight" in once.json()["hint"]
        begun = await service.post("/v1/rollback", {**BACK, "id": "back", "policy": {"commit": "manual"}})
        assert begun.status_code == 202
        await settle()
        assert (await service.get("/v1/updates/back")).json()["phase"] == "ready"
        await service.post("/v1/updates/back/commit")
        await settle()
        assert (await service.get("/v1/updates/back")).json()["receipt"]["outcome"] == "committed"
        assert front.serving == "0-7"

    run(tmp_path, scenario)


@pytest.mark.case("F28")
@pytest.mark.parametrize(
    "policy",
    [{"install": "exchange"}, {"new_run": True}, {"allow_nonfinite": True}, {"allow_narrowing": [["F32", "F16"]]}],
)
def test_what_a_rollback_cannot_honour_is_refused(tmp_path: Path, policy: dict[str, object]) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(7)
        await service.push(8)
        answer = await service.post("/v1/rollback?wait=true", {**BACK, "policy": policy})
        assert (answer.status_code, code(answer)) == (422, "mode_unsupported")
        usual = await service.post("/v1/rollback?wait=true", {**BACK, "policy": {"install": "auto", "new_run": False}})
        assert usual.status_code == 200

    run(tmp_path, scenario)


# --- what can go wrong on the way


@pytest.mark.case("B095", "B147")
@pytest.mark.parametrize(
    ("verb", "failure", "status", "outcome"),
    [
        ("plan", "tensor_missing", 422, "rejected"),
        ("stage", "read_failed", 424, "aborted"),
        ("verify", "tensor_digest", 422, "aborted"),
        ("pause", "rank_steps_differ", 424, "aborted"),
        ("install", "rank_failed", 424, "rolled_back"),
        ("invalidate", "cache_not_reset", 424, "rolled_back"),
    ],
)
def test_every_other_end_is_a_problem_with_the_receipt(
    tmp_path: Path, verb: str, failure: str, status: int, outcome: str
) -> None:
    """And after each kind of failure the next update goes through."""

    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        await service.push(7)
        one_failure(two, verb, failure)
        answer = await service.push(8)
        document = answer.json()
        assert (answer.status_code, document["code"], document["outcome"]) == (status, failure, outcome)
        assert (document["live_version"], document["failures"][0]["replica"]) == ("0-7", "two")
        receipt = document["receipt"]
        assert (receipt["outcome"], receipt["reason"], receipt["live_version"]) == (outcome, failure, "0-7")
        assert (one.serving, two.serving) == ("0-7", "0-7")
        again = await service.push(8)
        if outcome == "rolled_back":  # the decision used the version up
            assert (again.status_code, code(again)) == (412, "stale_version")
            again = await service.push(9)
        else:
            assert again.json()["id"] == "0-8.2"
        assert again.json()["outcome"] == "committed"
        assert one.serving == two.serving == again.json()["version"]
        assert one.opened == [
            "start",
            "0-7",
            *(["0-7"] if verb in ("pause", "install", "invalidate") else []),
            one.serving,
        ]

    run(tmp_path, scenario)


def test_a_member_that_cannot_be_restored_is_quarantined_and_the_others_serve(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        one_failure(two, "install", "rank_failed")
        one_failure(two, "restore", "rank_failed")
        document = (await service.push(7)).json()
        assert document["outcome"] == "rolled_back"
        states = {member["replica"]: member["state"] for member in document["receipt"]["members"]}
        assert states == {"one": "open", "two": "quarantined"}
        assert (one.serving, two.serving) == ("start", None)

    run(tmp_path, scenario)


def test_a_slow_drain_is_tried_again_with_the_staging_kept(tmp_path: Path) -> None:
    """Hazard 7."""

    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.hold["pause"] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await service.advance(35.5)
        assert one.serving == "start"
        two.hold["pause"].set()
        await service.advance(30)
        receipt = (await pushed).json()
        assert (receipt["outcome"], receipt["attempts"]) == ("committed", 2)
        assert (one.asked("stage"), two.asked("stage")) == (1, 1)

    run(tmp_path, scenario)


# --- repeats


@pytest.mark.case("B146")
def test_the_same_request_is_the_same_update(tmp_path: Path) -> None:
    """I7."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        body = {"path": service.checkpoint("v7"), "version": 7, "id": "mine"}
        first, second = await asyncio.gather(*(service.post("/v1/updates?wait=true", body) for _ in range(2)))
        spelled = {"source": {"kind": "disk", "path": body["path"]}, "version": 7, "id": "mine"}
        third = await service.post("/v1/updates?wait=true", spelled)
        assert first.json() == second.json() == third.json()
        assert front.asked("plan") == 1
        other = await service.post("/v1/updates?wait=true", {**body, "version": 8})
        assert (other.status_code, code(other)) == (422, "id_reused")
        different = await service.post("/v1/updates", {**body, "id": "yours"})
        assert (different.status_code, code(different)) == (412, "stale_version")

    run(tmp_path, scenario)


@pytest.mark.case("F06")
def test_a_path_that_was_written_over_is_not_what_is_live(tmp_path: Path) -> None:
    """A repeat joins what is live: under a chosen id always, else unless its source was seen to change."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        weights = Path(service.checkpoint("ckpt", "first"))
        body = {"path": str(weights), "version": 7}
        first = (await service.post("/v1/updates?wait=true", body)).json()
        again = await service.post("/v1/updates?wait=true", body)
        assert (again.status_code, again.json()) == (200, first)
        service.checkpoint("ckpt", "other")
        refused = await service.post("/v1/updates?wait=true", body)
        assert (refused.status_code, code(refused), refused.json()["live_version"]) == (412, "stale_version", "0-7")
        (failure,) = refused.json()["failures"]
        assert (failure["file"], bool(failure["hint"])) == (weights.name, True)
        assert (await service.post("/v1/updates?wait=true", {**body, "id": "0-7"})).json() == first
        await asyncio.to_thread(weights.unlink)
        for more in ({}, {"id": "0-7"}):  # a retry after the folder was pruned gets its receipt
            pruned = await service.post("/v1/updates?wait=true", {**body, **more})
            assert (pruned.status_code, pruned.json()) == (200, first)
        assert front.asked("plan") == 1

    run(tmp_path, scenario)


@pytest.mark.case("F06")
def test_the_default_id_of_another_request_is_no_repeat(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(7)
        other = {"path": service.checkpoint("other"), "version": 7}
        answer = await service.post("/v1/updates?wait=true", other)
        assert (answer.status_code, code(answer)) == (412, "stale_version")
        assert (await service.post("/v1/updates?wait=true", {**other, "version": 8})).json()["id"] == "0-8"

    run(tmp_path, scenario)


@pytest.mark.case("F06")
def test_while_it_runs_the_default_id_joins_whatever_becomes_of_the_path(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        path = service.checkpoint("v7")
        first = asyncio.create_task(service.post("/v1/updates?wait=true", {"path": path, "version": 7}))
        await settle()
        service.checkpoint("v7", "written over")
        second = asyncio.create_task(service.post("/v1/updates?wait=true", {"path": path, "version": 7}))
        await settle()
        front.hold["stage"].set()
        assert (await first).json()["id"] == (await second).json()["id"] == "0-7"

    run(tmp_path, scenario)


def test_a_failed_update_under_a_chosen_id_stays_what_it_was(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        one_failure(front, "stage", "read_failed")
        first = await service.push(7, id="mine")
        second = await service.push(7, id="mine")
        assert (first.status_code, second.status_code) == (424, 424)
        assert first.json()["receipt"] == second.json()["receipt"]
        assert front.asked("stage") == 1

    run(tmp_path, scenario)


# --- what a fleet allows


@pytest.mark.case("F05")
def test_what_an_update_allows_and_what_its_fleet_allows_reach_the_fronts(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        await service.push(8, policy={"allow_suspicious": ["*.bias", "embed.*"]})
        plans = [request for verb, request in front.calls if verb == "plan"]
        assert [plan.allow_suspicious for plan in plans] == [("embed.*",), ("*.bias", "embed.*")]
        assert (await service.push(9, policy={"allow_suspicious": [""]})).status_code == 400

    run(tmp_path, scenario, allow_suspicious=("embed.*",))


@pytest.mark.case("F04")
def test_what_is_said_of_layouts_reaches_the_fronts_an_updates_word_first(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        await service.push(8, policy={"layouts": {"*.qkv.*": "by_kv_head", "*.w13": "stacked"}})
        plans = [request for verb, request in front.calls if verb == "plan"]
        fleet, mine = ("*.qkv.*", "concatenated"), [("*.qkv.*", "by_kv_head"), ("*.w13", "stacked")]
        assert [list(plan.layouts) for plan in plans] == [[fleet], [*mine, fleet]]
        for wrong in ({"*": "sideways"}, {"": "stacked"}, ["*"]):
            assert (await service.push(9, policy={"layouts": wrong})).status_code == 400

    run(tmp_path, scenario, layouts=(("*.qkv.*", SourceLayout.CONCATENATED),))


# --- busy


@pytest.mark.case("B144")
def test_a_second_update_is_refused_and_both_are_answered(tmp_path: Path) -> None:

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        first = asyncio.create_task(service.push(7))
        await settle()
        second = await service.push(8)
        assert (second.status_code, code(second)) == (409, "busy")
        front.hold["stage"].set()
        assert (await first).json()["outcome"] == "committed"
        assert (await service.push(8)).json()["outcome"] == "committed"

    run(tmp_path, scenario)


def test_an_update_waits_for_its_turn(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        first = asyncio.create_task(service.push(7))
        await settle()
        second = asyncio.create_task(service.push(8, policy={"on_busy": "wait"}))
        await settle()
        assert (await service.get("/v1/updates/0-8")).json()["phase"] == "queued"
        front.hold["stage"].set()
        assert [(await task).json()["outcome"] for task in (first, second)] == ["committed", "committed"]
        assert await service.live() == "0-8"

    run(tmp_path, scenario)


def test_what_waited_in_vain_ends_as_rejected(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        first = asyncio.create_task(service.push(9))
        await settle()
        second = asyncio.create_task(service.push(8, policy={"on_busy": "wait"}))
        await settle()
        front.hold["stage"].set()
        assert (await first).json()["outcome"] == "committed"
        document = (await second).json()
        assert (document["code"], document["receipt"]["outcome"]) == ("stale_version", "rejected")
        assert (await service.get("/v1/updates/0-8")).json()["receipt"]["reason"] == "stale_version"

    run(tmp_path, scenario)


def test_a_newer_update_takes_the_place_of_an_undecided_one(tmp_path: Path) -> None:
    """Hazard 8."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        first = asyncio.create_task(service.push(7))
        await settle()
        second = asyncio.create_task(service.push(8, policy={"on_busy": "supersede"}))
        await settle()
        front.hold["stage"].set()
        old = (await first).json()
        assert (old["code"], old["receipt"]["outcome"]) == ("superseded", "aborted")
        assert (await second).json()["outcome"] == "committed"

    run(tmp_path, scenario)


# --- leases, commit, abort


def test_a_manual_commit_waits_for_the_client(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        begun = await service.begin(7, policy={"commit": "manual"})
        assert begun.status_code == 202
        assert (await service.get("/v1/updates/0-7")).json()["phase"] == "ready"
        assert front.serving == "start"
        accepted = await service.post("/v1/updates/0-7/commit")
        assert accepted.status_code == 202
        await settle()
        assert await service.live() == "0-7"
        late = await service.post("/v1/updates/0-7/abort")
        assert (late.status_code, code(late)) == (409, "wrong_phase")

    run(tmp_path, scenario)


@pytest.mark.case("B094")
def test_a_client_that_stops_renewing_loses_its_update(tmp_path: Path) -> None:
    """Nothing stays shut or staged for ever."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.begin(7, policy={"commit": "manual"})
        for _ in range(3):
            await service.advance(50)
            renewed = await service.post("/v1/updates/0-7/renew")
            assert renewed.json()["lease_left_s"] == 60
        await service.advance(61)
        state = (await service.get("/v1/updates/0-7")).json()
        assert (state["receipt"]["outcome"], state["receipt"]["reason"]) == ("aborted", "lease_expired")
        late = await service.post("/v1/updates/0-7/commit")
        assert (late.status_code, code(late)) == (409, "lease_expired")
        assert front.serving == "start"
        assert front.state.plan is None

    run(tmp_path, scenario)


def test_a_commit_after_the_lease_and_before_its_timer_is_late(tmp_path: Path) -> None:
    """Hazard 9: the clock has passed the end, the timer has not run yet."""

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.begin(7, policy={"commit": "manual"}, lease_s=5)
        service.clock._now += 6  # type: ignore[attr-defined]
        late = await service.post("/v1/updates/0-7/commit")
        assert (late.status_code, code(late)) == (409, "lease_expired")
        await settle()
        assert (await service.get("/v1/updates/0-7")).json()["receipt"]["outcome"] == "aborted"

    run(tmp_path, scenario)


def test_a_disk_push_that_commits_by_itself_has_no_lease(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        state = (await service.begin(7)).json()
        assert state["lease_left_s"] is None
        await service.advance(300)
        front.hold["stage"].set()
        await settle()
        assert await service.live() == "0-7"

    run(tmp_path, scenario)


def test_after_an_accepted_commit_the_lease_does_not_count(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        begun = await service.begin(7, policy={"commit": "manual"}, lease_s=5)
        assert begun.json()["lease_left_s"] == 5
        accepted = await service.post("/v1/updates/0-7/commit")
        assert (accepted.status_code, accepted.json()["lease_left_s"]) == (202, None)
        await service.advance(100)
        front.hold["stage"].set()
        await settle()
        assert await service.live() == "0-7"

    run(tmp_path, scenario)


@pytest.mark.parametrize("held", ["plan", "stage", "verify", "pause"])
def test_abort_before_the_decision(tmp_path: Path, held: str) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        one.hold[held] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await settle()
        assert (await service.post("/v1/updates/0-7/abort")).status_code == 202
        one.hold[held].set()
        document = (await pushed).json()
        assert (document["code"], document["receipt"]["outcome"]) == ("client_abort", "aborted")
        assert (one.serving, two.serving) == ("start", "start")

    run(tmp_path, scenario)


def test_abort_after_the_decision_comes_too_late(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["install"] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await settle()
        late = await service.post("/v1/updates/0-7/abort")
        assert (late.status_code, code(late)) == (409, "wrong_phase")
        front.hold["install"].set()
        assert (await pushed).status_code == 200

    run(tmp_path, scenario)


# --- versions


@pytest.mark.case("B172")
def test_versions(tmp_path: Path) -> None:
    """A trainer whose counter starts again is refused unless it opens a run."""

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        assert (await service.push(57)).status_code == 200
        stale = await service.push(1)
        assert (stale.status_code, code(stale), stale.json()["live_version"]) == (412, "stale_version", "0-57")
        run = await service.push(1, policy={"new_run": True})
        assert (run.status_code, run.json()["version"]) == (200, "1-1")
        assert (await service.push(2)).json()["version"] == "1-2"
        path = service.checkpoint("x")
        label = await service.post("/v1/updates?wait=true", {"path": path, "version": "1-3"})
        assert label.json()["version"] == "1-3"
        pair = await service.post("/v1/updates?wait=true", {"path": path, "version": {"run": 1, "step": 4}})
        assert pair.json()["version"] == "1-4"
        base = await service.push(5, base_version="1-3")
        assert (base.status_code, code(base)) == (412, "base_mismatch")
        assert (await service.push(5, base_version="1-4")).status_code == 200
        old_run = await service.post("/v1/updates", {"path": path, "version": "0-99"})
        assert (old_run.status_code, code(old_run)) == (412, "stale_version")

    run(tmp_path, scenario)


# --- what is refused before anything starts


@pytest.mark.parametrize(
    ("change", "status", "expected"),
    [
        ({"version": -1}, 400, "bad_request"),
        ({"version": "7"}, 400, "bad_request"),
        ({"version": "start"}, 400, "bad_request"),
        ({"version": True}, 400, "bad_request"),
        ({"version": 7.0}, 400, "bad_request"),
        ({"version": 10**30}, 400, "bad_request"),
        ({"version": None}, 400, "bad_request"),
        ({"source": {"kind": "disk", "path": "/x"}}, 400, "bad_request"),
        ({"unknown": 1}, 400, "bad_request"),
        ({"id": "a/b"}, 400, "bad_request"),
        ({"id": ""}, 400, "bad_request"),
        ({"lease_s": 0}, 400, "bad_request"),
        ({"policy": {"in_flight": "stop"}}, 400, "bad_request"),
        ({"policy": {"attempts": 0}}, 400, "bad_request"),
        ({"policy": {"deadline_s": "5"}}, 400, "bad_request"),
        ({"policy": {"in_flight": "keep"}}, 422, "mode_unsupported"),
        ({"policy": {"install": "none"}}, 422, "mode_unsupported"),
        ({"policy": {"previous": "keep_host"}}, 422, "mode_unsupported"),
        ({"policy": {"partial": True}}, 422, "mode_unsupported"),
        ({"adapter": "lora"}, 422, "adapter_unsupported"),
        ({"path": None, "source": {"kind": "pigeon"}}, 422, "transport_unsupported"),
        ({"path": None, "source": {"kind": "broadcast"}}, 400, "bad_request"),
        ({"path": None, "source": {"kind": "cuda_ipc", "path": "/x"}}, 400, "bad_request"),
        ({"path": None, "source": {"kind": "broadcast", "address": "a:1", "session": "s"}}, 422, "manifest_required"),
        ({"path": "/etc/passwd"}, 422, "source_outside_roots"),
        ({"path": "relative/v7"}, 422, "source_outside_roots"),
        ({"path": "ROOT/../../etc"}, 422, "source_outside_roots"),
        ({"path": "ROOT/link"}, 422, "source_outside_roots"),
        ({"path": "ROOT/v\u00007"}, 422, "source_outside_roots"),
        ({"path": "ROOT/nothing"}, 422, "source_missing"),
        ({"manifest": {"tensors": 7}}, 422, "manifest_invalid"),
        ({"manifest": "0" * 64}, 422, "manifest_invalid"),
        ({"manifest": "not a digest"}, 400, "bad_request"),
    ],
)
def test_refused_at_the_door(tmp_path: Path, change: dict[str, object], status: int, expected: str) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        os.symlink("/etc/passwd", service.root / "link")
        body = {"path": service.checkpoint("v7"), "version": 7} | change
        if isinstance(body["path"], str):
            body["path"] = body["path"].replace("ROOT", str(service.root))
        answer = await service.post("/v1/updates", body)
        assert (answer.status_code, code(answer)) == (status, expected)
        assert front.asked("plan") == 0
        assert (await service.push(7)).status_code == 200

    run(tmp_path, scenario)


def test_nobody_to_publish_to(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        answer = await service.push(7)
        assert (answer.status_code, code(answer)) == (503, "no_members")
        assert "retry-after" in answer.headers

    run(tmp_path, scenario)


# --- manifests


def test_manifests_go_by_digest(tmp_path: Path) -> None:
    manifest = Manifest((TensorEntry("w", "BF16", (2,), "0" * 16),))

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        text = manifest.to_json()
        put = await service.http.put(f"/v1/manifests/{manifest.digest}", content=text, headers=JSON)
        assert put.status_code == 201
        wrong = await service.http.put(f"/v1/manifests/{'0' * 64}", content=text, headers=JSON)
        assert (wrong.status_code, code(wrong)) == (422, "manifest_mismatch")
        broken = await service.http.put(f"/v1/manifests/{manifest.digest}", content="{", headers=JSON)
        assert (broken.status_code, code(broken)) == (422, "manifest_invalid")
        assert (await service.get(f"/v1/manifests/{manifest.digest}")).text == text
        assert (await service.get(f"/v1/manifests/{'0' * 64}")).status_code == 404
        assert (await service.get("/v1/manifests/..%2fjournal.sqlite3")).status_code in (400, 404)
        receipt = (await service.push(7, manifest=manifest.digest)).json()
        assert (receipt["proof"], receipt["manifest_digest"]) == ("digests", manifest.digest)
        asked = [request for verb, request in front.calls if verb == "plan"]
        assert asked[0].manifest == text
        inline = (await service.push(8, manifest={"tensors": [{"name": "w", "dtype": "BF16", "shape": [2]}]})).json()
        assert inline["outcome"] == "committed"

    run(tmp_path, scenario)


# --- watching


def test_events_tell_every_phase_and_end_with_the_receipt(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["stage"] = asyncio.Event()
        await service.begin(7)
        watching = asyncio.create_task(service.get("/v1/updates/0-7/events"))
        await settle()
        front.hold["stage"].set()
        answer = await watching
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names[0] == "phase"
        assert names[-1] == "receipt"
        assert names.count("receipt") == 1
        phases = [line.split('"phase":"')[1].split('"')[0] for line in answer.text.splitlines() if '"attempt"' in line]
        assert phases[:2] == ["staging", "verifying"]
        assert phases.index("pausing") < phases.index("installing") < phases.index("resuming")
        after = await service.get("/v1/updates/0-7/events")
        assert after.text.count("event: receipt") == 1
        assert (await service.get("/v1/updates/none/events")).status_code == 404

    run(tmp_path, scenario)


def test_history_and_metrics(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        await service.push(7)
        one_failure(front, "stage", "read_failed")
        await service.push(8)
        receipts = (await service.get("/v1/history")).json()["receipts"]
        assert [(each["version"], each["outcome"]) for each in receipts] == [("0-8", "aborted"), ("0-7", "committed")]
        assert len((await service.get("/v1/history?limit=1")).json()["receipts"]) == 1
        assert (await service.get("/v1/history?limit=0")).status_code == 400
        lines = (await service.get("/metrics")).text.splitlines()
        assert 'liveweights_updates_total{kind="update",outcome="aborted",reason="read_failed"} 1.0' in lines
        assert 'liveweights_updates_total{kind="update",outcome="committed",reason=""} 1.0' in lines
        assert 'liveweights_live_version{run="0"} 7.0' in lines
        assert 'liveweights_members{state="open"} 1.0' in lines
        assert "liveweights_read_bytes_total 2.0" in lines
        await service.push(3)
        await service.post("/v1/updates", {"path": "/etc/passwd", "version": 9})
        lines = (await service.get("/metrics")).text.splitlines()
        for reason in ("stale_version", "source_outside_roots"):
            assert f'liveweights_updates_total{{kind="update",outcome="rejected",reason="{reason}"}} 1.0' in lines

    run(tmp_path, scenario)


# --- members


def test_joins_that_are_refused(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        nobody = await service.post("/v1/fleet/replicas", {"replica": "two", "url": "http://two.test"})
        assert (nobody.status_code, code(nobody)) == (503, "unreachable")
        wrong = await service.post("/v1/fleet/replicas", {"replica": "two", "url": front.url})
        assert (wrong.status_code, code(wrong)) == (400, "bad_request")
        for url in (
            "ftp://x",
            "http://x/path?query",
            "http://x/../path",
            "http://a b",
            "http://u@h",
            "file:///etc/passwd",
            "http://x:99999",
            "http://x:y",
        ):
            assert (await service.post("/v1/fleet/replicas", {"replica": "two", "url": url})).status_code == 400
        second = service.fleet.add("one", url="http://elsewhere.test")
        taken = await service.post("/v1/fleet/replicas", {"replica": "one", "url": second.url})
        assert (taken.status_code, code(taken)) == (409, "replica_id_taken")
        assert [member["url"] for member in (await service.get("/v1/fleet")).json()["members"]] == [front.url]
        assert (await service.push(7)).status_code == 200
        assert front.serving == "0-7"

    run(tmp_path, scenario)


@pytest.mark.case("B166")
def test_a_late_joiner_catches_up_before_it_opens(tmp_path: Path) -> None:

    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(7)
        (late,) = await service.join("two")
        assert late.opened == ["0-7"]
        assert late.state.live.digest == digest_of("v7")
        assert (await service.push(8)).status_code == 200
        assert late.serving == "0-8"

    run(tmp_path, scenario)


@pytest.mark.case("B166")
def test_a_restarted_replica_comes_back_under_the_same_name(tmp_path: Path) -> None:
    """Hazard 10."""

    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        await service.push(7)
        two.restart()
        body = {"replica": two.replica, "url": two.url}
        assert (await service.post("/v1/fleet/replicas", body)).status_code == 201
        await settle()
        assert two.serving == "0-7"
        assert two.opened[-1] == "0-7"
        assert one.serving == "0-7"

    run(tmp_path, scenario)


def test_a_silent_member_blocks_until_it_is_confirmed_dead(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.deaf = True
        await service.advance(10)
        states = {m["replica"]: m["state"] for m in (await service.get("/v1/fleet")).json()["members"]}
        assert states == {"one": "open", "two": "lost"}
        blocked = await service.push(7)
        assert (blocked.status_code, code(blocked)) == (409, "member_blocked")
        refused = await service.http.delete("/v1/fleet/replicas/two")
        assert (refused.status_code, code(refused)) == (409, "member_blocked")
        gone = await service.http.delete("/v1/fleet/replicas/two?confirm_dead=true")
        assert gone.status_code == 204
        assert (await service.http.delete("/v1/fleet/replicas/two")).status_code == 404
        assert (await service.push(7)).status_code == 200
        assert one.serving == "0-7"

    run(tmp_path, scenario)


def test_a_silent_member_that_answers_again_counts_again(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.deaf = True
        await service.advance(10)
        two.deaf = False
        await service.advance(5)
        assert (await service.push(7)).status_code == 200
        assert (one.serving, two.serving) == ("0-7", "0-7")

    run(tmp_path, scenario)


@pytest.mark.parametrize("verb", ["stage", "pause", "install"])
def test_a_member_that_dies_in_the_middle(tmp_path: Path, verb: str) -> None:
    """Its death is noticed by a probe, long before the deadline of the phase."""

    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.hold[verb] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await settle()
        two.deaf = True
        await service.advance(40)
        document = (await pushed).json()
        assert document["code"] == "replica_lost"
        assert document["receipt"]["outcome"] == ("rolled_back" if verb == "install" else "aborted")
        assert one.serving == "start"

    run(tmp_path, scenario)


def test_a_closed_port_is_noticed_without_a_probe(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.deaf = True
        pushed = asyncio.create_task(service.push(7))
        await service.advance(5)
        states = {m["replica"]: m["state"] for m in (await service.get("/v1/fleet")).json()["members"]}
        assert states["two"] == "lost"
        await service.advance(20)
        assert (await pushed).json()["code"] == "replica_lost"
        assert one.serving == "start"

    run(tmp_path, scenario, deadlines=replace(DEADLINES, probe_every_s=1e6))


def test_a_member_lost_while_resuming_does_not_undo_the_publication(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        two.lose_answer.extend(["resume"] * 2)
        two.lose_call.extend(["resume"] * 3)
        pushed = asyncio.create_task(service.push(7))
        await service.advance(15)
        assert (await pushed).json()["outcome"] == "committed"
        await service.advance(10)
        assert (one.serving, two.serving) == ("0-7", "0-7")

    run(tmp_path, scenario)


@pytest.mark.parametrize("waited", ["discard", "resume"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_member_whose_removal_ends_an_update_is_in_its_receipt(tmp_path: Path, waited: str, comes_back: bool) -> None:
    """The update waits for nothing but that member: its end and the removal are one step."""

    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        was = two.state.incarnation
        two.hold[waited] = asyncio.Event()
        if waited == "discard":
            one_failure(one, "stage", "source_missing")
        pushed = asyncio.create_task(service.push(7))
        await settle()
        if comes_back:
            two.restart()
            body = {"replica": two.replica, "url": two.url}
            assert (await service.post("/v1/fleet/replicas", body)).status_code == 201
        else:
            assert (await service.http.delete("/v1/fleet/replicas/two?confirm_dead=true")).status_code == 204
        await settle()
        document = (await asyncio.wait_for(pushed, 30)).json()
        receipt = document.get("receipt", document)
        assert receipt["outcome"] == ("aborted" if waited == "discard" else "committed")
        states = {member["replica"]: (member["state"], member["incarnation"]) for member in receipt["members"]}
        assert states == {"one": ("open", one.state.incarnation), "two": ("lost", was)}
        two.hold.pop(waited).set()
        assert (await service.push(8)).status_code == 200

    run(tmp_path, scenario)


# --- the end


def test_a_journal_that_fails_stops_everything_at_once(tmp_path: Path) -> None:
    """Hazard 19: nothing is installed that is not durably decided; the pause lease reopens the old version."""

    async def scenario(service: LocalService) -> None:
        (front,) = await service.join("one")
        front.hold["pause"] = asyncio.Event()
        pushed = asyncio.create_task(service.push(7))
        await settle()
        os.rename(service.settings.state_folder / "journal.sqlite3", service.settings.state_folder / "gone")
        service.coordinator._journal._db.execute("PRAGMA query_only = ON")
        front.hold["pause"].set()
        answer = await pushed
        assert (answer.status_code, code(answer)) == (503, "journal_failed")
        assert [failure.code for failure in service.stopped] == ["journal_failed"]
        assert front.asked("install") == 0
        assert (await service.push(8)).status_code == 503
        assert (await service.get("/readyz")).status_code == 503
        assert (await service.get("/healthz")).status_code == 200
        await service.advance(100)
        assert front.serving == "start"

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("held", "version", "outcome"), [("stage", "start", "aborted"), ("install", "0-7", "committed")]
)
def test_the_end_of_the_service_leaves_no_half_update(tmp_path: Path, held: str, version: str, outcome: str) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        service = LocalService(tmp_path)
        async with service:
            (front,) = await service.join("one")
            front.hold[held] = asyncio.Event()
            pushed = asyncio.create_task(service.push(7))
            await settle()
            ending = asyncio.create_task(service.coordinator.wind_down())
            await settle()
            assert (await service.push(8)).status_code == 503
            front.hold[held].set()
            await ending
            document = (await pushed).json()
            assert document.get("receipt", document)["outcome"] == outcome
        assert front.serving == version
        assert front.state.plan is None
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(main(), 120))


def test_manifest_text_is_kept_under_its_own_hash(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        await service.push(7, manifest={"tensors": []})
        for path in (service.settings.state_folder / "manifests").iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem

    run(tmp_path, scenario)


# --- a dry run


@pytest.mark.case("F01")
def test_a_dry_run_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        one, two = await service.join("one", "two")
        assert (await service.push(1)).status_code == 200
        before = (await service.get("/v1/version")).json()
        path = service.checkpoint("next")
        ask = {"path": path, "dry_run": True}
        answer = await service.post("/v1/updates?wait=true", ask)
        receipt = answer.json()
        assert (answer.status_code, receipt["outcome"], receipt["version"]) == (200, "planned", "0-2")
        assert (receipt["live_version"], receipt["rollback_to"], receipt["bytes_read"]) == ("0-1", "start", 0)
        assert receipt["pause"] is None
        assert (await service.get("/v1/version")).json() == before
        assert (one.serving, two.serving) == ("0-1", "0-1")
        # Its id is its own: the publication that follows is no repeat of it, and neither is another look.
        again = (await service.post("/v1/updates?wait=true", ask)).json()
        assert again["id"] != receipt["id"]
        refused = await service.post("/v1/updates?wait=true", {**ask, "version": 1})
        assert (refused.status_code, code(refused)) == (412, "stale_version")
        one_failure(two, "plan", "tensor_shape")
        answer = await service.post("/v1/updates?wait=true", {**ask, "version": 2})
        assert (answer.status_code, code(answer)) == (422, "tensor_shape")
        assert answer.json()["receipt"]["outcome"] == "rejected"
        answer = await service.post("/v1/updates?wait=true", {"path": path, "version": 2})
        assert (answer.status_code, answer.json()["id"], answer.json()["outcome"]) == (200, "0-2", "committed")

    run(tmp_path, scenario)


@pytest.mark.case("F01")
def test_what_a_dry_run_cannot_be(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        path = service.checkpoint("next")
        stream = {"kind": "broadcast", "address": "127.0.0.1:1", "session": "s"}
        bodies: list[dict[str, object]] = [
            {"source": stream, "manifest": {"tensors": []}, "dry_run": True, "version": 1},
            {"path": path, "dry_run": True, "policy": {"on_busy": "supersede"}},
        ]
        for body in bodies:
            answer = await service.post("/v1/updates", body)
            assert (answer.status_code, code(answer)) == (422, "mode_unsupported"), answer.text
            assert answer.json()["hint"]
        assert code(await service.post("/v1/updates", {"path": path})) == "bad_request"  # no version

    run(tmp_path, scenario)


@pytest.mark.case("F01")
def test_dry_runs_that_wait_have_names_of_their_own(tmp_path: Path) -> None:
    async def scenario(service: LocalService) -> None:
        await service.join("one")
        ask = {"dry_run": True, "policy": {"on_busy": "wait"}}
        names = [
            (await service.post("/v1/updates", {**ask, "path": service.checkpoint(name)})).json()["id"]
            for name in ("x", "y", "z")
        ]
        assert len(set(names)) == 3
        await settle()
        for name in names:
            assert (await service.get(f"/v1/updates/{name}")).json()["receipt"]["outcome"] == "planned"

    run(tmp_path, scenario)
