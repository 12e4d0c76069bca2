"""The fleet machine where the stories do not go: every denial, and what happens in odd moments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from updater.core.errors import Failure
from updater.core.fleet import flow, requests
from updater.core.fleet import machine as fleet
from updater.core.fleet.begin import QUEUE_LIMIT, start_published
from updater.core.fleet.effects import Accepted, Denied, Finish, Outcome, Send
from updater.core.fleet.events import (
    AbortRequested,
    Begin,
    CommitRequested,
    Event,
    Joined,
    JournalFailed,
    LeaseExpired,
    Left,
    Lost,
    Refused,
    Replied,
    Seal,
    Seen,
)
from updater.core.fleet.state import Fleet, Phase, Standing
from updater.core.participant import Compared, DiskOffer, FrontState, Kind, PauseReply, SpareState
from updater.core.policy import CommitMode, InFlight, InstallMode, OnBusy, Policy
from updater.core.version import START, Version
from updater.testing import Simulation

GONE = Failure("replica_lost", "gone")


@pytest.fixture
def sim() -> Simulation:
    """Two serving members on version 0-3, with `start` to go back to."""
    sim = Simulation()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    sim.begin("v3", 3)
    sim.settle()
    return sim


def state(sim: Simulation) -> Fleet:
    assert sim.state is not None
    return sim.state


def code(answer: Any) -> str:
    return answer.failures[0].code if isinstance(answer, Denied) else ""


def denied(sim: Simulation, event: Event) -> str:
    """The code with which a client's event is denied; nothing else may happen."""
    before = state(sim)
    after, effects = fleet.step(before, event)
    assert after == before
    (effect,) = effects
    return code(effect)


def standing(sim: Simulation, name: str) -> Standing:
    member = state(sim).member(name)
    assert member is not None
    return member.standing


# --- denials


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"policy": Policy(in_flight=InFlight.KEEP)}, "mode_unsupported"),
        ({"offer": None}, "bad_request"),
        ({"step": -1}, "bad_request"),
        ({"step": 3}, "stale_version"),
        ({"run": 0, "step": 2}, "stale_version"),
        ({"run": 1}, "bad_request"),
        ({"run": 2, "policy": Policy(new_run=True)}, "bad_request"),
        ({"base": START}, "base_mismatch"),
        ({"expected": START}, "expected_mismatch"),
        ({"kind": Kind.ROLLBACK, "target": Version(0, 2)}, "no_rollback"),
        ({"kind": Kind.ROLLBACK, "expected": START}, "expected_mismatch"),
    ],
)
def test_what_cannot_begin(sim: Simulation, change: dict[str, Any], expected: str) -> None:
    good = Begin("u", "u", step=4, offer=DiskOffer("/x"), base=Version(0, 3), expected=Version(0, 3))
    assert isinstance(fleet.step(state(sim), good)[1][0], Accepted)
    assert denied(sim, replace(good, **change)) == expected


def test_nobody_to_publish_to() -> None:
    assert code(fleet.step(Fleet("f", 1), Begin("u", "u", offer=DiskOffer("/x")))[1][0]) == "no_members"


@pytest.mark.case("F01")
def test_a_dry_run_gives_way_to_a_publication_and_to_no_other_dry_run(sim: Simulation) -> None:
    sim.begin("look", None, dry_run=True)
    assert code(sim.begin("again", None, dry_run=True)) == "busy"
    assert isinstance(sim.begin("later", None, dry_run=True, policy=Policy(on_busy=OnBusy.WAIT)), Accepted)
    sim.settle()
    assert [(each.update, each.outcome) for each in sim.results[-2:]] == [
        ("look", Outcome.PLANNED),
        ("later", Outcome.PLANNED),
    ]
    assert {each.version for each in sim.results[-2:]} == {Version(0, 4)}
    sim.begin("v4", 4)
    assert code(sim.begin("look", None, dry_run=True)) == "busy"
    sim.settle()
    assert sim.results[-1].outcome is Outcome.COMMITTED
    sim.begin("new run", None, dry_run=True, policy=Policy(new_run=True))
    sim.settle()
    assert (sim.results[-1].version, sim.results[-1].outcome) == (Version(1, 0), Outcome.PLANNED)


def test_the_queue_is_bounded(sim: Simulation) -> None:
    sim.begin("u", 4)
    wait = Policy(on_busy=OnBusy.WAIT)
    for number in range(QUEUE_LIMIT):
        assert isinstance(sim.begin(f"w{number}", 5 + number, policy=wait), Accepted)
    assert code(sim.begin("too much", 99, policy=wait)) == "busy"


