"""What a coordinator does first: take the fleet over, ask every member, and let the core decide how to go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from updater.coordinator.clock import Clock
from updater.coordinator.journal.journal import Journal, KnownReplica, RequestRow
from updater.coordinator.members.directory import MemberDirectory, MemberHandle
from updater.coordinator.members.participants import ParticipantFactory, Refusal, Unreachable
from updater.core.errors import Failure, Rejected
from updater.core.fleet import lineage, recovery
from updater.core.fleet.effects import Effect, Outcome, Record, RecordKind, Result
from updater.core.fleet.state import Fleet
from updater.core.participant import Fence, FenceRequest, FrontStatus, Kind
from updater.core.release import mismatch
from updater.settings import Settings

_log = logging.getLogger("liveweights.coordinator")


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose receipt was never written although its end is known. `record`: the last one of it, if any."""

    request: RequestRow
    outcome: Outcome
    record: Record | None


@dataclass(frozen=True, slots=True)
class RecoveredFleet:
    """`going_on`: requests whose update continues."""

    state: Fleet
    effects: tuple[Effect, ...] = ()
    going_on: tuple[RequestRow, ...] = ()
    ended: tuple[Ended, ...] = ()


class FleetRecovery:
    """One recovery, tried again while it leads no member. Raises JournalFailed, OwnershipLost if another one takes the
    fleet over meanwhile.
    """

    def __init__(
        self,
        journal: Journal,
        directory: MemberDirectory,
        make: ParticipantFactory,
        settings: Settings,
        clock: Clock,
        owner: str,
    ) -> None:
        self._journal, self._directory, self._make = journal, directory, make
        self._settings, self._clock, self._owner = settings, clock, owner
        self._older = False

    async def run(self) -> RecoveredFleet:
        """Recover from the journal and from what the members report."""
        # Claimed first: the coordinator before appends nothing after what is read here.
        epoch = self._journal.claim(self._owner)
        return await self._find(epoch - 1)

    async def again(self) -> RecoveredFleet:
        """Try again where no member could be led: its members may report another state by now."""
        return await self._find(self._journal.epoch())

    async def _find(self, known_epoch: int) -> RecoveredFleet:
        records, members = self._journal.records(), self._journal.members()
        for member in members:
            if self._directory.get(member.replica) is None:
                self._directory.put(member.replica, MemberHandle(self._make(member.replica, member.url)))
        patient = bool(records) and records[-1].kind is RecordKind.DECIDED
        reports = await self._ask(members, patient)
        fleet, journal = self._journal.identity(), self._known(known_epoch, records, members)
        survey = lineage.survey(fleet, journal, reports)
        self._older |= survey.older
        if survey.hold is not None:
            return RecoveredFleet(lineage.nobody_led(fleet, journal, survey))
        if survey.epoch > self._journal.epoch():
            self._journal.claim(self._owner, survey.epoch - 1)
        if records:  # without one nothing was ever said to anybody
            reports = await self.lead(fleet, survey.epoch, members, reports)
        found = recovery.recover(
            fleet,
            journal,
            reports,
            epoch=survey.epoch,
            owner=self._owner,
            older=self._older,
            new_fleet=self._settings.new_fleet,
        )
        going_on, ended = self._sort(found.state, records)
        return RecoveredFleet(found.state, found.effects, going_on, ended)

    async def adopt(self, members: Sequence[KnownReplica]) -> RecoveredFleet:
        """Take over fronts with history that an operator named. They are in the directory already. Answers once every
        one that can be reached has acknowledged the new epoch. Raises LiveweightsError where they may not be adopted.
        """
        reports = await self._ask(members, patient=False)
        journal = self._known(self._journal.epoch(), self._journal.records(), members)
        adoption = recovery.may_adopt(journal, reports)
        if journal.records and adoption.fleet != self._journal.identity():
            hint = "adopt it with a coordinator on an empty state folder"
            why = f"the journal is that of fleet {self._journal.identity()}, not {adoption.fleet}"
            raise Rejected(adoption.refusal or Failure("wrong_phase", why, hint=hint))
        if adoption.refusal is not None:
            raise Rejected(adoption.refusal)
        self._journal.claim(self._owner, adoption.epoch - 1)
        reports = await self.lead(adoption.fleet, adoption.epoch, members, reports)
        if not any(reports.values()):
            raise Rejected(Failure("unreachable", "no front has acknowledged the new epoch", hint="adopt again"))
        found = recovery.adopt(adoption, journal, reports, owner=self._owner)
        self._journal.adopt(adoption.fleet)
        return RecoveredFleet(found.state, found.effects)

    def _known(self, epoch: int, records: tuple[Record, ...], members: Sequence[KnownReplica]) -> lineage.KnownJournal:
        known = tuple(lineage.KnownMember(m.replica, m.incarnation, m.url, m.config_hash) for m in members)
        gone, serial = self._journal.gone(), self._journal.last_serial()
        return lineage.KnownJournal(records, known, epoch, serial, gone, self._journal.taken_over())

    async def _ask(self, members: Sequence[KnownReplica], patient: bool) -> dict[str, FrontStatus | None]:
        """The status of every member. `patient`: a silent member would turn an update back, so it is asked again."""
        deadlines = self._settings.deadlines
        reports: dict[str, FrontStatus | None] = {member.replica: None for member in members}
        for attempt in range(deadlines.lost_after if patient else 1):
            silent = [replica for replica, report in reports.items() if report is None]
            if not silent:
                break
            if attempt:
                await self._clock.sleep(deadlines.retry_first_s * 2**attempt)
            reports |= await self._directory.ask_all(silent, deadlines.status_s)
        return reports

    async def lead(
        self, fleet: str, epoch: int, members: Sequence[KnownReplica], reports: dict[str, FrontStatus | None]
    ) -> dict[str, FrontStatus | None]:
        """The first word of this life to every member that answered; what they answer to that is what counts."""
        known = {member.replica: member.incarnation for member in members}
        foreign = [failure for report in reports.values() if report is not None and (failure := mismatch(report))]
        for failure in foreign:
            _log.warning("%s is not led: %s; %s", failure.replica, failure.message, failure.hint)
        asked = {
            replica: Fence(fleet, epoch, 0, 0, report.incarnation, self._owner)
            for replica, report in reports.items()
            if report is not None
            and mismatch(report) is None
            and known.get(replica) in ("", report.incarnation)
            and report.fleet in ("", fleet)
        }
        answers = await asyncio.gather(*(self._say(replica, fence) for replica, fence in asked.items()))
        unled: dict[str, FrontStatus | None] = dict.fromkeys((failure.replica for failure in foreign), None)
        return {**reports, **unled, **dict(zip(asked, answers, strict=True))}

    async def _say(self, replica: str, fence: Fence) -> FrontStatus | None:
        """None for one that did not answer, twice, or that obeys another one: the probe will find out more."""
        participant = self._directory.participant(replica)
        for _ in range(2):
            try:
                if participant is not None:
                    seconds = self._settings.deadlines.status_s
                    status: FrontStatus = await participant.call("lead", FenceRequest(fence), seconds)
                    return status
            except Unreachable as silence:
                _log.warning("%s does not answer: %s", replica, silence)
            except Refusal as refusal:
                _log.warning("%s does not obey: %s", replica, refusal)
                return None
        return None

    def _sort(self, state: Fleet, records: tuple[Record, ...]) -> tuple[tuple[RequestRow, ...], tuple[Ended, ...]]:
        """Of the requests without a receipt: which go on, and how the others ended. An older journal cannot say."""
        if state.hold is not None and state.hold.code == "behind":
            return (), ()
        going_on, ended = [], []
        for request in self._journal.requests(running=True):
            mine = [record for record in records if record.serial == request.serial]
            last = mine[-1] if mine else None
            if state.update is not None and state.update.update and state.update.serial == request.serial:
                going_on.append(request)
            elif last is not None and last.kind is RecordKind.PUBLISHED:
                ended.append(Ended(request, Outcome.COMMITTED, last))
            elif last is not None:
                ended.append(Ended(request, Outcome.ROLLED_BACK, last))
            else:
                ended.append(Ended(request, Outcome.ABORTED, None))
        return tuple(going_on), tuple(ended)


def result_of(ended: Ended, state: Fleet) -> Result:
    """How an update ended that a former coordinator did not live to tell. Presumed abort: of what nothing was
    recorded, nothing happened."""
    record, committed = ended.record, ended.outcome is Outcome.COMMITTED
    failure = Failure("coordinator_restarted", "the coordinator was restarted before this update was published")
    return Result(
        update=ended.request.id,
        serial=ended.request.serial,
        attempts=record.attempt if record is not None else 0,
        kind=Kind(ended.request.kind),
        outcome=ended.outcome,
        reason="" if committed else failure.code,
        failures=() if committed else (failure,),
        version=record.version if record is not None else None,
        digest=record.digest if record is not None else "",
        manifest_digest=record.manifest_digest if record is not None else "",
        proof="",
        bytes_read=0,
        tensors_changed=0,
        warnings=(),
        aborted_requests=0,
        requeued_requests=0,
        members=(),
        live=state.live.label if state.live is not None else None,
        rollback_to=state.rollback_to,
    )
