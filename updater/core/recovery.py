"""What a new coordinator does with an old one's journal and the fronts' reports (design section 4, "Recovery").

Nothing recorded: abort. `decided`: forward only if every participant reports that it installed exactly this, or if one
already serves it; else revert. `reverted`: finish restoring. `published`: forward only. Whatever a catch-up left
installed is taken back. Pure: the shell asks every known member for its status first, and feeds what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from updater.core.effects import Append, Effect, Label, Outcome, Record, RecordKind
from updater.core.errors import Failure
from updater.core.flow import Moved, enter
from updater.core.participant import FrontState, FrontStatus, Kind, SpareState
from updater.core.policy import Policy
from updater.core.requests import phase_request
from updater.core.state import FleetState, Member, Phase, Published, Standing, Transaction
from updater.core.version import START, Version

RESTARTED = Failure("coordinator_restarted", "the coordinator was restarted before this update was published")

SHUT_INSTALLED = (FrontState.INSTALLING, FrontState.INSTALLED, FrontState.INVALIDATED, FrontState.RESTORING)
PAUSED = (FrontState.CLOSING, FrontState.PAUSED)
DONE_INSTALLING = (FrontState.INSTALLED, FrontState.INVALIDATED)


@dataclass(frozen=True, slots=True)
class KnownMember:
    """What the journal says of a member."""

    replica: str
    incarnation: str
    url: str = ""
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """What the shell read. `records` oldest first; `epoch`, `serial`: the highest ever used."""

    records: tuple[Record, ...] = ()
    members: tuple[KnownMember, ...] = ()
    epoch: int = 0
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where to go on: perform `effects`, then step as usual. With `refusal` set: do not serve at all."""

    state: FleetState
    effects: tuple[Effect, ...] = ()
    refusal: Failure | None = None


Reports = Mapping[str, FrontStatus | None]


def recover(fleet: str, journal: Journal, reports: Reports, *, adopt: bool = False) -> Recovery:
    """`reports`: status of every member that could be asked, None for a silent one.

    A fleet with history and an empty journal needs `adopt`: it may be the wrong journal.
    """
    answered = [report for report in reports.values() if report is not None]
    state = FleetState(
        fleet=fleet,
        epoch=1 + max([journal.epoch, *(r.epoch for r in journal.records), *(r.epoch for r in answered)]),
        serial=max([journal.serial, *(r.serial for r in journal.records), *(r.serial for r in answered)]),
    )
    if not journal.records:
        return _without_history(state, journal, reports, adopt=adopt)
    state = _replay(state, journal.records)
    state = _with_members(state, journal, reports)
    after, effects = _go_on(state, journal.records, reports)
    return Recovery(after, effects)


# --- an empty journal


def _without_history(state: FleetState, journal: Journal, reports: Reports, *, adopt: bool) -> Recovery:
    veterans = [report for report in reports.values() if report is not None and report.fleet]
    if not veterans:
        return Recovery(_with_members(state, journal, reports))
    labels = {(report.live_version, report.live_digest) for report in veterans if report.state is FrontState.OPEN}
    unclear = [report for report in veterans if report.state in (*PAUSED, *SHUT_INSTALLED)]
    if not adopt or len(labels) != 1 or unclear:
        why = "serves, but the journal is empty" if not adopt else "the members do not serve one version"
        return Recovery(state, refusal=Failure("adopt_needed", why, replica=veterans[0].replica))
    version, digest = labels.pop()
    label = Label(Version.parse(version), digest)
    state = _with_members(replace(state, live=Published(label), highest=label.version), journal, reports)
    serial = state.serial + 1
    members = tuple((member.replica, member.incarnation) for member in state.serving())
    record = Record(
        RecordKind.PUBLISHED, state.epoch, serial, 0, "", "", Kind.UPDATE, label.version, digest, "", members
    )
    return Recovery(replace(state, serial=serial, starting=record), (Append(record),))


# --- what the journal says


def _replay(state: FleetState, records: Sequence[Record]) -> FleetState:
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


def _with_members(state: FleetState, journal: Journal, reports: Reports) -> FleetState:
    known = {member.replica: member for member in journal.members}
    # The publication of `start` admits nobody by itself.
    updates = [record for record in journal.records if record.kind is RecordKind.PUBLISHED and record.update]
    published = {pair for record in updates for pair in record.members}
    for replica in sorted({*known, *reports}):
        report = reports.get(replica)
        base = known.get(replica) or KnownMember(replica, "")
        if report is not None and base.incarnation not in ("", report.incarnation):
            continue  # that process is gone; the one in its place is no member before it joins
        state = state.with_member(_member(state, base, report, (replica, base.incarnation) in published))
    return state


def _member(state: FleetState, known: KnownMember, report: FrontStatus | None, published: bool) -> Member:
    member = Member(
        known.replica, known.incarnation, Standing.LOST, "", admitted=published, url=known.url,
        config_hash=known.config_hash,
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
    return replace(member, shut=report.state is FrontState.JOINING)


def _admitted(state: FleetState, known: KnownMember, report: FrontStatus, published: bool) -> bool:
    """Whether it served before: by the journal, or because it holds or held what is live."""
    if report.state is FrontState.JOINING:
        return False
    if report.state is FrontState.OPEN:
        return state.live is not None and _holds(report, state.live.label)
    kept = _previous(report)
    return (
        (published and report.incarnation == known.incarnation)
        or (state.live is not None and (_holds(report, state.live.label) or kept == state.live.label))
    )  # fmt: skip


def _holds(report: FrontStatus, label: Label) -> bool:
    return (report.live_version, report.live_digest) == (str(label.version), label.digest)


def _previous(report: FrontStatus) -> Label | None:
    if report.spare.state is not SpareState.PREVIOUS:
        return None
    return Label(Version.parse(report.spare.version), report.spare.digest)


def _way_back(state: FleetState, report: FrontStatus) -> Label | None:
    """What it keeps for a rollback. One that has installed keeps what is live: whichever way its update ends, that is
    not yet a version to go back to.
    """
    kept = _previous(report)
    return None if state.live is not None and kept == state.live.label else kept


# --- going on


def _go_on(state: FleetState, records: Sequence[Record], reports: Reports) -> Moved:
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


def _owed_by_silent(state: FleetState, last: Record, reports: Reports) -> Moved:
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
        effects = (*effects, send)
    return state, effects


def _undecided_end(state: FleetState, last: Record, same: Sequence[FrontStatus | None]) -> Moved:
    """`decided` is the last word: nothing was published, so nobody has seen it."""
    update = _transaction(last)
    label = Label(last.version, last.digest)
    serves = [r for r in same if r is not None and r.state is FrontState.OPEN and _holds(r, label)]
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
        and _holds(report, Label(last.version, last.digest))
    )


def _stuck(last: Record, report: FrontStatus) -> bool:
    """Shut by the update of the last record, not by a later one."""
    if last.kind is RecordKind.PUBLISHED:
        return _has_installed(last, report)
    return report.state in (*SHUT_INSTALLED, *PAUSED) and (report.serial, report.attempt) == (last.serial, last.attempt)


def _unrecorded(state: FleetState, reports: Sequence[FrontStatus]) -> Moved:
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


def _resume(state: FleetState, update: Transaction, phase: Phase) -> Moved:
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


def _leftover(state: FleetState, kind: Kind, reports: Sequence[FrontStatus]) -> Transaction:
    """A transaction that only cleans up. Its fence is later than whatever left the mess."""
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
