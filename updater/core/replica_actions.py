"""What the rows of the replica table do. Each takes (state, event, now) and returns the next state and effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import (
    Ack,
    Fence,
    FrontState,
    JoinRequest,
    Kind,
    PauseReply,
    PauseRequest,
    PlanRequest,
    ResumeRequest,
    Spare,
    SpareState,
    VerifyReply,
)
from updater.core.replica_state import (
    EMPTY,
    Answer,
    Asked,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    Held,
    LeaseTimer,
    OpenAdmission,
    RankDied,
    Refuse,
    ReplicaEffect,
    ReplicaState,
    Running,
    SetLease,
    ShutDown,
    Step,
    Work,
    with_running,
)

#: Verbs that a tombstone kills.
FORWARD = frozenset({"plan", "stage", "seal", "verify", "pause", "renew", "install"})
#: Verbs whose first answer is kept; the others are idempotent by what the state says.
REMEMBERED = frozenset({"plan", "stage", "verify", "pause", "install", "invalidate"})
STAGING_VERBS = ("plan", "stage", "verify")

# --- idempotency and answers


def repeated(state: ReplicaState, event: Asked) -> Step | None:
    """The first answer again, or a place among those who wait for the running work; None for a new request."""
    kept = state.answer(event.verb, event.fence)
    if isinstance(kept, tuple):
        return state, (Refuse(event.verb, event.fence, kept),)
    if kept is not None:
        return state, (Answer(event.verb, event.fence, kept),)
    work = state.work(event.verb)
    if work is None or (work.fence.serial, work.fence.attempt) != (event.fence.serial, event.fence.attempt):
        return None
    joined = replace(work, waiters=(*work.waiters, event.fence))
    return replace(state, running=tuple(joined if each is work else each for each in state.running)), ()


def running(state: ReplicaState, event: Done | Failed) -> Running | None:
    """The work that this reports on, unless it was cancelled."""
    work = state.work(event.verb)
    return work if work is not None and work.fence == event.fence else None


def _begin(state: ReplicaState, event: Asked, *before: ReplicaEffect) -> Step:
    return with_running(state, event), (*before, Work(event.verb, event.request, state.plan))


def _finish(state: ReplicaState, event: Done, reply: Any = None) -> Step:
    """Answer all who wait, and keep the answer."""
    work = running(state, event)
    waiters = work.waiters if work else ()
    answers = {fence: reply or Ack(fence, event.seconds) for fence in dict.fromkeys(waiters)}
    return _end(state, event, answers), tuple(Answer(event.verb, fence, answer) for fence, answer in answers.items())


def _end(state: ReplicaState, event: Done | Failed, answers: dict[Fence, Any]) -> ReplicaState:
    kept = state.answers
    if event.verb in REMEMBERED:
        kept = (*kept, *(((event.verb, *fence.order()), answer) for fence, answer in answers.items()))
    return replace(state, running=tuple(each for each in state.running if each.verb != event.verb), answers=kept)


def _refuse(event: Asked, code: str, message: str) -> tuple[ReplicaEffect, ...]:
    return (Refuse(event.verb, event.fence, (Failure(code, message),)),)


def _ack(event: Asked) -> tuple[ReplicaEffect, ...]:
    return (Answer(event.verb, event.fence, Ack(event.fence)),)


def _drop_work(state: ReplicaState, verbs: tuple[str, ...], failure: Failure) -> Step:
    """Nobody waits for this work any more; whoever did is refused."""
    dropped = [work for work in state.running if work.verb in verbs]
    refusals = tuple(Refuse(work.verb, fence, (failure,)) for work in dropped for fence in dict.fromkeys(work.waiters))
    return replace(state, running=tuple(work for work in state.running if work not in dropped)), refusals


def _bury(state: ReplicaState, fence: Fence) -> ReplicaState:
    """The tombstone: nothing up to here may ever install."""
    return replace(state, dead=max(state.dead, (fence.serial, fence.attempt), state.key))


def failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """The work failed and the state keeps its meaning: answer, and answer the same again."""
    work = running(state, event)
    answers = dict.fromkeys(dict.fromkeys(work.waiters if work else ()), event.failures)
    refusals = tuple(Refuse(event.verb, fence, event.failures) for fence in answers)
    return _end(state, event, answers), refusals


failed_once = stage_failed = failed

# --- admission


def join(state: ReplicaState, event: Asked, now: float) -> Step:
    request: JoinRequest = event.request
    if state.live.digest != request.digest:
        return state, _refuse(event, "expected_mismatch", f"holds {state.live.digest}, not {request.digest}")
    return _begin(state, event)


def join_done(state: ReplicaState, event: Done, now: float) -> Step:
    work = running(state, event)
    request: JoinRequest = work.request if work else event.reply
    state, answers = _finish(state, event)
    opened = replace(state, state=FrontState.OPEN, origin=FrontState.OPEN, live=Held(request.version, request.digest))
    return opened, (OpenAdmission(request.version, request.digest), *answers)


def join_again(state: ReplicaState, event: Asked, now: float) -> Step:
    if state.live != Held(event.request.version, event.request.digest):
        return state, _refuse(event, "expected_mismatch", f"serves {state.live.version}")
    return state, _ack(event)


# --- staging


def plan(state: ReplicaState, event: Asked, now: float) -> Step:
    """A newer update replaces whatever an older one left. A rollback's vote needs `previous` from the start."""
    request: PlanRequest = event.request
    older = Failure("replica_fenced", f"serial {event.fence.serial} took over")
    state, effects = _drop_work(state, (*STAGING_VERBS, "discard", "restore"), older)
    if state.plan is not None:
        effects = (Cancel(state.serial), *effects)
        # What an older update had verified must not be taken for this one's.
        spare = (
            replace(state.spare, state=SpareState.STAGING) if state.spare.state is SpareState.STAGED else state.spare
        )
        state = replace(state, spare=spare)
    state = replace(state, plan=None, reached="", digest="", answers=(), pause_reply=None)
    held = (state.spare.state, state.spare.version, state.spare.digest)
    if request.kind is Kind.ROLLBACK and held != (SpareState.PREVIOUS, request.version, request.digest):
        return state, (*effects, *_refuse(event, "no_rollback", f"the spare does not hold {request.version}"))
    return _begin(replace(state, plan=request), event, *effects)


