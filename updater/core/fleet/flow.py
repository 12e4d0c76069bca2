"""The interpreter of the fleet table: entering a phase, taking an acknowledgement, trouble, the end.

A participant counts while it is a member under the incarnation that the update began with (I9: no state is
inferred; who is replaced has to acknowledge nothing any more).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from updater.core.errors import SIGHT, Failure
from updater.core.fleet.effects import (
    Admit,
    Append,
    ClearDeadline,
    Effect,
    Finish,
    Outcome,
    SetBackoff,
    SetDeadline,
)
from updater.core.fleet.requests import first_word, phase_request
from updater.core.fleet.state import Fleet, Member, Phase, Published, Standing, Transaction
from updater.core.fleet.table import SKIPPED, TABLE, TIME_CODES, Row, backoff_s
from updater.core.fleet.votes import collect, objection, record, result, verdict
from updater.core.participant import Kind

Moved = tuple[Fleet, tuple[Effect, ...]]

#: Reasons that come from a client: the update is aborted even if nothing was staged yet.
CLIENT_REASONS = frozenset({"client_abort", "superseded", "lease_expired"})


def current(state: Fleet) -> Transaction:
    if state.update is None:
        raise LookupError(f"no update in phase {state.phase}")
    return state.update


def present(state: Fleet) -> tuple[Member, ...]:
    """Participants that are still members under the same incarnation."""
    named = [(state.member(replica), incarnation) for replica, incarnation in current(state).participants]
    return tuple(member for member, incarnation in named if member and member.incarnation == incarnation)


def _member(state: Fleet, replica: str) -> Member:
    member = state.member(replica)
    if member is None:
        raise LookupError(f"no member {replica}")
    return member


# --- entering


def enter(state: Fleet, phase: Phase) -> Moved:
    """Go to `phase` and ask for what its row asks for."""
    update = current(state)
    if phase in SKIPPED[update.kind]:
        return enter(state, TABLE[phase].done or after_reopening(update))
    if phase is Phase.IDLE:
        return finish(state)
    if phase is Phase.PAUSING:
        update = replace(update, attempt=update.attempt + 1, retry=False)
    if phase is Phase.STAGING:
        state = _spend_spares(state)
    if phase is Phase.RESUMING:
        state = _no_longer_shut(state)
    row = TABLE[phase]
    recording = row.record is not None and update.kind is not Kind.CATCH_UP
    state = replace(state, phase=phase, update=replace(update, waiting=frozenset(), replies=(), recording=recording))
    if row.record is not None and recording:
        return state, (ClearDeadline(), Append(record(state, update, row.record)))
    return begin_round(state) if row.verb else enter_ready(state)


def begin_round(state: Fleet) -> Moved:
    """Send the row's verb to all who have to answer it. Where the others go on without one that fails, one that is lost
    already is not waited for.
    """
    update, row = current(state), TABLE[state.phase]
    asked = [member for member in present(state) if not (row.tolerant and _out_of_reach(state, member))]
    timer: tuple[Effect, ...] = ()
    if row.seconds is not None:
        timer = (SetDeadline(row.phase.value, update.serial, update.attempt, row.seconds(update.policy)),)
    # Found silent by a recovery, a member hears first whom it has to obey; what it owes follows.
    sends = tuple(
        first_word(state, member) if member.unled else phase_request(state, update, member) for member in asked
    )
    waiting = frozenset(member.replica for member in asked)
    state = replace(state, update=replace(update, waiting=waiting))
    for member in asked:
        if row.tolerant and member.standing is Standing.LOST:
            state = _set_aside(state, member.replica, _not_heard(state, member.replica), answered=False)
    after, effects = proceed(state)
    return after, (*timer, *sends, *effects)


def _not_heard(state: Fleet, replica: str) -> tuple[Failure, ...]:
    """The failure of a member that was lost before it was asked; none if the update records one already."""
    if any(failure.replica == replica for failure in current(state).failures):
        return ()
    return (Failure("replica_lost", "it does not answer", replica=replica),)


def _out_of_reach(state: Fleet, member: Member) -> bool:
    """A quarantined member is not told to reopen or to drop anything: its ranks' state is not known."""
    return member.standing is Standing.QUARANTINED


def enter_ready(state: Fleet) -> Moved:
    """READY: go on to the pause, or wait for the client's commit or for the back-off to end."""
    update = current(state)
    if update.attempt > 0:
        state = replace(state, update=replace(update, backing_off=True))
        return state, (ClearDeadline(), SetBackoff(update.serial, update.attempt, backoff_s(update.attempt)))
    after, effects = pause_if_asked(state)
    return after, (ClearDeadline(), *effects)


def pause_if_asked(state: Fleet) -> Moved:
    update = current(state)
    if state.phase is Phase.READY and update.commit_requested and not update.backing_off:
        return enter(state, Phase.PAUSING)
    return state, ()


