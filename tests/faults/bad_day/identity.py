"""Bad things about who a fleet is (I11): two coordinators, lost and older journals, a member that was declared dead."""

from __future__ import annotations

import shutil
import time

from tests.faults.bad_day.actions import LATE, RESTART, STREAM, Scene, action
from tests.faults.bad_day.fleet import START_S


@action(of_coordinator=True)
def second_coordinator_refused(scene: Scene) -> None:
    """On the same state folder, while the first one lives: refused, and nothing happens."""
    second = scene.fleet.start_second(scene.fleet.state)
    second.process.wait(START_S)
    if second.process.returncode == 0:
        raise AssertionError("a second coordinator on a state folder in use ended well")


@action("journal_failed", "taken_over", "behind", *RESTART, *LATE, of_coordinator=True)
def second_coordinator_takes_over(scene: Scene) -> None:
    """Told to take over from one that stands still: which stops once it wakes up."""
    first = scene.fleet.coordinator
    if first is not None and first.alive:
        first.stop()
        scene.fleet.start_second(scene.fleet.state, take_over=True)
        scene.fleet.until(scene.fleet.second_answers, "the second coordinator answers", START_S)
        first.go_on()


@action("taken_over", "not_found", "behind", "journal_failed", *RESTART, *LATE, *STREAM, of_coordinator=True)
def second_coordinator_adopts(scene: Scene) -> None:
    """On a journal of its own, while the first one lives. A fleet in the middle of an update is not adopted."""
    fleet = scene.fleet
    other = fleet.home / f"state-{time.monotonic_ns()}"
    fleet.start_second(other)
    fleet.until(fleet.second_answers, "the second coordinator answers", START_S)
    adopted = fleet.adopt(fleet.second_port)
    scene.say(f"adopted: {adopted}")
    if adopted:
        scene.forgotten = True
        fleet.state = other


@action("behind", "adopt_needed", "listening", "not_found", "no_members", "stale_version", *RESTART, *LATE, *STREAM,
        of_coordinator=True)  # fmt: skip
def older_journal(scene: Scene) -> None:
    """The coordinator dies, and its state folder comes back from a copy that an earlier round made."""
    fleet = scene.fleet
    if fleet.coordinator is not None and fleet.copy is not None:
        fleet.coordinator.kill()
        shutil.rmtree(fleet.state)
        shutil.copytree(fleet.copy, fleet.state)
        fleet.start_coordinator()
        scene.forgotten = True


@action("behind", "adopt_needed", "listening", "not_found", "no_members", "stale_version", *RESTART, *LATE, *STREAM,
        of_coordinator=True)  # fmt: skip
def emptied_journal(scene: Scene) -> None:
    fleet = scene.fleet
    if fleet.coordinator is not None:
        fleet.coordinator.kill()
        shutil.rmtree(fleet.state)
        fleet.start_coordinator()
        scene.forgotten = True


@action("replica_lost", "member_blocked", *LATE, *STREAM)
def declared_dead_but_frozen(scene: Scene) -> None:
    name = scene.replica()
    scene.say(name)
    scene.touched.add(name)
    scene.fleet.fronts[name].stop()
    scene.fleet.delete(f"/v1/fleet/replicas/{name}?confirm_dead=true")
