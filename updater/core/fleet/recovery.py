"""What a new coordinator does with an old one's journal and the fronts' reports (docs/protocol.md, "Recovery").

Nothing recorded: abort. `decided`: forward only if every participant reports that it installed exactly this, or if one
already serves it; else revert. `reverted`: finish restoring. `published`: forward only. Whatever a catch-up left
installed is taken back.

Pure: the shell asks every known member for its status, lets `survey` say under which epoch they may be led, says `lead`
to those that answered, and feeds `recover` what they answered to that. A journal that turns out not to be the newest
of its fleet shuts no replica (I11): the newest version that all its members prove is followed, or nothing is done.
`adopt`: a coordinator without that journal takes the fleet over because an operator says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from updater.core.errors import Failure
from updater.core.fleet.effects import Append, Effect, Label, Outcome, Record, RecordKind
from updater.core.fleet.flow import Moved, enter
from updater.core.fleet.lineage import (
    ADOPTION,
    LISTENING,
    PAUSED,
    SHUT_INSTALLED,
    KnownJournal,
    KnownMember,
    Reports,
    held,
    holds,
    otherwise,
    replay,
    survey,
    unproved,
)
from updater.core.fleet.members import GONE_KEPT, adopt_needed, obeys
from updater.core.fleet.requests import first_word, phase_request
from updater.core.fleet.state import Fleet, Member, Phase, Published, Standing, Transaction
from updater.core.participant import FrontState, FrontStatus, Kind, SpareState
from updater.core.policy import Policy
from updater.core.version import START, Version

RESTARTED = Failure("coordinator_restarted", "the coordinator was restarted before this update was published")

SHUT_JOINING = (FrontState.JOINING, FrontState.ORPHANED)
DONE_INSTALLING = (FrontState.INSTALLED, FrontState.INVALIDATED)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where to go on: perform `effects`, then step as usual."""

    state: Fleet
    effects: tuple[Effect, ...] = ()


def recover(
    fleet: str,
    journal: KnownJournal,
    reports: Reports,
    *,
    epoch: int = 0,
    owner: str = "",
    older: bool = False,
    new_fleet: bool = False,
) -> Recovery:
    """`reports`: what every member answered to `lead`, None for a silent one. `epoch`, `older`: what the survey found.

    `new_fleet`: it need not listen for replicas that this journal does not know. A journal does not show that it is
    an older copy, so the wait is for all.
    """
    answered = [report for report in reports.values() if report is not None]
    state = Fleet(
        fleet=fleet,
        epoch=epoch or survey(fleet, journal, reports).epoch,
        serial=max([journal.serial, *(r.serial for r in journal.records), *(r.serial for r in answered)]),
        owner=owner,
        hold=None if new_fleet else LISTENING,
        gone=journal.gone,
    )
    if not journal.records:
        return Recovery(_without_history(state, journal, reports))
    state = replay(state, journal.records)
    if older or otherwise(state, journal, reports):
        hold = unproved(journal, reports)
        if hold is not None:
            return Recovery(held(state, journal, hold))
        return _follow(state, journal, reports)
    state = _with_members(state, journal, reports)
    after, effects = _go_on(state, journal.records, reports)
    return Recovery(after, effects)


# --- an empty journal


def _without_history(state: Fleet, journal: KnownJournal, reports: Reports) -> Fleet:
    """Nothing was ever published from here. Who knows of a fleet is not shut by the beginning of another."""
    veterans = [report for report in reports.values() if report is not None and report.fleet]
    if veterans:
        return held(state, journal, adopt_needed(veterans[0].replica, veterans[0].fleet))
    return _with_members(state, journal, reports)


# --- an older journal, and adoption


def _follow(state: Fleet, journal: KnownJournal, reports: Reports) -> Recovery:
    """The version that all serving members hold becomes `live`, and is recorded as published."""
    serving = [report for report in reports.values() if report is not None and report.state is FrontState.OPEN]
    return published(state, journal, reports, serving[0])


