"""Several ranks: they agree or nothing happens; one that dies takes the replica out of service, never into doubt."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from engine_adapter.testing.fronts import PROMPT, HandCoordinator, Stage, code_of, toy_stage
from updater.core.errors import LiveweightsError
from updater.core.participant import FrontState, StatusRequest

pytestmark = pytest.mark.engine


async def serves_old(stage: Stage, c: HandCoordinator, version: str) -> None:
    answer = await c.complete(PROMPT)
    assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
    assert answer["liveweights"]["spans"] == [{"version": version, "start": 0, "end": 8}]


def test_two_ranks_publish_one_version_and_a_killed_rank_breaks_the_replica(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"step_ms": 5}, tp=2) as stage:

        async def publish(c: HandCoordinator) -> None:
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            pause = await c.pause(serial)
            assert pause.staged_serial == serial
            await c.install(serial)
            await c.invalidate(serial)
            await c.resume(serial, 1, True, version, pause.staged_digest)
            stage.installed()
            await serves_old(stage, c, version)
            told = await c.call("describe", StatusRequest())
            assert [rank.rank for rank in told.ranks] == [0, 1]
            assert len({rank.pid for rank in told.ranks}) == 2

        async def kill(c: HandCoordinator) -> None:
            running = asyncio.ensure_future(c.complete(PROMPT, max_tokens=4000))
            await c.until(lambda status: status.in_flight == 1)
            os.kill(stage.replica.pool.pids[1], signal.SIGKILL)
            with pytest.raises(LiveweightsError) as caught:
                await running
            # Rank 0 may say that its peer is gone, and end of it, before the kernel tells of the killed one.
            found = caught.value.code, caught.value.failures[0].rank
            assert found in (("rank_died", 1), ("rank_failed", 0), ("rank_died", 0))
            status = await c.until(lambda status: status.state is FrontState.BROKEN)
            assert (status.failure and status.failure.code) == "rank_died"
            assert (await c.client.get("/readyz")).status_code == 503
            assert (await c.client.get("/healthz")).status_code == 200
            assert await code_of(c.complete(PROMPT)) == "shut"
            serial, path, version = stage.next()
            assert await code_of(c.plan(serial, path, version)) == "rank_died"

        stage.play(publish)
        stage.play(kill)
        pids = stage.replica.pool.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_at_different_steps_are_refused_and_the_old_version_goes_on(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"step_skew": 1}, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            before = await c.status()
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            with pytest.raises(LiveweightsError) as caught:
                await c.pause(serial)
            assert [(f.code, f.rank) for f in caught.value.failures] == [
                ("rank_steps_differ", 0),
                ("rank_steps_differ", 1),
            ]
            assert await code_of(c.install(serial)) == "wrong_phase"
            await c.resume(serial, 1, False, before.live_version, before.live_digest)
            await c.discard(serial, 1)
            await serves_old(stage, c, before.live_version)

        stage.play(scene)


def test_an_install_that_fails_on_one_rank_is_taken_back_on_all(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"fault": "raise:before:set_version:1:3"}, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            before, bytes_before = await c.status(), await stage.digests()
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            await c.pause(serial)
            with pytest.raises(LiveweightsError) as caught:
                await c.install(serial)
            assert [(f.code, f.rank) for f in caught.value.failures] == [("rank_failed", 1)]
            assert await code_of(c.complete(PROMPT, liveweights={"exact_version": "start"})) == "version_not_served"
            await c.restore(serial)
            await c.resume(serial, 1, False, before.live_version, before.live_digest)
            assert await stage.digests() == bytes_before
            await serves_old(stage, c, before.live_version)
            # The fault is over: the same bytes can be published by the next update.
            serial, path, version = stage.next()
            await c.update(serial, path, version)
            stage.installed()
            await serves_old(stage, c, version)

        stage.play(scene)


def test_a_rank_that_dies_in_the_install_leaves_the_replica_shut(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"fault": "die:before:set_version:1:3"}, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            await c.pause(serial)
            assert await code_of(c.install(serial)) == "rank_died"
            assert (await c.status()).state is FrontState.BROKEN
            assert await code_of(c.restore(serial)) == "rank_died"
            assert await code_of(c.complete(PROMPT)) == "shut"

        stage.play(scene)


def test_a_placement_that_does_not_reproduce_the_start_checkpoint_is_not_admitted(tmp_path: Path) -> None:
    """Rank 1 places as if it were rank 0: its replay differs from what it serves."""
    with pytest.raises(LiveweightsError) as caught, toy_stage(tmp_path, {"as_rank": 0, "defect_rank": 1}, tp=2):
        pass
    assert caught.value.code == "tensor_unwritten"
