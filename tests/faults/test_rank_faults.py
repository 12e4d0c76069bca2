"""Faults inside real rank processes: a tier that stays full, one that lies, ranks that fail or die mid-install."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_adapter.testing import ToyReference, make_toy_checkpoint
from engine_adapter.testing.harness import RankHarness
from updater.core.errors import LiveweightsError
from updater.core.policy import InstallMode

pytestmark = pytest.mark.engine

torch.set_num_threads(1)

TOY = "engine_adapter.testing:build_toy"
PROMPT = tuple(range(40, 53))
Options = dict[str, str | int | float | bool]


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "7", seed=7)


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "8", seed=8)


def tokens_of(folder: Path) -> list[int]:
    return list(ToyReference.load(folder).generate(PROMPT, 10))


@pytest.mark.case("B136")
def test_the_tier_that_stays_full_is_named_and_restoring_brings_the_old_version_back(seven: Path, eight: Path) -> None:
    options: Options = {"tiers": "device,host,store", "cache_refuses": "host"}
    with RankHarness(TOY, seven, 1, options) as replica:
        before, old = replica.digests(), tokens_of(seven)
        assert replica.generate(PROMPT, 10).tokens == old
        staged = replica.stage(eight)
        replica.pause(staged.serial)
        replica.install(staged.serial, "0-8", staged.digest)
        tiers = {tier.name: tier.cleared for tier in replica.invalidate(staged.serial)}
        assert tiers == {"device": True, "host": False, "store": True}
        replica.restore(staged.serial)
        replica.resume(staged.serial)
        assert replica.digests() == before
        reply = replica.generate(PROMPT, 10)
        assert (reply.tokens, set(reply.versions)) == (old, {"start"})


@pytest.mark.parametrize("namespaced", [False, True])
def test_a_tier_that_lies_gives_stale_tokens_unless_the_key_carries_the_version(
    seven: Path, eight: Path, namespaced: bool
) -> None:
    """The tokens see what no report says: the oracle of every cache test."""
    with RankHarness(TOY, seven, 1, {"namespaced": namespaced, "cache_lies": "device"}) as replica:
        replica.generate(PROMPT, 10)
        replica.publish(eight, "0-8")
        reply = replica.generate(PROMPT, 10)
        assert reply.cached_tokens == (0 if namespaced else 12)
        assert (reply.tokens == tokens_of(eight)) is namespaced


@pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
def test_a_rank_that_fails_in_the_middle_of_an_install_is_put_back_with_the_others(
    seven: Path, eight: Path, mode: InstallMode
) -> None:
    # Flipping rebinds each parameter; exchanging rebinds none, and fails when it relabels.
    verb, nth = ("rebind", 5) if mode is InstallMode.FLIP else ("set_version", 2)
    with RankHarness(TOY, seven, 2, {"fault": f"raise:before:{verb}:1:{nth}"}) as replica:
        before = replica.digests()
        staged = replica.stage(eight)
        replica.pause(staged.serial)
        with pytest.raises(LiveweightsError) as failed:
            replica.install(staged.serial, "0-8", staged.digest, mode)
        assert [(failure.code, failure.rank) for failure in failed.value.failures] == [("rank_failed", 1)]
        replica.restore(staged.serial)
        replica.resume(staged.serial)
        assert replica.digests() == before
        reply = replica.generate(PROMPT, 10)
        assert (reply.tokens, set(reply.versions)) == (tokens_of(seven), {"start"})
        replica.discard(staged.serial)
        replica.publish(eight, "0-9", mode=mode)
        assert replica.generate(PROMPT, 10).tokens == tokens_of(eight)


def test_a_rank_that_dies_in_an_install_is_known_to_be_dead(seven: Path, eight: Path) -> None:
    with RankHarness(TOY, seven, 2, {"fault": "die:before:set_version:1:2"}) as replica:
        staged = replica.stage(eight)
        replica.pause(staged.serial)
        with pytest.raises(LiveweightsError) as failed:
            replica.install(staged.serial, "0-8", staged.digest)
        assert ("rank_died", 1) in {(failure.code, failure.rank) for failure in failed.value.failures}
        replica.wait_until(lambda: any(death.rank == 1 for death in replica.deaths))


def test_a_parameter_that_later_placements_forget_is_refused_before_a_byte_moves(seven: Path, eight: Path) -> None:
    with RankHarness(
        TOY, seven, 2, {"skip_target": "model.norm.weight", "defect_from": 2, "defect_rank": 1}
    ) as replica:
        before = replica.digests()
        with pytest.raises(LiveweightsError) as refused:
            replica.plan(eight)
        assert [(failure.code, failure.tensor, failure.rank) for failure in refused.value.failures] == [
            ("tensor_unwritten", "model.norm.weight", 1)
        ]
        assert replica.digests() == before
        assert replica.generate(PROMPT, 10).tokens == tokens_of(seven)


def test_ranks_at_different_steps_say_so(seven: Path, eight: Path) -> None:
    with RankHarness(TOY, seven, 2, {"step_skew": 1}) as replica:
        staged = replica.stage(eight)
        first, second = replica.pause(staged.serial)
        assert second.step == first.step + 1
        replica.resume(staged.serial)
        replica.discard(staged.serial)
