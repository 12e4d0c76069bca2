"""Who is a member and how it stands: joining, leaving, silence and its end.

Silence proves nothing (I9): a member that does not answer stays a member, and blocks the next publication unless it
is known to be shut. `obstacle` and `cure` say in words why a member does not serve, and what ends that.
"""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.fleet.effects import Accepted, Admit, Denied, Effect, Forget, Send
from updater.core.fleet.events import Joined, Left, Refused, Replied
from updater.core.fleet.flow import Moved, back_on_old, drop_out, trouble
from updater.core.fleet.requests import first_word, live
from updater.core.fleet.state import Fleet, Member, Phase, Standing, Transaction
from updater.core.fleet.table import TABLE
from updater.core.participant import (
    Description,
    DiscardRequest,
    DiskOffer,
    Fence,
    FenceRequest,
    FrontState,
    FrontStatus,
    ResumeRequest,
    SpareState,
    StreamOffer,
    same_definition,
)
from updater.core.release import mismatch

#: How many of the last that were removed or replaced are told so if they ever call.
GONE_KEPT = 1000
_INSTALLED = (FrontState.INSTALLING, FrontState.INSTALLED, FrontState.INVALIDATED, FrontState.RESTORING)


def joined(state: Fleet, event: Joined) -> Moved:
    """A front asks to become a member. It is shut and stays so until IDLE admits it or an update enlists it."""
    description = event.description
    status = description.status
    known = state.member(status.replica)
    if known is not None and known.incarnation == status.incarnation:
        # Asking again is how a joiner gets another try at what an admission or a catch-up failed to reach.
        known = replace(known, gave_up_on=None)
        after, more = seen(state.with_member(known), known, status)
        return after, (Accepted(""), *more)
    state = _with_history(state, status)
    problem = _join_problem(state, known, event)
    problems = (problem,) if problem is not None else _config_problems(state, event)
    if problems:
        return state, (Denied(problems),)
    effects: tuple[Effect, ...] = ()
    if known is not None:
        gone = Failure("replica_lost", "came back as another process", replica=known.replica)
        state, effects = removed(state, known.replica, gone)
    # It may have used serials that this journal never heard of; what it calls dead stays dead.
    others = tuple(pair for pair in state.gone if pair != (status.replica, status.incarnation))
    state = replace(state, serial=max(state.serial, status.serial), gone=others)
    newcomer = _newcomer(state, description)
    if newcomer.unled and state.may_lead:
        # At once, also beside an update: who obeys may be enlisted in the next one.
        newcomer = replace(newcomer, owed=first_word(state, newcomer))
    greeting = (newcomer.owed,) if newcomer.owed is not None else ()
    return state.with_member(newcomer), (Accepted(""), *effects, *greeting)


def _with_history(state: Fleet, status: FrontStatus) -> Fleet:
    """A coordinator without history that hears of one may not begin another beside it (I11)."""
    if state.has_history or not status.fleet:
        return state
    return replace(state, hold=adopt_needed(status.replica, status.fleet))


def adopt_needed(replica: str, fleet: str) -> Failure:
    return Failure(
        "adopt_needed",
        f"belongs to fleet {fleet}, and this coordinator's journal is empty",
        replica=replica,
        hint="start the coordinator on the fleet's journal; if that is lost: liveweights adopt",
    )


def _join_problem(state: Fleet, known: Member | None, event: Joined) -> Failure | None:
    status = event.description.status
    if state.hold is not None and not state.listening:
        return state.hold
    foreign = mismatch(status)
    if foreign is not None:
        return foreign
    if status.fleet not in ("", state.fleet):
        return Failure(
            "bad_request",
            f"belongs to fleet {status.fleet!r}, this is fleet {state.fleet!r}",
            replica=status.replica,
            hint="restart the replica to let it join another fleet",
        )
    if known is not None and known.standing is not Standing.LOST and not event.old_gone:
        return Failure("replica_id_taken", "another live process holds this id", replica=status.replica)
    if status.state is FrontState.OPEN and state.live is None:
        return Failure("adopt_needed", "serves already, but this coordinator knows no history", replica=status.replica)
    if status.state is not FrontState.JOINING:
        return Failure("wrong_phase", f"is {status.state.value}; only a restart can join", replica=status.replica)
    return None


