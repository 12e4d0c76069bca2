"""Real ranks whose memory rots, whose restore fails, whose engine fails; and an operator who readmits or releases."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.models import encode, make_model
from engine_adapter.rank.messages import RankStatus
from engine_adapter.testing.fronts import (
    PROMPT,
    HandCoordinator,
    Stage,
    code_of,
    running_replica,
    toy_settings,
    toy_stage,
)
from updater.core.errors import LiveweightsError
from updater.core.participant import FenceRequest, FrontState, FrontStatus, Kind, Released, ReleaseTo, SpareState
from updater.protocol import problems, wire

pytestmark = pytest.mark.engine


async def operate(c: HandCoordinator, verb: str, body: dict[str, Any] | None = None) -> FrontStatus:
    """An operator's verb over HTTP. Raises LiveweightsError for a problem document."""
    response = await c.client.post(f"/replica/v1/{verb}", json=body or {})
    if response.status_code != 200:
        raise problems.error_of(response.status_code, response.json())
    status: FrontStatus = wire.decode(FrontStatus, response.content)
    return status


async def serves(stage: Stage, c: HandCoordinator, version: str) -> None:
    """The live checkpoint's tokens under that label."""
    answer = await c.complete(PROMPT)
    assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
    assert answer["liveweights"]["version"] == version


async def rank_states(stage: Stage) -> list[tuple[str, str]]:
    ranks = await stage.replica.pool.call("status", RankStatus(), deadline_s=60.0)
    return [(rank.live_version, rank.spare_state) for rank in ranks]


def test_a_live_byte_that_changes_shuts_the_replica_and_no_readmission_opens_it(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"rot": "live", "rot_rank": 1}, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            serial, path, version = stage.next()
            await c.update(serial, path, version)
            status = await c.until(lambda status: status.state is FrontState.QUARANTINED)
            assert status.failure is not None
            assert (status.failure.code, status.failure.rank, status.failure.replica) == ("tensor_digest", 1, "toy")
            assert (await c.client.get("/readyz")).status_code == 503
            assert await code_of(c.complete(PROMPT)) == "shut"
            serial, path, version = stage.next()
            assert await code_of(c.plan(serial, path, version)) == "tensor_digest"
            with pytest.raises(LiveweightsError) as caught:
                await operate(c, "readmit")
            assert [(failure.code, failure.rank) for failure in caught.value.failures] == [("tensor_digest", 1)]
            assert (await c.status()).state is FrontState.QUARANTINED

        stage.play(scene)


def test_a_byte_of_the_kept_copy_that_changes_empties_the_way_back(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"rot": "spare"}) as stage:

        async def scene(c: HandCoordinator) -> None:
            before = await c.status()
            serial, path, version = stage.next()
            await c.update(serial, path, version)
            stage.installed()
            status = await c.until(lambda status: status.spare.state is SpareState.EMPTY)
            assert (status.state, status.live_version) == (FrontState.OPEN, version)
            await serves(stage, c, version)
            old = {"kind": Kind.ROLLBACK, "digest": before.live_digest}
            assert await code_of(c.plan(next(stage.serials), None, "start", **old)) == "no_rollback"

        stage.play(scene)


