"""Layouts, derived state and buffers, on an engine that stores its weights in another layout than they come in."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.placement.atoms import make_cuts
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.messages import (
    RankInstall,
    RankInvalidate,
    RankPause,
    RankPlan,
    RankResume,
    RankStage,
    RankVerify,
)
from engine_adapter.testing import build_toy, expected_digests, make_toy_checkpoint, reference_generate
from engine_adapter.testing.harness import RankHarness
from engine_adapter.testing.toy.config import ToyOptions
from updater.core.participant import DiskOffer
from updater.core.policy import CachePolicy, InstallMode

torch.set_num_threads(1)

TOY = "engine_adapter.testing:build_toy"
PROMPT = tuple(range(40, 53))


@pytest.mark.case("B073")
@pytest.mark.engine
@pytest.mark.parametrize("kernel", ["swap", "packed"])
def test_the_same_bytes_three_times_give_the_same_tokens(tmp_path: Path, kernel: str) -> None:
    seven = make_toy_checkpoint(tmp_path / "7", "M2", seed=7)
    expected = list(reference_generate(seven, PROMPT, 12))
    with RankHarness(TOY, seven, 1, {"kernel": kernel}) as replica:
        before = replica.digests()
        for version in ("0-8", "0-9", "0-10"):
            assert replica.publish(seven, version).combined.changed == 0
            reply = replica.generate(PROMPT, 12)
            assert (reply.tokens, set(reply.versions)) == (expected, {version})
            assert replica.digests() == before


@pytest.mark.case("B074")
@pytest.mark.engine
def test_three_chunks_show_nothing_before_the_end_and_finalise_once(tmp_path: Path) -> None:
    seven = make_toy_checkpoint(tmp_path / "7", seed=7, shards=3)
    eight = make_toy_checkpoint(tmp_path / "8", seed=8, shards=3)
    # The only derived tensor may be bound once: a second time would fail the install.
    options: dict[str, str | int | float | bool] = {"kernel": "packed", "fault": "raise:before:bind:0:2"}
    with RankHarness(TOY, seven, 1, options) as replica:
        before, old = replica.digests(), list(reference_generate(seven, PROMPT, 12))

        def nothing_shows() -> None:
            assert replica.digests() == before
            assert replica.generate(PROMPT, 12).tokens == old

        serial, plans = replica.plan(eight)
        nothing_shows()
        replica.call("stage", RankStage(serial, 60.0))
        nothing_shows()
        cuts = make_cuts(plans[0].tensors, [plan.boxes for plan in plans])
        replica.call("verify", RankVerify(serial, cuts, 60.0))
        nothing_shows()
        replica.switch(serial, "0-8", "digest of eight", InstallMode.FLIP, CachePolicy.RESET)
        assert replica.digests() == [expected_digests(eight, 0, 1, ToyOptions(kernel="packed"))]
        assert replica.generate(PROMPT, 12).tokens == list(reference_generate(eight, PROMPT, 12))


@pytest.mark.case("B084")
@pytest.mark.parametrize("woken", [True, False])
def test_buffers_outside_the_parameters_come_back_after_a_sleep(tmp_path: Path, woken: bool) -> None:
    """Without the wake the tokens are wrong: this is what sees a buffer that was given up and not made again."""
    eight = make_toy_checkpoint(tmp_path / "8", seed=8)
    engine = build_toy(EngineSpec(0, 1, str(make_toy_checkpoint(tmp_path / "7", seed=7)), "", {}))
    agent = RankAgent(engine)
    events: queue.Queue[TokenEvent] = queue.Queue()
    engine.start(events.put)
    try:
        agent.handle("pause", RankPause(0, 60.0))
        engine.sleep()
        if woken:
            engine.wake()
        plan = agent.handle("plan", RankPlan(1, DiskOffer(str(eight)), (str(eight),), ""))
        agent.handle("stage", RankStage(1, 60.0))
        agent.handle("verify", RankVerify(1, make_cuts(plan.tensors, [plan.boxes]), 60.0))
        agent.handle("pause", RankPause(1, 60.0))
        agent.handle("install", RankInstall(1, 1, InstallMode.EXCHANGE, "0-8", "d8", CachePolicy.RESET))
        agent.handle("invalidate", RankInvalidate(1, 1, CachePolicy.RESET))
        agent.handle("resume", RankResume(1, 60.0))
        engine.submit(GenerateRequest("a", PROMPT, 8))
        tokens = [token for _ in range(8) for token in events.get(timeout=60).tokens]
    finally:
        engine.stop(60.0)
    assert (tuple(tokens) == reference_generate(eight, PROMPT, 8)) is woken