def _config_problems(state: Fleet, event: Joined) -> tuple[Failure, ...]:
    """Replicas of one fleet run on one config. A hash of another definition cannot be compared."""
    if event.differs is not None:
        return event.differs
    replica, mine = event.description.status.replica, event.description.config_hash
    others = {member.config_hash for member in state.members if member.replica != replica}
    others = {other for other in others if same_definition(mine, other)}
    if not others or mine in others:
        return ()
    return (Failure("config_mismatch", "has another model config than the fleet", replica=replica),)


def _newcomer(state: Fleet, description: Description) -> Member:
    status = description.status
    return Member(
        replica=status.replica,
        incarnation=status.incarnation,
        standing=Standing.JOINING,
        live=status.live_digest,
        shut=True,
        url=description.url,
        config_hash=description.config_hash,
        ranks=status.ranks,
        # Who has heard of an update before may hold what it staged: that is let go of after the first word.
        unled=not obeys(state, status) or status.serial > 0,
    )


def obeys(state: Fleet, status: FrontStatus) -> bool:
    """Whether the member has acknowledged `lead` of this coordinator's life."""
    return (status.fleet, status.epoch, status.owner) == (state.fleet, state.epoch, state.owner)


def left(state: Fleet, event: Left) -> Moved:
    """DELETE. Without a word that it is dead, only a member that cannot be serving may go."""
    member = state.member(event.replica)
    if member is None:
        return state, (Denied((Failure("not_found", "no such member", replica=event.replica),)),)
    if not event.dead and not member.shut:
        failure = Failure("member_blocked", "may be serving; confirm that it is dead", replica=event.replica)
        return state, (Denied((failure,)),)
    gone = Failure("replica_lost", "was removed", replica=event.replica)
    after, effects = removed(state, event.replica, gone)
    return after, (Accepted(""), *effects)


# --- silence


def removed(state: Fleet, replica: str, failure: Failure) -> Moved:
    """The member is no more: no phase waits for it and nothing is sent to it."""
    member = state.member(replica)
    state, effects = lost(state, replica, failure)
    if member is not None:
        state = replace(state, gone=(*state.gone, (replica, member.incarnation))[-GONE_KEPT:])
    return state.without_member(replica), (*effects, Forget(replica))


def lost(state: Fleet, replica: str, failure: Failure) -> Moved:
    """The member is out of reach. A running update takes it as its row says."""
    member = state.member(replica)
    if member is None or member.standing is Standing.QUARANTINED:
        return state, ()
    state = state.with_member(replace(member, standing=Standing.LOST))
    if state.update is None or (replica, member.incarnation) not in state.update.participants:
        return state, ()
    row = TABLE[state.phase]
    if row.tolerant and not state.update.recording:
        waited = replica in state.update.waiting
        return drop_out(state, replica, (failure,), answered=False) if waited else (state, ())
    if row.trouble is not None:
        return trouble(state, (failure.at(replica=replica),))
    # The journal is being written: DECIDING looks at the standing when it is, RESUMING asks all of them anyway.
    failures = (*state.update.failures, failure.at(replica=replica))
    return replace(state, update=replace(state.update, failures=failures)), ()


def broken(state: Fleet, replica: str, failure: Failure) -> Moved:
    """The member itself says that only a restart or an audit helps: it is shut."""
    after, effects = lost(state, replica, failure)
    member = after.member(replica)
    if member is None or (member.standing is Standing.QUARANTINED and member.shut):
        return after, effects
    shut = replace(member, standing=Standing.QUARANTINED, shut=True, owed=None, previous=None)
    return after.with_member(shut), (*effects, Forget(replica))


# --- and its end


