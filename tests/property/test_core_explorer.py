"""Random histories and crash sweeps of the simulated fleet: I1 to I9 hold after every step and at rest."""

from __future__ import annotations

import pytest

from updater.core.errors import Failure
from updater.core.fleet import machine as fleet
from updater.core.fleet.effects import RecordKind
from updater.core.fleet.events import BackoffEnded, Deadline, Event, LeaseExpired, Lost, Recorded, Replied
from updater.core.fleet.state import Fleet, Phase
from updater.core.participant import Ack
from updater.testing.explorer import Explorer, Rates
from updater.testing.sweep import COORDINATOR, HISTORIES, check_point, points
from updater.testing.values import Violation

FACTORS = (0.0, 1.0, 3.0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("seed", range(12))
def test_no_promise_breaks_in_a_random_history(seed: int, factor: float) -> None:
    Explorer(seed, Rates().scaled(factor), replicas=1 + seed % 3).run(150)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [*FACTORS, 6.0])
def test_no_promise_breaks_in_many_long_histories(factor: float) -> None:
    for seed in range(1000, 1150):
        Explorer(seed, Rates().scaled(factor), replicas=1 + seed % 3).run(400)


def test_histories_reach_every_phase_and_every_outcome() -> None:
    """Otherwise the walk above proves little."""
    lines: set[str] = set()
    outcomes = set()
    for seed in range(12):
        sim = Explorer(seed, Rates(), replicas=2).run(250)
        lines |= {line.partition(" (attempt")[0] for line in sim.log if line.startswith("coordinator: ")}
        outcomes |= {(result.kind, result.outcome) for result in sim.results}
    reached = {line.rpartition("-> ")[2] for line in lines if "->" in line}
    assert reached >= {phase.value for phase in Phase} - {"stopped"}
    assert len(outcomes) >= 7


def test_same_seed_same_history() -> None:
    assert Explorer(3, Rates()).run(120).log == Explorer(3, Rates()).run(120).log


@pytest.mark.parametrize("history", HISTORIES)
def test_the_coordinator_may_die_at_any_effect(history: str) -> None:
    every = [point for point in points(history) if point.role == COORDINATOR]
    assert len(every) > 20
    for point in every[::2] if history != "publish" else every:
        check_point(point)


@pytest.mark.slow
@pytest.mark.parametrize("history", HISTORIES)
def test_any_process_may_die_at_any_point(history: str) -> None:
    for point in points(history):
        check_point(point)


def _states() -> list[Fleet]:
    """Every state of one ordinary history."""
    seen: list[Fleet] = []
    sim = Explorer(1, Rates(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), replicas=2).sim
    for name in "ab":
        sim.join(name)
    sim.settle()
    sim.begin("u", 0)
    while sim.actions():
        sim.perform(sim.actions()[0])
        if sim.state is not None and sim.state not in seen:
            seen.append(sim.state)
    return seen


def test_what_does_not_apply_changes_nothing() -> None:
    states = _states()
    assert {state.phase for state in states} >= {Phase.PLANNING, Phase.DECIDING, Phase.RESUMING, Phase.IDLE}
    for state in states:
        old = state.fence(state.serial, 9, "a1")
        attempt = state.update.attempt if state.update else 0
        stale: tuple[Event, ...] = (
            Deadline("pausing", state.serial, 9),
            Deadline("of another phase", state.serial, attempt),
            Deadline(state.phase.value, state.serial + 1, 0),
            BackoffEnded(state.serial, 0),
            Recorded(RecordKind.DECIDED, state.serial + 1, 1),
            Recorded(RecordKind.REVERTED, state.serial, 1),
            LeaseExpired("somebody else's"),
            Lost("a", "another life", Failure("replica_lost", "gone")),
            Lost("nobody", "x", Failure("replica_lost", "gone")),
            Replied("a", "install", old, Ack(old)),
            Replied("nobody", "plan", old, Ack(old)),
        )
        for event in stale:
            assert fleet.step(state, event) == (state, ())


def test_the_simulation_itself_can_see_a_mixed_replica() -> None:
    sim = Explorer(1, Rates()).sim
    sim.join("a")
    sim.settle()
    sim.replicas["a"].ranks[1].live = "something else"
    with pytest.raises(Violation) as caught:
        sim.check()
    assert caught.value.invariant == "I1"
