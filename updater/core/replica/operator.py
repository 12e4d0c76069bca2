"""Rows of the replica table that no coordinator asks for: deaths, what audits find, and an operator's two verbs."""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.participant import (
    FrontState,
    Kind,
    ReadmitRequest,
    Released,
    ReleaseRequest,
    ReleaseTo,
    Spare,
    SpareState,
)
from updater.core.replica.install import back_on_old
from updater.core.replica.state import (
    EMPTY,
    Asked,
    AuditFailed,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    OpenAdmission,
    RankDied,
    Refuse,
    Rejoin,
    ReplicaEffect,
    ReplicaState,
    ShutDown,
    SpareLost,
    Step,
)
from updater.core.replica.steps import begin, drop_work, failed, finish, refuse, tombstone

# --- out of service


def rank_died(state: ReplicaState, event: RankDied, now: float) -> Step:
    """A rank process is gone: the replica is `broken`, shut, and only a restart helps."""
    return _out_of_service(state, FrontState.BROKEN, event.failure)


def audit_failed(state: ReplicaState, event: AuditFailed, now: float) -> Step:
    """What serves, or what a restore would bring back, is not what was voted (I1, I2)."""
    if event.audited not in (state.live, state.old):
        return state, ()
    after, effects = _out_of_service(state, FrontState.QUARANTINED, event.failure)
    return after, (*let_go(state), *effects)


def let_go(state: ReplicaState) -> tuple[ReplicaEffect, ...]:
    """I6: what was being staged is let go of; a readmission drops the rest."""
    return (Cancel(state.serial),) if state.plan else ()


def _out_of_service(state: ReplicaState, where: FrontState, failure: Failure) -> Step:
    """Shut at once, and clients are told why."""
    shut, (close, clear, *refusals) = shut_at_once(state, where, failure)
    return shut, (close, clear, ShutDown(failure), *refusals)


def shut_at_once(state: ReplicaState, where: FrontState, failure: Failure) -> Step:
    """No request comes in any more; the caller that waits for a verb is told why."""
    verbs = tuple(work.verb for work in state.running)
    state, refusals = drop_work(state, verbs, failure)
    if state.postponed is not None:
        refusals = (*refusals, Refuse(state.postponed.verb, state.postponed.fence, (failure,)))
    shut = replace(state, state=where, lease_end=None, resuming=False, failure=failure, postponed=None)
    return shut, (CloseAdmission(), ClearLease(), *refusals)


def spare_lost(state: ReplicaState, event: SpareLost, now: float) -> Step:
    """No way back any more, and the status says so. A rollback that was planned or voted on that copy is refused."""
    if state.spare != event.audited:
        return state, ()
    rollback = state.plan is not None and state.plan.kind is Kind.ROLLBACK
    return replace(state, spare=EMPTY, reached="" if rollback else state.reached), ()


# --- quarantined or orphaned: taken back after an audit


def readmit(state: ReplicaState, event: Asked, now: float) -> Step:
    if state.running:
        return state, refuse(event, "wrong_phase", "is being readmitted already")
    return begin(state, event)


def readmitted(state: ReplicaState, event: Done, now: float) -> Step:
    """A new life on proven bytes: nothing that was said to the old one counts any more. Shut, and asks to join."""
    request: ReadmitRequest = state.running[0].request
    after, answers = finish(state, event)
    fresh = ReplicaState(
        replica=state.replica,
        incarnation=request.incarnation,
        live=state.old or state.live,
        fleet=after.fleet,
        epoch=after.epoch,
        owner=after.owner,
        mark=after.mark,
        dead=after.dead,
        spare=kept(state),
        released=state.released,
        ranks=state.ranks,
    )
    return fresh, (Rejoin(), *answers)


def kept(state: ReplicaState) -> Spare:
    """The way back that a proof of the live bytes leaves: none where something was not settled."""
    settled = state.old is None and state.spare.state is SpareState.PREVIOUS
    return state.spare if settled else EMPTY


def readmit_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """The replica stays shut, with what the audit found last as its failure."""
    after, refusals = failed(state, event, now)
    failure = event.failures[0]
    told = () if state.state is FrontState.QUARANTINED else (ShutDown(failure),)
    return replace(after, state=FrontState.QUARANTINED, failure=failure), (*told, *refusals)


# --- installed, and the coordinator is gone


def release(state: ReplicaState, event: Asked, now: float) -> Step:
    """By hand, where two-phase commit blocks. Not while ranks are at work, nor while a coordinator was heard within
    the time that a pause lease would have given it.
    """
    quiet_at = state.heard + state.lease_s
    if state.running or now < quiet_at:
        return state, refuse(event, "wrong_phase", f"a coordinator is at work, or spoke {now - state.heard:.0f} s ago")
    return begin(replace(state, resuming=True), event)


def released(state: ReplicaState, event: Done, now: float) -> Step:
    """The replica serves the version that the operator chose, who answers for I1 now; `status` shows it as released
    until a coordinator has published since.
    """
    request: ReleaseRequest = state.running[0].request
    after, answers = finish(state, event)
    if request.to is ReleaseTo.PREVIOUS:
        after = replace(back_on_old(tombstone(after, event.fence)), state=state.origin)
    else:
        after = replace(
            after, state=FrontState.OPEN, origin=FrontState.OPEN, plan=None, reached="", digest="", old=None
        )
    note = Released(request.to, after.live.version, *state.key)
    after = replace(after, resuming=False, key=(0, 0), pause_reply=None, released=note)
    opened: tuple[ReplicaEffect, ...] = ()
    if after.state is FrontState.OPEN:
        opened = (OpenAdmission(after.live.version, after.live.digest),)
    return after, (*opened, *answers)


def release_failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """A cache that did not clear: shut, to be asked again. A way back that failed: in doubt."""
    request: ReleaseRequest = state.running[0].request
    after, refusals = failed(state, event, now)
    after = replace(after, resuming=False)
    if request.to is ReleaseTo.LIVE:
        return after, refusals
    failure = event.failures[0]
    return replace(after, state=FrontState.QUARANTINED, failure=failure), (ShutDown(failure), *refusals)
