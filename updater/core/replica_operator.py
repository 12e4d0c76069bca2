"""Rows of the replica table that no coordinator asks for: what audits find, what dies."""

from __future__ import annotations

from dataclasses import replace

from updater.core.participant import FrontState
from updater.core.replica_state import ClearLease, CloseAdmission, RankDied, Refuse, ReplicaState, ShutDown, Step
from updater.core.replica_steps import drop_work


def rank_died(state: ReplicaState, event: RankDied, now: float) -> Step:
    """Shut, and only a restart helps."""
    verbs = tuple(work.verb for work in state.running)
    state, refusals = drop_work(state, verbs, event.failure)
    if state.postponed is not None:
        refusals = (*refusals, Refuse(state.postponed.verb, state.postponed.fence, (event.failure,)))
    broken = replace(state, state=FrontState.BROKEN, lease_end=None, failure=event.failure, postponed=None)
    return broken, (CloseAdmission(), ClearLease(), ShutDown(event.failure), *refusals)