def _spend_spares(state: Fleet) -> Fleet:
    """Staging overwrites the rollback copy, and `rollback_to` says so from here on."""
    for member in present(state):
        state = state.with_member(replace(member, previous=None, spare_unknown=False))
    return state


def _no_longer_shut(state: Fleet) -> Fleet:
    """Once told to reopen on a published version, a joiner may be serving whatever becomes of its answer."""
    for member in present(state):
        state = state.with_member(replace(member, shut=False))
    return state


# --- acknowledgements


def acknowledge(state: Fleet, replica: str, reply: Any) -> Moved:
    """`replica` answered the phase's verb."""
    update = current(state)
    problem = objection(state.phase, update, replica, reply)
    if problem is not None:
        return refusal(state, replica, (problem,))
    replies = (*update.replies, (replica, reply))
    state = replace(state, update=replace(update, waiting=update.waiting - {replica}, replies=replies))
    effects: tuple[Effect, ...] = ()
    if state.phase is Phase.RESUMING:
        state, effects = _serves(state, replica)
    if state.phase in (Phase.REOPENING, Phase.DISCARDING):
        state = back_on_old(state, replica)
    after, more = proceed(state)
    return after, (*effects, *more)


def proceed(state: Fleet) -> Moved:
    """On to the next phase once no answer is waited for."""
    update, row = current(state), TABLE[state.phase]
    if update.waiting or update.recording:
        return state, ()
    if state.phase is Phase.PLANNING and update.failures:
        return trouble(state, ())
    if state.phase is Phase.STAGING and update.awaits_seal:
        return state, ()
    update = collect(state.phase, update)
    state = replace(state, update=update)
    problems = verdict(state.phase, update)
    if problems:
        return trouble(state, problems)
    if not row.tolerant and row.verb and not update.replies:
        return trouble(state, (Failure("replica_lost", "no participant is left"),))
    if state.phase is Phase.PLANNING and update.dry_run:
        return enter(replace(state, update=replace(update, end=Outcome.PLANNED)), Phase.DISCARDING)
    return enter(state, row.done or after_reopening(update))


def after_reopening(update: Transaction) -> Phase:
    """Go where the table row that led to REOPENING says."""
    if update.end is Outcome.ROLLED_BACK:
        return Phase.IDLE
    return Phase.READY if update.retry else Phase.DISCARDING


def recorded(state: Fleet) -> Moved:
    """The record of this phase is durable (I8): only now do ranks hear of it."""
    update, row = current(state), TABLE[state.phase]
    state = replace(state, update=replace(update, recording=False))
    if state.phase is Phase.DECIDING:
        state = replace(state, highest=max(state.highest, update.version))
        reachable = [member for member in present(state) if member.standing in (Standing.OK, Standing.JOINING)]
        if len(reachable) < len(update.participants):
            return trouble(state, ())
    if state.phase is Phase.PUBLISHING:
        state = _publish(state)
    return begin_round(state) if row.verb else proceed(state)


def _publish(state: Fleet) -> Fleet:
    """The commit point: `live` changes here and nowhere else."""
    update, old = current(state), state.live
    if update.kind is Kind.ROLLBACK and state.before is not None and state.before.label == update.label:
        new = state.before
    else:
        new = Published(update.label, update.manifest_digest, update.offer, update.manifest, update.policy)
    bare = update.enlisted | update.one_way
    for member in present(state):
        kept = None if member.replica in bare or old is None else old.label
        state = state.with_member(replace(member, previous=kept, spare_unknown=False))
    return replace(state, live=new, before=old)


def _serves(state: Fleet, replica: str) -> Moved:
    member = _member(state, replica)
    digest = current(state).digest
    serving = replace(member, standing=Standing.OK, live=digest, owed=None, shut=False, admitted=True)
    return state.with_member(serving), (Admit(replica),)


def back_on_old(state: Fleet, replica: str) -> Fleet:
    """`replica` acknowledged the reopening: it serves the old version, or it is joining again if it was a joiner."""
    member = _member(state, replica)
    standing = Standing.OK if member.admitted else Standing.JOINING
    return state.with_member(replace(member, standing=standing, owed=None))


# --- trouble


def refusal(state: Fleet, replica: str, failures: tuple[Failure, ...]) -> Moved:
    """`replica` answered that it will not, or answered something that cannot be accepted."""
    placed = tuple(failure.at(replica=replica) for failure in failures)
    if TABLE[state.phase].tolerant:
        return drop_out(state, replica, placed, answered=True)
    if state.phase is Phase.PLANNING and all(failure.code in SIGHT for failure in placed):
        # What the others see of the same files decides whether a retry makes sense: they are waited for.
        update = current(state)
        noted = replace(update, waiting=update.waiting - {replica}, failures=(*update.failures, *placed))
        return proceed(replace(state, update=noted))
    return trouble(state, placed)


