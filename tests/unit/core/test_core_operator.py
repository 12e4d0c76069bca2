"""The replica machine without a coordinator: what audits find, and what an operator may do by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_core_recovery import BEGUN, DECIDED, journal
from test_core_recovery import status as report
from test_core_replica import BROKE, DIED, FIRST, Front, old

from updater.core.errors import Failure
from updater.core.fleet.effects import Append, RecordKind
from updater.core.fleet.recovery import recover
from updater.core.fleet.state import Phase, Standing
from updater.core.participant import (
    DiscardRequest,
    Fence,
    FenceRequest,
    FrontState,
    InvalidateRequest,
    JoinRequest,
    Kind,
    PauseReply,
    ReadmitRequest,
    Released,
    ReleaseRequest,
    ReleaseTo,
    ResumeRequest,
    Spare,
    SpareState,
)
from updater.core.policy import CachePolicy
from updater.core.replica.machine import status
from updater.core.replica.state import (
    EMPTY,
    Answer,
    AuditFailed,
    Cancel,
    CloseAdmission,
    Held,
    OpenAdmission,
    RankDied,
    Refuse,
    Rejoin,
    ShutDown,
    SpareLost,
    Work,
)

ROT = Failure("tensor_digest", "other bytes", rank=1)
BASE = Held("start", "base")
KEPT = Spare(SpareState.PREVIOUS, 0, "start", "base")


def heard(front: Front) -> Fence:
    """The fence of an operator's verb: what the front heard last."""
    return Fence(front.state.fleet, *front.state.mark, front.state.incarnation)


def readmit(front: Front, incarnation: str = "life-2") -> Fence:
    fence = heard(front)
    front.ask("readmit", ReadmitRequest(fence, incarnation))
    return fence


def release(front: Front, to: ReleaseTo, after: float = 100.0) -> Fence:
    front.now += after
    fence = heard(front)
    front.ask("release", ReleaseRequest(fence, to))
    return fence


# --- audits


def test_other_live_bytes_shut_it_and_everybody_who_waits_is_told() -> None:
    front = Front().join()
    front.plan(5)
    front.feed(AuditFailed(BASE, ROT))
    assert front.state.state is FrontState.QUARANTINED
    assert status(front.state, 0.0).failure == ROT
    assert (front.saw(CloseAdmission), front.saw(ShutDown)) == (CloseAdmission(), ShutDown(ROT))
    assert front.saw(Cancel) == Cancel(5)
    assert front.saw(Refuse) == Refuse("plan", front.fence(5, 0), (ROT,))
    front.plan(6)
    assert front.refused() == "tensor_digest"


def test_a_pause_that_is_quarantined_never_reopens_by_its_lease() -> None:
    front = Front().join().vote().pause()
    front.feed(AuditFailed(BASE, ROT))
    front.now = 1000.0
    front.ask("resume", old(front))
    assert (front.state.state, front.refused(), front.saw(OpenAdmission)) == (
        FrontState.QUARANTINED,
        "tensor_digest",
        None,
    )


def test_a_late_audit_of_what_is_not_live_any_more_says_nothing() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    before = front.state
    assert front.feed(AuditFailed(BASE, ROT)) == ()
    assert front.state == before


def test_an_audit_that_ends_after_the_install_still_keeps_what_it_found_from_coming_back() -> None:
    front = Front().join().vote().pause().install()
    front.feed(AuditFailed(BASE, ROT))
    assert front.state.state is FrontState.QUARANTINED
    front.ask("restore", FenceRequest(front.fence(*FIRST)))
    assert (front.refused(), front.saw(Work)) == ("tensor_digest", None)


@pytest.mark.parametrize("event", [AuditFailed(BASE, ROT), SpareLost(EMPTY, ROT)])
def test_a_broken_replica_stays_broken(event: Any) -> None:
    front = Front().join()
    front.feed(RankDied(DIED))
    before = front.state
    front.feed(event)
    assert front.state == before


