"""The replica machine, message by message. Scenarios and the explorer show it in a fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from updater.core.errors import Failure
from updater.core.participant import (
    DiscardRequest,
    DiskOffer,
    Fence,
    FenceRequest,
    FrontState,
    InvalidateRequest,
    JoinRequest,
    Kind,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    ResumeRequest,
    Spare,
    SpareState,
    StageReply,
    StageRequest,
    VerifyReply,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode
from updater.core.replica.machine import started, status, step
from updater.core.replica.state import (
    EMPTY,
    Answer,
    Asked,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    LeaseTimer,
    OpenAdmission,
    RankDied,
    Refuse,
    SetLease,
    ShutDown,
    Work,
)

DIED = Failure("rank_died", "gone")
BROKE = Failure("rank_failed", "no")
FIRST = (5, 1)


class Front:
    """A front without ranks: says what they did by hand."""

    def __init__(self) -> None:
        self.state = started("a", "life", "start", "base")
        self.now = 0.0
        self.effects: tuple[Any, ...] = ()
        self.lead()

    def lead(self, epoch: int = 1) -> Front:
        self.ask("lead", FenceRequest(self.fence(0, 0, epoch)))
        return self

    def fence(self, serial: int, attempt: int, epoch: int = 1) -> Fence:
        return Fence("fleet", epoch, serial, attempt, "life")

    def feed(self, event: Any) -> tuple[Any, ...]:
        self.state, self.effects = step(self.state, event, self.now)
        return self.effects

    def ask(self, verb: str, request: Any) -> tuple[Any, ...]:
        return self.feed(Asked(verb, request))

    def done(self, verb: str, fence: Fence, reply: Any = None) -> tuple[Any, ...]:
        return self.feed(Done(verb, fence, reply))

    def fail(self, verb: str, fence: Fence, failure: Failure = BROKE) -> tuple[Any, ...]:
        return self.feed(Failed(verb, fence, (failure,)))

    def refused(self) -> str:
        """Code of the last refusal among the effects."""
        codes = [effect.failures[0].code for effect in self.effects if isinstance(effect, Refuse)]
        return codes[-1] if codes else ""

    def saw(self, kind: type) -> Any:
        return next((effect for effect in self.effects if isinstance(effect, kind)), None)

    # --- the ordinary way, up to a state

    def join(self) -> Front:
        fence = self.fence(1, 0)
        self.ask("join", JoinRequest(fence, "start", "base"))
        self.done("join", fence)
        return self

    def vote(self, serial: int = 5, kind: Kind = Kind.UPDATE, digest: str = "", observed: str = "new") -> Front:
        fence = self.fence(serial, 0)
        self.plan(serial, kind, digest)
        self.done("plan", fence, PlanReply(fence, "", 1, 1, InstallMode.FLIP))
        if kind is not Kind.ROLLBACK:
            self.ask("stage", StageRequest(fence, 1))
            self.done("stage", fence, StageReply(fence, 1, 0))
        self.ask("verify", VerifyRequest(fence, 1))
        self.done("verify", fence, VerifyReply(fence, observed, "digests", 1))
        return self

    def plan(self, serial: int, kind: Kind = Kind.UPDATE, digest: str = "", version: str = "0-1") -> tuple[Any, ...]:
        offer = None if kind is Kind.ROLLBACK else DiskOffer("/x")
        return self.ask(
            "plan",
            PlanRequest(
                self.fence(serial, 0), kind, "u", version, offer, "", digest, InFlight.DRAIN, CachePolicy.RESET,
                InstallMode.AUTO, False, (), False,
            ),
        )  # fmt: skip

    def close(self, serial: int = 5, attempt: int = 1) -> Front:
        self.ask("pause", PauseRequest(self.fence(serial, attempt), InFlight.DRAIN, 1, 10))
        return self

    def pause(self, serial: int = 5, attempt: int = 1) -> Front:
        self.close(serial, attempt)
        fence = self.fence(serial, attempt)
        self.done("pause", fence, PauseReply(fence, serial, "", 3, False))
        return self

    def install(self, serial: int = 5, attempt: int = 1) -> Front:
        fence = self.fence(serial, attempt)
        self.ask("install", FenceRequest(fence))
        self.done("install", fence)
        return self

    def invalidate(self, serial: int = 5, attempt: int = 1) -> Front:
        fence = self.fence(serial, attempt)
        self.ask("invalidate", InvalidateRequest(fence, CachePolicy.RESET))
        self.done("invalidate", fence)
        return self

    def publish(self, serial: int = 5, attempt: int = 1) -> Front:
        fence = self.fence(serial, attempt)
        self.ask("resume", ResumeRequest(fence, True, "0-1", "new"))
        self.done("resume", fence)
        return self


def old(front: Front, serial: int = 5, attempt: int = 1, epoch: int = 1) -> ResumeRequest:
    return ResumeRequest(front.fence(serial, attempt, epoch), False, "start", "base")


def test_the_whole_way_and_what_status_says() -> None:
    front = Front().join().vote().pause()
    assert status(front.state, 4.0, in_flight=2, waiting=3).lease_left_s == 6.0
    assert status(front.state, 4.0).staged_serial == 5
    front.install()
    assert front.state.spare == Spare(SpareState.PREVIOUS, 0, "start", "base")
    front.invalidate().publish()
    assert front.state.state is FrontState.OPEN
    assert status(front.state, 4.0).live_version == "0-1"
    assert status(front.state, 4.0).lease_left_s is None
    assert front.saw(OpenAdmission) == OpenAdmission("0-1", "new")


def test_an_install_that_keeps_nothing_leaves_no_way_back() -> None:
    front = Front().join()
    fence = front.fence(5, 0)
    front.plan(5)
    front.done("plan", fence, PlanReply(fence, "", 1, 1, InstallMode.NONE))
    front.ask("stage", StageRequest(fence, 1))
    front.done("stage", fence, StageReply(fence, 1, 0))
    front.ask("verify", VerifyRequest(fence, 1))
    front.done("verify", fence, VerifyReply(fence, "new", "structure_only", 1))
    front.pause().install()
    assert front.state.spare == EMPTY
    front.invalidate().publish()
    assert (front.state.spare, front.state.live.version) == (EMPTY, "0-1")
    assert Front().join().vote().pause().install().state.one_way is False


# --- fencing and idempotency


def test_another_fleet_is_refused() -> None:
    front = Front().join()
    front.ask("discard", DiscardRequest(replace(front.fence(9, 0), fleet="other")))
    assert front.refused() == "replica_fenced"


def test_a_refusal_is_given_again() -> None:
    front = Front().join()
    front.plan(5)
    front.fail("plan", front.fence(5, 0))
    assert front.refused() == "rank_failed"
    front.plan(5)
    assert front.effects == (Refuse("plan", front.fence(5, 0), (BROKE,)),)


def test_a_join_again_is_acknowledged_only_for_what_is_served() -> None:
    front = Front().join()
    front.ask("join", JoinRequest(front.fence(2, 0), "start", "base"))
    assert front.saw(Answer) is not None
    front.ask("join", JoinRequest(front.fence(3, 0), "0-9", "base"))
    assert front.refused() == "expected_mismatch"


def test_a_failed_join_may_be_asked_again() -> None:
    front = Front()
    fence = front.fence(1, 0)
    front.ask("join", JoinRequest(fence, "start", "base"))
    front.fail("join", fence)
    front.ask("join", JoinRequest(fence, "start", "base"))
    assert front.saw(Work) is not None


def test_news_of_cancelled_work_does_nothing() -> None:
    front = Front().join()
    before = front.state
    assert front.done("install", front.fence(5, 1)) == ()
    assert front.state == before


def test_an_early_timer_does_nothing() -> None:
    front = Front().join().vote().pause()
    before = front.state
    assert front.feed(LeaseTimer()) == ()
    assert front.state == before


# --- staging


def test_verbs_out_of_order_are_refused() -> None:
    front = Front().join()
    fence = front.fence(5, 0)
    requests = {
        "stage": StageRequest(fence, 1),
        "verify": VerifyRequest(fence, 1),
        "pause": PauseRequest(front.fence(5, 1), InFlight.DRAIN, 1, 1),
        "install": FenceRequest(front.fence(5, 1)),
        "invalidate": InvalidateRequest(front.fence(5, 1), CachePolicy.RESET),
    }
    for verb, request in requests.items():
        front.ask(verb, request)
        assert front.refused() == "wrong_phase", verb


def test_a_rollback_has_nothing_to_stage() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.plan(6, Kind.ROLLBACK, "base", "start")
    front.done("plan", front.fence(6, 0), PlanReply(front.fence(6, 0), "", 1, 0, InstallMode.FLIP))
    front.ask("stage", StageRequest(front.fence(6, 0), 1))
    assert front.refused() == "wrong_phase"


def test_a_rollback_needs_exactly_the_kept_version() -> None:
    front = Front().join()
    front.plan(5, Kind.ROLLBACK, "base", "0-3")
    assert front.refused() == "no_rollback"


def test_a_rollback_that_is_taken_back_keeps_the_copy() -> None:
    front = Front().join().vote().pause().install().invalidate().publish()
    front.plan(6, Kind.ROLLBACK, "base", "start")
    fence = front.fence(6, 0)
    front.done("plan", fence, PlanReply(fence, "", 1, 0, InstallMode.FLIP))
    front.ask("verify", VerifyRequest(fence, 1))
    front.done("verify", fence, VerifyReply(fence, "base", "digests", 0))
    front.pause(6).install(6)
    front.ask("restore", FenceRequest(front.fence(6, 1)))
    front.done("restore", front.fence(6, 1))
    assert front.state.spare == Spare(SpareState.PREVIOUS, 0, "start", "base")
    assert front.state.live.version == "0-1"


def test_a_vote_for_other_bytes_than_wanted_is_a_refusal() -> None:
    front = Front().vote(kind=Kind.CATCH_UP, digest="wanted", observed="found")
    assert front.refused() == "tensor_digest"
    front.close()
    assert front.refused() == "wrong_phase"


def test_a_newer_plan_takes_over() -> None:
    """What the older one had staged does not count as staged any more, and who waited for it is told."""
    front = Front().join().vote()
    front.ask("discard", DiscardRequest(front.fence(5, 0)))
    front.plan(6)
    assert front.refused() == "replica_fenced"
    assert front.saw(Cancel) == Cancel(5)
    assert front.state.spare.state is SpareState.STAGING
    front.done("discard", front.fence(5, 0))
    assert front.state.serial == 6


def test_a_discard_that_fails_leaves_an_unknown_spare() -> None:
    front = Front().join().vote()
    front.ask("discard", DiscardRequest(front.fence(5, 0)))
    front.fail("discard", front.fence(5, 0))
    assert front.state.spare.state is SpareState.UNKNOWN
    front.ask("discard", DiscardRequest(front.fence(5, 0)))
    assert front.saw(Work) is not None


# --- the pause


def test_a_later_attempt_finds_it_paused() -> None:
    front = Front().join().vote().pause()
    front.now = 3.0
    front.ask("pause", PauseRequest(front.fence(5, 2), InFlight.DRAIN, 1, 10))
    reply = front.saw(Answer).reply
    assert (reply.fence, reply.staged_digest) == (front.fence(5, 2), "new")
    assert front.saw(SetLease) == SetLease(13.0)
    front.now = 12.0
    assert front.feed(LeaseTimer()) == ()
    front.ask("install", FenceRequest(front.fence(5, 1)))
    assert front.refused() == "replica_fenced"


def test_a_restored_front_does_not_say_that_it_is_paused_for_a_later_attempt() -> None:
    front = Front().join().vote().pause().install()
    front.ask("restore", FenceRequest(front.fence(5, 1)))
    front.done("restore", front.fence(5, 1))
    front.ask("pause", PauseRequest(front.fence(5, 2), InFlight.DRAIN, 1, 10))
    assert front.refused() == "wrong_phase"


def test_the_lease_also_ends_a_quiesce() -> None:
    front = Front().join().vote().close()
    front.now = 11.0
    front.feed(LeaseTimer())
    assert front.refused() == "lease_expired"
    assert front.saw(ClearLease) is not None
    front.done("resume", front.fence(5, 1))
    assert front.state.state is FrontState.OPEN


def test_a_resume_joins_the_reopening_that_runs() -> None:
    front = Front().join().vote().pause()
    front.now = 11.0
    front.feed(LeaseTimer())
    front.lead(2)
    assert front.ask("resume", old(front, epoch=2)) == ()
    front.done("resume", front.fence(5, 1))
    assert front.saw(Answer).fence == front.fence(5, 1, epoch=2)


def test_a_later_reopening_joins_the_running_one_too() -> None:
    front = Front().join().vote().pause()
    front.ask("resume", old(front))
    assert front.ask("resume", old(front, attempt=2)) == ()
    front.done("resume", front.fence(5, 1))
    assert {effect.fence for effect in front.effects if isinstance(effect, Answer)} == {
        front.fence(5, 1),
        front.fence(5, 2),
    }


def test_a_reopening_that_fails_is_tried_again_by_lease_and_stays_dead() -> None:
    front = Front().join().vote().pause()
    front.ask("discard", DiscardRequest(front.fence(5, 1)))
    front.fail("resume", front.fence(5, 1))
    assert front.refused() == "rank_failed"
    assert front.state.lease_end == 10.0
    front.ask("install", FenceRequest(front.fence(5, 1)))
    assert front.refused() == "replica_fenced"
    front.now = 11.0
    front.feed(LeaseTimer())
    assert front.saw(Work).verb == "resume"


def test_a_reopening_that_fails_without_a_discard() -> None:
    front = Front().join().vote().pause()
    front.ask("resume", old(front))
    front.fail("resume", front.fence(5, 1))
    assert front.refused() == "rank_failed"
    assert front.saw(SetLease) is not None


def test_a_discard_while_it_reopens_waits_for_that() -> None:
    front = Front().join().vote().pause()
    front.ask("resume", old(front))
    assert front.ask("discard", DiscardRequest(front.fence(5, 1))) == ()
    front.ask("discard", DiscardRequest(front.fence(5, 2)))
    assert front.refused() == "replica_fenced"
    front.done("resume", front.fence(5, 1))
    assert front.state.state is FrontState.OPEN
    assert front.saw(Work).verb == "discard"


def test_a_pause_overrules_a_join_that_is_under_way() -> None:
    front = Front().vote()
    front.ask("join", JoinRequest(front.fence(5, 0), "start", "base"))
    front.close()
    assert front.refused() == "replica_fenced"
    assert front.state.origin is FrontState.JOINING


# --- installation and the way back


def test_only_the_paused_attempt_installs() -> None:
    front = Front().join().vote().pause()
    front.ask("install", FenceRequest(front.fence(5, 2)))
    assert front.refused() == "wrong_phase"


def test_what_is_done_is_acknowledged_for_the_same_attempt_only() -> None:
    front = Front().join().vote().pause().install()
    front.lead(2)
    front.ask("install", FenceRequest(front.fence(5, 1, epoch=2)))
    assert front.saw(Answer) is not None
    front.ask("install", FenceRequest(front.fence(5, 2, epoch=2)))
    assert front.refused() == "wrong_phase"
    front.ask("invalidate", InvalidateRequest(front.fence(5, 3, epoch=2), CachePolicy.RESET))
    assert front.refused() == "wrong_phase"


def test_it_does_not_reopen_before_it_is_invalidated_and_published() -> None:
    front = Front().join().vote().pause().install()
    front.ask("resume", ResumeRequest(front.fence(5, 1), True, "0-1", "new"))
    assert front.refused() == "wrong_phase"
    front.invalidate()
    front.ask("resume", old(front))
    assert front.refused() == "wrong_phase"
    front.ask("resume", ResumeRequest(front.fence(5, 1), True, "0-1", "other bytes"))
    assert front.refused() == "wrong_phase"


def test_a_failed_resume_is_asked_again() -> None:
    front = Front().join().vote().pause().install().invalidate()
    fence = front.fence(5, 1)
    front.ask("resume", ResumeRequest(fence, True, "0-1", "new"))
    front.fail("resume", fence)
    assert front.refused() == "rank_failed"
    front.publish()
    assert front.state.state is FrontState.OPEN


def test_what_is_published_is_never_restored() -> None:
    front = Front().join().vote().pause().install().invalidate()
    front.ask("resume", ResumeRequest(front.fence(5, 1), True, "0-1", "new"))
    front.ask("restore", FenceRequest(front.fence(5, 1)))
    assert front.refused() == "wrong_phase"


def test_a_restore_waits_until_ranks_have_stopped() -> None:
    front = Front().join().vote().pause()
    front.ask("install", FenceRequest(front.fence(5, 1)))
    assert front.ask("restore", FenceRequest(front.fence(5, 1))) == ()
    front.lead(2)
    front.ask("restore", FenceRequest(front.fence(5, 1, epoch=2)))
    assert front.refused() == "replica_fenced"
    front.fail("install", front.fence(5, 1))
    assert front.saw(Work).verb == "restore"
    assert front.state.state is FrontState.RESTORING
    front.done("restore", front.fence(5, 1, epoch=2))
    assert (front.state.state, front.state.live.version) == (FrontState.PAUSED, "start")


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_restore_waits_for_the_invalidation_too(ends_well: bool) -> None:
    front = Front().join().vote().pause().install()
    fence = front.fence(5, 1)
    front.ask("invalidate", InvalidateRequest(fence, CachePolicy.RESET))
    assert front.ask("restore", FenceRequest(fence)) == ()
    if ends_well:
        front.done("invalidate", fence)
    else:
        front.fail("invalidate", fence)
    assert front.state.state is FrontState.RESTORING


def test_an_invalidation_after_a_waiting_restore_is_refused() -> None:
    front = Front().join().vote().pause().install()
    front.ask("invalidate", InvalidateRequest(front.fence(5, 1), CachePolicy.RESET))
    front.ask("restore", FenceRequest(front.fence(5, 1)))
    front.lead(2)
    front.ask("invalidate", InvalidateRequest(front.fence(5, 1, epoch=2), CachePolicy.RESET))
    front.ask("invalidate", InvalidateRequest(front.fence(5, 2, epoch=2), CachePolicy.RESET))
    assert front.refused() == "wrong_phase"


def test_a_restore_that_fails_quarantines() -> None:
    front = Front().join().vote().pause().install()
    front.ask("restore", FenceRequest(front.fence(5, 1)))
    front.fail("restore", front.fence(5, 1))
    assert front.state.state is FrontState.QUARANTINED
    assert front.saw(ShutDown) == ShutDown(BROKE)
    front.ask("resume", old(front))
    assert front.refused() == "rank_failed"


def test_resuming_what_is_not_there_is_refused() -> None:
    front = Front().join()
    front.ask("resume", ResumeRequest(front.fence(5, 1), True, "0-9", "x"))
    assert front.refused() == "wrong_phase"
    joining = Front()
    joining.ask("resume", ResumeRequest(joining.fence(5, 1), True, "0-9", "x"))
    assert joining.refused() == "wrong_phase"
    joining.ask("resume", old(joining))
    assert joining.saw(Answer) is not None
    paused = Front().join().vote().pause()
    paused.ask("resume", ResumeRequest(paused.fence(5, 1), True, "0-1", "new"))
    assert paused.refused() == "wrong_phase"


def test_a_dead_rank_breaks_whatever_it_was_doing() -> None:
    front = Front().join().vote().pause()
    front.ask("install", FenceRequest(front.fence(5, 1)))
    front.ask("restore", FenceRequest(front.fence(5, 1)))
    front.feed(RankDied(DIED))
    assert {effect.verb for effect in front.effects if isinstance(effect, Refuse)} == {"install", "restore"}
    assert front.saw(CloseAdmission) is not None
    assert front.state.state is FrontState.BROKEN
    assert front.feed(RankDied(DIED)) == ()
    front.ask("resume", old(front))
    assert front.refused() == "rank_died"
    assert status(front.state, 0.0).failure == DIED


def test_a_vote_without_a_plan_is_a_bug_of_the_caller() -> None:
    front = Front().join()
    fence = front.fence(5, 0)
    front.plan(5)
    front.done("plan", fence, PlanReply(fence, "", 1, 1, InstallMode.FLIP))
    front.ask("stage", StageRequest(fence, 1))
    front.done("stage", fence, StageReply(fence, 1, 0))
    front.ask("verify", VerifyRequest(fence, 1))
    front.state = replace(front.state, plan=None)
    with pytest.raises(LookupError):
        front.done("verify", fence, VerifyReply(fence, "new", "digests", 1))