def test_verbs_for_updates_that_do_not_run(sim: Simulation) -> None:
    for event in (Seal("x"), CommitRequested("x"), AbortRequested("x")):
        assert denied(sim, event) == "not_found"
    assert fleet.step(state(sim), LeaseExpired("x")) == (state(sim), ())
    sim.begin("u", 4)
    sim.begin("waits", 5, policy=Policy(on_busy=OnBusy.WAIT))
    assert denied(sim, Seal("waits")) == "wrong_phase"
    assert denied(sim, CommitRequested("waits")) == "wrong_phase"


def test_waiting_updates_can_be_given_up(sim: Simulation) -> None:
    sim.begin("u", 4)
    wait = Policy(on_busy=OnBusy.WAIT)
    sim.begin("w1", 5, policy=wait)
    sim.begin("w2", 6, policy=wait)
    sim.rollback("w3", policy=wait)
    assert isinstance(sim.ask(AbortRequested("w1")), Accepted)
    assert sim.results[-1].reason == "client_abort"
    sim.feed(LeaseExpired("w2"))
    assert sim.results[-1].reason == "lease_expired"
    sim.ask(AbortRequested("w3"))
    assert (sim.results[-1].kind, sim.results[-1].version) == (Kind.ROLLBACK, None)
    sim.settle()
    assert [result.update for result in sim.results[-4:]] == ["w1", "w2", "w3", "u"]


def test_sealing_and_committing_in_time_and_too_late(sim: Simulation) -> None:
    sim.begin("u", 4, policy=Policy(commit=CommitMode.MANUAL))
    assert isinstance(sim.ask(Seal("u")), Accepted)
    assert isinstance(sim.ask(CommitRequested("u")), Accepted)
    sim.run(until=Phase.INSTALLING)
    assert denied(sim, Seal("u")) == "wrong_phase"
    assert isinstance(sim.ask(CommitRequested("u")), Accepted)
    sim.settle()
    assert sim.results[-1].outcome is Outcome.COMMITTED


def test_a_stopped_coordinator_denies_everything(sim: Simulation) -> None:
    stopped, _ = fleet.step(state(sim), JournalFailed(Failure("journal_failed", "x")))
    assert stopped.phase is Phase.STOPPED
    for event in (Begin("u", "u"), Seal("u"), CommitRequested("u"), AbortRequested("u"), Left("a")):
        assert code(fleet.step(stopped, event)[1][0]) == "journal_failed"
    assert fleet.step(stopped, Lost("a", "a1", GONE)) == (stopped, ())


# --- joining and leaving


@pytest.mark.case("F02")
def test_a_hash_of_another_definition_says_nothing(sim: Simulation) -> None:
    description = sim.start_replica("c").describe(0.0)
    for event in (Joined(replace(description, config_hash="a" * 64)), Joined(replace(description, config_hash=""))):
        assert isinstance(fleet.step(state(sim), event)[1][0], Accepted)
    assert isinstance(
        fleet.step(state(sim), Joined(replace(description, config_hash="v2:b"), differs=()))[1][0], Accepted
    )


@pytest.mark.case("F01")
def test_a_fleet_compared_what_all_its_engines_compared() -> None:
    both = Compared("engine", "engine", "none").both(Compared("engine", "none", "none"))
    assert both == Compared("engine", "none", "none")


def test_who_may_not_join(sim: Simulation) -> None:
    joiner = sim.start_replica("c")
    description = joiner.describe(0.0)

    def with_status(**change: Any) -> Joined:
        return Joined(replace(description, status=replace(description.status, **change)))

    assert denied(sim, with_status(fleet="other")) == "bad_request"
    assert denied(sim, with_status(state=FrontState.PAUSED)) == "wrong_phase"
    assert denied(sim, with_status(state=FrontState.OPEN)) == "wrong_phase"
    assert denied(sim, Joined(replace(description, config_hash="v2:another"))) == "config_mismatch"
    differs = (Failure("config_mismatch", "x is 1 in this replica, 2 in replica a", replica="c"),)
    assert denied(sim, Joined(description, differs=differs)) == "config_mismatch"
    nothing_live = Fleet("fleet", 1)
    assert code(fleet.step(nothing_live, with_status(state=FrontState.OPEN))[1][0]) == "adopt_needed"
    assert denied(sim, Left("nobody")) == "not_found"


