"""A client's abort with its causes: they come first, and it stays the client's abort."""

from __future__ import annotations

import pytest

from updater.core.errors import Failure
from updater.core.fleet.effects import Accepted, Outcome, Result
from updater.core.fleet.events import AbortRequested
from updater.core.fleet.state import Phase
from updater.core.fleet.table import TIME_CODES
from updater.core.policy import OnBusy, Policy
from updater.testing import Simulation

STEPPED = Failure("source_changed", "written to", rank=1, tensor="w")
STALLED = Failure("peer_timeout", "did not take bucket 2", replica="a", rank=0)


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    return sim


def ended(sim: Simulation, *causes: Failure) -> Result:
    """What the update comes to after an abort with these causes."""
    assert isinstance(sim.ask(AbortRequested("u", causes)), Accepted)
    sim.settle()
    return sim.results[-1]


@pytest.mark.parametrize("phase", [Phase.PLANNING, Phase.STAGING, Phase.VERIFYING, Phase.PAUSING])
def test_causes_come_first_and_the_update_is_aborted_whatever_they_are(sim: Simulation, phase: Phase) -> None:
    """Also while nothing is staged, where what a front says would reject it."""
    sim.begin("u", 4)
    sim.run(until=phase)
    result = ended(sim, STEPPED, STALLED)
    assert (result.outcome, result.reason) == (Outcome.ABORTED, "source_changed")
    assert result.failures[:2] == (STEPPED, STALLED)
    assert [failure.code for failure in result.failures[2:]] == ["client_abort"]


@pytest.mark.parametrize("code", sorted(TIME_CODES))
def test_a_cause_that_is_only_about_time_is_no_reason_to_try_again(sim: Simulation, code: str) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.PAUSING)
    result = ended(sim, Failure(code, "took long"))
    assert (result.outcome, result.reason, result.attempts) == (Outcome.ABORTED, code, 1)


def test_a_retry_is_given_up_with_its_causes(sim: Simulation) -> None:
    sim.do_fault("a", "pause", "quiesce_timeout")
    sim.begin("u", 4)
    sim.run(until=Phase.REOPENING)
    result = ended(sim, STEPPED)
    assert (result.outcome, [failure.code for failure in result.failures]) == (
        Outcome.ABORTED,
        ["source_changed", "client_abort"],
    )


def test_what_waits_in_the_queue_ends_with_its_causes(sim: Simulation) -> None:
    sim.begin("first", 4)
    sim.run(until=Phase.STAGING)
    sim.begin("u", 5, policy=Policy(on_busy=OnBusy.WAIT))
    assert isinstance(sim.ask(AbortRequested("u", (STEPPED,))), Accepted)
    result = sim.results[-1]
    assert (result.update, result.outcome, result.reason) == ("u", Outcome.ABORTED, "source_changed")
    assert [failure.code for failure in result.failures] == ["source_changed", "client_abort"]
    sim.settle()
    assert (sim.results[-1].update, sim.results[-1].outcome) == ("first", Outcome.COMMITTED)