def published(state: Fleet, journal: KnownJournal, reports: Reports, proof: FrontStatus) -> Recovery:
    label = Label(Version.parse(proof.live_version), proof.live_digest)
    live = state.live if state.live is not None and state.live.label == label else Published(label)
    state = replace(state, live=live, before=None, highest=max(state.highest, label.version))
    state = _with_members(state, journal, reports)
    serial = state.serial + 1
    members = tuple((member.replica, member.incarnation) for member in state.serving())
    record = Record(
        RecordKind.PUBLISHED, state.epoch, serial, 0, "", "", Kind.UPDATE, label.version, label.digest, "", members
    )
    return Recovery(replace(state, serial=serial, starting=record), (Append(record),))


# --- what the journal says


def _with_members(state: Fleet, journal: KnownJournal, reports: Reports) -> Fleet:
    known = {member.replica: member for member in journal.members}
    # The publication of `start` admits no replica by itself.
    updates = [record for record in journal.records if record.kind is RecordKind.PUBLISHED and record.update]
    published = {pair for record in updates for pair in record.members}
    for replica in sorted({*known, *reports}):
        report = reports.get(replica)
        base = known.get(replica) or KnownMember(replica, "")
        if report is not None and base.incarnation not in ("", report.incarnation):
            # That process is gone; the one in its place is no member before it joins.
            state = replace(state, gone=(*state.gone, (replica, base.incarnation))[-GONE_KEPT:])
            continue
        state = state.with_member(_member(state, base, report, (replica, base.incarnation) in published))
    return state


def _member(state: Fleet, known: KnownMember, report: FrontStatus | None, published: bool) -> Member:
    member = Member(
        known.replica, known.incarnation, Standing.LOST, "", admitted=published, url=known.url,
        config_hash=known.config_hash, unled=report is None or not obeys(state, report),
    )  # fmt: skip
    if report is None:
        return member
    admitted = _admitted(state, known, report, published)
    member = replace(
        member,
        incarnation=report.incarnation,
        live=report.live_digest,
        admitted=admitted,
        previous=_way_back(state, report),
        standing=Standing.OK if admitted else Standing.JOINING,
        ranks=report.ranks,
    )
    if report.state in (FrontState.BROKEN, FrontState.QUARANTINED):
        return replace(member, standing=Standing.QUARANTINED, shut=True, previous=None)
    if report.state is FrontState.OPEN and not admitted:
        return replace(member, standing=Standing.QUARANTINED)
    return replace(member, shut=report.state in SHUT_JOINING)


def _admitted(state: Fleet, known: KnownMember, report: FrontStatus, published: bool) -> bool:
    """Whether the member served before: the journal says so, or its spare or live bytes are the live version."""
    if report.state in SHUT_JOINING:
        return False
    if report.state is FrontState.OPEN:
        return state.live is not None and holds(report, state.live.label)
    kept = _previous(report)
    return (
        (published and report.incarnation == known.incarnation)
        or (state.live is not None and (holds(report, state.live.label) or kept == state.live.label))
    )  # fmt: skip


def _previous(report: FrontStatus) -> Label | None:
    if report.spare.state is not SpareState.PREVIOUS:
        return None
    return Label(Version.parse(report.spare.version), report.spare.digest)


def _way_back(state: Fleet, report: FrontStatus) -> Label | None:
    """What it keeps for a rollback. One that has installed keeps what is live: whichever way its update ends, that is
    not yet a version to go back to.
    """
    kept = _previous(report)
    return None if state.live is not None and kept == state.live.label else kept


# --- going on