def test_a_member_that_leaves_in_the_middle_is_not_waited_for(sim: Simulation) -> None:
    for phase, outcome in ((Phase.STAGING, Outcome.ABORTED), (Phase.INSTALLING, Outcome.ROLLED_BACK)):
        sim.begin(f"u-{phase}", state(sim).highest.step + 1)
        sim.run(until=phase)
        sim.do_die("b")
        sim.ask(Left("b", dead=True))
        sim.settle()
        assert (sim.results[-1].outcome, sim.results[-1].reason) == (outcome, "replica_lost")
        sim.start_replica("b")
        sim.join("b")
        sim.settle()
        assert standing(sim, "b") is Standing.OK


def test_a_process_replaced_while_it_is_waited_for(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.VERIFYING)
    sim.ask(AbortRequested("u"))
    assert state(sim).phase is Phase.DISCARDING
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    sim.run()
    assert "u" in [result.update for result in sim.results]
    sim.settle()
    assert standing(sim, "b") is Standing.OK


def test_a_new_process_is_waited_for_by_nobody(sim: Simulation) -> None:
    """It joins while its predecessor is still asked to discard: it starts clean."""
    sim.begin("u", 4)
    sim.run(until=Phase.STAGING)
    sim.do_lost("b")
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    member = state(sim).member("b")
    assert member is not None
    assert (member.standing, member.shut, member.unled, member.owed and member.owed.verb) == (
        Standing.JOINING,
        True,
        True,
        "lead",
    )
    assert "b" not in flow.current(state(sim)).waiting


# --- losses in odd moments


def test_a_loss_while_the_decision_is_written_takes_it_back(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.DECIDING)
    sim.do_lost("b")
    assert state(sim).phase is Phase.DECIDING
    sim.settle()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.ROLLED_BACK, "replica_lost")
    sim.heal()
    assert {standing(sim, name) for name in "ab"} == {Standing.OK}


def test_a_loss_while_the_publication_is_written_changes_nothing(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.PUBLISHING)
    sim.do_lost("b")
    sim.settle()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.COMMITTED, "")
    assert standing(sim, "b") is Standing.OK


def test_a_retry_is_given_up_when_the_client_gives_up(sim: Simulation) -> None:
    sim.do_fault("a", "pause", "quiesce_timeout")
    sim.begin("u", 4)
    sim.run(until=Phase.REOPENING)
    assert isinstance(sim.ask(AbortRequested("u")), Accepted)
    assert denied(sim, AbortRequested("u")) == "wrong_phase"
    sim.settle()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.ABORTED, "client_abort")


def test_a_retry_is_given_up_when_a_member_does_not_reopen(sim: Simulation) -> None:
    sim.do_fault("a", "pause", "quiesce_timeout")
    sim.begin("u", 4)
    sim.run(until=Phase.REOPENING)
    sim.do_lost("b")
    sim.run()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.ABORTED, "replica_lost")
    sim.heal()
    assert standing(sim, "b") is Standing.OK


def test_a_deadline_while_staging_aborts(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.STAGING)
    sim.do_deadline()
    sim.settle()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.ABORTED, "phase_timeout")


def test_the_pause_is_checked_against_the_vote(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.PAUSING)
    update = flow.current(state(sim))
    member = state(sim).member("a")
    assert member is not None
    fence = state(sim).fence(update.serial, 1, member.incarnation)
    good = PauseReply(fence, update.serial, update.digest, 1, False)
    for change, expected in (
        ({"staged_serial": 1}, "replica_fenced"),
        ({"staged_digest": "other"}, "tensor_digest"),
        ({"asleep": True}, "replica_asleep"),
    ):
        after, _ = fleet.step(state(sim), Replied("a", "pause", fence, replace(good, **change)))  # type: ignore[arg-type]
        assert after.phase is Phase.REOPENING
        assert flow.current(after).failures[0].code == expected
    after, _ = fleet.step(state(sim), Replied("a", "pause", fence, good))
    assert after.phase is Phase.PAUSING
    assert flow.current(after).waiting == {"b"}


# --- status polls


def poll(sim: Simulation, name: str, **change: Any) -> None:
    status = replace(sim.replicas[name].describe(sim.now).status, **change)
    sim.feed(Seen(name, status))


def test_polls_of_strangers_and_of_other_lives_do_nothing(sim: Simulation) -> None:
    before = state(sim)
    poll(sim, "a", incarnation="another")
    sim.feed(Seen("nobody", sim.replicas["a"].describe(0.0).status))
    assert state(sim) == before


