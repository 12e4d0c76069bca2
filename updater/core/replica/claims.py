"""Rows of the replica table about whom it obeys (I11): the first word of a coordinator, and life as an orphan."""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.participant import FrontState, JoinRequest, Released, ReleaseRequest, ReleaseTo
from updater.core.replica.operator import kept, let_go, shut_at_once
from updater.core.replica.state import (
    Answer,
    Asked,
    Done,
    Failed,
    Held,
    OpenAdmission,
    ReplicaEffect,
    ReplicaState,
    ShutDown,
    Step,
    Told,
    status,
)
from updater.core.replica.steps import STAGING_VERBS, begin, failed, finish, refuse

#: Work that an orphan's proof of its bytes may cut off. Ranks that do anything else are let finish first.
GIVEN_UP = (*STAGING_VERBS, "pause")


def lead(state: ReplicaState, event: Asked, now: float) -> Step:
    """From here on this fleet, epoch and owner are obeyed, and no other. Nothing else changes."""
    fence = event.fence
    same = fence.epoch == state.epoch
    rival = state.owner if same and state.owner != fence.owner else state.rival if same else ""
    led = replace(state, fleet=fence.fleet, epoch=fence.epoch, owner=fence.owner, rival=rival, unclaimed=False)
    return led, (Answer(event.verb, fence, status(led, now)),)


def removed(state: ReplicaState, event: Told, now: float) -> Step:
    """The fleet goes on without this replica, so it may not serve. While ranks install or go back it is shut anyway,
    and hears of it again.
    """
    if any(work.verb not in GIVEN_UP for work in state.running):
        return state, ()
    failure = Failure(
        "orphaned",
        f"epoch {event.epoch} of its fleet has removed it",
        hint="it joins again by itself; without a coordinator: liveweights release",
    )
    after, effects = shut_at_once(state, FrontState.ORPHANED, failure)
    return after, (*let_go(state), *effects)


# --- the ends of an orphan's life, beside a readmission: adopted, or released by hand


def join(state: ReplicaState, event: Asked, now: float) -> Step:
    """A coordinator that adopts knows it again. The ranks prove their bytes first, as for a readmission."""
    request: JoinRequest = event.request
    if state.running or state.held.digest != request.digest:
        return state, refuse(event, "expected_mismatch", f"holds {state.held.digest}, not {request.digest}, or is busy")
    return begin(state, event)


def joined(state: ReplicaState, event: Done, now: float) -> Step:
    request: JoinRequest = state.running[0].request
    return _opened(state, event, Held(request.version, request.digest))


def release(state: ReplicaState, event: Asked, now: float) -> Step:
    """An operator opens the orphan by hand. It can serve one version: the one that was live before any unpublished
    install.
    """
    request: ReleaseRequest = event.request
    only = ReleaseTo.LIVE if state.old is None else ReleaseTo.PREVIOUS
    if state.running or request.to is not only:
        return state, refuse(event, "wrong_phase", f"is busy, or can be released to {only.value} only")
    return begin(state, event)


def released(state: ReplicaState, event: Done, now: float) -> Step:
    request: ReleaseRequest = state.running[0].request
    after, effects = _opened(state, event, state.held)
    return replace(after, released=Released(request.to, after.live.version, *state.key)), effects


def not_proven(state: ReplicaState, event: Failed, now: float) -> Step:
    """The ranks' bytes could not be proved: quarantined."""
    after, refusals = failed(state, event, now)
    failure = event.failures[0]
    return replace(after, state=FrontState.QUARANTINED, failure=failure), (ShutDown(failure), *refusals)


def _opened(state: ReplicaState, event: Done, serves: Held) -> Step:
    after, answers = finish(state, event)
    opened = replace(
        after,
        state=FrontState.OPEN,
        origin=FrontState.OPEN,
        live=serves,
        old=None,
        spare=kept(state),
        plan=None,
        reached="",
        digest="",
        key=(0, 0),
        answers=(),
        pause_reply=None,
        failure=None,
    )
    effects: tuple[ReplicaEffect, ...] = (OpenAdmission(serves.version, serves.digest), *answers)
    return opened, effects
