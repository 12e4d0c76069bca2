"""Failure stories of a fleet, each told on a fresh `Simulation`. A story drives, asserts, and leaves a transcript.

The number in a docstring is that of the interleaving in the list of docs/hazards.md that it closes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from updater.core.errors import Failure
from updater.core.fleet import events
from updater.core.fleet.effects import Accepted, Denied, Outcome, Result
from updater.core.fleet.state import Phase, Standing
from updater.core.participant import Fence, FenceRequest, FrontState, JoinRequest, Kind, ReleaseTo
from updater.core.policy import CachePolicy, CommitMode, OnBusy, Policy
from updater.core.replica.state import Asked, LeaseTimer
from updater.core.version import START, Version
from updater.testing import Machines, SimulatedSource, Simulation

Story = Callable[[Simulation], None]
STORIES: dict[str, Story] = {}


def story(tell: Story) -> Story:
    STORIES[tell.__name__] = tell
    return tell


def fleet(sim: Simulation, names: str = "ab") -> None:
    for name in names:
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    sim.log.clear()


def publish(sim: Simulation, step: int) -> None:
    """What a story begins from: a version that all members serve, not part of the transcript."""
    sim.begin(f"v{step}", step)
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    sim.log.clear()


def obey(sim: Simulation) -> None:
    """A joiner has heard the first word, and nothing else has happened."""
    sim.run(hold=lambda packet: getattr(packet.payload, "verb", "") != "lead")


def call(sim: Simulation, *names: str) -> None:
    """Fronts ask whether they are still members, and hear the answer."""
    for name in names:
        sim.do_call(name)
        sim.run()


def held(sim: Simulation) -> str:
    """Why the coordinator publishes nothing and admits no replica, as a code."""
    assert sim.state is not None
    return sim.state.hold.code if sim.state.hold else ""


def last(sim: Simulation) -> Result:
    return sim.results[-1]


def ended(sim: Simulation, outcome: Outcome, reason: str = "") -> None:
    assert (last(sim).outcome, last(sim).reason) == (outcome, reason)


def serving(sim: Simulation) -> dict[str, str]:
    """What clients get where: replica -> label, "" where shut. Also checks the bytes behind the label."""
    for name in sim.replicas:
        sim.do_generate(name)
    return {name: process.admission[0] if process.admission else "" for name, process in sim.replicas.items()}


def live(sim: Simulation) -> Version:
    assert sim.state is not None
    assert sim.state.live is not None
    return sim.state.live.label.version


def standing(sim: Simulation, name: str) -> Standing:
    member = sim.state.member(name) if sim.state else None
    assert member is not None
    return member.standing


def code(answer: object) -> str:
    return answer.failures[0].code if isinstance(answer, Denied) else ""


def rest(sim: Simulation) -> None:
    """The end of every story: the fleet is healed, nothing hangs and nothing is held. Not part of the transcript."""
    told = list(sim.log)
    sim.heal()
    sim.check_settled()
    sim.log = told


# --- the ordinary way


@story
def three_versions_and_a_rollback(sim: Simulation) -> None:
    fleet(sim)
    for step in range(3):
        sim.begin(f"0-{step}", step)
        sim.settle()
        ended(sim, Outcome.COMMITTED)
        assert serving(sim) == {"a": f"0-{step}", "b": f"0-{step}"}
    assert sim.state is not None
    assert last(sim).rollback_to == sim.state.rollback_to
    sim.rollback("back", target=Version(0, 1), expected=Version(0, 2))
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert last(sim).kind is Kind.ROLLBACK
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    assert str(last(sim).rollback_to and last(sim).rollback_to.version) == "0-2"
    rest(sim)


@story
@pytest.mark.case("B169", "B175")
def a_refused_vote_pauses_no_replica(sim: Simulation) -> None:
    """The vote of one rank is enough."""
    fleet(sim)
    sim.begin("bad", 0, manifest="something else")
    sim.settle()
    ended(sim, Outcome.ABORTED, "tensor_digest")
    assert serving(sim) == {"a": "start", "b": "start"}
    assert not any("closing" in line for line in sim.log)
    assert sim.begin("again", 0) == Accepted("again", sim.state.serial if sim.state else 0)
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    rest(sim)


@story
def a_rejected_plan_spends_nothing(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("good", 0)
    sim.settle()
    sim.do_fault("b", "plan", "tensor_shape")
    sim.begin("bad", 1)
    sim.settle()
    ended(sim, Outcome.REJECTED, "tensor_shape")
    assert last(sim).rollback_to is not None
    assert last(sim).rollback_to.version == START
    rest(sim)


@story
def a_dry_run_plans_and_spends_nothing(sim: Simulation) -> None:
    """What a publication would meet before its first byte; the version stays free, and a publication comes first."""
    fleet(sim)
    publish(sim, 0)
    sim.begin("look", None, dry_run=True)
    sim.settle()
    ended(sim, Outcome.PLANNED)
    assert last(sim).version == Version(0, 1)
    assert last(sim).rollback_to is not None
    sim.do_fault("b", "plan", "tensor_shape")
    sim.begin("look again", 1, dry_run=True)
    sim.settle()
    ended(sim, Outcome.REJECTED, "tensor_shape")
    sim.begin("once more", 1, dry_run=True)
    assert isinstance(sim.begin("v1", 1), Accepted)
    sim.settle()
    assert [result.outcome for result in sim.results[-2:]] == [Outcome.ABORTED, Outcome.COMMITTED]
    assert sim.results[-2].reason == "superseded"
    rest(sim)


@story
@pytest.mark.case("B163")
def members_that_read_different_bytes_do_not_publish(sim: Simulation) -> None:
    """One of them staged before the source changed."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(hold=lambda packet: packet.to == "b" and packet.payload.verb == "stage")
    sim.sources["/u"] = SimulatedSource("rewritten")
    sim.settle()
    ended(sim, Outcome.ABORTED, "copies_differ")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
