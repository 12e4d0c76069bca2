"""A trainer of two ranks: one sends, both learn the same, whatever becomes of the update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from tests.cases.live_fleet import LiveFleet, live_fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


@dataclass
class Trainer:
    """Two processes that hold a checkpoint sharded over them."""

    fleet: LiveFleet
    ranks: list[subprocess.Popen[str]]
    step: int = 0

    def push(self, transport: str, story: str = "", step: int | None = None) -> list[dict[str, Any]]:
        """What each rank says of it."""
        self.step += step is None
        version = self.step if step is None else step
        line = json.dumps({"transport": transport, "version": version, "story": story}) + "\n"
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        told = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        assert all(told), "a rank of the trainer ended"
        return [json.loads(line) for line in told]


@contextmanager
def _ranks(home: Path, url: str, checkpoint: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            arguments = [str(rank), str(WORLD), str(home / "store"), url, str(checkpoint), str(home / "pushed")]
            command = [sys.executable, "-m", "tests.integration.stream_ranks", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
            )
            ranks.append(stack.enter_context(process))
        try:
            yield ranks
            for process in ranks:
                assert process.stdin is not None
                process.stdin.close()
            assert [process.wait(60) for process in ranks] == [0] * WORLD
        finally:
            for process in ranks:
                process.kill()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    home = tmp_path_factory.mktemp("ranks")
    old, new = make_toy_checkpoint(home / "a", seed=7), make_toy_checkpoint(home / "b", seed=8)
    with live_fleet(home) as fleet:
        fleet.begin("one", old, 1)
        fleet.admitted("one")
        with _ranks(home, fleet.url, new) as ranks:
            yield Trainer(fleet, ranks)


def test_every_rank_returns_the_receipt_and_one_was_given_the_tensors(trainer: Trainer) -> None:
    told = {kind: trainer.push(kind) for kind in ("disk", "broadcast", "shared_memory")}
    for first, second in told.values():
        assert (first["outcome"], first["version"]) == ("committed", second["version"])
        assert first["observed"] == second["observed"]
        assert (first["walked"], second["walked"]) == (first["names"], first["names"])
        assert (first["given"], second["given"]) == (first["names"], 0)
        assert (first["left"], second["left"]) == ([], [])
    assert len({json.dumps(first["observed"]) for first, _second in told.values()}) == 1


def test_a_copy_is_published_while_the_trainer_goes_on(trainer: Trainer) -> None:
    same = trainer.push("broadcast")[0]["observed"]
    for kind in ("disk", "broadcast", "shared_memory"):
        first, second = trainer.push(kind, "in_the_background")
        assert (first["outcome"], second["outcome"]) == ("committed", "committed")
        assert first["observed"] == second["observed"] == same


@pytest.mark.parametrize("transport", ["disk", "broadcast", "shared_memory"])
@pytest.mark.parametrize(
    ("story", "code", "tensor"),
    [
        ("other_rank_steps", "source_changed", "model.layers.0.input_layernorm.weight"),
        ("wrong_shape", "tensor_shape", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_raised_on_all_after_a_whole_walk(
    trainer: Trainer, transport: str, story: str, code: str, tensor: str
) -> None:
    before = trainer.fleet.view()
    first, second = trainer.push(transport, story)
    assert first == {**second, "given": first["names"]}
    assert (first["error"], first["failures"][0]) == ("Aborted", [code, tensor])
    assert first["has_receipt"] == (transport != "disk")  # the folder was never offered
    assert first["walked"] == first["names"]
    after = trainer.fleet.view()
    assert (after.version, after.digests, after.answers) == (before.version, before.digests, before.answers)
    assert trainer.push(transport)[1]["outcome"] == "committed"


@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_what_is_refused_at_the_door_is_raised_on_all(trainer: Trainer, transport: str) -> None:
    """Over a stream nothing was gathered for it."""
    first, second = trainer.push(transport, step=0)
    assert (first["error"], first["failures"]) == (second["error"], second["failures"])
    assert (first["error"], first["failures"][0][0]) == ("Rejected", "stale_version")
    assert first["walked"] == (first["names"] if transport == "disk" else 0)