def test_a_lost_copy_is_no_way_back_and_serving_goes_on() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    assert front.feed(SpareLost(KEPT, ROT)) == ()
    assert (front.state.state, front.state.spare) == (FrontState.OPEN, EMPTY)
    front.plan(6, Kind.ROLLBACK, "base", "start")
    assert front.refused() == "no_rollback"


def test_a_copy_that_is_not_the_audited_one_is_not_lost() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.feed(SpareLost(Spare(SpareState.PREVIOUS, 0, "0-0", "older"), ROT))
    assert front.state.spare == KEPT


def test_a_rollback_that_was_voted_on_a_copy_now_lost_cannot_pause() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.vote(6, Kind.ROLLBACK, "base", observed="base")
    front.feed(SpareLost(KEPT, ROT))
    front.close(6)
    assert (front.refused(), front.state.state) == ("wrong_phase", FrontState.OPEN)


def test_an_update_that_is_staged_over_the_lost_copy_goes_on() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.plan(6, version="0-2")
    front.feed(SpareLost(KEPT, ROT))
    fence = front.fence(6, 0)
    front.done("plan", fence)
    assert front.state.reached == "planned"


# --- readmission


def test_a_readmitted_replica_is_a_joiner_in_a_life_of_its_own() -> None:
    front = Front().join()
    front.feed(AuditFailed(BASE, ROT))
    fence = readmit(front)
    assert front.saw(Work) == Work("readmit", ReadmitRequest(fence, "life-2"))
    assert front.state.state is FrontState.QUARANTINED
    front.done("readmit", fence)
    assert (front.state.state, front.state.incarnation, front.state.failure) == (FrontState.JOINING, "life-2", None)
    assert (front.saw(Rejoin), front.saw(OpenAdmission)) == (Rejoin(), None)
    front.ask("discard", DiscardRequest(front.fence(9, 0)))
    assert front.refused() == "replica_fenced"
    front.ask("join", JoinRequest(replace(front.fence(9, 0), incarnation="life-2"), "start", "base"))
    assert front.saw(Work) is not None


def test_it_remembers_its_tombstones_and_what_it_heard() -> None:
    front = Front().join().vote().pause()
    front.ask("discard", DiscardRequest(front.fence(5, 1)))
    front.done("resume", front.fence(5, 1))
    front.done("discard", front.fence(5, 1))
    front.feed(AuditFailed(BASE, ROT))
    front.done("readmit", readmit(front))
    assert (front.state.mark, front.state.dead, front.state.fleet) == ((1, 5, 1), (5, 1), "fleet")


def test_an_installation_that_was_not_settled_is_taken_back_by_a_readmission() -> None:
    front = Front().join().vote().pause().install()
    front.ask("restore", FenceRequest(front.fence(*FIRST)))
    front.fail("restore", front.fence(*FIRST))
    assert (front.state.state, front.state.live) == (FrontState.QUARANTINED, Held("0-1", "new"))
    fence = readmit(front)
    work = front.saw(Work)
    assert work.plan is not None
    assert work.plan.fence.serial == 5
    front.done("readmit", fence)
    assert (front.state.live, front.state.spare, front.state.plan) == (BASE, EMPTY, None)


def test_a_settled_way_back_survives_a_readmission() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.feed(AuditFailed(Held("0-1", "new"), ROT))
    front.done("readmit", readmit(front))
    assert (front.state.live, front.state.spare) == (Held("0-1", "new"), KEPT)


def test_a_readmission_that_fails_leaves_it_quarantined_and_may_be_tried_again() -> None:
    front = Front().join()
    front.feed(AuditFailed(BASE, ROT))
    fence = readmit(front)
    front.fail("readmit", fence)
    assert (front.state.state, front.state.failure, front.refused()) == (FrontState.QUARANTINED, BROKE, "rank_failed")
    readmit(front)
    assert front.saw(Work) is not None


