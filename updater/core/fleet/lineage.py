"""What a journal knows of its fleet, and whether it is the newest that there is (I11).

A journal may be lost, or be an older copy. Then its fleet has obeyed and published what it does not know, and what it
would do to the members by its own knowledge would be wrong. `survey` looks at what they say before anything is said to
them: it finds the epoch to lead them with, or the reason why no replica may be led. `led` to `hold_ended`: what the
running machine does with a front's answer to `lead`, with what a front says of who leads it, and with its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from updater.core.errors import Failure
from updater.core.fleet import flow, members
from updater.core.fleet.effects import Effect, Label, Record, RecordKind, Stop
from updater.core.fleet.events import Called, HoldEnded, Refused, Replied, Seen
from updater.core.fleet.flow import Moved
from updater.core.fleet.requests import first_word, phase_request
from updater.core.fleet.state import Fleet, Member, Phase, Published, Standing
from updater.core.fleet.table import TABLE
from updater.core.participant import Call, Claim, Claimed, FrontState, FrontStatus, Kind
from updater.core.version import Version

#: An adoption opens the next million of epochs: who is led with one of those was not led by a later life of the same
#: journal, but by another journal, which an older copy of this one may not follow.
ADOPTION = 1_000_000
WAY_OUT = "start the coordinator on the fleet's newest journal; if that is lost: liveweights adopt"
LISTENING = Failure(
    "listening",
    "the coordinator has just started: replicas that its journal does not know may still call",
    hint="wait two watch intervals, or start the coordinator with --new-fleet",
)
SHUT_INSTALLED = (FrontState.INSTALLING, FrontState.INSTALLED, FrontState.INVALIDATED, FrontState.RESTORING)
PAUSED = (FrontState.CLOSING, FrontState.PAUSED)


@dataclass(frozen=True, slots=True)
class KnownMember:
    """What the journal says of a member."""

    replica: str
    incarnation: str
    url: str = ""
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class KnownJournal:
    """What the shell read. `records` oldest first; `epoch`, `serial`: the highest ever used. `gone`: as of Fleet.

    `taken_over`: this fleet's coordinator was once refused because another one led it.
    """

    records: tuple[Record, ...] = ()
    members: tuple[KnownMember, ...] = ()
    epoch: int = 0
    serial: int = 0
    gone: tuple[tuple[str, str], ...] = ()
    taken_over: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """What the members say before anything is said to them. `epoch`: to lead them with. `older`: they have obeyed a
    later life of this fleet than the journal knows of. `hold`: why no replica may be led at all.
    """

    epoch: int
    older: bool = False
    hold: Failure | None = None


Reports = Mapping[str, FrontStatus | None]


def survey(fleet: str, journal: KnownJournal, reports: Reports) -> Survey:
    """`reports`: status of every member that could be asked, None for a silent one."""
    answered = [report for report in reports.values() if report is not None and report.fleet == fleet]
    known = max([journal.epoch, *(record.epoch for record in journal.records)])
    newest = max((report.epoch for report in answered), default=0)
    epoch = 1 + max(known, newest)
    if not journal.records:
        return Survey(epoch)
    state = replay(Fleet(fleet, epoch), journal.records)
    older = newest > known or bool(otherwise(state, journal, reports))
    if journal.taken_over or newest // ADOPTION > known // ADOPTION:
        why = "another coordinator has adopted the fleet, or led it after this one"
        return Survey(epoch, older, not_newest(why))
    return Survey(epoch, older, unproved(journal, reports) if older else None)


def held(state: Fleet, journal: KnownJournal, hold: Failure) -> Fleet:
    """State of a coordinator that holds: it leads no member, sends nothing and trusts no report; it knows the members'
    ids.
    """
    members = tuple(
        Member(known.replica, known.incarnation, Standing.LOST, "", url=known.url, config_hash=known.config_hash,
               unled=True)
        for known in sorted(journal.members, key=lambda each: each.replica)
    )  # fmt: skip
    return replace(state, members=members, hold=hold)


def nobody_led(fleet: str, journal: KnownJournal, found: Survey) -> Fleet:
    """The state of a coordinator that may lead no replica, because of what its survey found."""
    epoch = 1 + max([journal.epoch, *(record.epoch for record in journal.records)])
    state = replay(Fleet(fleet, epoch, journal.serial, gone=journal.gone), journal.records)
    return held(state, journal, found.hold or not_newest("it may lead no replica"))


def otherwise(state: Fleet, journal: KnownJournal, reports: Reports) -> list[FrontStatus]:
    """Who holds, of this fleet, what no record explains, or serves as another incarnation than the journal knows. Who
    was released by hand is explained by that.
    """
    last = journal.records[-1]
    explained = [state.live.label] if state.live is not None else []
    explained += [Label(last.version, last.digest)] if last.kind is RecordKind.DECIDED else []
    known = {member.replica: member.incarnation for member in journal.members}
    mine = [report for report in reports.values() if report is not None and report.fleet == state.fleet]
    return [report for report in mine if _is_otherwise(report, state, explained, known)]


def _is_otherwise(report: FrontStatus, state: Fleet, explained: Sequence[Label], known: Mapping[str, str]) -> bool:
    serves = report.state in (FrontState.OPEN, *PAUSED, *SHUT_INSTALLED)
    if serves and known.get(report.replica) not in ("", report.incarnation):
        return True
    if report.released is not None:
        return False
    undecided = Version.parse(report.live_version) > state.highest
    return undecided or (report.state is FrontState.OPEN and not _one_of(report, explained))


def _one_of(report: FrontStatus, labels: Sequence[Label]) -> bool:
    return any(holds(report, label) for label in labels)


def unproved(journal: KnownJournal, reports: Reports) -> Failure | None:
    """Why the members do not prove one newest version together, or None."""
    known = {member.replica: member.incarnation for member in journal.members}
    labels = set()
    for replica in sorted({*known, *reports}):
        report = reports.get(replica)
        if report is None:
            return not_newest("a member does not answer", replica)
        if report.state in (*PAUSED, *SHUT_INSTALLED):
            return not_newest(f"a member is {report.state.value}", replica)
        if report.state is FrontState.OPEN:
            if known.get(replica) not in ("", report.incarnation):
                return not_newest("a replica serves that it has never heard of", replica)
            labels.add((report.live_version, report.live_digest))
    return not_newest("its members do not serve one version") if len(labels) != 1 else None


def not_newest(why: str, replica: str = "") -> Failure:
    return Failure("behind", f"this journal is not the newest of the fleet: {why}", replica=replica, hint=WAY_OUT)


def replay(state: Fleet, records: Sequence[Record]) -> Fleet:
    """Live, the one before, and the highest decided version. A rollback's source is that of what it went back to."""
    seen: list[Published] = []
    for record in records:
        state = replace(state, highest=max(state.highest, record.version))
        if record.kind is not RecordKind.PUBLISHED:
            continue
        label = Label(record.version, record.digest)
        new = Published(label, record.manifest_digest, record.offer, record.manifest, record.policy)
        if record.op is Kind.ROLLBACK:
            new = next((old for old in reversed(seen) if old.label == label), new)
        seen.append(new)
        state = replace(state, live=new, before=state.live)
    return state


