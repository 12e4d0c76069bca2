"""The fleet machine: `step` takes an event to the next state and the effects it asks for.

The table is data in `table.py`, its interpreter is `flow.py`. `step` is pure and total: equal inputs give equal
outputs, and an event that does not apply leaves the state as it is and asks for nothing (a client's event is then
`Denied`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from updater.core.errors import Failure
from updater.core.fleet import begin, events, flow, lineage, members
from updater.core.fleet.effects import Accepted, Denied, Effect, Outcome, RecordKind, Stop
from updater.core.fleet.flow import Moved
from updater.core.fleet.state import Fleet, Member, Phase, Published, Standing, Transaction
from updater.core.fleet.table import TABLE
from updater.core.policy import CommitMode

__all__ = ["Fleet", "Member", "Phase", "Published", "Standing", "Transaction", "step"]


def step(state: Fleet, event: events.Event) -> tuple[Fleet, tuple[Effect, ...]]:
    """The next state and the effects that `event` asks for."""
    if state.phase is Phase.STOPPED:
        stopped = Failure("journal_failed", "this coordinator has stopped")
        return state, ((Denied((stopped,)),) if isinstance(event, events.ClientEvent) else ())
    after, effects = _HANDLERS[type(event)](state, event)
    if after.phase is Phase.IDLE:
        after, more = begin.settle(after)
        effects = (*effects, *more)
    return after, effects


# --- clients


def _seal(state: Fleet, event: events.Seal) -> Moved:
    """The stream is complete. Nothing is to be done for a disk offer, which has no stream; a seal that is too late is
    denied all the same.
    """
    if not begin.owner(state, event.update):
        return state, (_not_running(state, event.update),)
    if TABLE[state.phase].undo is None:
        return state, (_too_late(state, event.update),)
    accepted, update = _accepted(state), flow.current(state)
    if not update.awaits_seal:
        return state, (accepted,)
    if state.phase is not Phase.STAGING:
        return state, (Denied((Failure("wrong_phase", "nothing can be complete before staging began"),)),)
    update = replace(
        update,
        sealed=True,
        digests=event.digests,
        manifest=event.manifest or update.manifest,
        manifest_digest=event.manifest_digest or update.manifest_digest,
    )
    after, effects = flow.proceed(replace(state, update=update))
    return after, (accepted, *effects)


def _commit(state: Fleet, event: events.CommitRequested) -> Moved:
    if not begin.owner(state, event.update):
        return state, (_not_running(state, event.update),)
    update = flow.current(state)
    if update.end is not None or (TABLE[state.phase].undo is None and not update.commit_requested):
        return state, (_too_late(state, event.update),)
    accepted = _accepted(state)
    after, effects = flow.pause_if_asked(replace(state, update=replace(update, commit_requested=True)))
    return after, (accepted, *effects)


def _abort(state: Fleet, event: events.AbortRequested) -> Moved:
    waiting = _unqueue(state, event.update, "client_abort", event.causes)
    if waiting is not None:
        return waiting[0], (Accepted(event.update), *waiting[1])
    if not begin.owner(state, event.update):
        return state, (_not_running(state, event.update),)
    accepted = _accepted(state)
    moved = flow.undo(state, "client_abort", event.causes)
    if moved is None:
        return state, (_too_late(state, event.update),)
    return moved[0], (accepted, *moved[1])


def _lease_expired(state: Fleet, event: events.LeaseExpired) -> Moved:
    """The client lost the update, unless its commit was accepted: then the coordinator's deadlines hold."""
    waiting = _unqueue(state, event.update, "lease_expired")
    if waiting is not None:
        return waiting
    if not begin.owner(state, event.update):
        return state, ()
    update = flow.current(state)
    if update.policy.commit is CommitMode.MANUAL and update.commit_requested:
        return state, ()
    return flow.undo(state, "lease_expired") or (state, ())


def _unqueue(state: Fleet, update: str, reason: str, causes: tuple[Failure, ...] = ()) -> Moved | None:
    found = next((each for each in state.queue if each.update == update), None)
    if found is None:
        return None
    state = replace(state, queue=tuple(each for each in state.queue if each is not found))
    failure = Failure(reason, f"update {update} was given up while it waited: {reason}")
    return state, (begin.never_began(state, found, Outcome.ABORTED, (*causes, failure)),)