def test_two_operators_readmit_once() -> None:
    front = Front().join()
    front.feed(AuditFailed(BASE, ROT))
    readmit(front)
    readmit(front, "life-3")
    assert (front.refused(), front.saw(Work)) == ("wrong_phase", None)


def test_only_what_is_quarantined_is_readmitted() -> None:
    front = Front().join()
    readmit(front)
    assert front.refused() == "wrong_phase"
    front.feed(RankDied(DIED))
    readmit(front)
    assert front.refused() == "rank_died"


# --- release


def test_released_to_live_it_serves_what_is_installed_and_says_so() -> None:
    front = Front().join().vote().pause().install()
    fence = release(front, ReleaseTo.LIVE)
    assert front.saw(Work).verb == "release"
    assert front.saw(OpenAdmission) is None
    front.done("release", fence)
    assert (front.state.state, front.saw(OpenAdmission)) == (FrontState.OPEN, OpenAdmission("0-1", "new"))
    assert status(front.state, 0.0).released == Released(ReleaseTo.LIVE, "0-1", 5, 1)
    assert front.state.spare == KEPT


def test_released_to_previous_it_serves_what_it_served_and_never_installs_that_attempt() -> None:
    front = Front().join().vote().pause().install().invalidate()
    front.done("release", release(front, ReleaseTo.PREVIOUS))
    assert front.saw(OpenAdmission) == OpenAdmission("start", "base")
    assert status(front.state, 0.0).released == Released(ReleaseTo.PREVIOUS, "start", 5, 1)
    assert (front.state.spare, front.state.dead, front.state.plan) == (EMPTY, (5, 1), None)
    front.ask("restore", FenceRequest(front.fence(*FIRST)))
    assert front.saw(Answer) is not None
    front.ask("resume", old(front))
    assert front.saw(Answer) is not None


def test_a_joiner_released_to_previous_goes_on_joining() -> None:
    front = Front()
    front.vote(kind=Kind.CATCH_UP, digest="new").pause().install()
    front.done("release", release(front, ReleaseTo.PREVIOUS))
    assert (front.state.state, front.saw(OpenAdmission)) == (FrontState.JOINING, None)


def test_nobody_releases_while_a_coordinator_speaks() -> None:
    front = Front().join().vote().pause().install()
    front.now = 9.0
    front.ask("invalidate", InvalidateRequest(front.fence(*FIRST), CachePolicy.RESET))
    front.done("invalidate", front.fence(*FIRST))
    release(front, ReleaseTo.LIVE, after=9.5)
    assert (front.refused(), front.saw(Work)) == ("wrong_phase", None)
    release(front, ReleaseTo.LIVE, after=0.5)
    assert front.saw(Work) is not None


def test_nobody_releases_what_ranks_are_at_work_on() -> None:
    front = Front().join().vote().pause().install()
    front.ask("invalidate", InvalidateRequest(front.fence(*FIRST), CachePolicy.RESET))
    release(front, ReleaseTo.LIVE)
    assert front.refused() == "wrong_phase"


@pytest.mark.parametrize("state", ["open", "paused", "installing"])
def test_only_what_has_installed_is_released(state: str) -> None:
    front = Front().join()
    if state != "open":
        front.vote().pause()
    if state == "installing":
        front.ask("install", FenceRequest(front.fence(*FIRST)))
    release(front, ReleaseTo.PREVIOUS, after=1.0)
    assert (front.refused(), front.state.state.value) == ("wrong_phase", state)


@pytest.mark.parametrize("invalidated", [False, True])
def test_while_it_is_being_released_a_coordinator_is_refused(invalidated: bool) -> None:
    front = Front().join().vote().pause().install()
    if invalidated:
        front.invalidate()
    release(front, ReleaseTo.PREVIOUS)
    front.lead(2)
    later = front.fence(5, 1, epoch=2)
    asked = {
        "install": FenceRequest(later),
        "invalidate": InvalidateRequest(later, CachePolicy.RESET),
        "resume": ResumeRequest(later, True, "0-1", "new"),
        "restore": FenceRequest(later),
    }
    for verb, request in asked.items():
        front.ask(verb, request)
        assert (verb, front.refused(), front.saw(Work)) == (verb, "wrong_phase", None)