def trouble(state: Fleet, failures: tuple[Failure, ...]) -> Moved:
    """A refusal, a loss or a deadline before the commit point."""
    update, row = current(state), TABLE[state.phase]
    target = row.trouble or Phase.RESTORING  # DECIDING: recorded, but a participant was lost meanwhile
    retry = (
        state.phase is Phase.PAUSING
        and all(failure.code in TIME_CODES for failure in failures)
        and update.attempt < update.policy.attempts
    )
    update = replace(update, retry=retry, failures=update.failures if retry else (*update.failures, *failures))
    if not retry:
        update = replace(update, end=update.end or _outcome(state.phase, target, update))
    return enter(replace(state, update=update), target)


def _outcome(phase: Phase, target: Phase, update: Transaction) -> Outcome:
    if target is Phase.RESTORING:
        return Outcome.ROLLED_BACK
    return Outcome.REJECTED if phase is Phase.PLANNING and not _asked_for(update) else Outcome.ABORTED


def _asked_for(update: Transaction) -> bool:
    """Whether a client asked for this end. If a member uses the same code, it speaks of its own work, and is named."""
    return any(failure.code in CLIENT_REASONS and not failure.replica for failure in update.failures)


def undo(state: Fleet, reason: str, causes: tuple[Failure, ...] = ()) -> Moved | None:
    """Client abort, supersede, end of the update lease; None where they come too late.

    `causes` come before the reason, which stays: whatever a client says of itself, it asked for this end.
    """
    update, row = current(state), TABLE[state.phase]
    failures = (*causes, Failure(reason, f"update {update.update or update.serial} was given up: {reason}"))
    if row.undo is not None:
        return trouble(state, failures)
    if state.phase is Phase.REOPENING and update.retry:
        given_up = replace(update, retry=False, end=Outcome.ABORTED, failures=(*update.failures, *failures))
        return replace(state, update=given_up), ()
    return None


def drop_out(state: Fleet, replica: str, failures: tuple[Failure, ...], *, answered: bool) -> Moved:
    """In a tolerant phase one member fails: mark it and go on with the others."""
    return proceed(_set_aside(state, replica, failures, answered=answered))


def _set_aside(state: Fleet, replica: str, failures: tuple[Failure, ...], *, answered: bool) -> Fleet:
    """Mark the member and wait for it no longer: it owes its acknowledgement from here on."""
    update, row = current(state), TABLE[state.phase]
    state = state.with_member(_marked(state, row, _member(state, replica), failures, answered))
    if update.retry:  # the next attempt would need it
        update = replace(update, retry=False, end=Outcome.ABORTED)
    update = replace(update, waiting=update.waiting - {replica}, failures=(*update.failures, *failures))
    return replace(state, update=update)


def _marked(state: Fleet, row: Row, member: Member, failures: tuple[Failure, ...], answered: bool) -> Member:
    """It keeps owing its acknowledgement, unless it is broken: only then is it known to be shut for good. What refuses
    for any other reason may still be reopened by its lease.
    """
    if any(failure.code == "rank_died" for failure in failures) and answered:
        return replace(member, standing=Standing.QUARANTINED, shut=True, previous=None, owed=None)
    owed = phase_request(state, current(state), member)
    if row.phase is Phase.DISCARDING:
        return replace(member, spare_unknown=True, previous=None, owed=owed)
    if row.phase is Phase.RESTORING:
        return replace(member, standing=Standing.QUARANTINED, previous=None, owed=owed)
    return replace(member, standing=Standing.LOST, owed=owed)


def timed_out(state: Fleet) -> Moved:
    """The deadline of the current phase."""
    update, row = current(state), TABLE[state.phase]
    code = "quiesce_timeout" if state.phase is Phase.PAUSING else "phase_timeout"
    late = sorted(update.waiting)
    if not row.tolerant:
        return trouble(state, tuple(Failure(code, f"no answer in {state.phase}", replica=each) for each in late))
    effects: tuple[Effect, ...] = ()
    for replica in late:
        # The last one moves the machine on.
        state, effects = drop_out(
            state, replica, (Failure(code, f"no answer in {row.phase}", replica=replica),), answered=False
        )
    return state, effects


# --- the end


def finish(state: Fleet) -> Moved:
    """The one end of an update (I4)."""
    update = current(state)
    outcome = update.end or Outcome.COMMITTED
    if update.kind is Kind.CATCH_UP and outcome is not Outcome.COMMITTED:
        state = _gave_up(state)
    state = replace(state, phase=Phase.IDLE, update=None)
    return state, (ClearDeadline(), Finish(result(state, update, outcome)))


def _gave_up(state: Fleet) -> Fleet:
    """Not tried again against the same live version, unless it was only in the way of a client."""
    update = current(state)
    if _asked_for(update):
        return state
    why = update.failures[0] if update.failures else None
    for member in present(state):
        state = state.with_member(replace(member, gave_up_on=update.label, why=why))
    return state