def plan_done(state: ReplicaState, event: Done, now: float) -> Step:
    return _finish(replace(state, reached="planned"), event, event.reply)


def stage(state: ReplicaState, event: Asked, now: float) -> Step:
    """From here on the spare's old content is spent."""
    if not _at(state, event, "planned") or _planned(state).kind is Kind.ROLLBACK:
        return state, _refuse(event, "wrong_phase", "nothing is planned under this serial")
    return _begin(replace(state, spare=Spare(SpareState.STAGING, event.fence.serial)), event)


def stage_done(state: ReplicaState, event: Done, now: float) -> Step:
    return _finish(replace(state, reached="staged"), event, event.reply)


def seal(state: ReplicaState, event: Asked, now: float) -> Step:
    """No stream, nothing to seal."""
    if state.serial != event.fence.serial:
        return state, _refuse(event, "wrong_phase", "nothing is planned under this serial")
    return state, _ack(event)


def verify(state: ReplicaState, event: Asked, now: float) -> Step:
    rollback = state.plan is not None and state.plan.kind is Kind.ROLLBACK
    if not _at(state, event, "planned" if rollback else "staged"):
        return state, _refuse(event, "wrong_phase", "nothing is staged under this serial")
    return _begin(state, event)


def verify_done(state: ReplicaState, event: Done, now: float) -> Step:
    """The vote (I2): what is named here is what an install makes live."""
    reply: VerifyReply = event.reply
    plan = _planned(state)
    if plan.digest and reply.observed != plan.digest:
        failure = Failure("tensor_digest", f"observed {reply.observed}, wanted {plan.digest}")
        return failed(state, Failed(event.verb, event.fence, (failure,)), now)
    spare = Spare(SpareState.STAGED, state.serial, plan.version, reply.observed)
    if plan.kind is Kind.ROLLBACK:
        spare = state.spare
    return _finish(replace(state, reached="voted", digest=reply.observed, spare=spare), event, reply)


