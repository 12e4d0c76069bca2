"""Requests in flight, caches and their neighbours, over a real front and real ranks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.testing.fronts import PROMPT, HandCoordinator, Stage, code_of, toy_stage
from engine_adapter.testing.toy.reference import NarrowMargin
from updater.core.errors import LiveweightsError
from updater.core.participant import FrontState, FrontStatus
from updater.core.policy import CachePolicy, InFlight

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with toy_stage(tmp_path_factory.mktemp("toy")) as made:
        yield made


def ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def closed(status: FrontStatus) -> bool:
    """The pause has begun; an engine that had not taken up what is cancelled may be past its end already."""
    return status.state is not FrontState.OPEN


async def publish(stage: Stage, c: HandCoordinator, **policy: Any) -> str:
    serial, path, version = stage.next()
    await c.update(serial, path, version, **policy)
    stage.installed()
    return version


@pytest.mark.case("B130")
def test_a_prompt_cached_under_the_old_version_is_computed_anew(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        await c.complete(PROMPT)
        repeat = await c.complete(PROMPT)
        assert repeat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        await publish(stage, c)
        fresh = await c.complete(PROMPT)
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert ids(fresh) == stage.expected(stage.live)

    stage.play(scene)


@pytest.mark.case("B131")
def test_invalidation_is_part_of_the_commit(stage: Stage) -> None:
    """No cache is flushed, and a reopening before the invalidation is refused."""

    async def scene(c: HandCoordinator) -> None:
        await c.complete(PROMPT)
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version)
        await c.pause(serial)
        await c.install(serial)
        assert await code_of(c.resume(serial, 1, True, version, vote.observed)) == "wrong_phase"
        await c.invalidate(serial)
        await c.resume(serial, 1, True, version, vote.observed)
        stage.installed()
        assert ids(await c.complete(PROMPT)) == stage.expected(stage.live)

    stage.play(scene)


@pytest.mark.case("B133")
@pytest.mark.parametrize("mode", [InFlight.DRAIN, InFlight.ABORT, InFlight.RECOMPUTE])
def test_running_requests_never_keep_the_cache_from_being_reset(stage: Stage, mode: InFlight) -> None:
    async def scene(c: HandCoordinator) -> None:
        old = (await c.status()).live_version
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version, in_flight=mode)
        # What is aborted must not end by itself first, however late the engine hears that it is.
        count = 4000 if mode is InFlight.ABORT else 40
        with stage.steps_held():
            running = [asyncio.ensure_future(c.complete([n, *PROMPT], count)) for n in (1, 2)]
            await c.until(lambda status: status.in_flight == 2)
            pausing = asyncio.ensure_future(c.pause(serial, in_flight=mode))
            await c.until(closed)
        await pausing
        await c.install(serial)
        await c.invalidate(serial)  # refuses unless every tier is really empty
        await c.resume(serial, 1, True, version, vote.observed)
        stage.installed()
        answers = await asyncio.gather(*running)
        for answer in answers:
            told = answer["liveweights"]
            versions = [span["version"] for span in told["spans"]]
            if mode is InFlight.DRAIN:
                assert (versions, len(ids(answer))) == ([old], 40)
            elif mode is InFlight.ABORT:
                assert answer["choices"][0]["finish_reason"] == "abort"
                assert (told["reason"], told["retryable"]) == ("aborted_by_update", True)
                assert versions in ([], [old])
            else:
                assert versions in ([version], [old, version])
                assert len(ids(answer)) == 40
        assert (await c.complete(PROMPT))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    stage.play(scene)


@pytest.mark.case("B136")
def test_a_tier_that_does_not_clear_fails_the_commit_and_is_named(tmp_path: Path) -> None:
    with toy_stage(tmp_path, {"tiers": "device,host,disk", "cache_refuses": "host"}) as stage:

        async def scene(c: HandCoordinator) -> None:
            before = await c.status()
            await c.complete(PROMPT)
            serial, path, version = stage.next()
            await c.prepare(serial, path, version)
            await c.pause(serial)
            await c.install(serial)
            with pytest.raises(LiveweightsError) as caught:
                await c.invalidate(serial)
            assert [(failure.code, failure.rank) for failure in caught.value.failures] == [("cache_not_reset", 0)]
            assert "'host'" in caught.value.failures[0].message
            await c.restore(serial)
            await c.resume(serial, 1, False, before.live_version, before.live_digest)
            assert ids(await c.complete(PROMPT)) == stage.expected(stage.live)

        stage.play(scene)


@pytest.mark.case("B139")
def test_recompute_aborts_nobody_and_every_reply_carries_its_spans(stage: Stage) -> None:
    async def scene(c: HandCoordinator) -> None:
        old, before = (await c.status()).live_version, stage.live
        serial, path, version = stage.next()
        vote = await c.prepare(serial, path, version, in_flight=InFlight.RECOMPUTE)
        prompts = [[n, *PROMPT] for n in range(1, 5)]
        with stage.steps_held() as allow:
            running = [asyncio.ensure_future(c.complete(prompt, 24)) for prompt in prompts]
            await c.until(lambda status: status.in_flight == 4)
            allow(10)
            pausing = asyncio.ensure_future(c.pause(serial, in_flight=InFlight.RECOMPUTE))
            await c.until(closed)
        pause = await pausing
        assert (pause.aborted, pause.requeued) == (0, 4)
        await c.install(serial)
        await c.invalidate(serial)
        await c.resume(serial, 1, True, version, vote.observed)
        stage.installed()
        for prompt, answer in zip(prompts, await asyncio.gather(*running), strict=True):
            assert (answer["choices"][0]["finish_reason"], len(ids(answer))) == ("length", 24)
            follows(stage, before, prompt, answer, old, version)

    stage.play(scene)


def follows(stage: Stage, before: int, prompt: list[int], answer: dict[str, Any], old: str, new: str) -> int:
    """Tokens equal a reference that swaps weights at the token where the spans say so. Returns how many it compared."""
    tokens, spans = ids(answer), answer["liveweights"]["spans"]
    assert [span["version"] for span in spans] in ([old], [new], [old, new])
    assert [span["start"] for span in spans] + [len(tokens)] == [0] + [span["end"] for span in spans]
    compared = 0
    for span in spans:
        index = before if span["version"] == old else 1 - before
        start, end = span["start"], span["end"]
        try:
            assert tokens[start:end] == stage.expected(index, [*prompt, *tokens[:start]], end - start)
        except NarrowMargin:
            continue
        compared += end - start
    return compared


@pytest.mark.case("B141")
def test_weights_are_written_only_when_no_forward_runs(tmp_path: Path) -> None:
    """Steps take long; the pause waits for the running one, and no step reads two versions."""
    with toy_stage(tmp_path) as stage:

        async def scene(c: HandCoordinator) -> None:
            old, before = (await c.status()).live_version, stage.live
            serial, path, version = stage.next()
            vote = await c.prepare(serial, path, version, in_flight=InFlight.KEEP, cache=CachePolicy.NAMESPACE)
            with stage.steps_held() as allow:
                running = asyncio.ensure_future(c.complete(PROMPT, 300))
                await c.until(lambda status: status.in_flight == 1)
                allow(3)
                assert await code_of(c.install(serial)) == "wrong_phase"
                pausing = asyncio.ensure_future(c.pause(serial, in_flight=InFlight.KEEP))
                while not pausing.done():
                    allow(1)  # the step in which the pause finds the engine must end
                    await c.status()
            await pausing
            await c.install(serial)
            await c.invalidate(serial, cache=CachePolicy.NAMESPACE)
            await c.resume(serial, 1, True, version, vote.observed)
            stage.installed()
            answer = await running
            spans = answer["liveweights"]["spans"]
            assert [span["version"] for span in spans] in ([version], [old, version])
            cut = spans[0]["end"] if len(spans) == 2 else 0
            with suppress(NarrowMargin):
                assert ids(answer)[:cut] == stage.expected(before, PROMPT, cut)[:cut]
            # Later requests never see the keys and values of the one that spans versions (I5).
            fresh = await c.complete([*PROMPT, *ids(answer)[:4]])
            assert ids(fresh) == stage.expected(stage.live, [*PROMPT, *ids(answer)[:4]])

        stage.play(scene)


@pytest.mark.case("B157")
@pytest.mark.parametrize("outcome", ["ok", "refused", "failed", "restored", "expired", "aborted"])
def test_generation_answers_after_every_outcome(stage: Stage, outcome: str) -> None:
    async def scene(c: HandCoordinator) -> None:
        before = await c.status()
        serial, path, version = stage.next()
        if outcome == "refused":
            assert await code_of(c.plan(serial, path.parent / "nowhere", version)) == "source_missing"
        elif outcome == "ok":
            await c.update(serial, path, version)
            stage.installed()
        else:
            await c.prepare(serial, path, version)
            await ended(stage, c, outcome, serial, before.live_version, before.live_digest)
        answer = await c.complete(PROMPT)
        assert ids(answer) == stage.expected(stage.live)
        assert answer["liveweights"]["version"] == (version if outcome == "ok" else before.live_version)

    stage.play(scene)


async def ended(stage: Stage, c: HandCoordinator, outcome: str, serial: int, version: str, digest: str) -> None:
    """The pause of an update that does not come to its end."""
    if outcome == "failed":
        with stage.steps_held():
            running = asyncio.ensure_future(c.complete(PROMPT, 20))
            await c.until(lambda status: status.in_flight == 1)
            assert await code_of(c.pause(serial, quiesce_s=0.05)) == "quiesce_timeout"
            await c.resume(serial, 1, False, version, digest)
        await running
    elif outcome == "restored":
        await c.pause(serial)
        await c.install(serial)
        await c.restore(serial)
        await c.resume(serial, 1, False, version, digest)
    elif outcome == "expired":
        await c.pause(serial, lease_s=60.0)
        stage.later(61.0)
        await c.until(lambda status: status.state is FrontState.OPEN)
    else:
        await c.pause(serial)
    await c.discard(serial, 1)
    await c.until(lambda status: status.state is FrontState.OPEN)


@pytest.mark.case("B161")
def test_an_install_never_overtakes_the_acknowledgement_of_the_pause(tmp_path: Path) -> None:
    """A step lasts until the test has looked, so the ranks' acknowledgement of the stop comes that late."""
    with toy_stage(tmp_path, tp=2) as stage:

        async def scene(c: HandCoordinator) -> None:
            serial, path, version = stage.next()
            vote = await c.prepare(serial, path, version)
            with stage.steps_held():
                running = asyncio.ensure_future(c.complete(PROMPT, 3))
                await c.until(lambda status: status.in_flight == 1)
                pausing = asyncio.ensure_future(c.pause(serial))
                await c.until(lambda status: status.state is FrontState.CLOSING)
                assert await code_of(c.install(serial)) == "wrong_phase"
                assert not pausing.done()
            await pausing
            assert (await running)["choices"][0]["finish_reason"] == "length"
            await c.install(serial)
            await c.invalidate(serial)
            await c.resume(serial, 1, True, version, vote.observed)
            stage.installed()
            assert ids(await c.complete(PROMPT, 3)) == stage.expected(stage.live, PROMPT, 3)

        stage.play(scene)


