"""One replica, one real rank, a coordinator played by hand: what every verb does to what clients see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from engine_adapter.rank.messages import RankStatus
from engine_adapter.replica.admission import Limits
from engine_adapter.testing.fronts import PROMPT, HandCoordinator, Stage, code_of, toy_stage
from updater.core.errors import LiveweightsError
from updater.core.participant import FrontState, Kind, SpareState, StageRequest, StatusRequest
from updater.core.policy import CachePolicy, InFlight

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    limits = Limits(max_waiting=2, wait_s=60.0)
    with toy_stage(tmp_path_factory.mktemp("toy"), limits=limits) as made:
        yield made


def test_an_update_changes_tokens_label_and_digest_together_and_a_rollback_brings_them_back(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        old = before.live_version, before.live_digest
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert (answer["liveweights"]["version"], answer["liveweights"]["digest"]) == old
        old_bytes = await stage.digests()
        serial, path, version = stage.next()
        digest = await c.update(serial, path, version)
        stage.installed()
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        told = answer["liveweights"]
        assert (told["version"], told["digest"]) == (version, digest)
        assert told["spans"] == [{"version": version, "start": 0, "end": 8}]
        status = await c.status()
        assert (status.state, status.live_version, status.live_digest) == (FrontState.OPEN, version, digest)
        assert (status.spare.state, status.spare.version, status.spare.digest) == (SpareState.PREVIOUS, *old)
        assert (await c.client.get("/v1/version")).json()["version"] == version
        serial = next(stage.serials)
        await c.plan(serial, None, old[0], kind=Kind.ROLLBACK, digest=old[1])
        vote = await c.verify(serial)
        assert vote.observed == old[1]
        await c.pause(serial)
        await c.install(serial)
        await c.invalidate(serial)
        await c.resume(serial, 1, True, *old)
        stage.installed()
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert answer["liveweights"]["version"] == old[0]
        assert await stage.digests() == old_bytes
        assert (await c.status()).spare.version == version

    stage.play(scene)


async def told(c: HandCoordinator, *, stream: bool) -> tuple[bool, bool]:
    """Of a completion of PROMPT: whether it found cached blocks, and whether it says that they may be stale."""
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    answer = (await c.client.post("/v1/completions", json=body)).text
    whole = [line for line in answer.splitlines() if '"usage"' in line][-1].removeprefix("data: ")
    document = json.loads(whole)
    cached = document["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    return cached, document["liveweights"].get("stale_prefix", False)


@pytest.mark.case("F08")
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_over_blocks_that_outlived_a_switch_says_so(stage: Stage, stream: bool) -> None:
    async def publish(c: HandCoordinator, cache: CachePolicy) -> None:
        serial, path, version = stage.next()
        await c.update(serial, path, version, cache=cache)
        stage.installed()

    async def taken_back(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        await c.prepare(serial, path, version, cache=CachePolicy.KEEP)
        await c.pause(serial)
        await c.install(serial)
        await c.restore(serial)
        await c.resume(serial, 1, False, before.live_version, before.live_digest)
        await c.discard(serial, 1)

    async def scene(c: HandCoordinator) -> None:
        await publish(c, CachePolicy.RESET)
        assert await told(c, stream=stream) == (False, False)
        assert await told(c, stream=stream) == (True, False)
        await taken_back(c)  # no switch: the blocks are those of what serves
        assert await told(c, stream=stream) == (True, False)
        await publish(c, CachePolicy.KEEP)
        assert await told(c, stream=stream) == (True, True)
        await publish(c, CachePolicy.RESET)
        assert await told(c, stream=stream) == (False, False)
        assert await told(c, stream=stream) == (True, False)

    stage.play(scene)


def test_staging_and_voting_leave_what_serves_as_it_is(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before, bytes_before = await c.status(), await stage.digests()
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version)
        assert vote.tensors_changed > 0
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert await stage.digests() == bytes_before
        status = await c.status()
        assert (status.live_version, status.staged_serial) == (before.live_version, serial)
        await c.discard(serial)
        assert (await c.status()).spare.state is SpareState.EMPTY
        ranks = await stage.replica.pool.call("status", RankStatus(), deadline_s=60.0)
        assert [rank.spare_state for rank in ranks] == ["empty"]

    stage.play(scene)


def test_a_bad_source_is_refused_and_admission_never_shuts(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        assert await code_of(c.plan(serial, path.parent / "nowhere", version)) == "source_missing"
        serial = next(stage.serials)
        assert await code_of(c.plan(serial, Path("/etc"), version)) == "source_outside_roots"
        assert await code_of(c.plan(next(stage.serials), path, version, require_digests=True)) == "manifest_required"
        modes = {"in_flight": InFlight.KEEP, "cache": CachePolicy.RESET}
        assert await code_of(c.plan(next(stage.serials), path, version, **modes)) == "mode_unsupported"
        status = await c.status()
        assert (status.state, status.spare) == (FrontState.OPEN, before.spare)
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)

    stage.play(scene)


def test_a_pause_whose_lease_ends_reopens_on_the_old_version_and_may_never_install(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version)
        await c.pause(serial, lease_s=60.0)
        stage.later(61.0)
        await c.until(lambda status: status.state is FrontState.OPEN)
        assert await code_of(c.install(serial)) in ("wrong_phase", "replica_fenced")
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert answer["liveweights"]["version"] == before.live_version
        # The staging is kept: the next attempt needs no byte of it again.
        await c.pause(serial, 2)
        assert await code_of(c.install(serial, 1)) == "replica_fenced"
        await c.install(serial, 2)
        await c.invalidate(serial, 2)
        await c.resume(serial, 2, True, version, vote.observed)
        stage.installed()
        assert (await c.complete(PROMPT))["choices"][0]["token_ids"] == stage.expected(stage.live)

    stage.play(scene)


def test_a_lease_ends_by_its_own_timer_too(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        await c.prepare(serial, path, version)
        # Shorter than a pause may take, which is then refused: either way no client has to ask for the reopening.
        with suppress(LiveweightsError):
            await c.pause(serial, lease_s=0.2)
        status = await c.until(lambda status: status.state is FrontState.OPEN)
        assert (status.live_version, status.lease_left_s) == (before.live_version, None)
        await c.discard(serial, 1)

    stage.play(scene)


def test_a_later_attempt_brings_a_lease_of_its_own(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        serial, path, version = stage.next()
        await c.prepare(serial, path, version)
        await c.pause(serial, lease_s=600.0)
        stage.later(500.0)
        await c.pause(serial, 2, lease_s=600.0)
        stage.later(500.0)
        left = (await c.status()).lease_left_s
        assert left is not None
        assert 0 < left <= 100.0
        await c.discard(serial, 2)
        await c.until(lambda status: status.state is FrontState.OPEN)

    stage.play(scene)


def test_restore_after_an_install_brings_bytes_label_and_tokens_back(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before, bytes_before = await c.status(), await stage.digests()
        serial, path, version = stage.next()
        await c.prepare(serial, path, version)
        await c.pause(serial)
        await c.install(serial)
        assert await code_of(c.resume(serial, 1, True, version, before.live_digest)) == "wrong_phase"
        await c.restore(serial)
        await c.restore(serial)
        await c.resume(serial, 1, False, before.live_version, before.live_digest)
        assert await stage.digests() == bytes_before
        answer = await c.complete(PROMPT)
        assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
        assert answer["liveweights"]["version"] == before.live_version
        assert await code_of(c.install(serial)) in ("wrong_phase", "replica_fenced")
        assert (await c.status()).state is FrontState.OPEN

    stage.play(scene)


def test_messages_of_another_life_or_an_older_attempt_are_fenced(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        serial, path, version = stage.next()
        await c.plan(serial, path, version)
        for fence in (
            c.fence(serial, incarnation="other"),
            c.fence(serial, fleet="other"),
            c.fence(serial - 1),
            c.fence(serial, epoch=0),
        ):
            assert await code_of(c.call("stage", StageRequest(fence, 10.0))) == "replica_fenced"
        await c.discard(serial)
        assert await code_of(c.stage(serial)) in ("wrong_phase", "replica_fenced")

    stage.play(scene)


def test_a_repeated_verb_joins_the_first_or_gets_its_answer_again(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        serial, path, version = stage.next()
        first, second = await asyncio.gather(c.plan(serial, path, version), c.plan(serial, path, version))
        assert first == second
        staged = await asyncio.gather(c.stage(serial), c.stage(serial))
        assert staged[0] == staged[1] == await c.stage(serial)
        votes = await asyncio.gather(c.verify(serial), c.verify(serial))
        assert votes[0] == votes[1]
        pauses = await asyncio.gather(c.pause(serial), c.pause(serial))
        assert pauses[0] == pauses[1]
        await asyncio.gather(c.install(serial), c.install(serial))
        await asyncio.gather(c.invalidate(serial), c.invalidate(serial))
        await c.resume(serial, 1, True, version, votes[0].observed)
        await c.resume(serial, 1, True, version, votes[0].observed)
        stage.installed()
        assert (await c.complete(PROMPT))["choices"][0]["token_ids"] == stage.expected(stage.live)

    stage.play(scene)


def test_while_shut_requests_wait_and_are_served_by_the_version_that_opens(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version)
        await c.pause(serial)
        plain = asyncio.ensure_future(c.complete(PROMPT))
        exact = asyncio.ensure_future(c.complete(PROMPT, liveweights={"exact_version": version}))
        await c.until(lambda status: status.waiting == 2)
        assert await code_of(c.complete(PROMPT)) == "queue_full"
        assert await code_of(c.complete(PROMPT, liveweights={"min_version": "9-9"})) == "version_not_served"
        assert (await c.client.get("/readyz")).status_code == 503
        await c.install(serial)
        await c.invalidate(serial)
        await c.resume(serial, 1, True, version, vote.observed)
        stage.installed()
        for answer in (await plain, await exact):
            assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
            assert answer["liveweights"]["spans"] == [{"version": version, "start": 0, "end": 8}]
        assert (await c.client.get("/readyz")).status_code == 200

    stage.play(scene)


def test_a_stream_of_a_client_that_went_away_ends_at_the_engine(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
        async with c.client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    break
        await c.until(lambda status: status.in_flight == 0)
        serial, path, version = stage.next()
        await c.prepare(serial, path, version)
        await c.pause(serial)  # the engine holds nothing of it any more
        await c.discard(serial, 1)
        await c.until(lambda status: status.state is FrontState.OPEN)

    stage.play(scene)


def test_a_drain_that_runs_out_of_time_stays_shut_until_told_and_keeps_the_staging(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version)
        with stage.steps_held():
            long = asyncio.ensure_future(c.complete(PROMPT, max_tokens=30))
            await c.until(lambda status: status.in_flight > 0)
            assert await code_of(c.pause(serial, quiesce_s=0.1)) == "quiesce_timeout"
            assert (await c.status()).state is FrontState.CLOSING
            await c.resume(serial, 1, False, before.live_version, before.live_digest)
            assert (await c.status()).state is FrontState.OPEN
        answer = await long
        assert answer["liveweights"]["spans"] == [{"version": before.live_version, "start": 0, "end": 30}]
        await c.pause(serial, 2)
        await c.install(serial, 2)
        await c.invalidate(serial, 2)
        await c.resume(serial, 2, True, version, vote.observed)
        stage.installed()

    stage.play(scene)


def test_a_resume_during_the_quiesce_ends_it_for_good(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        await c.prepare(serial, path, version)
        with stage.steps_held():
            long = asyncio.ensure_future(c.complete(PROMPT, max_tokens=30))
            await c.until(lambda status: status.in_flight > 0)
            pausing = asyncio.ensure_future(code_of(c.pause(serial, quiesce_s=60.0)))
            await c.until(lambda status: status.state is FrontState.CLOSING)
            await c.resume(serial, 1, False, before.live_version, before.live_digest)
            assert await pausing in ("lease_expired", "replica_fenced")
        await long
        ranks = await stage.replica.pool.call("status", RankStatus(), deadline_s=60.0)
        assert [rank.paused for rank in ranks] == [False]
        assert (await c.complete(PROMPT))["choices"][0]["token_ids"] == stage.expected(stage.live)
        await c.discard(serial, 1)

    stage.play(scene)


def test_describe_says_what_a_coordinator_needs(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        told = await c.call("describe", StatusRequest())
        assert (told.engine, told.url, len(told.ranks)) == ("toy", stage.replica.url, 1)
        assert told.ranks[0].pid == stage.replica.pool.pids[0]
        assert replace(told.status, lease_left_s=None) == replace(await c.status(), lease_left_s=None)
        metrics = (await c.client.get("/metrics")).text
        assert "liveweights_replica_mixed_tokens_total 0.0" in metrics

    stage.play(scene)