def test_a_lost_member_that_serves_the_live_version_is_back(sim: Simulation) -> None:
    sim.do_lost("b")
    poll(sim, "b", live_version="0-1")
    assert standing(sim, "b") is Standing.LOST
    poll(sim, "b")
    assert standing(sim, "b") is Standing.OK


def test_a_lost_joiner_goes_on_joining(sim: Simulation) -> None:
    sim.start_replica("c", base="other")
    sim.sources["/v3"] = replace(sim.sources["/v3"], content="changed")
    sim.join("c")
    sim.settle()
    sim.do_lost("c")
    assert standing(sim, "c") is Standing.LOST
    poll(sim, "c")
    assert standing(sim, "c") is Standing.JOINING


def test_an_installed_member_that_nobody_published_to_is_taken_back(sim: Simulation) -> None:
    """One that was out of reach: of one that acknowledged every end it would be old news."""
    sim.do_lost("b")
    poll(sim, "b", state=FrontState.INSTALLED)
    assert isinstance(sim.outbox["b"], Send)
    assert sim.outbox["b"].verb == "restore"
    sim.settle()
    assert standing(sim, "b") is Standing.OK


def test_a_serving_member_that_says_it_is_joining_is_admitted_again(sim: Simulation) -> None:
    poll(sim, "b", state=FrontState.JOINING)
    sim.settle()
    assert standing(sim, "b") is Standing.OK


def test_a_member_that_keeps_nothing_leaves_the_fleet_no_way_back(sim: Simulation) -> None:
    assert state(sim).rollback_to is not None
    sim.replicas["b"].installs_by = InstallMode.NONE
    sim.begin("v4", 4)
    sim.settle()
    assert state(sim).rollback_to is None
    previous = {member.replica: member.previous and str(member.previous.version) for member in state(sim).members}
    assert previous == {"a": "0-3", "b": None}
    sim.replicas["b"].installs_by = InstallMode.FLIP
    sim.begin("v5", 5)
    sim.settle()
    found = state(sim).rollback_to
    assert found is not None
    assert str(found.version) == "0-4"


def test_a_spare_that_is_gone_empties_the_way_back(sim: Simulation) -> None:
    assert state(sim).rollback_to is not None
    spare = replace(sim.replicas["b"].state.spare, state=SpareState.UNKNOWN)
    poll(sim, "b", spare=spare)
    assert state(sim).rollback_to is None


def test_a_broken_member_is_known_to_be_shut_and_reported_twice_is_no_news(sim: Simulation) -> None:
    for _ in range(2):
        poll(sim, "b", state=FrontState.BROKEN)
        member = state(sim).member("b")
        assert member is not None
        assert (member.standing, member.shut) == (Standing.QUARANTINED, True)
    assert isinstance(sim.begin("u", 4), Accepted)
    sim.feed(Lost("b", member.incarnation, GONE))
    assert standing(sim, "b") is Standing.QUARANTINED


def test_a_member_that_breaks_while_it_is_asked_to_discard_is_not_waited_for(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.STAGING)
    sim.ask(AbortRequested("u"))
    poll(sim, "b", state=FrontState.QUARANTINED)
    assert flow.current(state(sim)).waiting == {"a"}


def test_a_member_that_was_lost_before_is_asked_to_discard_and_not_waited_for(sim: Simulation) -> None:
    """Its answer is owed: once it is back it lets go of what it staged, and serves as before."""
    sim.begin("u", 4)
    sim.run(until=Phase.STAGING)
    sim.do_lost("b")
    assert (state(sim).phase, flow.current(state(sim)).waiting) == (Phase.DISCARDING, {"a"})
    sim.run(hold=lambda packet: packet.to == "b")
    (result,) = [each for each in sim.results if each.update == "u"]
    assert (result.outcome, [failure.code for failure in result.failures]) == (Outcome.ABORTED, ["replica_lost"])
    member = state(sim).member("b")
    assert member is not None
    assert member.owed is not None
    assert (state(sim).phase, member.standing, member.spare_unknown) == (Phase.IDLE, Standing.LOST, True)
    assert (member.owed.verb, code(sim.begin("next", 5))) == ("discard", "member_blocked")
    sim.heal()
    assert standing(sim, "b") is Standing.OK
    sim.begin("next", 5)
    sim.settle()
    assert sim.results[-1].outcome is Outcome.COMMITTED