@pytest.mark.case("B163", "B148")
def the_third_replica_refuses_at_commit(sim: Simulation) -> None:
    """Installed on some ranks of one replica and on all of two others; all go back."""
    fleet(sim, "abc")
    sim.do_fault("c", "install", "rank_failed", after=1)
    sim.begin("u", 0)
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "rank_failed")
    assert serving(sim) == {"a": "start", "b": "start", "c": "start"}
    assert {standing(sim, name) for name in "abc"} == {Standing.OK}
    assert code(sim.begin("same", 0)) == "stale_version"
    rest(sim)


@story
def a_cache_that_does_not_clear_takes_the_update_back(sim: Simulation) -> None:
    fleet(sim)
    sim.do_fault("b", "invalidate", "cache_not_reset")
    sim.begin("u", 0)
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "cache_not_reset")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


# --- the list of interleavings


@story
def a_lost_install_publishes_nowhere(sim: Simulation) -> None:
    """1: R1 installed, R2's install is lost, R2's lease ends. Nothing is published without every acknowledgement."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(hold=lambda packet: packet.to == "b" and packet.payload.verb == "install")
    assert sim.state is not None
    assert sim.state.phase is Phase.INSTALLING
    sim.do_lease("b")
    sim.work("b")
    assert serving(sim) == {"a": "", "b": "start"}
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "replica_fenced")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def recovery_does_not_undo_what_one_replica_serves(sim: Simulation) -> None:
    """2: R1 reopened, the coordinator dies, R2 comes back with its start weights."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.RESUMING)
    sim.run(hold=lambda packet: packet.to == "b")
    assert serving(sim) == {"a": "0-0", "b": ""}
    sim.crash()
    sim.do_die("b")
    sim.start_replica("b")
    sim.restart()
    sim.settle()
    assert serving(sim)["a"] == "0-0"
    assert serving(sim)["b"] in ("", "0-0")
    sim.join("b")
    sim.settle()
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


@story
def a_lease_timer_between_two_ranks(sim: Simulation) -> None:
    """3: the timer fires when rank 0 has installed and rank 1 has not: it comes too late."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INSTALLING)
    old_lease = sim.replicas["a"].lease_timer
    sim.perform(next(a for a in sim.actions() if a.kind == "deliver"))
    sim.work("a", times=1)
    assert [rank.label for rank in sim.replicas["a"].ranks] == ["0-0", "start"]
    sim.now = old_lease or 0.0
    sim.replicas["a"].handle(LeaseTimer(), sim.now)
    sim.check()
    assert sim.replicas["a"].state.state is FrontState.INSTALLING
    sim.work("a")
    assert sim.replicas["a"].state.state is FrontState.INSTALLED
    rest(sim)


@story
def restore_overtakes_a_delayed_install(sim: Simulation) -> None:
    """4: the install arrives after the restore that took it back."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INSTALLING)
    late = sim.on_wire("install", "b")[0]
    sim.wire.remove(late)
    sim.run()
    sim.do_deadline()
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "phase_timeout")
    sim.wire.append(late)
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    assert all(not rank.installs for rank in sim.replicas["b"].ranks)
    rest(sim)


@story
def discard_overtakes_a_delayed_pause(sim: Simulation) -> None:
    """4: the pause arrives after the update was given up. Nothing closes."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.PAUSING)
    late = sim.on_wire("pause", "b")[0]
    sim.wire.remove(late)
    sim.run()
    sim.ask(events.AbortRequested("u"))
    sim.settle()
    ended(sim, Outcome.ABORTED, "client_abort")
    sim.wire.append(late)
    sim.run()
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def a_pause_whose_lease_ended_is_dead(sim: Simulation) -> None:
    """Its acknowledgement was lost, it reopened by itself; asked again it must not say that it is paused."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.PAUSING)
    asked = sim.on_wire("pause", "b")[0]
    sim.run(hold=lambda packet: packet.to == "" and packet.payload.replica == "b")
    sim.wire = []
    sim.do_lease("b")
    sim.work("b")
    assert serving(sim) == {"a": "", "b": "start"}
    sim.wire.append(asked)
    sim.settle()
    ended(sim, Outcome.ABORTED, "replica_fenced")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def a_rolled_back_version_is_used_up(sim: Simulation) -> None:
    """5: v0 is rolled back, the trainer repairs it and pushes it under the same number."""
    fleet(sim)
    sim.begin("v0", 0)
    sim.settle()
    sim.rollback("back")
    sim.settle()
    assert live(sim) == START
    assert code(sim.begin("v0-repaired", 0)) == "stale_version"
    assert isinstance(sim.begin("v1", 1), Accepted)
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
@pytest.mark.case("B172")
def an_older_checkpoint_opens_a_new_run(sim: Simulation) -> None:
    """6: a trainer that lost its counter proposes small numbers again."""
    fleet(sim, "a")
    sim.begin("v57", 57)
    sim.settle()
    assert code(sim.begin("v1", 1)) == "stale_version"
    assert code(sim.begin("odd", 1, run=3)) == "bad_request"
    assert isinstance(sim.begin("v1-again", 1, policy=Policy(new_run=True)), Accepted)
    sim.settle()
    assert live(sim) == Version(1, 1)
    assert code(sim.begin("old-run", 58, run=0)) == "stale_version"
    rest(sim)


