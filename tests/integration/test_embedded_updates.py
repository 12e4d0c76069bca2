"""The embedded engine in real rank processes, TP=1 and TP=2: what it says is exactly one version's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.models import SAFE_MARGIN, ModelShape, encode, make_versions, reference_tokens
from engine_adapter.rank.messages import RankPause, RankResume, RankStatus
from tests.integration.embedded_driver import HANG_S, Replica
from updater.core.errors import LiveweightsError
from updater.core.policy import CachePolicy, InstallMode

pytestmark = pytest.mark.engine

PROMPTS = [
    encode(text)
    for text in ("The quick brown fox jumps over the lazy dog.", "A shared prefix of 32 bytes, then x", "y" * 48)
]
COUNT = 24


SERVED = {"tp1": (1, ModelShape()), "tp2": (2, ModelShape(family="qwen3", tied=True))}


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest) -> tuple[int, ModelShape]:
    found: tuple[int, ModelShape] = SERVED[request.param]
    return found


@pytest.fixture(scope="module")
def models(served: tuple[int, ModelShape], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return make_versions(tmp_path_factory.mktemp("models"), 3, served[1], seed=21)


@pytest.fixture(scope="module")
def shared(served: tuple[int, ModelShape], models: tuple[Path, ...]) -> Iterator[Replica]:
    replica = Replica(models[0], served[0])
    yield replica
    replica.close()


@pytest.fixture
def replica(shared: Replica, models: tuple[Path, ...]) -> Replica:
    """Serving v1 with an empty cache."""
    shared.update(models[0], "0-1")
    return shared


def reference(model: Path, prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
    found = reference_tokens(model, prompt, count)
    assert min(found.margins) >= SAFE_MARGIN
    return list(found.tokens)


def test_the_start_checkpoint_replays_to_the_live_bytes(shared: Replica) -> None:
    assert shared.differs == []


@pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
def test_an_update_gives_the_new_tokens_and_a_rollback_the_old(
    replica: Replica, models: tuple[Path, ...], mode: InstallMode
) -> None:
    assert replica.generate(PROMPTS[0], COUNT).tokens == reference(models[0], PROMPTS[0])
    assert replica.update(models[1], "0-2", mode=mode) == {"kv_blocks": True}
    after = replica.generate(PROMPTS[0], COUNT)
    assert after.tokens == reference(models[1], PROMPTS[0])
    assert set(after.versions) == {"0-2"}
    replica.roll_back("0-1")
    back = replica.generate(PROMPTS[0], COUNT)
    assert back.tokens == reference(models[0], PROMPTS[0])
    assert set(back.versions) == {"0-1"}
    assert back.cached == 0


def test_batched_requests_say_what_single_ones_say(replica: Replica, models: tuple[Path, ...]) -> None:
    ids = [replica.submit(prompt, COUNT) for prompt in PROMPTS * 3]
    for request_id, prompt in zip(ids, PROMPTS * 3, strict=True):
        assert replica.wait(request_id).tokens == reference(models[0], prompt)


def test_without_the_reset_the_same_prompt_gives_stale_tokens(replica: Replica, models: tuple[Path, ...]) -> None:
    replica.generate(PROMPTS[0], COUNT)
    again = replica.generate(PROMPTS[0], COUNT)
    assert again.cached == 32  # two whole pages of 16
    assert again.tokens == reference(models[0], PROMPTS[0])

    assert replica.update(models[1], "0-2", cache=CachePolicy.KEEP) == {}
    stale = replica.generate(PROMPTS[0], COUNT)
    assert stale.cached == 32
    assert stale.tokens not in (reference(models[0], PROMPTS[0]), reference(models[1], PROMPTS[0]))

    assert replica.update(models[1], "0-3", cache=CachePolicy.RESET) == {"kv_blocks": True}
    fresh = replica.generate(PROMPTS[0], COUNT)
    assert fresh.cached == 0
    assert fresh.tokens == reference(models[1], PROMPTS[0])


def test_ranks_stop_at_one_step_and_nothing_moves_while_paused(replica: Replica, models: tuple[Path, ...]) -> None:
    ids = [replica.submit(prompt, 100) for prompt in PROMPTS]
    replica.wait(ids[0], tokens=3)
    serial = replica.next_serial()
    points = {(reply.step, reply.running) for reply in replica.pause(serial)}
    before = [len(replica.replies[each].tokens) for each in ids]
    late = replica.submit(PROMPTS[0], COUNT)
    for _ in range(20):
        replica.call("status", RankStatus())
    assert [len(replica.replies[each].tokens) for each in ids] == before
    assert replica.replies[late].tokens == []
    assert {(reply.step, reply.running) for reply in replica.pause(serial)} == points
    assert len(points) == 1
    replica.resume(serial)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert replica.wait(request_id).tokens == reference(models[0], prompt, 100)
    assert replica.wait(late).tokens == reference(models[0], PROMPTS[0])


def test_recompute_continues_on_the_new_weights_from_clean_keys_and_values(
    replica: Replica, models: tuple[Path, ...]
) -> None:
    serial = replica.next_serial()
    replica.stage(models[1], serial)
    ids = replica.paused_in_the_middle(PROMPTS, 120, serial)
    cut = [len(replica.replies[request_id].tokens) for request_id in ids]
    assert replica.install(serial, "0-2") == {"kv_blocks": True}
    replica.resume(serial)
    for request_id, prompt, done in zip(ids, PROMPTS, cut, strict=True):
        reply = replica.wait(request_id)
        assert reply.reason == "length"
        assert reply.versions == ["0-1"] * done + ["0-2"] * (120 - done)
        old = reference(models[0], prompt, done)
        assert reply.tokens == old + reference(models[1], (*prompt, *old), 120 - done)
    # I5: blocks of a sequence that spans versions hold new keys and values only, so sharing them is right.
    shared = replica.generate((*PROMPTS[0], *replica.replies[ids[0]].tokens[: cut[0] + 32]), COUNT)
    assert shared.cached > 0
    assert shared.tokens == reference(models[1], (*PROMPTS[0], *replica.replies[ids[0]].tokens[: cut[0] + 32]))


@pytest.mark.parametrize("cache", [CachePolicy.RESET, CachePolicy.KEEP])
def test_aborted_requests_end_with_what_they_have(
    replica: Replica, models: tuple[Path, ...], cache: CachePolicy
) -> None:
    serial = replica.next_serial()
    ids = replica.paused_in_the_middle(PROMPTS, 150, serial)
    for request_id in ids:
        replica.cancel(request_id)
    replica.resume(serial)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        reply = replica.wait(request_id)
        assert reply.reason == "abort"
        assert len(reply.tokens) < 150
        assert reply.tokens == reference(models[0], prompt, 150)[: len(reply.tokens)]
    tiers = replica.update(models[1], "0-2", cache=cache)
    assert tiers == ({"kv_blocks": True} if cache is CachePolicy.RESET else {})
    after = replica.generate(PROMPTS[0], COUNT)
    assert (after.tokens == reference(models[1], PROMPTS[0])) == (cache is CachePolicy.RESET)


def test_a_pause_told_to_one_rank_only_parks_nobody_for_ever(replica: Replica, models: tuple[Path, ...]) -> None:
    serial = replica.next_serial()
    replica.first("pause", RankPause(serial, HANG_S))
    replica.first("resume", RankResume(serial, HANG_S))
    assert replica.generate(PROMPTS[0], COUNT).tokens == reference(models[0], PROMPTS[0])
    assert len({reply.step for reply in replica.pause(serial)}) == 1
    replica.resume(serial)


def test_stop_tokens_and_lengths_end_requests(replica: Replica, models: tuple[Path, ...]) -> None:
    expected = reference(models[0], PROMPTS[0])
    stop = expected[5]
    reply = replica.generate(PROMPTS[0], COUNT, stop_token_ids=(stop,))
    assert reply.reason == "stop"
    assert reply.tokens == expected[: expected.index(stop) + 1]
    assert replica.generate(PROMPTS[0], 7).reason == "length"


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ()},
        {"prompt": (-1,)},
        {"prompt": (260,)},
        {"prompt": (1,) * 4000},
        {"count": 0},
        {"temperature": 0.7},
    ],
)
def test_what_would_break_the_loop_is_refused_before_it_gets_there(
    replica: Replica, models: tuple[Path, ...], more: dict[str, object]
) -> None:
    request = {"prompt": PROMPTS[0], "count": COUNT} | more
    with pytest.raises(LiveweightsError) as caught:
        replica.submit(**request)  # type: ignore[arg-type]
    assert caught.value.code == "bad_request"
    assert replica.generate(PROMPTS[0], COUNT).tokens == reference(models[0], PROMPTS[0])