@pytest.mark.case("B170")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_carry_the_version_that_made_them_at_a_hundred_random_moments(stage: Stage) -> None:
    chance = random.Random(170)

    async def once(c: HandCoordinator) -> tuple[int, int, int]:
        old, before = (await c.status()).live_version, stage.live
        serial, path, version = stage.next()
        mode = chance.choice([InFlight.RECOMPUTE, InFlight.DRAIN])
        vote = await c.prepare(serial, path, version, in_flight=mode)
        prompt = [chance.randrange(256) for _ in range(6)]
        with stage.steps_held() as allow:
            running = asyncio.ensure_future(c.complete(prompt, 12))
            await c.until(lambda status: status.in_flight == 1)
            allow(chance.randrange(12))  # the close finds the engine somewhere among these steps
            pausing = asyncio.ensure_future(c.pause(serial, in_flight=mode))
            await c.until(closed)
        await pausing
        await c.install(serial)
        await c.invalidate(serial)
        await c.resume(serial, 1, True, version, vote.observed)
        stage.installed()
        answer = await running
        compared = follows(stage, before, prompt, answer, old, version)
        return compared, len(ids(answer)), len(answer["liveweights"]["spans"])

    async def scene(c: HandCoordinator) -> None:
        results = [await once(c) for _ in range(100)]
        compared, made = sum(result[0] for result in results), sum(result[1] for result in results)
        assert made == 1200
        assert compared > made // 2  # the rest had a narrow margin somewhere
        assert sum(result[2] == 2 for result in results) > 10

    stage.play(scene, deadline_s=850)
    assert stage.replica.gate.mixed == 0