def seen(state: Fleet, member: Member, status: FrontStatus) -> Moved:
    """A member's status. It may arrive late: it ends the member's silence only if the member owes nothing, and is not
    used for an installation whose end the member has acknowledged.
    """
    foreign = mismatch(status)
    if foreign is not None:
        return state.with_member(replace(member, foreign=foreign)), ()
    if not state.has_history and status.state is FrontState.JOINING:
        # Nothing was said to any member yet: one that was silent at the start waits like the others.
        return state.with_member(replace(member, standing=Standing.JOINING, live=status.live_digest, shut=True)), ()
    if member.unled:
        return state, ((first_word(state, member),) if state.may_lead else ())
    if status.state in (FrontState.BROKEN, FrontState.QUARANTINED):
        code = "rank_died" if status.state is FrontState.BROKEN else "rank_failed"
        return broken(state, member.replica, status.failure or Failure(code, f"is {status.state.value}"))
    if state.phase is not Phase.IDLE or state.live is None:
        return state, ()
    if member.owed is not None:
        return state, (member.owed,)  # it is reachable: ask again, also if it refused before
    if status.state is FrontState.ORPHANED and member.standing is Standing.LOST:
        # Shut, and told by another life of this fleet that it is no member: taken in like a joiner.
        return state.with_member(
            replace(member, standing=Standing.JOINING, admitted=False, live=status.live_digest)
        ), ()
    if status.state in _INSTALLED and member.standing is not Standing.OK:
        return _take_back(state, member)
    if member.standing is Standing.LOST or (member.standing is Standing.JOINING and _serves_live(state, status)):
        return _back(state, member, status)
    if member.standing is Standing.OK and status.state is FrontState.JOINING:
        # Admitted in the eyes of a recovery only: admit it again, which a serving front just acknowledges.
        again = replace(member, standing=Standing.JOINING, admitted=False, live=status.live_digest)
        return state.with_member(again), ()
    if _serves_live(state, status) and status.spare.state in (SpareState.EMPTY, SpareState.UNKNOWN):
        member = replace(member, previous=None)
    return state.with_member(member), ()


def _serves_live(state: Fleet, status: FrontStatus) -> bool:
    label = live(state)
    serves = (status.state, status.live_version, status.live_digest)
    return serves == (FrontState.OPEN, str(label.version), label.digest)


def _back(state: Fleet, member: Member, status: FrontStatus) -> Moved:
    if status.state is FrontState.JOINING and not member.admitted:
        return tidy_anew(state, replace(member, standing=Standing.JOINING, live=status.live_digest))
    if _serves_live(state, status):
        back = replace(member, standing=Standing.OK, shut=False, admitted=True, live=status.live_digest)
        after, effects = tidy_anew(state, back)
        return after, (Admit(member.replica), *effects)
    return state, ()


def _take_back(state: Fleet, member: Member) -> Moved:
    """Nothing that it may have installed was published to it, or it would owe the acknowledgement of that."""
    state = replace(state, serial=state.serial + 1)
    send = Send(member.replica, "restore", FenceRequest(state.fence(state.serial, 0, member.incarnation)))
    return state.with_member(replace(member, owed=send)), (send,)


def pending_ack(state: Fleet, replica: str, verb: str, fence: Fence) -> Member | None:
    """The member, if this answers what it owes."""
    member = state.member(replica)
    if member is None or member.owed is None:
        return None
    return member if (member.owed.verb, member.owed.fence) == (verb, fence) else None


def acknowledged(state: Fleet, member: Member, event: Replied) -> Moved:
    """The acknowledgement that a member owed since an earlier phase."""
    owed = member.owed
    if event.verb == "restore":
        return _reopen_restored(state, member, event.fence)
    if event.verb == "discard":
        # Dropping the staging also reopens what was still paused.
        settled = back_on_old(state, member.replica) if member.standing is Standing.LOST else state
        return settled.with_member(replace(settled.member(member.replica) or member, owed=None)), ()
    if event.verb == "join" or (owed and isinstance(owed.request, ResumeRequest) and owed.request.published):
        digest = owed.request.digest if owed else member.live
        serving = replace(member, standing=Standing.OK, owed=None, shut=False, admitted=True, live=digest, why=None)
        state = state.with_member(serving)
        if event.verb == "join":
            return state, (Admit(member.replica),)
        state, effects = _tidy(state, serving, event.fence)
        return state, (Admit(member.replica), *effects)
    back = back_on_old(state, member.replica)
    return _tidy(back, back.member(member.replica) or member, event.fence)


