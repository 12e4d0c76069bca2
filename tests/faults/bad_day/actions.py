"""The bad things, and the refusals that each may give.

A code is allowed only where the thing can be its cause: what else an update is refused for is a fault of ours.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.bad_day.fleet import RANKS, Fleet
from tests.faults.bad_day.publisher import Trainer
from tests.faults.bad_day.relay import BAD
from tests.standing import stand_still

#: What may end an update whose parts wait for each other for too long.
LATE = ("phase_timeout", "quiesce_timeout", "lease_expired")
STREAM = ("peer_lost", "peer_timeout")
RESTART = ("coordinator_restarted", "unreachable", "lease_expired")


@dataclass(eq=False)
class Scene:
    """What actions work on. `path`: the checkpoint that is being published. `touched`: replicas that cannot go on."""

    fleet: Fleet
    trainer: Trainer
    random: random.Random
    path: Path
    touched: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    spoiled: bool = False
    forgotten: bool = False  # the coordinator lost its journal, or a part of it

    def say(self, text: str) -> None:
        self.told.append(text)

    def replica(self) -> str:
        return self.random.choice(sorted(RANKS))

    def mend(self) -> None:
        """What only lasts: processes go on, links pass, the disk has room, the checkpoint is whole again."""
        self.fleet.go_on()
        self.trainer.go_on()
        self.fleet.network.mend()
        self.fleet.free_disk()
        if self.spoiled:
            shutil.rmtree(self.path, ignore_errors=True)
            shutil.copytree(kept(self.path), self.path)
            self.spoiled = False


def kept(path: Path) -> Path:
    """The copy of a checkpoint that no action touches."""
    return path.parent / "kept" / path.name


@dataclass(frozen=True)
class Action:
    """`gives`: codes that an update may be refused for because of it. `of_coordinator`: nothing else is at fault.

    `disk`: needs an update that reads its checkpoint itself.
    """

    name: str
    do: Callable[[Scene], None]
    gives: frozenset[str] = frozenset()
    of_coordinator: bool = False
    disk: bool = False


ACTIONS: dict[str, Action] = {}


def action(
    *gives: str, of_coordinator: bool = False, disk: bool = False
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def take(do: Callable[[Scene], None]) -> Callable[[Scene], None]:
        name = do.__name__
        ACTIONS[name] = Action(name, do, frozenset(gives), of_coordinator, disk)
        return do

    return take


@action(*RESTART, of_coordinator=True)
def kill_coordinator(scene: Scene) -> None:
    if scene.fleet.coordinator is not None:
        scene.fleet.coordinator.kill()


@action(*LATE, "unreachable", of_coordinator=True)
def stop_coordinator(scene: Scene) -> None:
    if scene.fleet.coordinator is not None:
        scene.fleet.coordinator.stop()


@action("shut", "replica_lost", "member_blocked", *LATE, *STREAM)
def kill_front(scene: Scene) -> None:
    name = scene.replica()
    scene.say(name)
    scene.touched.add(name)
    scene.fleet.fronts[name].kill()


@action("replica_lost", "member_blocked", *LATE, *STREAM)
def stop_front(scene: Scene) -> None:
    name = scene.replica()
    scene.say(name)
    scene.fleet.fronts[name].stop()


@action("shut", "rank_died", "replica_lost", "member_blocked", *LATE, *STREAM)
def kill_rank(scene: Scene) -> None:
    name = scene.replica()
    ranks = scene.fleet.ranks(name)
    if ranks:
        rank = scene.random.randrange(len(ranks))
        scene.say(f"{name} {rank}")
        scene.touched.add(name)
        ranks[rank].kill()


@action("replica_lost", "member_blocked", *LATE, *STREAM)
def stop_rank(scene: Scene) -> None:
    name = scene.replica()
    ranks = scene.fleet.ranks(name)
    if ranks:
        rank = scene.random.randrange(len(ranks))
        scene.say(f"{name} {rank}")
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            stand_still(ranks[rank].pid)


@action("lease_expired", *STREAM)
def kill_trainer(scene: Scene) -> None:
    scene.trainer.kill()


@action("lease_expired", *STREAM)
def stop_trainer(scene: Scene) -> None:
    scene.trainer.stop()


@action("journal_failed", *RESTART, of_coordinator=True)
def full_disk(scene: Scene) -> None:
    scene.fleet.fill_disk()


def _cut(scene: Scene, links: list[str]) -> None:
    name, mode = scene.random.choice(links), scene.random.choice(BAD)
    scene.say(f"{name}: {mode.value}")
    scene.fleet.network.turn(name, mode)


@action("replica_lost", "unreachable", "member_blocked", *LATE, *STREAM)
def cut_to_front(scene: Scene) -> None:
    _cut(scene, [f"to {name}" for name in sorted(RANKS)])


@action()
def cut_from_front(scene: Scene) -> None:
    """A front's own questions go unanswered: nothing may be refused for that."""
    _cut(scene, [f"from {name}" for name in sorted(RANKS)])


@action("lease_expired", "unreachable", *STREAM)
def cut_trainer(scene: Scene) -> None:
    _cut(scene, ["trainer"])


@action("lease_expired", "phase_timeout", *STREAM)
def cut_ranks(scene: Scene) -> None:
    """From the trainer, as far as a stream's own lines lead through a relay: those of a broadcast."""
    _cut(scene, ["ranks"])


_FILES = ("source_changed", "source_missing", "read_failed", "file_truncated", "file_header", "manifest_mismatch")


@action(*_FILES, "tensor_digest", disk=True)
def rewrite_checkpoint(scene: Scene) -> None:
    """By another version of the same sizes, in place or under a new inode."""
    file = scene.path / "model.safetensors"
    others = [path for path in scene.fleet.stand.checkpoints if path != scene.path]
    other = kept(scene.random.choice(others)) / file.name
    scene.spoiled = True
    if scene.random.random() < 0.5:
        scene.say("in place")
        file.write_bytes(other.read_bytes())
    else:
        scene.say("replaced")
        fresh = file.with_suffix(".new")
        shutil.copyfile(other, fresh)
        fresh.replace(file)


@action(*_FILES, "manifest_required", disk=True)
def remove_checkpoint(scene: Scene) -> None:
    scene.spoiled = True
    shutil.rmtree(scene.path)


@action("shut", "replica_lost", "rank_died", "member_blocked", *LATE, *STREAM)
def restart_on_another_checkpoint(scene: Scene) -> None:
    name = scene.replica()
    scene.say(name)
    scene.touched.add(name)
    scene.fleet.fronts[name].kill()
    others = [path for path in scene.fleet.stand.checkpoints if path != scene.path]
    scene.fleet.start_front(name, scene.random.choice(others))