def test_a_cache_that_does_not_clear_keeps_it_shut_and_it_may_be_asked_again() -> None:
    front = Front().join().vote().pause().install()
    front.fail("release", release(front, ReleaseTo.LIVE))
    assert (front.state.state, front.refused()) == (FrontState.INSTALLED, "rank_failed")
    front.lead(2)
    front.ask("restore", FenceRequest(front.fence(5, 1, epoch=2)))
    assert front.saw(Work).verb == "restore"


def test_a_way_back_that_fails_is_in_doubt() -> None:
    front = Front().join().vote().pause().install()
    front.fail("release", release(front, ReleaseTo.PREVIOUS))
    assert (front.state.state, front.saw(ShutDown)) == (FrontState.QUARANTINED, ShutDown(BROKE))


def test_what_was_released_to_live_is_not_restored_by_the_coordinator_that_comes_back() -> None:
    front = Front().join().vote().pause().install()
    front.done("release", release(front, ReleaseTo.LIVE))
    front.lead(2)
    front.ask("restore", FenceRequest(front.fence(5, 1, epoch=2)))
    assert front.refused() == "wrong_phase"
    front.ask("resume", ResumeRequest(front.fence(5, 1, epoch=2), True, "0-1", "new"))
    assert front.saw(Answer) is not None
    assert status(front.state, 0.0).released is None


def test_the_note_of_a_release_goes_with_the_next_publication() -> None:
    front = Front().join().vote().pause().install()
    front.done("release", release(front, ReleaseTo.PREVIOUS))
    front.vote(6).pause(6).install(6).invalidate(6).publish(6)
    assert (front.state.state, front.state.released) == (FrontState.OPEN, None)


# --- and the coordinator that comes back


def test_recovery_goes_forward_with_what_was_released_to_live() -> None:
    note = Released(ReleaseTo.LIVE, "0-1", 4, 1)
    reports = {"a": report("a", FrontState.OPEN, released=note), "b": report("b", FrontState.INVALIDATED)}
    found = recover("fleet", journal(BEGUN, DECIDED), reports)
    assert found.state.phase is Phase.PUBLISHING
    assert [effect.record.kind for effect in found.effects if isinstance(effect, Append)] == [RecordKind.PUBLISHED]


def test_recovery_takes_back_beside_what_was_released_to_previous() -> None:
    note = Released(ReleaseTo.PREVIOUS, "start", 4, 1)
    reports = {
        "a": report("a", FrontState.OPEN, "start", "base", released=note, spare=EMPTY),
        "b": report("b", FrontState.INSTALLED),
    }
    found = recover("fleet", journal(BEGUN, DECIDED), reports)
    assert found.state.phase is Phase.RESTORING
    assert {member.standing for member in found.state.members} == {Standing.OK}


def test_what_was_released_to_previous_after_the_publication_is_not_taken_for_a_member_that_serves() -> None:
    published = replace(DECIDED, kind=RecordKind.PUBLISHED)
    note = Released(ReleaseTo.PREVIOUS, "start", 4, 1)
    reports = {
        "a": report("a", FrontState.OPEN, "start", "base", released=note, spare=EMPTY),
        "b": report("b", FrontState.OPEN),
    }
    found = recover("fleet", journal(BEGUN, DECIDED, published), reports)
    assert [(member.replica, member.standing, member.shut) for member in found.state.members] == [
        ("a", Standing.QUARANTINED, False),
        ("b", Standing.OK, False),
    ]


def test_a_pause_reply_that_comes_after_the_audit_moves_nothing() -> None:
    front = Front().join().vote().close()
    front.feed(AuditFailed(BASE, ROT))
    fence = front.fence(*FIRST)
    assert front.done("pause", fence, PauseReply(fence, 5, "", 3, False)) == ()
    assert front.state.state is FrontState.QUARANTINED