def test_the_others_do_not_stay_shut_for_a_member_that_is_lost(sim: Simulation) -> None:
    """It dies before it installs: who has installed is put back and reopened at once. Its own word is owed."""
    sim.begin("u", 4)
    sim.run(until=Phase.INSTALLING)
    sim.do_lost("b")
    assert (state(sim).phase, flow.current(state(sim)).waiting) == (Phase.RESTORING, frozenset())
    sim.run(hold=lambda packet: packet.to == "b")
    assert (sim.results[-1].update, sim.results[-1].outcome) == ("u", Outcome.ROLLED_BACK)
    assert (standing(sim, "a"), standing(sim, "b")) == (Standing.OK, Standing.QUARANTINED)
    sim.heal()
    assert {standing(sim, name) for name in "ab"} == {Standing.OK}


def test_a_loss_that_only_a_recovery_found_is_said_of_the_member(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.RESUMING)
    sim.do_crash()
    sim.do_restart(("b",))
    sim.run(hold=lambda packet: packet.to == "b")
    result = sim.results[-1]
    assert result.outcome is Outcome.COMMITTED
    assert [(failure.code, failure.replica) for failure in result.failures] == [("replica_lost", "b")]


def test_a_broken_member_owes_nothing(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.RESUMING)
    sim.do_deadline()
    owed = state(sim).member("b")
    assert owed is not None
    assert owed.owed is not None
    sim.feed(Refused("b", "resume", owed.owed.fence, (Failure("rank_failed", "x"),)))
    assert standing(sim, "b") is Standing.LOST
    sim.feed(Refused("b", "resume", owed.owed.fence, (Failure("rank_died", "x"),)))
    broken = state(sim).member("b")
    assert broken is not None
    assert (broken.standing, broken.shut, broken.owed) == (Standing.QUARANTINED, True, None)


# --- what callers inside the core must not do


def test_misuse_is_an_error(sim: Simulation) -> None:
    idle = Fleet("f", 1)
    for misuse in (
        lambda: flow.current(idle),
        lambda: requests.live(idle),
        lambda: start_published(idle),
        lambda: flow.back_on_old(idle, "nobody"),
    ):
        with pytest.raises(LookupError):
            misuse()


def test_an_update_without_participants_never_goes_on(sim: Simulation) -> None:
    sim.begin("u", 4)
    sim.run(until=Phase.PAUSING)
    empty = replace(state(sim), members=())
    after, effects = flow.enter(empty, Phase.INSTALLING)
    assert flow.current(after).end is Outcome.ROLLED_BACK
    assert not any(isinstance(effect, Finish) for effect in effects)


@pytest.mark.case("F22")
@pytest.mark.parametrize("other", ["source_missing", "tensor_shape"])
def test_what_one_member_does_not_see_waits_for_what_the_others_say(sim: Simulation, other: str) -> None:
    sim.begin("u", 4)
    update = flow.current(state(sim))
    fences = {
        name: state(sim).fence(update.serial, update.attempt, incarnation) for name, incarnation in update.participants
    }
    first = Refused("b", "plan", fences["b"], (Failure("source_missing", "not here"),))
    noted, _ = fleet.step(state(sim), first)
    assert noted.phase is Phase.PLANNING
    assert flow.current(noted).waiting == {"a"}
    after, _ = fleet.step(noted, Refused("a", "plan", fences["a"], (Failure(other, "no"),)))
    assert after.update is None or after.update.end is Outcome.REJECTED
    assert after.phase is not Phase.PLANNING


# --- whose words count


@pytest.mark.parametrize("reason", sorted(flow.CLIENT_REASONS))
def test_a_member_that_speaks_of_an_abort_does_not_speak_for_the_client(sim: Simulation, reason: str) -> None:
    """A front may report that its own ranks were told to stop; that is still its refusal."""
    sim.begin("u", 4)
    update = state(sim).update
    assert update is not None
    assert state(sim).phase is Phase.PLANNING
    fence = state(sim).fence(update.serial, update.attempt, dict(update.participants)["b"])
    failures = (Failure("tensor_shape", "no"), Failure(reason, "told to stop", replica="b", rank=1))
    after, _ = fleet.step(state(sim), Refused("b", "plan", fence, failures))
    assert after.update is not None
    assert after.update.end is Outcome.REJECTED
    asked, _ = fleet.step(state(sim), AbortRequested("u"))
    assert asked.update is not None
    assert asked.update.end is Outcome.ABORTED
