"""The replica machine: the replica table (docs/state-machines.md) as data, and the interpreter that walks it.

`step(state, event, now)` is pure and total. The front keeps the state in one variable and replaces it whole before it
performs an effect: that is the compare-and-set which keeps a lease timer from reopening a replica whose first rank
has installed. `now` is any monotonic clock in seconds; leases are compared whenever anything is handled, not only
when their timer fires.
"""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.participant import Claim, Fence, FrontState
from updater.core.replica import steps
from updater.core.replica.state import (
    Asked,
    AuditFailed,
    Done,
    LeaseTimer,
    RankDied,
    Refuse,
    ReplicaEvent,
    ReplicaState,
    SpareLost,
    Step,
    Told,
    started,
    status,
)
from updater.core.replica.table import ROWS

__all__ = ["ReplicaState", "started", "status", "step"]

OUT_OF_SERVICE = (FrontState.BROKEN, FrontState.QUARANTINED, FrontState.ORPHANED)
OTHER_FLEET = "restart the replica to let it join another fleet"
_HAPPENINGS = {RankDied: "a rank dies", AuditFailed: "an audit fails", SpareLost: "the spare is lost"}
_BY_TRIGGER = {(source, row.trigger): row for row in ROWS for source in row.sources}


def step(state: ReplicaState, event: ReplicaEvent, now: float) -> Step:
    """What follows from `event` at time `now`."""
    expired, effects = _end_lease(state, now)
    after, more = _handle(expired, event, now)
    return after, (*effects, *more)


def _end_lease(state: ReplicaState, now: float) -> Step:
    """A lease that is over is over, by whichever event that is noticed first."""
    if state.lease_end is None or now < state.lease_end:
        return state, ()
    return _apply(state, "lease ends", LeaseTimer(), now)


def _handle(state: ReplicaState, event: ReplicaEvent, now: float) -> Step:
    if isinstance(event, LeaseTimer):
        return state, ()
    if isinstance(event, RankDied | AuditFailed | SpareLost):
        return _apply(state, _HAPPENINGS[type(event)], event, now)
    if isinstance(event, Asked):
        return _asked(state, event, now)
    if isinstance(event, Told):
        return _told(state, event, now)
    if steps.running(state, event) is None:
        return state, ()  # cancelled, or of another life
    return _apply(state, f"{event.verb} {'done' if isinstance(event, Done) else 'failed'}", event, now)


def _asked(state: ReplicaState, event: Asked, now: float) -> Step:
    """Fencing, then idempotency, then the table."""
    problem = _fenced(state, event)
    if problem is not None:
        if event.verb == "lead" and problem.code == "taken_over" and event.fence.epoch == state.epoch:
            state = replace(state, rival=event.fence.owner)
        return state, (Refuse(event.verb, event.fence, (problem,)),)
    if event.verb not in steps.OPERATOR:
        state = replace(state, heard=now)
    if event.verb in steps.FORWARD and state.tombstoned(event.fence):
        dead = Failure("replica_fenced", f"serial {event.fence.serial} was given up by attempt {event.fence.attempt}")
        return state, (Refuse(event.verb, event.fence, (dead,)),)
    repeated = steps.repeated(state, event)
    after, effects = repeated if repeated is not None else _apply(state, event.verb, event, now)
    refused = any(isinstance(each, Refuse) and each.fence == event.fence for each in effects)
    if event.verb == "lead" or refused:  # a refused verb leaves no mark
        return after, effects
    return replace(after, mark=max(after.mark, event.fence.order())), effects


def _fenced(state: ReplicaState, event: Asked) -> Failure | None:
    fence = event.fence
    if fence.incarnation != state.incarnation:
        return Failure("replica_fenced", f"is for incarnation {fence.incarnation}")
    if event.verb == "lead":
        return _led_otherwise(state, fence)
    if (fence.fleet, fence.epoch, fence.owner) != (state.fleet, state.epoch, state.owner):
        theirs, mine = f"epoch {fence.epoch} of fleet {fence.fleet}", f"epoch {state.epoch} of {state.fleet or 'none'}"
        return Failure("replica_fenced", f"comes from {theirs}, and {mine} is obeyed")
    if fence.order() < state.mark:
        return Failure("replica_fenced", f"{fence.order()} is older than {state.mark}")
    return None


def _led_otherwise(state: ReplicaState, fence: Fence) -> Failure | None:
    """I11. Of two coordinators on copies of one journal the lower owner id is obeyed."""
    if state.fleet and fence.fleet != state.fleet:
        return Failure("replica_fenced", f"belongs to fleet {state.fleet}, not {fence.fleet}", hint=OTHER_FLEET)
    if fence.epoch < state.epoch or (fence.epoch == state.epoch and "" != state.owner < fence.owner):
        return Failure("taken_over", f"another coordinator leads this fleet with epoch {state.epoch}")
    return None


def _told(state: ReplicaState, event: Told, now: float) -> Step:
    """Only what is said of this life counts, and `removed` only from the fleet that is obeyed, not from its past."""
    if event.incarnation != state.incarnation or not state.fleet:
        return state, ()
    if event.claim is Claim.UNKNOWN:
        return replace(state, unclaimed=True), ()
    if event.fleet != state.fleet:
        return state, ()
    state = replace(state, unclaimed=False)
    if event.claim is Claim.MEMBER or event.epoch < state.epoch:
        return state, ()
    return _apply(state, "removed", event, now)


def _apply(state: ReplicaState, trigger: str, event: ReplicaEvent, now: float) -> Step:
    row = _BY_TRIGGER.get((state.state, trigger))
    if row is not None:
        return row.act(state, event, now)
    if not isinstance(event, Asked):
        return state, ()
    if state.failure is not None and state.state in OUT_OF_SERVICE:
        return state, (Refuse(event.verb, event.fence, (state.failure,)),)
    failure = Failure("wrong_phase", f"{trigger} while {state.state.value}")
    return state, (Refuse(event.verb, event.fence, (failure,)),)
