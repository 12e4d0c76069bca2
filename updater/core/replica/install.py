"""Rows of the replica table after the decision: installation, publication, the way back."""

from __future__ import annotations

from dataclasses import replace

from updater.core.participant import FrontState, Kind, ReleaseTo, ResumeRequest, Spare, SpareState
from updater.core.replica.staging import drop_staging
from updater.core.replica.state import (
    EMPTY,
    Asked,
    ClearLease,
    Done,
    Failed,
    Held,
    OpenAdmission,
    ReplicaState,
    SetLease,
    ShutDown,
    Step,
)
from updater.core.replica.steps import ack, begin, failed, finish, planned, reached, refuse, superseded, tombstone

# --- installation


def install(state: ReplicaState, event: Asked, now: float) -> Step:
    """The compare-and-set: after it no lease reopens this replica. Nothing but the table may refuse."""
    if state.resuming or state.key != (event.fence.serial, event.fence.attempt) or not reached(state, event, "voted"):
        return state, refuse(event, "wrong_phase", "is not paused for this attempt")
    state = replace(state, state=FrontState.INSTALLING, lease_end=None, old=state.live)
    return begin(state, event, ClearLease())


def installed(state: ReplicaState, event: Done, now: float) -> Step:
    """Label, bytes and namespace changed at one point (I3)."""
    new, previous = Held(planned(state).version, state.digest), state.live
    spare = EMPTY if state.one_way else Spare(SpareState.PREVIOUS, 0, previous.version, previous.digest)
    state, answers = finish(state, event)
    state = replace(state, state=FrontState.INSTALLED, live=new, spare=spare)
    after, more = _postponed_restore(state)
    return after, (*answers, *more)


def install_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    after, more = _postponed_restore(replace(state, spare=replace(state.spare, state=SpareState.UNKNOWN)))
    return after, (*refusals, *more)


def acknowledge_same(state: ReplicaState, event: Asked, now: float) -> Step:
    """The verb was performed already, also if another life of the coordinator asked for it."""
    if state.resuming or state.key != (event.fence.serial, event.fence.attempt):
        return state, refuse(event, "wrong_phase", "another attempt is installed")
    return state, ack(event)


def invalidate(state: ReplicaState, event: Asked, now: float) -> Step:
    busy = state.resuming or state.postponed is not None
    if busy or state.key != (event.fence.serial, event.fence.attempt):
        return state, refuse(event, "wrong_phase", "another attempt is installed")
    return begin(state, event)


def invalidated(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = finish(state, event)
    after, more = _postponed_restore(replace(state, state=FrontState.INVALIDATED))
    return after, (*answers, *more)


def invalidate_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    after, more = _postponed_restore(state)
    return after, (*refusals, *more)


# --- publication


def resume_new(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    same = not state.resuming and state.key == (event.fence.serial, event.fence.attempt)
    if not request.published or not same or state.live != Held(request.version, request.digest):
        return state, refuse(event, "wrong_phase", f"has installed {state.live.version}, not published to it yet")
    return begin(replace(state, resuming=True), event)


def published(state: ReplicaState, event: Done, now: float) -> Step:
    state, answers = finish(state, event)
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
        released=None,
    )
    return opened, (OpenAdmission(state.live.version, state.live.digest), *answers)


def resume_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """The replica stays shut on the new version; the coordinator sends `resume` again until it is acknowledged."""
    state, refusals = failed(state, event, now)
    return replace(state, resuming=False), refusals


def resume_again(state: ReplicaState, event: Asked, now: float) -> Step:
    request: ResumeRequest = event.request
    if state.live != Held(request.version, request.digest):
        return state, refuse(event, "wrong_phase", f"serves {state.live.version}, not {request.version}")
    if request.published:
        return replace(state, released=None), ack(event)
    return tombstone(state, event.fence), ack(event)


def resume_joining(state: ReplicaState, event: Asked, now: float) -> Step:
    """A joiner that lost the published version is a late joiner; one that was not published to goes on joining."""
    if event.request.published:
        return state, refuse(event, "wrong_phase", "is joining and holds nothing that was published")
    return tombstone(state, event.fence), ack(event)


# --- the way back


def restore(state: ReplicaState, event: Asked, now: float) -> Step:
    """Restore the old version, once the ranks have stopped. A published version is never undone (I3)."""
    if state.resuming:
        return state, refuse(event, "wrong_phase", f"{state.live.version} is published")
    if state.postponed is not None:
        return replace(state, postponed=event), superseded(state.postponed)
    return _postponed_restore(replace(tombstone(state, event.fence), postponed=event))


def _postponed_restore(state: ReplicaState) -> Step:
    """Begin the restore that waits, if no rank is at work any more."""
    if state.postponed is None or state.work("install") or state.work("invalidate"):
        return state, ()
    event = state.postponed
    return begin(replace(state, state=FrontState.RESTORING, postponed=None), event)


def restored(state: ReplicaState, event: Done, now: float) -> Step:
    """Paused on the old version, which may reopen by lease: that the update is reverted is durable."""
    state, answers = finish(state, event)
    end = now + state.lease_s
    return replace(back_on_old(state), state=FrontState.PAUSED, lease_end=end), (SetLease(end), *answers)


def back_on_old(state: ReplicaState) -> ReplicaState:
    """The installation was taken back. Only a rollback that was taken back leaves something to go back to."""
    spare = EMPTY
    if state.plan is not None and state.plan.kind is Kind.ROLLBACK:
        spare = Spare(SpareState.PREVIOUS, 0, state.plan.version, state.plan.digest)
    return replace(
        state,
        live=state.old or state.live,
        old=None,
        spare=spare,
        plan=None,
        reached="",
        digest="",
        pause_reply=None,
    )


def restore_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    state, refusals = failed(state, event, now)
    failure = event.failures[0]
    return replace(state, state=FrontState.QUARANTINED, failure=failure), (ShutDown(failure), *refusals)


def restore_nothing(state: ReplicaState, event: Asked, now: float) -> Step:
    """The replica never installed this attempt, and the tombstone keeps it from doing so, unless an operator made it
    serve just that.
    """
    note = state.released
    if note is not None and (note.to, note.serial) == (ReleaseTo.LIVE, event.fence.serial):
        return state, refuse(event, "wrong_phase", f"was released by hand to serve {note.version}")
    return drop_staging(tombstone(state, event.fence), event)
