"""Real sharded trainers as Ray actors publish into a real engine that is an actor, over every transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from engine_adapter.models import SAFE_MARGIN, ModelShape, encode, make_versions, reference_tokens
from engine_adapter.ray_replica import start_replica, stop_replica
from engine_adapter.replica.launch import FrontSettings
from tests.integration.ray_stage import DEADLINES, HANG_S, ask, two_nodes
from tests.integration.ray_trainers import WORLD, TrainerRank
from updater.ray_actor import start_coordinator, stop_coordinator
from updater.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(4 * HANG_S)]

SHAPE = ModelShape(hidden=80, intermediate=64)
PROMPT = list(encode("the quick brown fox jumps over it, and the lazy dog sleeps"))
TOKENS = 16


@dataclass
class Stage:
    """`versions`: the engine starts on the first one, the others are published in turn."""

    home: Path
    versions: Sequence[Path]
    replica: Any
    ranks: Sequence[Any]
    observed: dict[int, Mapping[str, str]] = field(default_factory=dict)
    step: int = 0

    def publish(self, trainer: str, transport: str) -> tuple[Mapping[str, Any], int]:
        """The receipt, which is that of every rank, and which version it was."""
        self.step += 1
        which = 1 + self.step % 2
        options: dict[str, Any] = {"transport": transport}
        if transport == "disk":
            options["directory"] = str(self.home / "pushed")
        calls = [getattr(rank, trainer).remote(str(self.versions[which]), self.step, **options) for rank in self.ranks]
        receipts = ask(calls)
        assert receipts[1:] == receipts[:-1]
        return receipts[0], which

    def answer(self) -> tuple[list[int], str]:
        told = ask(self.replica.generate.remote(PROMPT, TOKENS, ignore_eos=True))
        assert told["status"] == 200, told
        return told["body"]["choices"][0]["token_ids"], told["body"]["liveweights"]["version"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("trainers")
    versions = make_versions(home / "models", 3, SHAPE)
    with two_nodes():
        coordinator = start_coordinator(
            Settings(state=home / "state", roots=(home,), deadlines=DEADLINES, new_fleet=True), namespace="trainers"
        )
        wanted = FrontSettings(model=versions[0], port=0, replica="embedded", roots=(home,), logs=home / "logs")
        replica = start_replica(wanted, coordinator=coordinator, namespace="trainers", resources={"left": 1})
        nodes = ("left", "right")
        ranks = [
            ray.remote(TrainerRank)
            .options(num_cpus=0, resources={nodes[rank % 2]: 1})
            .remote(rank, str(home / "store"), coordinator)
            for rank in range(WORLD)
        ]
        try:
            assert ask(replica.ready.remote())["body"]["state"] == "open"
            yield Stage(home, versions, replica, ranks)
        finally:
            for rank in ranks:
                ray.kill(rank)
            stop_replica(replica, HANG_S)
            stop_coordinator(coordinator, HANG_S)


@pytest.mark.parametrize("transport", ["broadcast", "shared_memory", "disk"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_the_engine_answers_like_the_checkpoint_that_was_published(stage: Stage, trainer: str, transport: str) -> None:
    before = stage.answer()[0]
    receipt, which = stage.publish(trainer, transport)
    assert (receipt["outcome"], receipt["proof"], receipt["version"]) == ("committed", "digests", f"0-{stage.step}")
    tokens, version = stage.answer()
    expected = reference_tokens(stage.versions[which], PROMPT, TOKENS)
    assert min(expected.margins) > SAFE_MARGIN
    assert (tokens, version) == (list(expected.tokens), receipt["version"])
    assert tokens != before
    # The same bytes, from whichever sender and on whichever way.
    assert stage.observed.setdefault(which, receipt["observed"]) == receipt["observed"]