def _planned(state: ReplicaState) -> PlanRequest:
    if state.plan is None:
        raise LookupError("nothing is planned")
    return state.plan


def _at(state: ReplicaState, event: Asked, reached: str) -> bool:
    return state.serial == event.fence.serial and state.reached == reached


# --- the pause and its lease


def pause(state: ReplicaState, event: Asked, now: float) -> Step:
    request: PauseRequest = event.request
    if not _at(state, event, "voted"):
        return state, _refuse(event, "wrong_phase", "nothing is voted for under this serial")
    # An admission that is still under way would open what is about to shut.
    state, refusals = _drop_work(state, ("join",), Failure("replica_fenced", "an update took over"))
    end = now + request.lease_s
    closing = replace(
        state,
        state=FrontState.CLOSING,
        origin=state.state,
        key=(event.fence.serial, event.fence.attempt),
        lease_s=request.lease_s,
        lease_end=end,
    )
    return _begin(closing, event, *refusals, CloseAdmission(), SetLease(end))


def quiesced(state: ReplicaState, event: Done, now: float) -> Step:
    reply: PauseReply = replace(event.reply, staged_digest=state.digest)
    return _finish(replace(state, state=FrontState.PAUSED, pause_reply=reply), event, reply)


def pause_again(state: ReplicaState, event: Asked, now: float) -> Step:
    """A later attempt finds it paused already."""
    request: PauseRequest = event.request
    if state.resuming or state.pause_reply is None or not _at(state, event, "voted"):
        return state, _refuse(event, "wrong_phase", "is reopening, or holds nothing that was voted for")
    reply = replace(state.pause_reply, fence=event.fence, aborted=0, requeued=0)
    end = now + request.lease_s
    key = (event.fence.serial, event.fence.attempt)
    paused = replace(state, key=key, lease_s=request.lease_s, lease_end=end, pause_reply=reply)
    return paused, (SetLease(end), Answer("pause", event.fence, reply))


def renew(state: ReplicaState, event: Asked, now: float) -> Step:
    if state.lease_end is None or state.key != (event.fence.serial, event.fence.attempt):
        return state, _refuse(event, "lease_expired", "no such lease is running")
    end = now + state.lease_s
    return replace(state, lease_end=end), (SetLease(end), *_ack(event))


def lease_ends(state: ReplicaState, event: LeaseTimer, now: float) -> Step:
    """Hears nothing and has not installed: reopen on the old version, and never install this attempt (I9)."""
    fence = Fence(state.fleet, state.mark[0], *state.key, state.incarnation)
    return _reopen(_bury(state, fence), fence, ())


def _reopen(state: ReplicaState, fence: Fence, waiters: tuple[Fence, ...]) -> Step:
    state, refusals = _drop_work(state, ("pause",), Failure("lease_expired", "the pause was given up"))
    request = ResumeRequest(fence, False, state.live.version, state.live.digest)
    work = Running("resume", fence, request, waiters)
    state = replace(state, resuming=True, lease_end=None, running=(*state.running, work))
    return state, (ClearLease(), *refusals, Work("resume", request, state.plan))


