"""What ended a push is told everywhere: to every rank of the trainer, and in the receipt of the update.

Three processes hold a checkpoint sharded over gloo; in each story something goes wrong on one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from tests.cases.live_fleet import LiveFleet, live_fleet
from trainer_side import Client

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3
Told = dict[str, Any]


@dataclass
class Trainer:
    """`names`: of the tensors, in the order in which they are pushed."""

    fleet: LiveFleet
    ranks: list[subprocess.Popen[str]]
    names: list[str]
    pushes: int = 0
    step: int = 0

    def push(self, transport: str, story: str = "", rank: int = -1, at: int = -1) -> list[Told]:
        """What each rank says of it; those that died say nothing. A version that was refused is pushed again."""
        self.pushes += 1
        asked = {"transport": transport, "story": story, "rank": rank, "at": at, "id": self.id}
        line = json.dumps({**asked, "version": self.step + 1}) + "\n"
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.ranks if process.stdout is not None]
        told = [json.loads(answer) for answer in answers if answer]
        self.step += all(each.get("outcome") == "committed" for each in told)
        return told

    @property
    def id(self) -> str:
        """Of the last push."""
        return f"push-{self.pushes}"

    def goes_on(self, transport: str) -> None:
        """The next push of the same ranks, with the same senders and groups, works."""
        assert [each.get("outcome") for each in self.push(transport)] == ["committed"] * WORLD


@contextlib.contextmanager
def running(home: Path, url: str, checkpoint: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            arguments = [str(rank), str(WORLD), str(home / "store"), url, str(checkpoint), str(home / "pushed")]
            command = [sys.executable, "-m", "tests.integration.push_causes_program", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
            )
            ranks.append(stack.enter_context(process))
        try:
            yield ranks
            for process in ranks:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # of the one that a story ends
                    process.stdin.close()
            assert {process.wait(120) for process in ranks} <= {0, -signal.SIGKILL}
        finally:
            for process in ranks:
                process.kill()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    home = tmp_path_factory.mktemp("causes")
    old, new = make_toy_checkpoint(home / "a", seed=7), make_toy_checkpoint(home / "b", seed=8)
    with live_fleet(home) as fleet:
        fleet.begin("one", old, 1)
        fleet.admitted("one")
        with running(home, fleet.url, new) as ranks:
            yield Trainer(fleet, ranks, list(load_file(new / "model.safetensors")))


def place(trainer: Trainer, where: str) -> int:
    return {"first": 0, "middle": len(trainer.names) // 2, "last": len(trainer.names) - 1}[where]


def same_everywhere(told: Sequence[Told], code: str, rank: int, tensor: str) -> None:
    """All ranks raised one error, and what came first names the place."""
    assert len(told) == WORLD
    assert [each["failures"] for each in told] == [told[0]["failures"]] * WORLD
    assert {each["error"] for each in told} == {"Aborted"}
    assert told[0]["failures"][0] == [code, rank, tensor, ""]


def receipt_tells(trainer: Trainer, code: str, rank: int, tensor: str) -> None:
    """By every way in which one can ask the coordinator."""
    fleet = trainer.fleet
    receipt = fleet.get(f"/v1/updates/{trainer.id}")["receipt"]
    assert (receipt["outcome"], receipt["reason"]) == ("aborted", code)
    first, *rest = receipt["failures"]
    assert (first["code"], first["rank"], first["tensor"], first["replica"]) == (code, rank, tensor, "")
    assert [failure["code"] for failure in rest] == ["client_abort"]
    with Client(fleet.url, "") as client:
        assert dict(client.events(trainer.id))["receipt"] == receipt
        assert client.history(1)[0].model_dump(mode="json") == receipt
    metrics = fleet.client.get(f"{fleet.url}/metrics").text
    assert f'outcome="aborted",reason="{code}"' in metrics


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_source_that_raises_on_one_rank_ends_the_push_on_all(trainer: Trainer, rank: int, where: str) -> None:
    before, at = trainer.fleet.view(), place(trainer, where)
    told = trainer.push("broadcast", "raises after its collective", rank, at)
    same_everywhere(told, "rank_failed", rank, trainer.names[at])
    assert {each["walked"] for each in told} == {at, at + 1}
    assert [each["cause"] for each in told] == ["ValueError" if each == rank else "NoneType" for each in range(WORLD)]
    assert {each["reason"] for each in told} == {"rank_failed"}
    receipt_tells(trainer, "rank_failed", rank, trainer.names[at])
    after = trainer.fleet.view()
    assert (after.version, after.digests, after.answers) == (before.version, before.digests, before.answers)
    trainer.goes_on("broadcast")


@pytest.mark.parametrize(
    ("transport", "story", "rank", "code"),
    [
        ("shared_memory", "raises after its collective", 1, "rank_failed"),
        ("shared_memory", "refuses after its collective", 2, "read_failed"),
        ("shared_memory", "steps after its collective", 2, "source_changed"),
        ("broadcast", "steps after its collective", 0, "source_changed"),
        ("broadcast", "ends early", 1, "manifest_mismatch"),
    ],
)
def test_whatever_the_cause_it_is_told_with_its_rank_and_tensor(
    trainer: Trainer, transport: str, story: str, rank: int, code: str
) -> None:
    at = place(trainer, "middle")
    told = trainer.push(transport, story, rank, at)
    same_everywhere(told, code, rank, trainer.names[at])
    receipt_tells(trainer, code, rank, trainer.names[at])
    trainer.goes_on(transport)


def test_the_callers_own_code_fails_on_the_sending_rank(trainer: Trainer) -> None:
    """After the source has given all: no rank is left in the middle of it."""
    told = trainer.push("broadcast", "raises while it sends", 0, 0)
    same_everywhere(told, "rank_failed", 0, trainer.names[0])
    assert {each["walked"] for each in told} == {len(trainer.names)}
    receipt_tells(trainer, "rank_failed", 0, trainer.names[0])
    trainer.goes_on("broadcast")


@pytest.mark.parametrize("story", ["raises after its collective", "raises after the walk"])
def test_after_the_last_tensor_nothing_is_sealed_either(trainer: Trainer, story: str) -> None:
    at = len(trainer.names) if story == "raises after its collective" else 0
    told = trainer.push("broadcast", story, 1, at)
    same_everywhere(told, "rank_failed", 1, "")
    receipt_tells(trainer, "rank_failed", 1, "")
    trainer.goes_on("broadcast")


def test_over_disk_nothing_is_offered_and_no_folder_stays(trainer: Trainer) -> None:
    trainer.goes_on("disk")
    folder = trainer.fleet.home / "pushed"
    left = sorted(folder.iterdir())
    told = trainer.push("disk", "raises after its collective", 2, place(trainer, "middle"))
    same_everywhere(told, "rank_failed", 2, trainer.names[place(trainer, "middle")])
    assert {each["reason"] for each in told} == {None}
    assert sorted(folder.iterdir()) == left
    trainer.goes_on("disk")


@pytest.mark.parametrize(("story", "named"), [("cannot digest", True), ("raises digests", False)])
def test_before_the_first_tensor_nothing_has_begun(trainer: Trainer, story: str, named: bool) -> None:
    told = trainer.push("broadcast", story, 1, 0)
    assert [each["failures"] for each in told] == [[["rank_failed", 1, trainer.names[0] if named else "", ""]]] * WORLD
    assert {each["error"] for each in told} == {"Rejected"}
    assert trainer.fleet.client.get(f"{trainer.fleet.url}/v1/updates/{trainer.id}").status_code == 404
    trainer.goes_on("broadcast")


def test_a_collective_that_a_rank_never_joined_ends_with_its_groups_time_out(trainer: Trainer) -> None:
    """The others come back from it with an error of their own; the cause is told all the same."""
    at = place(trainer, "middle")
    told = trainer.push("disk", "raises before its collective", 1, at)
    same_everywhere(told, "rank_failed", 1, trainer.names[at])
    assert told[1]["cause"] == "ValueError"
    trainer.goes_on("disk")


def test_a_rank_that_dies_is_missed_by_the_others(trainer: Trainer) -> None:
    """Last: it does not come back."""
    before = trainer.fleet.view()
    told = trainer.push("broadcast", "dies after its collective", 2, place(trainer, "middle"))
    assert {(each["error"], each["failures"][0][0]) for each in told} == {("Aborted", "peer_lost")}
    assert len(told) == WORLD - 1
    trainer.fleet.until(lambda: trainer.fleet.get("/v1/fleet")["phase"] == "idle")
    receipt = trainer.fleet.get(f"/v1/updates/{trainer.id}")["receipt"]
    assert (receipt["outcome"], receipt["reason"], receipt["failures"][0]["replica"]) == ("aborted", "peer_lost", "")
    after = trainer.fleet.view()
    assert (after.version, after.digests, after.answers) == (before.version, before.digests, before.answers)