def _go_on(state: Fleet, records: Sequence[Record], reports: Reports) -> Moved:
    last = records[-1]
    mates = [(reports.get(replica), incarnation) for replica, incarnation in last.members]
    same = [report if report and report.incarnation == incarnation else None for report, incarnation in mates]
    if last.kind is RecordKind.DECIDED:
        return _undecided_end(state, last, same)
    if any(report is not None and _stuck(last, report) for report in same):
        update = _transaction(last)
        if last.kind is RecordKind.PUBLISHED:
            return _resume(state, update, Phase.RESUMING)
        back = replace(update, end=Outcome.ROLLED_BACK, failures=(RESTARTED,))
        return _resume(state, back, Phase.RESTORING)
    state, sends = _owed_by_silent(state, last, reports)
    after, effects = _unrecorded(state, [report for report in reports.values() if report is not None])
    return after, (*sends, *effects)


def _owed_by_silent(state: Fleet, last: Record, reports: Reports) -> Moved:
    """Who took part in the last record and does not answer may still have to be told how it ended."""
    silent = [member for member in state.members if reports.get(member.replica) is None]
    owing = [member for member in silent if (member.replica, member.incarnation) in last.members and last.update]
    effects: tuple[Effect, ...] = ()
    phase = Phase.RESUMING if last.kind is RecordKind.PUBLISHED else Phase.RESTORING
    asking = replace(state, phase=phase, update=_transaction(last))
    for member in owing:
        send = phase_request(asking, _transaction(last), member)
        standing = Standing.LOST if last.kind is RecordKind.PUBLISHED else Standing.QUARANTINED
        state = state.with_member(replace(member, owed=send, standing=standing))
        effects = (*effects, first_word(state, member))  # the message that it owes an answer to follows
    return state, effects


def _undecided_end(state: Fleet, last: Record, same: Sequence[FrontStatus | None]) -> Moved:
    """`decided` is the last word: nothing was published, so no client has seen it."""
    update = _transaction(last)
    label = Label(last.version, last.digest)
    serves = [r for r in same if r is not None and r.state is FrontState.OPEN and holds(r, label)]
    if serves:
        names = {report.replica for report in serves}
        for member in state.members:
            if member.replica in names:
                state = state.with_member(replace(member, standing=Standing.OK, admitted=True))
        return _resume(state, update, Phase.PUBLISHING)
    if all(report is not None and _has_installed(last, report) for report in same):
        return _resume(state, update, Phase.INVALIDATING)
    back = replace(update, end=Outcome.ROLLED_BACK, failures=(RESTARTED,))
    return _resume(state, back, Phase.RESTORING)


def _has_installed(last: Record, report: FrontStatus) -> bool:
    return (
        report.state in DONE_INSTALLING
        and (report.serial, report.attempt) == (last.serial, last.attempt)
        and holds(report, Label(last.version, last.digest))
    )


def _stuck(last: Record, report: FrontStatus) -> bool:
    """Whether the update of the last record shut this member, and not a later one."""
    if last.kind is RecordKind.PUBLISHED:
        return _has_installed(last, report)
    return report.state in (*SHUT_INSTALLED, *PAUSED) and (report.serial, report.attempt) == (last.serial, last.attempt)


def _unrecorded(state: Fleet, reports: Sequence[FrontStatus]) -> Moved:
    """Nothing was recorded of it: take back what a catch-up installed, reopen what is paused, drop what is staged. All
    under a serial of its own: how the updates before ended is not said again.
    """
    state = replace(state, serial=state.serial + 1)
    installed = [report for report in reports if report.state in SHUT_INSTALLED]
    if installed:
        back = _leftover(state, Kind.CATCH_UP, installed)
        return _resume(state, replace(back, end=Outcome.ROLLED_BACK), Phase.RESTORING)
    # A discard also reopens what is paused, is acknowledged at once where nothing is held, and fences the old epoch.
    asked = [report for report in reports if report.state in (FrontState.OPEN, FrontState.JOINING, *PAUSED)]
    if not asked:
        return state, ()
    back = _leftover(state, Kind.UPDATE, asked)
    return _resume(state, replace(back, end=Outcome.ABORTED), Phase.DISCARDING)


