"""Crash sweeps: the same short histories, with one process dying at every single point of them.

A point is (history, role, number). For the coordinator the number counts effects: it dies before that one, which is
after the one before it, and what was durable by then stays. For a replica it counts whatever happens in the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from updater.core.fleet.events import AbortRequested
from updater.core.fleet.state import Phase
from updater.core.policy import CommitMode, Policy
from updater.testing.simulation import Simulation
from updater.testing.values import Machines

COORDINATOR = "coordinator"
History = Callable[[Simulation], None]


def publish(sim: Simulation) -> None:
    sim.begin("u0", 0, manifest="bytes-u0")
    sim.settle()


def publish_and_go_back(sim: Simulation) -> None:
    sim.begin("u0", 0)
    sim.settle()
    sim.rollback("back")
    sim.settle()


def take_back(sim: Simulation) -> None:
    sim.do_fault("b", "install", "rank_failed", after=1)
    sim.begin("u0", 0)
    sim.settle()


def give_up(sim: Simulation) -> None:
    sim.begin("u0", 0, policy=Policy(commit=CommitMode.MANUAL))
    sim.run()
    sim.ask(AbortRequested("u0"))
    sim.settle()


def catch_up(sim: Simulation) -> None:
    sim.begin("u0", 0)
    sim.settle()
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    sim.settle()


HISTORIES: dict[str, History] = {
    each.__name__: each for each in (publish, publish_and_go_back, take_back, give_up, catch_up)
}


@dataclass(frozen=True, slots=True)
class Point:
    history: str
    role: str
    number: int


def points(history: str) -> Iterator[Point]:
    """Every point of one history: the coordinator's by effect, both replicas' by happening."""
    sim = _fleet(None)
    effects, happenings = sim.effects, sim.happenings
    HISTORIES[history](sim)
    for number in range(sim.effects - effects):
        yield Point(history, COORDINATOR, number)
    for role in ("a", "b"):
        for number in range(sim.happenings - happenings):
            yield Point(history, role, number)


def check_point(point: Point, machines: Machines | None = None) -> Simulation:
    """Play the history, let the process die, heal, and publish once more. Raises Violation."""
    sim = _fleet(machines)
    if point.role == COORDINATOR:
        sim.crash_in = point.number
    else:
        sim.dies_at = (sim.happenings + point.number, point.role)
    HISTORIES[point.history](sim)
    sim.dies_at = None
    sim.heal()
    sim.check_settled()
    sim.begin("after", 7)
    sim.heal()
    sim.check_settled()
    _everybody_serves(sim)
    return sim


def _everybody_serves(sim: Simulation) -> None:
    for name, process in sim.replicas.items():
        sim.do_generate(name)
        if process.admission is None or process.admission[0] != "0-7":
            raise AssertionError(f"{name} serves {process.admission} in the end")


def _fleet(machines: Machines | None) -> Simulation:
    sim = Simulation(machines=machines)
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    if sim.state is None or sim.state.phase is not Phase.IDLE:
        raise AssertionError("the fleet does not start")
    return sim