def reopen_old(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    if request.published and state.live != Held(request.version, request.digest):
        return state, _refuse(event, "wrong_phase", "has not installed what was published")
    state = _bury(state, event.fence)
    work = state.work("resume")
    if work is not None:
        joined = replace(work, waiters=(*work.waiters, event.fence))
        return replace(state, running=tuple(joined if each is work else each for each in state.running)), ()
    return _reopen(state, event.fence, (event.fence,))


def reopened(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = _finish(state, event)
    discard_next = state.postponed
    state = replace(state, state=state.origin, resuming=False, key=(0, 0), pause_reply=None, postponed=None)
    opened: tuple[ReplicaEffect, ...] = ()
    if state.state is FrontState.OPEN:
        opened = (OpenAdmission(state.live.version, state.live.digest),)
    if discard_next is None:
        return state, (*opened, *answers)
    after, more = discard(state, discard_next, now)
    return after, (*opened, *answers, *more)


def reopen_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """Stays shut, with a new lease to try again; the tombstone stands."""
    refused = state.postponed
    state, refusals = failed(state, event, now)
    end = now + state.lease_s
    if refused is not None:
        refusals = (*refusals, Refuse(refused.verb, refused.fence, event.failures))
    return replace(state, resuming=False, lease_end=end, postponed=None), (SetLease(end), *refusals)


# --- installation


def install(state: ReplicaState, event: Asked, now: float) -> Step:
    """The compare-and-set: after it no lease reopens this replica. Nothing but the table may refuse."""
    if state.resuming or state.key != (event.fence.serial, event.fence.attempt) or not _at(state, event, "voted"):
        return state, _refuse(event, "wrong_phase", "is not paused for this attempt")
    state = replace(state, state=FrontState.INSTALLING, lease_end=None, old=state.live)
    return _begin(state, event, ClearLease())


def installed(state: ReplicaState, event: Done, now: float) -> Step:
    """Label, bytes and namespace changed at one point (I3)."""
    new, previous = Held(_planned(state).version, state.digest), state.live
    spare = Spare(SpareState.PREVIOUS, 0, previous.version, previous.digest)
    state, answers = _finish(state, event)
    state = replace(state, state=FrontState.INSTALLED, live=new, spare=spare)
    after, more = _postponed_restore(state)
    return after, (*answers, *more)


def install_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    after, more = _postponed_restore(replace(state, spare=replace(state.spare, state=SpareState.UNKNOWN)))
    return after, (*refusals, *more)


def acknowledge_same(state: ReplicaState, event: Asked, now: float) -> Step:
    """It is done already, also if another life of the coordinator asked for it."""
    if state.resuming or state.key != (event.fence.serial, event.fence.attempt):
        return state, _refuse(event, "wrong_phase", "another attempt is installed")
    return state, _ack(event)


def invalidate(state: ReplicaState, event: Asked, now: float) -> Step:
    if state.key != (event.fence.serial, event.fence.attempt) or state.postponed is not None:
        return state, _refuse(event, "wrong_phase", "another attempt is installed")
    return _begin(state, event)


def invalidated(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = _finish(state, event)
    after, more = _postponed_restore(replace(state, state=FrontState.INVALIDATED))
    return after, (*answers, *more)


def invalidate_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    after, more = _postponed_restore(state)
    return after, (*refusals, *more)


# --- publication


def resume_new(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    same = state.key == (event.fence.serial, event.fence.attempt)
    if not request.published or not same or state.live != Held(request.version, request.digest):
        return state, _refuse(event, "wrong_phase", f"has installed {state.live.version}, not published to it yet")
    return _begin(replace(state, resuming=True), event)


def published(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = _finish(state, event)
    opened = replace(
        state,
        state=FrontState.OPEN,
        origin=FrontState.OPEN,
        resuming=False,
        key=(0, 0),
        plan=None,
        reached="",
        digest="",
        old=None,
        pause_reply=None,
    )
    return opened, (OpenAdmission(state.live.version, state.live.digest), *answers)


def resume_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """Stays shut on the new version; the coordinator asks again for ever."""
    state, refusals = failed(state, event, now)
    return replace(state, resuming=False), refusals


def resume_again(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    if state.live != Held(request.version, request.digest):
        return state, _refuse(event, "wrong_phase", f"serves {state.live.version}, not {request.version}")
    return (state if request.published else _bury(state, event.fence)), _ack(event)


def resume_joining(state: ReplicaState, event: Asked, now: float) -> Step:
    """A joiner that lost the published version is a late joiner; one that was not published to goes on joining."""
    if event.request.published:
        return state, _refuse(event, "wrong_phase", "is joining and holds nothing that was published")
    return _bury(state, event.fence), _ack(event)


# --- the way back


def restore(state: ReplicaState, event: Asked, now: float) -> Step:
    """Waits until ranks have stopped. A published version is never undone (I3)."""
    if state.resuming:
        return state, _refuse(event, "wrong_phase", f"{state.live.version} is published")
    if state.postponed is not None:
        return replace(state, postponed=event), _superseded(state.postponed)
    return _postponed_restore(replace(_bury(state, event.fence), postponed=event))


def _superseded(asked: Asked) -> tuple[ReplicaEffect, ...]:
    return _refuse(asked, "replica_fenced", "was asked again")


def _postponed_restore(state: ReplicaState) -> Step:
    """Begin the restore that waits, if no rank is at work any more."""
    if state.postponed is None or state.work("install") or state.work("invalidate"):
        return state, ()
    event = state.postponed
    return _begin(replace(state, state=FrontState.RESTORING, postponed=None), event)


def restored(state: ReplicaState, event: Done, now: float) -> Step:
    """Paused on the old version, which may reopen by lease: that the update is reverted is durable."""
    state, answers = _finish(state, event)
    end = now + state.lease_s
    spare = EMPTY
    if state.plan is not None and state.plan.kind is Kind.ROLLBACK:
        spare = Spare(SpareState.PREVIOUS, 0, state.plan.version, state.plan.digest)
    back = replace(
        state,
        state=FrontState.PAUSED,
        live=state.old or state.live,
        old=None,
        spare=spare,
        plan=None,
        reached="",
        digest="",
        pause_reply=None,
        lease_end=end,
    )
    return back, (SetLease(end), *answers)


def restore_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    failure = event.failures[0]
    return replace(state, state=FrontState.QUARANTINED, failure=failure), (ShutDown(failure), *refusals)


def restore_nothing(state: ReplicaState, event: Asked, now: float) -> Step:
    """It never installed this attempt and now never will."""
    return _drop_staging(_bury(state, event.fence), event)


# --- the end of staging


def discard(state: ReplicaState, event: Asked, now: float) -> Step:
    """Tombstone, reopen if paused, drop what the update holds."""
    state = _bury(state, event.fence)
    if state.state in (FrontState.CLOSING, FrontState.PAUSED):
        refusals = _superseded(state.postponed) if state.postponed else ()
        state = replace(state, postponed=event)
        if state.resuming:
            return state, refusals
        after, effects = _reopen(state, event.fence, ())
        return after, (*refusals, *effects)
    return _drop_staging(state, event)


def _drop_staging(state: ReplicaState, event: Asked) -> Step:
    if state.plan is None and state.spare.state in (SpareState.EMPTY, SpareState.PREVIOUS):
        return state, _ack(event)
    cancelled = Failure("replica_fenced", "the update was given up")
    state, refusals = _drop_work(state, (*STAGING_VERBS, "discard", "restore"), cancelled)
    stop: tuple[ReplicaEffect, ...] = (Cancel(state.serial),) if state.plan else ()
    return _begin(state, event, *stop, *refusals)


def discarded(state: ReplicaState, event: Done, now: float) -> Step:
    spare = state.spare if state.spare.state is SpareState.PREVIOUS else EMPTY
    return _finish(replace(state, plan=None, reached="", digest="", spare=spare, answers=()), event)


def discard_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    return replace(state, spare=Spare(SpareState.UNKNOWN)), refusals


# --- death


def rank_died(state: ReplicaState, event: RankDied, now: float) -> Step:
    """Shut, and only a restart helps."""
    verbs = tuple(work.verb for work in state.running)
    state, refusals = _drop_work(state, verbs, event.failure)
    if state.postponed is not None:
        refusals = (*refusals, Refuse(state.postponed.verb, state.postponed.fence, (event.failure,)))
    broken = replace(state, state=FrontState.BROKEN, lease_end=None, failure=event.failure, postponed=None)
    return broken, (CloseAdmission(), ClearLease(), ShutDown(event.failure), *refusals)