def _resume(state: Fleet, update: Transaction, phase: Phase) -> Moved:
    return enter(replace(state, update=update), phase)


def _transaction(last: Record) -> Transaction:
    return Transaction(
        update=last.update,
        body_hash=last.body_hash,
        kind=last.op,
        serial=last.serial,
        version=last.version,
        policy=last.policy,
        offer=last.offer,
        manifest=last.manifest,
        participants=last.members,
        attempt=last.attempt,
        digest=last.digest,
        manifest_digest=last.manifest_digest,
        commit_requested=True,
    )


def _leftover(state: Fleet, kind: Kind, reports: Sequence[FrontStatus]) -> Transaction:
    """A transaction that only cleans up. Its fence is later than that of every update which left something behind."""
    return Transaction(
        update="",
        body_hash="",
        kind=kind,
        serial=state.serial,
        version=state.live.label.version if state.live else START,
        policy=state.live.policy if state.live else Policy(),
        offer=None,
        manifest="",
        participants=tuple((report.replica, report.incarnation) for report in reports),
        failures=(RESTARTED,),
    )


@dataclass(frozen=True, slots=True)
class Adoption:
    """Which fleet, and the epoch to lead it with. If `refusal` is set, nothing may be sent to its fronts."""

    fleet: str = ""
    epoch: int = 0
    refusal: Failure | None = None


def may_adopt(journal: KnownJournal, reports: Reports) -> Adoption:
    """`reports`: status of each front that an operator named. A silent front may be adopted too: it is `lost`, and
    blocks.
    """
    answered = [report for report in reports.values() if report is not None]
    fleets = sorted({report.fleet for report in answered if report.fleet})
    if len(fleets) != 1:
        why = f"they belong to {len(fleets)} fleets: {', '.join(fleets) or 'none of them has ever been in one'}"
        return Adoption(refusal=Failure("adopt_needed", why, hint="name the fronts of one fleet"))
    for report in answered:
        if report.state in (*PAUSED, *SHUT_INSTALLED):
            hint = "wait for the end of its pause, or open it first: liveweights release URL --to live or previous"
            busy = Failure("wrong_phase", f"is {report.state.value} in an update", replica=report.replica, hint=hint)
            return Adoption(refusal=busy)
    if len({(r.live_version, r.live_digest) for r in _proofs(answered)}) != 1:
        said = tuple(f"{r.replica} {r.live_version} {r.live_digest[:12]} ({r.state.value})" for r in answered)
        hint = "adopt those that serve one version; restart the others to let them join"
        why = f"they do not hold one version: {', '.join(said)}"
        return Adoption(refusal=Failure("adopt_needed", why, hint=hint))
    newest = max([journal.epoch, *(r.epoch for r in journal.records), *(report.epoch for report in answered)])
    return Adoption(fleets[0], (newest // ADOPTION + 1) * ADOPTION)


def adopt(adoption: Adoption, journal: KnownJournal, reports: Reports, *, owner: str = "") -> Recovery:
    """`journal.members`: the named fronts. `reports`: what they answered to `lead`, None for a silent one."""
    answered = [report for report in reports.values() if report is not None]
    serial = max([journal.serial, *(r.serial for r in journal.records), *(r.serial for r in answered)])
    state = Fleet(adoption.fleet, adoption.epoch, serial, owner=owner, gone=journal.gone)
    return published(replay(state, journal.records), journal, reports, _proofs(answered)[0])


def _proofs(reports: Sequence[FrontStatus]) -> list[FrontStatus]:
    """The fronts that prove what the fleet serves: those that serve or were shut as orphans; if there are none, those
    that had served.
    """
    serving = [report for report in reports if report.state in (FrontState.OPEN, FrontState.ORPHANED)]
    return serving or [report for report in reports if report.fleet and report.state is FrontState.JOINING]