@story
def a_long_rollout_makes_the_drain_time_out(sim: Simulation) -> None:
    """7: the staging is kept, the second attempt publishes."""
    fleet(sim)
    sim.do_fault("b", "pause", "quiesce_timeout")
    sim.begin("u", 0)
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert last(sim).attempts == 2
    assert sum(line.startswith("-> a: stage") for line in sim.log) == 1
    rest(sim)


@story
def attempts_run_out(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("u", 0, policy=Policy(attempts=2))
    for _ in range(2):
        sim.do_fault("a", "pause", "quiesce_timeout")
        sim.run()
        if sim.backoff is not None and last_phase(sim) is Phase.READY:
            sim.do_backoff()
    sim.settle()
    ended(sim, Outcome.ABORTED, "quiesce_timeout")
    assert last(sim).attempts == 2
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
@pytest.mark.case("B144", "B146")
def a_second_update_arrives_while_the_first_runs(sim: Simulation) -> None:
    """8: refuse, wait, supersede; and supersede after the decision."""
    fleet(sim)
    sim.begin("v0", 0)
    sim.run(until=Phase.STAGING)
    assert code(sim.begin("refused", 1)) == "busy"
    assert sim.begin("waits", 1, policy=Policy(on_busy=OnBusy.WAIT)) == Accepted("waits", queued=True)
    assert code(sim.begin("older", 0, policy=Policy(on_busy=OnBusy.SUPERSEDE))) == "busy"
    assert sim.begin("v2", 2, policy=Policy(on_busy=OnBusy.SUPERSEDE)) == Accepted("v2", queued=True)
    sim.run(until=Phase.DECIDING)
    assert (sim.results[-1].update, sim.results[-1].reason) == ("v0", "superseded")
    assert code(sim.begin("late", 3, policy=Policy(on_busy=OnBusy.SUPERSEDE))) == "busy"
    sim.settle()
    assert [(r.update, r.outcome.value, r.reason) for r in sim.results[-2:]] == [
        ("v2", "committed", ""),
        ("waits", "rejected", "stale_version"),
    ]
    assert serving(sim) == {"a": "0-2", "b": "0-2"}
    rest(sim)


@story
def a_manual_commit_and_its_lease(sim: Simulation) -> None:
    """9: too late after the lease; and once commit is accepted the lease does not matter any more."""
    fleet(sim)
    manual = Policy(commit=CommitMode.MANUAL)
    sim.begin("v0", 0, policy=manual)
    sim.run()
    assert last_phase(sim) is Phase.READY
    sim.feed(events.LeaseExpired("v0"))
    assert code(sim.ask(events.CommitRequested("v0"))) == "wrong_phase"
    sim.settle()
    ended(sim, Outcome.ABORTED, "lease_expired")
    sim.begin("v1", 1, policy=manual)
    sim.run()
    assert isinstance(sim.ask(events.CommitRequested("v1")), Accepted)
    sim.feed(events.LeaseExpired("v1"))
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert code(sim.ask(events.CommitRequested("v1"))) == "not_found"
    rest(sim)


@story
def an_install_after_the_lease_before_its_timer(sim: Simulation) -> None:
    """9: the timer is late, the message is not: the lease is checked when the install is handled."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INSTALLING)
    sim.do_pass_lease("b")
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "replica_fenced")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def a_second_process_under_a_living_id(sim: Simulation) -> None:
    """10: refused until the first one misses a probe; messages for the first one do nothing to the second."""
    fleet(sim)
    first = sim.replicas["b"]
    sim.lives["b"] = 1
    impostor = sim.start_replica("b")
    assert code(sim.ask(events.Joined(impostor.describe(sim.now)))) == "replica_id_taken"
    sim.replicas["b"] = first
    sim.begin("u", 0)
    sim.run(until=Phase.PAUSING)
    sim.replicas["b"] = impostor
    first.die()
    sim.run()
    assert impostor.state.mark == (0, 0, 0)
    sim.ask(events.Joined(impostor.describe(sim.now), old_gone=True))
    sim.settle()
    assert (sim.results[0].outcome, sim.results[0].reason) == (Outcome.ABORTED, "replica_fenced")
    rest(sim)


@story
def a_late_join_for_a_dead_process(sim: Simulation) -> None:
    """10: the message that would open the old process must not open the new one of the same name."""
    fleet(sim, "a")
    sim.start_replica("b")
    sim.join("b")
    obey(sim)
    late = sim.on_wire("join", "b")[0]
    sim.wire.remove(late)
    sim.do_die("b")
    sim.start_replica("b")
    sim.ask(events.Left("b", dead=True))
    sim.wire.append(late)
    sim.run()
    assert serving(sim) == {"a": "start", "b": ""}
    sim.begin("u", 0)
    sim.settle()
    assert serving(sim) == {"a": "0-0", "b": ""}
    rest(sim)


@story
def an_old_discard_does_not_touch_a_newer_update(sim: Simulation) -> None:
    """A message of the update before arrives once more while the next one is staged."""
    fleet(sim)
    sim.begin("u0", 0)
    sim.run(until=Phase.VERIFYING)
    sim.ask(events.AbortRequested("u0"))
    late = sim.on_wire("discard", "b")[0]
    sim.settle()
    sim.begin("u1", 1)
    sim.run(until=Phase.VERIFYING)
    sim.wire.insert(0, late)
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def everything_arrives_twice(sim: Simulation) -> None:
    """I7: a repeated verb joins the running one or gets the first answer again."""
    fleet(sim)
    for update, step in (("u0", 0), ("u1", 1)):
        sim.begin(update, step)
        while sim.actions():
            packet = next((packet for packet in sim.wire), None)
            if packet is not None:
                sim.do_repeat(packet.number)
                sim.check()
            sim.perform(sim.actions()[0])
        ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    assert all(len(rank.installs) == 2 for process in sim.replicas.values() for rank in process.ranks)
    rest(sim)


@story
def a_joiner_that_never_paused_stays_shut(sim: Simulation) -> None:
    """It holds other bytes than the fleet: told to reopen on the old version, it goes on joining."""
    fleet(sim, "a")
    sim.start_replica("b", base="other")
    sim.join("b")
    obey(sim)
    sim.do_fault("a", "pause", "rank_steps_differ")
    sim.begin("u", 0)
    sim.run(hold=lambda packet: packet.to == "b" and packet.payload.verb == "pause")
    sim.wire = [packet for packet in sim.wire if packet.payload.verb != "pause"]
    sim.settle()
    ended(sim, Outcome.ABORTED, "rank_steps_differ")
    assert serving(sim) == {"a": "start", "b": ""}
    assert standing(sim, "b") is Standing.JOINING
    sim.begin("v1", 1)
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def a_join_for_other_bytes(sim: Simulation) -> None:
    """The front compares too: it opens on nothing but what it holds."""
    fleet(sim, "a")
    process = sim.start_replica("b", base="other")
    fence = Fence("fleet", 1, 99, 0, process.incarnation)
    process.handle(Asked("lead", FenceRequest(fence)), sim.now)
    process.handle(Asked("join", JoinRequest(fence, "start", "base")), sim.now)
    sim.work("b")
    assert serving(sim) == {"a": "start", "b": ""}
    assert process.state.state is FrontState.JOINING


@story
@pytest.mark.case("B166")
def a_joiner_between_decision_and_publication(sim: Simulation) -> None:
    """11: it waits for IDLE, and is caught up before it serves anything."""
    fleet(sim, "a")
    sim.begin("u", 0)
    sim.run(until=Phase.PUBLISHING)
    sim.start_replica("b")
    sim.join("b")
    assert not sim.on_wire("join", "b")
    sim.run(until=Phase.RESUMING)
    assert serving(sim) == {"a": "", "b": ""}
    sim.settle()
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    assert last(sim).kind is Kind.CATCH_UP
    rest(sim)


@story
def a_frozen_coordinator_wakes_up(sim: Simulation) -> None:
    """12: its messages carry an old epoch, and its next append fails because the journal has another owner."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.PAUSING)
    frozen_wire = list(sim.wire)
    frozen = sim.state
    sim.crash()
    sim.wire = []
    sim.restart()
    sim.settle()
    ended(sim, Outcome.ABORTED, "coordinator_restarted")
    assert frozen is not None
    assert sim.state is not None
    assert sim.state.epoch > frozen.epoch
    sim.wire.extend(frozen_wire)
    sim.run()
    assert serving(sim) == {"a": "start", "b": "start"}
    after, effects = sim.machines.fleet.step(frozen, events.JournalFailed(Failure("journal_failed", "another owner")))
    assert after.phase is Phase.STOPPED
    assert [type(effect).__name__ for effect in effects] == ["Stop"]
    assert sim.machines.fleet.step(after, events.BackoffEnded(1, 1)) == (after, ())
    rest(sim)


@story
def an_emptied_journal_shuts_no_replica(sim: Simulation) -> None:
    """13, F10: fronts with history stay open and obey nothing; no replica is admitted until an operator adopts them."""
    fleet(sim)
    publish(sim, 3)
    sim.lose_journal()
    sim.restart()
    assert held(sim) == "listening"
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    sim.settle()
    assert serving(sim) == {"a": "0-3", "b": ""}
    sim.do_hold_ends()  # not yet: a has not called
    call(sim, "a")
    assert held(sim) == "adopt_needed"
    assert sim.replicas["a"].state.unclaimed
    sim.do_hold_ends()
    sim.join("b")
    sim.settle()
    assert code(sim.begin("v4", 4)) == "adopt_needed"
    assert serving(sim) == {"a": "0-3", "b": ""}
    sim.adopt("a")
    sim.settle()
    assert live(sim) == Version(0, 3)
    assert not sim.replicas["a"].state.unclaimed
    assert code(sim.begin("v3-again", 3)) == "stale_version"
    sim.join("b")
    sim.settle()
    sim.begin("v4", 4)
    sim.settle()
    assert serving(sim) == {"a": "0-4", "b": "0-4"}
    rest(sim)


@story
def a_new_fleet_waits_for_an_older_one_to_call(sim: Simulation) -> None:
    """F10: nothing is published and no replica admitted before two watch intervals went by in silence."""
    sim.lose_journal()
    sim.restart()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    assert serving(sim) == {"a": "", "b": ""}
    assert code(sim.begin("early", 0)) == "listening"
    sim.do_hold_ends()
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def an_older_journal_follows_what_all_members_prove(sim: Simulation) -> None:
    """F11: all of them serve what it has never heard of: that is live, and one that restarts opens on nothing else."""
    fleet(sim)
    publish(sim, 1)
    older = sim.disk.copy()
    publish(sim, 3)
    sim.lose_journal(older)
    sim.restart()
    sim.settle()
    assert live(sim) == Version(0, 3)
    assert serving(sim) == {"a": "0-3", "b": "0-3"}
    call(sim, "a", "b")
    sim.do_hold_ends()
    sim.do_die("b")
    sim.start_replica("b")
    sim.do_lost("b")
    sim.join("b")
    sim.settle()
    assert serving(sim) == {"a": "0-3", "b": ""}
    sim.begin("v4", 4)
    sim.settle()
    assert serving(sim) == {"a": "0-4", "b": "0-4"}
    rest(sim)


@story
def an_older_journal_and_a_silent_member(sim: Simulation) -> None:
    """F11: one of them does not answer, so nothing is proved: nothing is published, none admitted and none shut."""
    fleet(sim)
    publish(sim, 1)
    older = sim.disk.copy()
    sim.crash()
    sim.restart()
    sim.settle()
    publish(sim, 3)
    sim.lose_journal(older)
    sim.restart(silent=frozenset("b"))
    sim.settle()
    assert held(sim) == "behind"
    assert code(sim.begin("v4", 4)) == "behind"
    sim.start_replica("c")
    assert code(sim.join("c")) == "behind"
    call(sim, "a", "b")
    assert serving(sim) == {"a": "0-3", "b": "0-3", "c": ""}
    sim.crash()
    sim.restart()
    sim.settle()
    assert held(sim) == "listening"
    call(sim, "a", "b")
    sim.do_hold_ends()
    assert live(sim) == Version(0, 3)
    sim.join("c")
    sim.settle()
    sim.begin("v4", 4)
    sim.settle()
    assert serving(sim) == {"a": "0-4", "b": "0-4", "c": "0-4"}
    rest(sim)


@story
def an_older_journal_that_does_not_know_a_member(sim: Simulation) -> None:
    """F11: the one that joined later is not called removed by a journal that has never heard of it."""
    fleet(sim, "a")
    older = sim.disk.copy()
    sim.start_replica("b")
    sim.join("b")
    sim.settle()
    publish(sim, 3)
    sim.lose_journal(older)
    sim.restart()
    sim.settle()
    assert held(sim) == "listening"
    call(sim, "a", "b")
    assert held(sim) == "behind"
    assert code(sim.begin("v4", 4)) == "behind"
    assert serving(sim) == {"a": "0-3", "b": "0-3"}
    sim.adopt("ab")
    sim.settle()
    sim.begin("v4", 4)
    sim.settle()
    assert serving(sim) == {"a": "0-4", "b": "0-4"}
    rest(sim)


@story
def an_older_journal_whose_members_contradict_nothing(sim: Simulation) -> None:
    """F11: no member proves that it is old, so what is asked of it waits until the one that joined later has called."""
    fleet(sim, "a")
    publish(sim, 1)
    older = sim.disk.copy()
    sim.start_replica("b")
    sim.join("b")
    sim.settle()
    sim.log.clear()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    sim.lose_journal(older)
    sim.restart()
    sim.settle()
    sim.begin("v2", 2)
    sim.settle(timers=False)
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    call(sim, "b")
    ended(sim, Outcome.REJECTED, "behind")
    sim.adopt("ab")
    sim.settle()
    sim.begin("v2-again", 2)
    sim.settle()
    assert serving(sim) == {"a": "0-2", "b": "0-2"}
    rest(sim)


@story
def two_coordinators_with_two_journals(sim: Simulation) -> None:
    """F09: the fleet is adopted while its coordinator stands still; woken up, that is obeyed by no front, and stops."""
    fleet(sim)
    publish(sim, 1)
    frozen = sim.park()
    sim.lose_journal()
    sim.restart()
    sim.adopt("ab")
    sim.settle()
    adopted = sim.park()
    sim.unpark(frozen)
    sim.begin("v2-old", 2)
    sim.settle()
    ended(sim, Outcome.REJECTED, "replica_fenced")
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    sim.do_poll("a")
    sim.run()
    assert sim.state is None
    sim.restart()
    assert held(sim) == "behind"
    sim.settle()
    sim.unpark(adopted)
    sim.begin("v2", 2)
    sim.settle()
    assert serving(sim) == {"a": "0-2", "b": "0-2"}
    rest(sim)


@story
def an_adopted_fleet_and_its_old_journal(sim: Simulation) -> None:
    """F09: the first coordinator was dead while its fleet was adopted; started again, it does not take it back."""
    fleet(sim)
    publish(sim, 1)
    old = sim.disk.copy()
    sim.lose_journal()
    sim.restart()
    sim.adopt("ab", silent=frozenset("b"))
    sim.settle()
    assert standing(sim, "b") is Standing.LOST
    assert code(sim.begin("v2", 2)) == "member_blocked"
    adopted = sim.park()
    sim.lose_journal(old)
    sim.restart()
    assert held(sim) == "behind"
    sim.settle()
    sim.unpark(adopted)
    sim.do_poll("b")
    sim.settle()
    sim.begin("v2", 2)
    sim.settle()
    assert serving(sim) == {"a": "0-2", "b": "0-2"}
    rest(sim)


@story
def a_member_wakes_up_after_it_was_declared_dead(sim: Simulation) -> None:
    """F12: it hears that it was removed, shuts, and joins again in the same process as another incarnation."""
    fleet(sim)
    sim.do_lost("b")
    sim.do_remove("b")
    sim.begin("v1", 1)
    sim.settle()
    assert sim.replicas["b"].admission == ("start", "base")
    call(sim, "b")
    assert sim.replicas["b"].state.state is FrontState.ORPHANED
    assert serving(sim) == {"a": "0-1", "b": ""}
    sim.do_rejoin("b")
    sim.settle()
    assert sim.join("b") == Accepted("")
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def a_member_hears_that_it_was_removed_while_it_installs(sim: Simulation) -> None:
    """F12: ranks that install are let finish; then what was never published to it is taken back."""
    fleet(sim)
    sim.begin("v1", 1)
    sim.run(until=Phase.INSTALLING)
    sim.run(hold=lambda packet: not packet.to)
    assert sim.replicas["b"].state.state is FrontState.INSTALLED
    sim.do_lost("b")
    sim.do_remove("b")
    sim.settle()
    call(sim, "b")
    assert sim.replicas["b"].state.state is FrontState.ORPHANED
    sim.do_rejoin("b")
    sim.settle()
    assert sim.join("b") == Accepted("")
    sim.settle()
    assert serving(sim)["a"] == serving(sim)["b"]
    rest(sim)


@story
def a_released_front_under_an_adopt(sim: Simulation) -> None:
    """Between two installs the coordinator dies for good: released by hand, fronts are adopted as what they serve."""
    fleet(sim)
    sim.begin("v1", 1)
    sim.run(until=Phase.INSTALLING)
    sim.run(hold=lambda packet: not packet.to or packet.to == "b")
    sim.lose_journal()
    sim.wire = []
    sim.restart()
    sim.adopt("ab")
    assert code(sim.answers[-1]) == "wrong_phase"
    sim.now += 1000
    sim.do_lease("b")
    sim.do_release("a", ReleaseTo.PREVIOUS)
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    call(sim, "a", "b")
    sim.adopt("ab")
    sim.settle()
    sim.begin("v2", 2)
    sim.settle()
    assert serving(sim) == {"a": "0-2", "b": "0-2"}
    assert sim.replicas["a"].state.released is None
    rest(sim)


@story
def an_orphan_is_adopted(sim: Simulation) -> None:
    """It was removed, and then the journal was lost: it counts like one that serves."""
    fleet(sim)
    publish(sim, 1)
    sim.do_lost("b")
    sim.do_remove("b")
    call(sim, "b")
    sim.lose_journal()
    sim.restart()
    call(sim, "a", "b")
    assert serving(sim) == {"a": "0-1", "b": ""}
    sim.adopt("ab")
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def two_coordinators_on_copies_of_one_journal(sim: Simulation) -> None:
    """F61: the same fleet and the same epoch. The lower owner id is obeyed, and the other one stops."""
    fleet(sim)
    sim.crash()
    copy = sim.disk.copy()
    sim.restart()
    sim.settle()
    first = sim.park()
    sim.disk = copy
    sim.restart(silent=frozenset("ab"))  # both asked before either was heard
    second = sim.park()
    assert (first.state and first.state.epoch) == (second.state and second.state.epoch)
    sim.unpark(second)
    sim.do_poll("a")
    sim.run()
    assert sim.replicas["a"].state.owner == (first.state and first.state.owner)
    sim.run()
    assert held(sim) == "behind"
    sim.park()
    sim.unpark(first)
    sim.begin("v1", 1)
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def asleep_between_vote_and_install(sim: Simulation) -> None:
    """14: the pause says so, and nothing is decided."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.PAUSING)
    sim.replicas["b"].asleep = True
    sim.settle()
    ended(sim, Outcome.ABORTED, "replica_asleep")
    assert not any(record.version == Version(0, 0) for record in sim.disk.records)
    rest(sim)


@story
def ranks_at_different_steps(sim: Simulation) -> None:
    """15: not a matter of time, so no second attempt."""
    fleet(sim)
    sim.do_fault("a", "pause", "rank_steps_differ")
    sim.begin("u", 0)
    sim.settle()
    ended(sim, Outcome.ABORTED, "rank_steps_differ")
    assert last(sim).attempts == 1
    rest(sim)


@story
@pytest.mark.case("B168")
def the_version_flips_at_published(sim: Simulation) -> None:
    """18: not when the first rank installs, and not when the first replica reopens."""
    fleet(sim)
    sim.begin("u", 0)
    for phase in (Phase.INSTALLING, Phase.INVALIDATING, Phase.PUBLISHING):
        sim.run(until=phase)
        assert live(sim) == START
        assert serving(sim) == {"a": "", "b": ""}
    sim.run(until=Phase.RESUMING)
    assert live(sim) == Version(0, 0)
    assert serving(sim) == {"a": "", "b": ""}
    rest(sim)


@story
def the_journal_fails_at_the_decision(sim: Simulation) -> None:
    """19: the coordinator stops at once; leases reopen what has not installed."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.DECIDING)
    sim.durable.clear()
    sim.disk.records.pop()
    sim.feed(events.JournalFailed(Failure("journal_failed", "no space")))
    assert sim.stopped
    for name in "ab":
        sim.do_lease(name)
        sim.work(name)
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


# --- recovery


@story
def the_coordinator_dies_after_every_install(sim: Simulation) -> None:
    """Decided, and installed everywhere: forward."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INVALIDATING)
    sim.crash()
    sim.restart()
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


@story
def the_coordinator_dies_between_two_installs(sim: Simulation) -> None:
    """Decided, but one of them did not install: back."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(hold=lambda packet: packet.to == "b" and packet.payload.verb == "install")
    sim.crash()
    sim.wire = []
    sim.restart()
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "coordinator_restarted")
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def the_coordinator_dies_at_the_commit_point(sim: Simulation) -> None:
    """Published, and no front has been told: forward, whatever else."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.RESUMING)
    sim.crash()
    sim.wire = []
    sim.restart()
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


@story
def a_silent_member_at_recovery_is_told_later(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.RESUMING)
    sim.run(hold=lambda packet: packet.to == "b")
    sim.wire = []
    sim.crash()
    sim.restart(frozenset({"b"}))
    sim.wire = [packet for packet in sim.wire if packet.to != "b"]
    sim.run()
    assert serving(sim) == {"a": "0-0", "b": ""}
    assert code(sim.begin("next", 1)) == "member_blocked"
    sim.settle()
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


# --- silence, death and return


@story
def a_member_that_misses_the_reopening_is_lost_and_blocks(sim: Simulation) -> None:
    """It may have reopened or not: the receipt does not wait for it, the next publication does."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.RESUMING)
    sim.run(hold=lambda packet: packet.to == "b")
    sim.do_deadline()
    ended(sim, Outcome.COMMITTED)
    assert standing(sim, "b") is Standing.LOST
    assert code(sim.begin("next", 1)) == "member_blocked"
    assert code(sim.rollback("back")) == "member_blocked"
    sim.settle()
    assert standing(sim, "b") is Standing.OK
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


