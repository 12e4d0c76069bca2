"""What a journal knows of its fleet, and whether it is the newest that there is (I11).

A journal may be lost, or be an older copy. Then its fleet has obeyed and published what it does not know, and what it
would do to the members by its own knowledge would be wrong. `survey` looks at what they say before anything is said to
them: it finds the epoch to lead them with, or the reason why no replica may be led.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from updater.core.effects import Label, Record, RecordKind
from updater.core.errors import Failure
from updater.core.participant import FrontState, FrontStatus, Kind
from updater.core.state import FleetState, Member, Published, Standing
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
class Journal:
    """What the shell read. `records` oldest first; `epoch`, `serial`: the highest ever used. `gone`: as of FleetState.

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


def survey(fleet: str, journal: Journal, reports: Reports) -> Survey:
    """`reports`: status of every member that could be asked, None for a silent one."""
    answered = [report for report in reports.values() if report is not None and report.fleet == fleet]
    known = max([journal.epoch, *(record.epoch for record in journal.records)])
    newest = max((report.epoch for report in answered), default=0)
    epoch = 1 + max(known, newest)
    if not journal.records:
        return Survey(epoch)
    state = replay(FleetState(fleet, epoch), journal.records)
    older = newest > known or bool(otherwise(state, journal, reports))
    if journal.taken_over or newest // ADOPTION > known // ADOPTION:
        why = "another coordinator has adopted the fleet, or led it after this one"
        return Survey(epoch, older, not_newest(why))
    return Survey(epoch, older, unproved(journal, reports) if older else None)


def held(state: FleetState, journal: Journal, hold: Failure) -> FleetState:
    """State of a coordinator that holds: it leads no member, sends nothing and trusts no report; it knows the members'
    ids.
    """
    members = tuple(
        Member(known.replica, known.incarnation, Standing.LOST, "", url=known.url, config_hash=known.config_hash,
               unled=True)
        for known in sorted(journal.members, key=lambda each: each.replica)
    )  # fmt: skip
    return replace(state, members=members, hold=hold)


def nobody_led(fleet: str, journal: Journal, found: Survey) -> FleetState:
    """The state of a coordinator that may lead no replica, because of what its survey found."""
    epoch = 1 + max([journal.epoch, *(record.epoch for record in journal.records)])
    state = replay(FleetState(fleet, epoch, journal.serial, gone=journal.gone), journal.records)
    return held(state, journal, found.hold or not_newest("it may lead no replica"))


def otherwise(state: FleetState, journal: Journal, reports: Reports) -> list[FrontStatus]:
    """Who holds, of this fleet, what no record explains, or serves as another incarnation than the journal knows. Who
    was released by hand is explained by that.
    """
    last = journal.records[-1]
    explained = [state.live.label] if state.live is not None else []
    explained += [Label(last.version, last.digest)] if last.kind is RecordKind.DECIDED else []
    known = {member.replica: member.incarnation for member in journal.members}
    mine = [report for report in reports.values() if report is not None and report.fleet == state.fleet]
    return [report for report in mine if _is_otherwise(report, state, explained, known)]


def _is_otherwise(report: FrontStatus, state: FleetState, explained: Sequence[Label], known: Mapping[str, str]) -> bool:
    serves = report.state in (FrontState.OPEN, *PAUSED, *SHUT_INSTALLED)
    if serves and known.get(report.replica) not in ("", report.incarnation):
        return True
    if report.released is not None:
        return False
    undecided = Version.parse(report.live_version) > state.highest
    return undecided or (report.state is FrontState.OPEN and not _one_of(report, explained))


def _one_of(report: FrontStatus, labels: Sequence[Label]) -> bool:
    return any(holds(report, label) for label in labels)


def unproved(journal: Journal, reports: Reports) -> Failure | None:
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


def replay(state: FleetState, records: Sequence[Record]) -> FleetState:
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
