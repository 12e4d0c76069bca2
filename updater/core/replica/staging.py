"""Rows of the replica table beside serving: admission, staging, the vote, and the end of staging."""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.participant import (
    FrontState,
    JoinRequest,
    Kind,
    PlanReply,
    PlanRequest,
    Spare,
    SpareState,
    VerifyReply,
)
from updater.core.policy import InstallMode
from updater.core.replica.state import (
    EMPTY,
    Asked,
    Cancel,
    Done,
    Failed,
    Held,
    OpenAdmission,
    ReplicaEffect,
    ReplicaState,
    Step,
)
from updater.core.replica.steps import (
    STAGING_VERBS,
    ack,
    begin,
    drop_work,
    failed,
    finish,
    planned,
    reached,
    refuse,
    running,
)

# --- admission


def join(state: ReplicaState, event: Asked, now: float) -> Step:
    request: JoinRequest = event.request
    if state.live.digest != request.digest:
        return state, refuse(event, "expected_mismatch", f"holds {state.live.digest}, not {request.digest}")
    return begin(state, event)


def join_done(state: ReplicaState, event: Done, now: float) -> Step:
    work = running(state, event)
    request: JoinRequest = work.request if work else event.reply
    state, answers = finish(state, event)
    opened = replace(state, state=FrontState.OPEN, origin=FrontState.OPEN, live=Held(request.version, request.digest))
    return opened, (OpenAdmission(request.version, request.digest), *answers)


def join_again(state: ReplicaState, event: Asked, now: float) -> Step:
    if state.live != Held(event.request.version, event.request.digest):
        return state, refuse(event, "expected_mismatch", f"serves {state.live.version}")
    return state, ack(event)


# --- staging


def plan(state: ReplicaState, event: Asked, now: float) -> Step:
    """A newer update replaces whatever an older one left. A rollback's vote needs `previous` from the start."""
    request: PlanRequest = event.request
    older = Failure("replica_fenced", f"serial {event.fence.serial} took over")
    state, effects = drop_work(state, (*STAGING_VERBS, "discard", "restore"), older)
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
        return state, (*effects, *refuse(event, "no_rollback", f"the spare does not hold {request.version}"))
    return begin(replace(state, plan=request), event, *effects)


def plan_done(state: ReplicaState, event: Done, now: float) -> Step:
    one_way = isinstance(event.reply, PlanReply) and event.reply.install is InstallMode.NONE
    return finish(replace(state, reached="planned", one_way=one_way), event, event.reply)


def stage(state: ReplicaState, event: Asked, now: float) -> Step:
    """From here on the spare's old content is spent."""
    if not reached(state, event, "planned") or planned(state).kind is Kind.ROLLBACK:
        return state, refuse(event, "wrong_phase", "nothing is planned under this serial")
    return begin(replace(state, spare=Spare(SpareState.STAGING, event.fence.serial)), event)


def stage_done(state: ReplicaState, event: Done, now: float) -> Step:
    return finish(replace(state, reached="staged"), event, event.reply)


def verify(state: ReplicaState, event: Asked, now: float) -> Step:
    rollback = state.plan is not None and state.plan.kind is Kind.ROLLBACK
    if not reached(state, event, "planned" if rollback else "staged"):
        return state, refuse(event, "wrong_phase", "nothing is staged under this serial")
    return begin(state, event)


def verify_done(state: ReplicaState, event: Done, now: float) -> Step:
    """The vote (I2): what is named here is what an install makes live."""
    reply: VerifyReply = event.reply
    plan = planned(state)
    if plan.digest and reply.observed != plan.digest:
        failure = Failure("tensor_digest", f"observed {reply.observed}, wanted {plan.digest}")
        return failed(state, Failed(event.verb, event.fence, (failure,)), now)
    spare = Spare(SpareState.STAGED, state.serial, plan.version, reply.observed)
    if plan.kind is Kind.ROLLBACK:
        spare = state.spare
    return finish(replace(state, reached="voted", digest=reply.observed, spare=spare), event, reply)


# --- the end of staging


def drop_staging(state: ReplicaState, event: Asked) -> Step:
    if state.plan is None and state.spare.state in (SpareState.EMPTY, SpareState.PREVIOUS):
        return state, ack(event)
    cancelled = Failure("replica_fenced", "the update was given up")
    state, refusals = drop_work(state, (*STAGING_VERBS, "discard", "restore"), cancelled)
    stop: tuple[ReplicaEffect, ...] = (Cancel(state.serial),) if state.plan else ()
    return begin(state, event, *stop, *refusals)


def discarded(state: ReplicaState, event: Done, now: float) -> Step:
    spare = state.spare if state.spare.state is SpareState.PREVIOUS else EMPTY
    return finish(replace(state, plan=None, reached="", digest="", spare=spare, answers=()), event)


def discard_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    return replace(state, spare=Spare(SpareState.UNKNOWN)), refusals
