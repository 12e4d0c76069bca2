"""What comes late, twice, or for something that is over: the machines look at every name on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_core_recovery import BEGUN, DECIDED, journal
from test_core_recovery import status as report
from test_core_replica import FIRST, Front, old

from updater.core.errors import Failure
from updater.core.fleet import machine as fleet
from updater.core.fleet.effects import Accepted, Admit, Outcome, RecordKind, Send
from updater.core.fleet.events import BackoffEnded, Begin, Deadline, Event, Recorded, Refused, Seen
from updater.core.fleet.recovery import recover
from updater.core.fleet.state import Fleet, Phase, Standing
from updater.core.participant import DiskOffer, FrontState, Kind, PauseRequest, StageRequest
from updater.core.policy import InFlight, Policy
from updater.core.replica.state import Answer, OpenAdmission
from updater.testing import Simulation


@pytest.fixture
def sim() -> Simulation:
    """Two serving members on `start`."""
    sim = Simulation()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    return sim


def state(sim: Simulation) -> Fleet:
    assert sim.state is not None
    return sim.state


def ignored(sim: Simulation, event: Event) -> bool:
    return fleet.step(state(sim), event) == (state(sim), ())


def seen(sim: Simulation, name: str, **change: Any) -> Seen:
    return Seen(name, replace(sim.replicas[name].describe(sim.now).status, **change))


# --- the fleet machine


def test_a_timer_counts_only_for_its_own_phase_and_attempt(sim: Simulation) -> None:
    assert ignored(sim, Deadline("staging", 4, 0))
    sim.begin("u", 0)
    sim.run(until=Phase.STAGING)
    serial = state(sim).serial
    assert ignored(sim, Deadline("staging", serial - 1, 0))
    assert ignored(sim, Deadline("installing", serial, 0))
    assert ignored(sim, BackoffEnded(serial, 0))
    assert not ignored(sim, Deadline(sim.deadline.phase if sim.deadline else "", serial, 0))


def test_a_record_counts_only_where_it_was_asked_for(sim: Simulation) -> None:
    assert ignored(sim, Recorded(RecordKind.DECIDED, 4, 1))
    sim.begin("u", 0)
    sim.run(until=Phase.DECIDING)
    serial = state(sim).serial
    assert ignored(sim, Recorded(RecordKind.DECIDED, serial, 2))
    assert ignored(sim, Recorded(RecordKind.PUBLISHED, serial, 1))
    assert not ignored(sim, Recorded(RecordKind.DECIDED, serial, 1))


@pytest.mark.parametrize("phase", [FrontState.INSTALLING, FrontState.INSTALLED, FrontState.INVALIDATED])
def test_a_status_of_the_last_installation_that_arrives_after_its_end_changes_nothing(
    sim: Simulation, phase: FrontState
) -> None:
    """It was asked for before the replica reopened. Taken for news, the member was called lost for a moment, and an
    update in that moment was refused."""
    sim.begin("u", 0)
    sim.settle()
    assert state(sim).phase is Phase.IDLE
    assert ignored(sim, seen(sim, "a", state=phase))
    assert state(sim).members[0].standing is Standing.OK


def test_the_record_of_the_start_is_awaited_before_anything_begins() -> None:
    sim = Simulation()
    sim.start_replica("a")
    sim.join("a")
    assert state(sim).starting is not None
    assert ignored(sim, Recorded(RecordKind.PUBLISHED, 99, 0))
    after, effects = fleet.step(state(sim), Begin("u", "u", offer=DiskOffer("/x"), policy=Policy()))
    assert (effects, len(after.queue)) == ((Accepted("u", queued=True),), 1)


def test_a_status_moves_no_update(sim: Simulation) -> None:
    sim.begin("u", 0)
    sim.run(until=Phase.STAGING)
    assert ignored(sim, seen(sim, "a"))


def test_a_member_that_is_seen_is_asked_again_for_what_it_owes(sim: Simulation) -> None:
    sim.do_fault("b", "resume")
    sim.begin("u", 0)
    sim.run()
    member = state(sim).member("b")
    assert member is not None
    assert (member.standing, member.owed and member.owed.verb) == (Standing.LOST, "resume")
    after, effects = fleet.step(state(sim), seen(sim, "b"))
    assert (after, effects) == (state(sim), (member.owed,))


def test_a_joiner_that_refuses_its_admission_is_not_asked_for_ever() -> None:
    sim = Simulation()
    sim.start_replica("a")
    sim.join("a")
    sim.settle()
    sim.start_replica("b")
    sim.join("b")
    sim.run(hold=lambda packet: getattr(packet.payload, "verb", "") != "lead")
    member = state(sim).member("b")
    assert member is not None
    assert member.owed is not None
    refused = Refused("b", "join", member.owed.fence, (Failure("expected_mismatch", "no"),))
    after, effects = fleet.step(state(sim), refused)
    assert not any(isinstance(effect, Admit | Send) for effect in effects)
    joining = after.member("b")
    assert joining is not None
    assert (joining.standing, joining.owed) == (Standing.JOINING, None)
    assert joining.gave_up_on is not None


# --- recovery


def test_a_member_that_was_restarted_in_place_is_joining() -> None:
    reports = {"a": report("a", FrontState.OPEN, "start", "base"), "b": report("b", FrontState.JOINING)}
    members = recover("fleet", journal(BEGUN), reports).state.members
    assert [(member.standing, member.shut) for member in members] == [(Standing.OK, False), (Standing.JOINING, True)]


@pytest.mark.parametrize("stuck", [FrontState.INSTALLED, FrontState.RESTORING, FrontState.PAUSED, FrontState.CLOSING])
def test_what_was_reverted_is_taken_back_to_the_end(stuck: FrontState) -> None:
    reverted = replace(DECIDED, kind=RecordKind.REVERTED)
    reports = {"a": report("a", stuck), "b": report("b", FrontState.OPEN, "start", "base")}
    found = recover("fleet", journal(BEGUN, DECIDED, reverted), reports)
    assert found.state.phase is Phase.RESTORING
    assert found.state.update is not None
    assert found.state.update.end is Outcome.ROLLED_BACK


def test_what_is_stuck_in_something_later_is_not_taken_for_the_last_record() -> None:
    reverted = replace(DECIDED, kind=RecordKind.REVERTED)
    reports = {
        "a": report("a", FrontState.PAUSED, "start", "base", serial=6),
        "b": report("b", FrontState.OPEN, "start", "base"),
    }
    found = recover("fleet", journal(BEGUN, DECIDED, reverted), reports)
    assert found.state.phase is Phase.DISCARDING
    assert found.state.update is not None
    assert found.state.update.serial == 10


def test_what_a_catch_up_left_installed_is_taken_back() -> None:
    reports = {
        "a": report("a", FrontState.OPEN, "start", "base"),
        "b": report("b", FrontState.INSTALLED, "start", "base", serial=6),
    }
    found = recover("fleet", journal(BEGUN), reports)
    assert found.state.phase is Phase.RESTORING
    assert found.state.update is not None
    assert (found.state.update.kind, found.state.update.participants) == (Kind.CATCH_UP, (("b", "b1"),))


# --- the replica machine


def test_an_answer_is_given_again() -> None:
    front = Front().join().vote()
    fence = front.fence(5, 0)
    first = front.state.answer("stage", fence)
    front.ask("stage", StageRequest(fence, 1))
    assert front.effects == (Answer("stage", fence, first),)


def test_a_joiner_that_was_paused_goes_on_joining() -> None:
    front = Front()
    front.vote(kind=Kind.CATCH_UP, digest="new")
    front.ask("pause", PauseRequest(front.fence(*FIRST), InFlight.DRAIN, 1, 10))
    front.ask("resume", old(front))
    front.done("resume", front.fence(*FIRST))
    assert (front.state.state, front.saw(OpenAdmission)) == (FrontState.JOINING, None)