def holds(report: FrontStatus, label: Label) -> bool:
    return (report.live_version, report.live_digest) == (str(label.version), label.digest)


#: States in which a front serves, or may do so without anybody else.
SERVES = (FrontState.OPEN, FrontState.CLOSING, FrontState.PAUSED, FrontState.INSTALLED, FrontState.INVALIDATED)


# --- the first word


def led(state: Fleet, event: Replied) -> Moved:
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


def not_led(state: Fleet, event: Refused) -> Moved:
    """The member obeys another coordinator. If it obeyed this one before, the fleet was taken over."""
    member = _asked_to_obey(state, event)
    if member is None or not member.unled:
        return state, ()
    if event.failures[0].code == "taken_over":
        return _another_leads(state, event.failures[0].at(replica=event.replica))
    return state, ()  # the member is asked again when its next status arrives


def _asked_to_obey(state: Fleet, event: Replied | Refused) -> Member | None:
    member = state.member(event.replica)
    return member if member is not None and event.fence == first_word(state, member).fence else None


# --- polls


def seen(state: Fleet, event: Seen) -> Moved:
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


def _another_leads(state: Fleet, failure: Failure) -> Moved:
    """A higher epoch of this fleet leads the member. A coordinator that was obeyed in this life was taken over and
    stops; otherwise its journal is old.
    """
    if any(not member.unled for member in state.members):
        message = f"another coordinator leads this fleet: {failure.replica} {failure.message}"
        taken = Failure("taken_over", message, replica=failure.replica, hint="send updates to the other coordinator")
        return replace(state, phase=Phase.STOPPED), (Stop(taken),)
    return behind(state, failure.message, failure.replica)


def _copy_of_the_journal(state: Fleet, member: Member, status: FrontStatus) -> Moved:
    """Two coordinators were started on copies of one journal: the higher owner id loses."""
    if status.owner < state.owner:
        message = f"a coordinator on a copy of this journal leads the fleet with the same epoch {state.epoch}"
        hint = "give every coordinator a state folder of its own"
        return replace(state, phase=Phase.STOPPED), (Stop(Failure("taken_over", message, member.replica, hint=hint)),)
    member = replace(member, unled=True)
    return state.with_member(member), (first_word(state, member),)


# --- calls


def called(state: Fleet, event: Called) -> Moved:
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


def _newer(state: Fleet, call: Call) -> str:
    """What it obeys or serves that this coordinator has not decided, or nothing."""
    if call.epoch > state.epoch:
        return f"obeys epoch {call.epoch}, this is {state.epoch}"
    if call.state in (*SERVES, FrontState.ORPHANED) and Version.parse(call.version) > state.highest:
        return f"holds version {call.version}, and the newest here is {state.highest}"
    return ""


# --- holding still


def behind(state: Fleet, message: str, replica: str) -> Moved:
    """Publish nothing, admit no replica, and say so. What is not decided yet is given up."""
    state = replace(state, hold=not_newest(message, replica))
    if state.update is None:
        return state, ()
    return flow.undo(state, "behind", ()) or (state, ())


def hold_ended(state: Fleet, event: HoldEnded) -> Moved:
    return (replace(state, hold=None) if state.listening else state), ()
