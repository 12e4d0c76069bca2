"""Rows of the replica table around the pause: its lease, and every way to reopen on the old version."""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.participant import Fence, FrontState, PauseReply, PauseRequest, ResumeRequest
from updater.core.replica.staging import drop_staging
from updater.core.replica.state import (
    Answer,
    Asked,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    Held,
    LeaseTimer,
    OpenAdmission,
    Refuse,
    ReplicaEffect,
    ReplicaState,
    Running,
    SetLease,
    Step,
    Work,
)
from updater.core.replica.steps import begin, drop_work, failed, finish, reached, refuse, superseded, tombstone


def pause(state: ReplicaState, event: Asked, now: float) -> Step:
    request: PauseRequest = event.request
    if not reached(state, event, "voted"):
        return state, refuse(event, "wrong_phase", "nothing is voted for under this serial")
    # An admission that is still under way would open what is about to shut.
    state, refusals = drop_work(state, ("join",), Failure("replica_fenced", "an update took over"))
    end = now + request.lease_s
    closing = replace(
        state,
        state=FrontState.CLOSING,
        origin=state.state,
        key=(event.fence.serial, event.fence.attempt),
        lease_s=request.lease_s,
        lease_end=end,
    )
    return begin(closing, event, *refusals, CloseAdmission(), SetLease(end))


def quiesced(state: ReplicaState, event: Done, now: float) -> Step:
    reply: PauseReply = replace(event.reply, staged_digest=state.digest)
    return finish(replace(state, state=FrontState.PAUSED, pause_reply=reply), event, reply)


def pause_again(state: ReplicaState, event: Asked, now: float) -> Step:
    """A pause of a later attempt, while the replica is paused already."""
    request: PauseRequest = event.request
    if state.resuming or state.pause_reply is None or not reached(state, event, "voted"):
        return state, refuse(event, "wrong_phase", "is reopening, or holds nothing that was voted for")
    reply = replace(state.pause_reply, fence=event.fence, aborted=0, requeued=0)
    end = now + request.lease_s
    key = (event.fence.serial, event.fence.attempt)
    paused = replace(state, key=key, lease_s=request.lease_s, lease_end=end, pause_reply=reply)
    return paused, (SetLease(end), Answer("pause", event.fence, reply))


# --- back to the old version


def lease_ends(state: ReplicaState, event: LeaseTimer, now: float) -> Step:
    """No message came and nothing is installed: reopen on the old version, and never install this attempt (I9)."""
    fence = Fence(state.fleet, state.epoch, *state.key, state.incarnation, state.owner)
    return reopen(tombstone(state, fence), fence, ())


def reopen(state: ReplicaState, fence: Fence, waiters: tuple[Fence, ...]) -> Step:
    state, refusals = drop_work(state, ("pause",), Failure("lease_expired", "the pause was given up"))
    request = ResumeRequest(fence, False, state.live.version, state.live.digest)
    work = Running("resume", fence, request, waiters)
    state = replace(state, resuming=True, lease_end=None, running=(*state.running, work))
    return state, (ClearLease(), *refusals, Work("resume", request, state.plan))


def reopen_old(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    if request.published and state.live != Held(request.version, request.digest):
        return state, refuse(event, "wrong_phase", "has not installed what was published")
    state = tombstone(state, event.fence)
    work = state.work("resume")
    if work is not None:
        joined = replace(work, waiters=(*work.waiters, event.fence))
        return replace(state, running=tuple(joined if each is work else each for each in state.running)), ()
    return reopen(state, event.fence, (event.fence,))


def reopened(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = finish(state, event)
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
    """The replica stays shut, with a new lease after which it tries again; the tombstone stays."""
    refused = state.postponed
    state, refusals = failed(state, event, now)
    end = now + state.lease_s
    if refused is not None:
        refusals = (*refusals, Refuse(refused.verb, refused.fence, event.failures))
    return replace(state, resuming=False, lease_end=end, postponed=None), (SetLease(end), *refusals)


def discard(state: ReplicaState, event: Asked, now: float) -> Step:
    """Tombstone, reopen if paused, drop what the update holds."""
    state = tombstone(state, event.fence)
    if state.state in (FrontState.CLOSING, FrontState.PAUSED):
        refusals = superseded(state.postponed) if state.postponed else ()
        state = replace(state, postponed=event)
        if state.resuming:
            return state, refusals
        after, effects = reopen(state, event.fence, ())
        return after, (*refusals, *effects)
    return drop_staging(state, event)