@story
def a_silent_member_at_the_restore_is_quarantined(sim: Simulation) -> None:
    """The others reopen; when it answers at last, it takes its installation back and reopens too."""
    fleet(sim)
    sim.do_fault("a", "invalidate", "cache_not_reset")
    sim.begin("u", 0)
    sim.run(until=Phase.RESTORING)
    sim.run(hold=lambda packet: packet.to == "b")
    held = [packet for packet in sim.wire if packet.to == "b"]
    sim.wire = [packet for packet in sim.wire if packet.to != "b"]
    sim.do_deadline()
    sim.run(hold=lambda packet: packet.to == "b")
    ended(sim, Outcome.ROLLED_BACK, "cache_not_reset")
    assert standing(sim, "b") is Standing.QUARANTINED
    assert serving(sim) == {"a": "start", "b": ""}
    assert code(sim.begin("next", 1)) == "member_blocked"
    sim.wire.extend(held)
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def a_rank_that_dies_mid_install(sim: Simulation) -> None:
    """Broken is shut for good, so it does not block; it comes back as a joiner and is enlisted."""
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INSTALLING)
    sim.do_rank_dies("b")
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "rank_died")
    assert serving(sim) == {"a": "start", "b": ""}
    assert isinstance(sim.begin("v1", 1), Accepted)
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": ""}
    rest(sim)
    assert serving(sim) == {"a": "0-1", "b": "0-1"}