def _accepted(state: Fleet) -> Accepted:
    update = flow.current(state)
    return Accepted(update.update, update.serial)


def _not_running(state: Fleet, update: str) -> Denied:
    queued = any(each.update == update for each in state.queue)
    code = "wrong_phase" if queued else "not_found"
    return Denied((Failure(code, f"update {update!r} is not running"),))


def _too_late(state: Fleet, update: str) -> Denied:
    return Denied((Failure("wrong_phase", f"too late: update {update!r} is {state.phase.value}"),), update)


# --- fronts


def _replied(state: Fleet, event: events.Replied) -> Moved:
    if event.verb == "lead":
        return lineage.led(state, event)
    if _is_awaited(state, event):
        return flow.acknowledge(state, event.replica, event.reply)
    owing = members.pending_ack(state, event.replica, event.verb, event.fence)
    return members.acknowledged(state, owing, event) if owing is not None else (state, ())


def _refused(state: Fleet, event: events.Refused) -> Moved:
    if event.verb == "lead":
        return lineage.not_led(state, event)
    if _is_awaited(state, event):
        return flow.refusal(state, event.replica, event.failures)
    owing = members.pending_ack(state, event.replica, event.verb, event.fence)
    return members.refused(state, owing, event) if owing is not None else (state, ())


def _is_awaited(state: Fleet, event: events.Replied | events.Refused) -> bool:
    """Only the answer to exactly what was asked counts; late and repeated ones do nothing."""
    update, member = state.update, state.member(event.replica)
    if update is None or member is None or event.replica not in update.waiting or update.recording:
        return False
    wanted = state.fence(update.serial, update.attempt, member.incarnation)
    return event.verb == TABLE[state.phase].verb and event.fence == wanted


def _lost(state: Fleet, event: events.Lost) -> Moved:
    member = state.member(event.replica)
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    return members.lost(state, event.replica, event.failure)


# --- clock and journal


def _deadline(state: Fleet, event: events.Deadline) -> Moved:
    update = state.update
    if update is None or update.recording or (event.serial, event.attempt) != (update.serial, update.attempt):
        return state, ()
    if TABLE[state.phase].timer != event.phase:
        return state, ()
    return flow.timed_out(state)


def _backoff_ended(state: Fleet, event: events.BackoffEnded) -> Moved:
    update = state.update
    if update is None or not update.backing_off or (event.serial, event.attempt) != (update.serial, update.attempt):
        return state, ()
    return flow.pause_if_asked(replace(state, update=replace(update, backing_off=False)))


def _recorded(state: Fleet, event: events.Recorded) -> Moved:
    starting = state.starting
    if starting is not None:
        matches = (event.kind, event.serial) == (RecordKind.PUBLISHED, starting.serial)
        return (begin.start_published(state), ()) if matches else (state, ())
    update = state.update
    if update is None or not update.recording:
        return state, ()
    wanted = (TABLE[state.phase].record, update.serial, update.attempt)
    return flow.recorded(state) if (event.kind, event.serial, event.attempt) == wanted else (state, ())


def _journal_failed(state: Fleet, event: events.JournalFailed) -> Moved:
    """Stop at once, whatever the phase: what is durable is not known any more."""
    return replace(state, phase=Phase.STOPPED), (Stop(event.failure),)


_HANDLERS: dict[type, Callable[[Fleet, Any], Moved]] = {
    events.Begin: begin.begin,
    events.Seal: _seal,
    events.CommitRequested: _commit,
    events.AbortRequested: _abort,
    events.LeaseExpired: _lease_expired,
    events.Joined: members.joined,
    events.Left: members.left,
    events.Called: lineage.called,
    events.HoldEnded: lineage.hold_ended,
    events.Replied: _replied,
    events.Refused: _refused,
    events.Lost: _lost,
    events.Seen: lineage.seen,
    events.Deadline: _deadline,
    events.BackoffEnded: _backoff_ended,
    events.Recorded: _recorded,
    events.JournalFailed: _journal_failed,
}