def tidy_anew(state: Fleet, member: Member) -> Moved:
    """The same under a serial of its own, which also fences what an older life of the coordinator sent it."""
    state = replace(state, serial=state.serial + 1)
    return _tidy(state, member, state.fence(state.serial, 0, member.incarnation))


def _tidy(state: Fleet, member: Member, fence: Fence) -> Moved:
    """The member was out of reach for a while, and may still hold staging of an update that ended meanwhile (I6)."""
    send = Send(member.replica, "discard", DiscardRequest(fence))
    return state.with_member(replace(member, owed=send)), (send,)


def _reopen_restored(state: Fleet, member: Member, fence: Fence) -> Moved:
    """The member took its installation back at last: it may reopen, and owes the acknowledgement of that."""
    label = live(state)
    send = Send(member.replica, "resume", ResumeRequest(fence, False, str(label.version), label.digest))
    return state.with_member(replace(member, standing=Standing.LOST, owed=send)), (send,)


def refused(state: Fleet, member: Member, event: Refused) -> Moved:
    """The member refused what it owed. A refused join leaves it joining; anything else is asked again when it is seen,
    unless it is broken.
    """
    if event.verb == "join":
        label = live(state)
        refused = replace(member, standing=Standing.JOINING, owed=None, gave_up_on=label, why=event.failures[0])
        return state.with_member(refused), ()
    if any(failure.code == "rank_died" for failure in event.failures):
        return state.with_member(replace(member, standing=Standing.QUARANTINED, owed=None, shut=True)), ()
    return state, ()


_CURES = {
    "joining": "wait: it proves its weights, or catches up",
    "closing": "wait: a publication is under way",
    "paused": "wait: a publication is under way",
    "installing": "wait: a publication is under way",
    "installed": "wait for the coordinator; `liveweights release` if it does not come back",
    "invalidated": "wait for the coordinator; `liveweights release` if it does not come back",
    "restoring": "wait: a publication is being taken back",
    "quarantined": "`liveweights readmit` the replica, or restart it",
    "broken": "restart the replica: a rank or its engine is dead, so `liveweights readmit` does not help",
    "orphaned": "wait: it joins again; or `liveweights release` it",
    "lost": "wait for it or restart it; once it is dead: DELETE /v1/fleet/replicas/ID?confirm_dead=true",
}


def cure(state: str) -> str:
    """What ends a state of a member, empty for one that serves."""
    return _CURES.get(state, "")


def shown(member: Member, status: FrontStatus | None, heard: bool) -> str:
    """The state that people see: the front's own word, unless the coordinator knows better. `heard`: it answered the
    last time it was asked.
    """
    if status is None:
        return member.standing.value
    if member.standing is Standing.QUARANTINED and status.state is FrontState.BROKEN:
        return FrontState.BROKEN.value
    trusted = member.standing in (Standing.OK, Standing.JOINING) or (member.unled and heard)
    return status.state.value if trusted else member.standing.value


def obstacle(state: Fleet, member: Member) -> Failure | None:
    """Why a joiner is not admitted, or a member not spoken to; None while it is on its way."""
    if member.foreign is not None:
        return member.foreign
    if member.standing is not Standing.JOINING:
        return None
    if state.hold is not None:
        return state.hold
    if member.why is not None:
        return member.why
    serving = state.live
    if serving is None or member.live == serving.label.digest or isinstance(serving.offer, DiskOffer):
        return None
    came = "was published by a stream" if serving.offer is not None else "is the checkpoint that the fleet started on"
    return Failure(
        "no_source",
        f"its weights (digest {member.live}) are not the live ones (version {serving.label.version}, digest"
        f" {serving.label.digest}), and what is live {came}: there is nothing to catch up from",
        replica=member.replica,
    )


def left_behind(state: Fleet, update: Transaction) -> tuple[str, ...]:
    """Warnings of a stream that begins: members without a part in it cannot have its bytes later."""
    if not isinstance(update.offer, StreamOffer):
        return ()
    seated = {replica for replica, _ in update.participants}
    return tuple(
        f"{member.replica} is {member.standing.value} and takes no part: it cannot catch up on what comes by a stream,"
        " and serves again with the first update after its restart"
        for member in state.members
        if member.replica not in seated
    )
