"""Who is obeyed (I11): the first word to every front, what a front's own call is answered, and when to hold still.

One coordinator is obeyed at a time, and losing a journal never shuts a fleet that serves one version. So a front is
called removed only by a journal that says so, and a coordinator that hears of what its journal does not know holds:
it publishes nothing, admits no replica and says why.
"""

from __future__ import annotations

from dataclasses import replace

from updater.core import flow, members
from updater.core.effects import Effect, Stop
from updater.core.errors import Failure
from updater.core.events import Called, HoldEnded, Refused, Replied, Seen
from updater.core.flow import Moved
from updater.core.lineage import not_newest
from updater.core.participant import Call, Claim, Claimed, FrontState, FrontStatus
from updater.core.requests import first_word, phase_request
from updater.core.state import FleetState, Member, Phase, Standing
from updater.core.table import TABLE
from updater.core.version import Version

#: States in which a front serves, or may do so without anybody else.
SERVES = (FrontState.OPEN, FrontState.CLOSING, FrontState.PAUSED, FrontState.INSTALLED, FrontState.INVALIDATED)


# --- the first word


def led(state: FleetState, event: Replied) -> Moved:
    """The member obeys this epoch from now on, and its reply says what state it is in."""
    member = _asked_to_obey(state, event)
    if member is None or not member.unled:
        return state, ()
    status: FrontStatus = event.reply
    owed = None if member.owed == first_word(state, member) else member.owed
    member = replace(member, unled=False, owed=owed, ranks=status.ranks or member.ranks)
    state = replace(state.with_member(member), serial=max(state.serial, status.serial))
    update = state.update
    if update is not None and member.replica in update.waiting and not update.recording and TABLE[state.phase].verb:
        return state, (phase_request(state, update, member),)
    if member.standing is Standing.JOINING and state.phase is Phase.IDLE and status.serial > 0:
        return members.tidy_anew(state, member)
    return seen(state, Seen(member.replica, status))


def not_led(state: FleetState, event: Refused) -> Moved:
    """The member obeys another coordinator. If it obeyed this one before, the fleet was taken over."""
    member = _asked_to_obey(state, event)
    if member is None or not member.unled:
        return state, ()
    if event.failures[0].code == "taken_over":
        return _another_leads(state, event.failures[0].at(replica=event.replica))
    return state, ()  # the member is asked again when its next status arrives


def _asked_to_obey(state: FleetState, event: Replied | Refused) -> Member | None:
    member = state.member(event.replica)
    return member if member is not None and event.fence == first_word(state, member).fence else None


# --- polls


def seen(state: FleetState, event: Seen) -> Moved:
    """A status poll: first compare whom the member obeys, then take over its state."""
    member, status = state.member(event.replica), event.status
    if member is not None and not member.incarnation:
        # Adopted while it was silent: this is its first word to us.
        member = replace(member, incarnation=status.incarnation)
        state = state.with_member(member)
    if member is None or member.incarnation != status.incarnation:
        return state, ()
    if status.ranks and status.ranks != member.ranks:
        member = replace(member, ranks=status.ranks)
        state = state.with_member(member)
    if status.fleet == state.fleet and status.epoch > state.epoch:
        return _another_leads(state, Failure("taken_over", f"obeys epoch {status.epoch}", replica=member.replica))
    if not member.unled and status.epoch == state.epoch and status.owner != state.owner:
        return _copy_of_the_journal(state, member, status)
    return members.seen(state, member, status)


def _another_leads(state: FleetState, failure: Failure) -> Moved:
    """A higher epoch of this fleet leads the member. A coordinator that was obeyed in this life was taken over and
    stops; otherwise its journal is old.
    """
    if any(not member.unled for member in state.members):
        message = f"another coordinator leads this fleet: {failure.replica} {failure.message}"
        taken = Failure("taken_over", message, replica=failure.replica, hint="send updates to the other coordinator")
        return replace(state, phase=Phase.STOPPED), (Stop(taken),)
    return behind(state, failure.message, failure.replica)


def _copy_of_the_journal(state: FleetState, member: Member, status: FrontStatus) -> Moved:
    """Two coordinators were started on copies of one journal: the higher owner id loses."""
    if status.owner < state.owner:
        message = f"a coordinator on a copy of this journal leads the fleet with the same epoch {state.epoch}"
        hint = "give every coordinator a state folder of its own"
        return replace(state, phase=Phase.STOPPED), (Stop(Failure("taken_over", message, member.replica, hint=hint)),)
    member = replace(member, unled=True)
    return state.with_member(member), (first_word(state, member),)


# --- calls


def called(state: FleetState, event: Called) -> Moved:
    """A front asks whether it is still a member. What it says may show that this journal is not the newest."""
    call, member = event.call, state.member(event.call.replica)
    if not state.has_history:
        if call.fleet:
            state = replace(state, hold=members.adopt_needed(call.replica, call.fleet))
        return state, (Claimed(Claim.UNKNOWN, "", state.epoch),)
    mine = call.fleet in ("", state.fleet)
    known = member is not None and member.incarnation in ("", call.incarnation)
    newer = _newer(state, call) if call.fleet == state.fleet else ""
    claim = Claim.UNKNOWN
    if mine and known:
        claim = Claim.MEMBER
    elif call.fleet == state.fleet and not newer:
        if {(call.replica, call.incarnation), (call.replica, "")} & set(state.gone):
            claim = Claim.REMOVED
        elif call.state in SERVES:
            newer = "serves, and this journal has never heard of it"
    effects: tuple[Effect, ...] = ()
    if newer:
        state, effects = behind(state, newer, call.replica)
    return state, (*effects, Claimed(claim, state.fleet, state.epoch))


def _newer(state: FleetState, call: Call) -> str:
    """What it obeys or serves that this coordinator has not decided, or nothing."""
    if call.epoch > state.epoch:
        return f"obeys epoch {call.epoch}, this is {state.epoch}"
    if call.state in (*SERVES, FrontState.ORPHANED) and Version.parse(call.version) > state.highest:
        return f"holds version {call.version}, and the newest here is {state.highest}"
    return ""


# --- holding still


def behind(state: FleetState, message: str, replica: str) -> Moved:
    """Publish nothing, admit no replica, and say so. What is not decided yet is given up."""
    state = replace(state, hold=not_newest(message, replica))
    if state.update is None:
        return state, ()
    return flow.undo(state, "behind", ()) or (state, ())


def hold_ended(state: FleetState, event: HoldEnded) -> Moved:
    return (replace(state, hold=None) if state.listening else state), ()