def test_a_restore_that_failed_on_one_rank_is_finished_by_a_readmission(tmp_path: Path) -> None:
    # Labels on rank 1: at the start, at the join, by the install, and the one of the restore fails.
    with toy_stage(tmp_path, {"fault": "raise:before:set_version:1:4"}, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            before, bytes_before = await c.status(), await stage.digests()
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            await c.pause(serial)
            await c.install(serial)
            assert await code_of(c.restore(serial)) == "rank_failed"
            assert (await c.status()).state is FrontState.QUARANTINED
            status = await operate(c, "readmit")
            assert status.incarnation != before.incarnation
            status = await c.until(lambda status: status.state is FrontState.OPEN)
            assert (status.live_version, status.live_digest) == (before.live_version, before.live_digest)
            assert await rank_states(stage) == [("start", "empty")] * 2
            assert await stage.digests() == bytes_before
            await serves(stage, c, "start")
            await c.lead()
            await c.update(serial + 5, path, "0-99")
            stage.installed()
            await serves(stage, c, "0-99")

        stage.play(scene)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with toy_stage(tmp_path_factory.mktemp("toy"), tp=2) as stage:
        yield stage


def test_a_replica_is_released_to_what_it_has_installed(calm: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        await c.complete(PROMPT)  # leaves blocks in the cache
        serial, path, version = calm.next()
        await c.prepare(serial, path, version)
        await c.pause(serial, lease_s=60.0)
        await c.install(serial)
        assert await code_of(operate(c, "release", {"to": "elsewhere"})) == "bad_request"
        assert await code_of(operate(c, "release", {"to": "live"})) == "wrong_phase"  # the coordinator just spoke
        calm.later(61.0)
        status = await operate(c, "release", {"to": "live"})
        calm.installed()
        assert (status.state, status.live_version) == (FrontState.OPEN, version)
        assert status.released == Released(ReleaseTo.LIVE, version, serial, 1)
        await serves(calm, c, version)
        assert (await c.client.get("/v1/version")).json()["released"]["to"] == "live"
        # The coordinator that comes back may not undo it, and publishes it.
        await c.lead()
        assert await code_of(c.restore(serial)) == "wrong_phase"
        await c.resume(serial, 1, True, version, status.live_digest)
        assert (await c.status()).released is None

    calm.play(scene)


def test_a_replica_is_released_to_what_it_served_before(calm: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        await c.lead(2)
        before, bytes_before = await c.status(), await calm.digests()
        serial, path, version = calm.next()
        await c.prepare(serial, path, version)
        await c.pause(serial, lease_s=60.0)
        assert await code_of(operate(c, "release", {"to": "previous"})) == "wrong_phase"  # its lease will reopen it
        calm.later(61.0)
        await c.until(lambda status: status.state is FrontState.OPEN)
        await c.pause(serial, 2, lease_s=60.0)
        await c.install(serial, 2)
        await c.invalidate(serial, 2)
        calm.later(61.0)
        status = await operate(c, "release", {"to": "previous"})
        assert (status.state, status.live_version) == (FrontState.OPEN, before.live_version)
        assert status.released == Released(ReleaseTo.PREVIOUS, before.live_version, serial, 2)
        assert await calm.digests() == bytes_before
        assert await rank_states(calm) == [(before.live_version, "empty")] * 2
        await serves(calm, c, before.live_version)
        assert await code_of(c.install(serial, 2)) in ("replica_fenced", "wrong_phase")

    calm.play(scene)


def test_an_update_is_cleaned_up_under_a_later_serial_to_the_last_byte(calm: Stage) -> None:
    """I6: ranks are told the serial that they know, whatever serial a coordinator that came back speaks under."""

    async def scene(c: HandCoordinator) -> None:
        await c.lead(3)
        before, bytes_before = await c.status(), await calm.digests()
        serial, path, version = calm.next()
        await c.prepare(serial, path, version)
        await c.pause(serial)
        await c.install(serial)
        later = next(calm.serials)
        await c.call("restore", FenceRequest(c.fence(later, 0)))
        assert await calm.digests() == bytes_before
        assert await rank_states(calm) == [(before.live_version, "empty")] * 2
        await c.resume(later, 0, False, before.live_version, before.live_digest)
        await serves(calm, c, before.live_version)
        serial, path, version = calm.next()
        await c.prepare(serial, path, version)
        assert [state for _, state in await rank_states(calm)] == ["staged", "staged"]
        await c.discard(next(calm.serials))
        assert [state for _, state in await rank_states(calm)] == ["empty", "empty"]

    calm.play(scene)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_fails_in_a_process_that_lives_breaks_the_replica(tmp_path: Path, tp: int) -> None:
    with toy_stage(tmp_path, {"fault": "raise:before:step:0:3"}, tp=tp) as stage:

        async def scene(c: HandCoordinator) -> None:
            assert await code_of(c.complete(PROMPT)) in ("rank_failed", "rank_died")
            status = await c.until(lambda status: status.state is FrontState.BROKEN)
            assert (status.failure and status.failure.code) == "rank_died"
            assert (await c.client.get("/readyz")).status_code == 503
            assert await code_of(c.complete(PROMPT)) == "shut"
            assert await code_of(operate(c, "readmit")) == "rank_died"

        stage.play(scene)


def test_the_embedded_engine_that_fails_breaks_the_replica_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    factory = "tests.integration.failing_engine:build"

    async def life() -> None:
        async with running_replica(toy_settings(model, factory=factory)) as replica, HandCoordinator(replica) as c:
            assert await code_of(c.complete(encode("once"))) in ("rank_failed", "rank_died")
            await c.until(lambda status: status.state is FrontState.BROKEN)
            assert (await c.client.get("/readyz")).status_code == 503
            assert await code_of(c.complete(encode("again"))) == "shut"

    asyncio.run(asyncio.wait_for(life(), 200))