@story
def a_dead_member_blocks_until_somebody_says_so(sim: Simulation) -> None:
    fleet(sim)
    sim.do_die("b")
    sim.do_lost("b")
    assert code(sim.begin("u", 0)) == "member_blocked"
    assert code(sim.ask(events.Left("b"))) == "member_blocked"
    assert isinstance(sim.ask(events.Left("b", dead=True)), Accepted)
    sim.begin("u", 0)
    sim.settle()
    assert serving(sim)["a"] == "0-0"
    rest(sim)


@story
@pytest.mark.case("B166")
def a_restarted_member_catches_up(sim: Simulation) -> None:
    """Shut until it verified the live version; the way back is gone until the next update."""
    fleet(sim)
    sim.begin("u", 0)
    sim.settle()
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    assert serving(sim) == {"a": "0-0", "b": ""}
    sim.settle()
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    sim.feed(events.Lost("b", "b1", Failure("replica_lost", "news of the process before")))
    assert standing(sim, "b") is Standing.OK
    assert code(sim.rollback("back")) == "no_rollback"
    sim.begin("v1", 1)
    sim.settle()
    assert last(sim).rollback_to is not None
    rest(sim)


@story
def a_source_that_changed_does_not_catch_up(sim: Simulation) -> None:
    """Other bytes under the live label are refused; the joiner waits for the next update."""
    fleet(sim)
    sim.begin("u", 0)
    sim.settle()
    sim.do_die("b")
    sim.start_replica("b")
    sim.sources["/u"] = SimulatedSource("other bytes")
    sim.join("b")
    sim.settle()
    assert (last(sim).kind, last(sim).reason) == (Kind.CATCH_UP, "tensor_digest")
    assert serving(sim) == {"a": "0-0", "b": ""}
    sim.begin("v1", 1)
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def an_update_does_not_wait_for_a_catch_up(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("u", 0)
    sim.settle()
    sim.do_die("b")
    sim.start_replica("b")
    sim.join("b")
    sim.run(until=Phase.STAGING)
    assert sim.begin("v1", 1) == Accepted("v1", queued=True)
    sim.settle()
    assert sim.results[-2].reason == "superseded"
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
@pytest.mark.case("B174")
def rollback_without_the_source(sim: Simulation) -> None:
    """The kept copy is used, not the folder it came from, also when two updates failed in between."""
    fleet(sim)
    sim.begin("v7", 7)
    sim.settle()
    sim.begin("v8", 8)
    sim.settle()
    del sim.sources["/v7"]
    sim.rollback("back")
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-7", "b": "0-7"}
    assert sim.state is not None
    assert sim.state.live is not None
    assert sim.state.live.offer is not None
    assert sim.state.live.offer.path == "/v7"
    rest(sim)


@story
def namespaces_instead_of_a_reset(sim: Simulation) -> None:
    """I5: blocks of the old version stay, but under another name; going back finds them again."""
    fleet(sim)
    policy = Policy(cache=CachePolicy.NAMESPACE)
    serving(sim)
    sim.begin("v0", 0, policy=policy)
    sim.settle()
    serving(sim)
    sim.rollback("back", policy=policy)
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    assert {namespace[0] for _, namespace in sim.replicas["a"].cache} == {"start", "0-0"}
    rest(sim)


@story
def an_abort_comes_too_late_after_the_decision(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("u", 0)
    sim.run(until=Phase.INVALIDATING)
    assert code(sim.ask(events.AbortRequested("u"))) == "wrong_phase"
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    rest(sim)


@story
def an_audit_shuts_a_replica_until_it_proves_itself(sim: Simulation) -> None:
    """An audit erred, an operator has it repeated, and the replica joins again with the bytes that it has."""
    fleet(sim)
    sim.begin("v0", 0)
    sim.settle()
    sim.do_audit_fails("b", rotten=False)
    assert serving(sim) == {"a": "0-0", "b": ""}
    sim.do_poll("b")
    sim.settle()
    assert standing(sim, "b") is Standing.QUARANTINED
    assert sim.state is not None
    assert sim.state.rollback_to is not None  # of those that serve
    sim.begin("v1", 1)
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-1", "b": ""}
    sim.do_readmit("b")
    sim.settle()
    assert serving(sim)["b"] == ""  # proven is not admitted
    sim.join("b")
    sim.settle()
    assert serving(sim) == {"a": "0-1", "b": "0-1"}
    rest(sim)


@story
def rotten_bytes_are_not_readmitted(sim: Simulation) -> None:
    """In the middle of a publication, and only another process helps."""
    fleet(sim)
    sim.begin("v0", 0)
    sim.run(until=Phase.STAGING)
    sim.do_audit_fails("b")
    sim.settle()
    ended(sim, Outcome.ABORTED, "tensor_digest")
    sim.do_readmit("b")
    sim.settle()
    assert sim.replicas["b"].state.state is FrontState.QUARANTINED
    assert serving(sim) == {"a": "start", "b": ""}
    rest(sim)


@story
def a_restore_that_failed_is_finished_by_a_readmission(sim: Simulation) -> None:
    """One rank was taken back and the other was not: no front may serve that, and a readmission ends it."""
    fleet(sim)
    sim.do_fault("b", "invalidate", "cache_not_reset")
    sim.do_fault("b", "restore", "rank_failed", after=1)
    sim.begin("v0", 0)
    sim.settle()
    ended(sim, Outcome.ROLLED_BACK, "cache_not_reset")
    assert sim.replicas["b"].state.state is FrontState.QUARANTINED
    assert len({rank.live for rank in sim.replicas["b"].ranks}) == 2
    sim.do_readmit("b")
    sim.settle()
    assert {rank.live for rank in sim.replicas["b"].ranks} == {"base"}
    sim.join("b")
    sim.settle()
    assert serving(sim) == {"a": "start", "b": "start"}
    rest(sim)


@story
def a_lost_copy_empties_the_way_back(sim: Simulation) -> None:
    fleet(sim)
    sim.begin("v0", 0)
    sim.settle()
    assert sim.state is not None
    assert sim.state.rollback_to is not None
    sim.do_spare_lost("b")
    sim.do_poll("b")
    sim.settle()
    assert sim.state.rollback_to is None
    assert code(sim.rollback("back")) == "no_rollback"
    assert serving(sim) == {"a": "0-0", "b": "0-0"}
    rest(sim)


def last_phase(sim: Simulation) -> Phase | None:
    return sim.state.phase if sim.state else None


def tell(name: str, machines: Machines | None = None) -> Simulation:
    """Tell one story on fresh machines."""
    sim = Simulation(machines=machines)
    STORIES[name](sim)
    return sim


@story
def a_stream_is_voted_on_only_once_it_is_sealed(sim: Simulation) -> None:
    """Every rank has staged what came; more may come until the trainer says that it was all."""
    fleet(sim)
    sim.begin("pushed", 0, stream=True, manifest="bytes-pushed")
    sim.run()
    assert sim.state is not None
    assert sim.state.phase is Phase.STAGING
    assert sim.on_wire("verify", "a") == []
    sim.ask(events.Seal("pushed"))
    sim.settle()
    ended(sim, Outcome.COMMITTED)
    assert serving(sim) == {"a": "0-0", "b": "0-0"}


@story
def a_stream_whose_sender_is_gone_is_given_up(sim: Simulation) -> None:
    """The lease ends: the staging goes, nothing paused, and a joiner is not caught up from a stream."""
    fleet(sim)
    sim.begin("pushed", 0, stream=True, manifest="bytes-pushed")
    sim.run()
    sim.feed(events.LeaseExpired("pushed"))
    sim.settle()
    ended(sim, Outcome.ABORTED, "lease_expired")
    assert serving(sim) == {"a": "start", "b": "start"}
