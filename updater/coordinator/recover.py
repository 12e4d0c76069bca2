"""What a coordinator does first: take the fleet over, ask everybody, and let the core decide how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from updater.coordinator.clock import Clock
from updater.coordinator.journal import Journal, Member, Request
from updater.coordinator.membership import Contact, Directory
from updater.coordinator.participants import ParticipantFactory
from updater.core import recovery
from updater.core.effects import Effect, Outcome, Record, RecordKind, Result
from updater.core.errors import Failure
from updater.core.participant import FrontStatus, Kind
from updater.core.state import FleetState
from updater.settings import Settings


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose receipt was never written although its end is known. `record`: the last one of it, if any."""

    request: Request
    outcome: Outcome
    record: Record | None


@dataclass(frozen=True, slots=True)
class Found:
    """`going_on`: requests whose update continues."""

    state: FleetState
    effects: tuple[Effect, ...] = ()
    going_on: tuple[Request, ...] = ()
    ended: tuple[Ended, ...] = ()
    refusal: Failure | None = None


class Recovery:
    """One recovery. Raises JournalFailed, OwnershipLost if another one takes the fleet over meanwhile."""

    def __init__(
        self, journal: Journal, directory: Directory, make: ParticipantFactory, settings: Settings, clock: Clock
    ) -> None:
        self._journal, self._directory, self._make = journal, directory, make
        self._settings, self._clock = settings, clock

    async def run(self, owner: str) -> Found:
        """From what the journal knows."""
        # Claimed first: whoever owned the fleet appends nothing after what is read here.
        epoch = self._journal.claim(owner)
        records, members = self._journal.records(), self._journal.members()
        for member in members:
            self._directory.put(member.replica, Contact(self._make(member.replica, member.url)))
        patient = bool(records) and records[-1].kind is RecordKind.DECIDED
        reports = await self._ask(members, patient)
        return self._decide(owner, epoch, records, members, reports, adopt=False)

    async def adopt(self, owner: str, members: Sequence[Member]) -> Found:
        """Take over members with history under an empty journal. They are in the directory already."""
        epoch = self._journal.epoch()
        reports = await self._ask(members, patient=False)
        return self._decide(owner, epoch, (), members, reports, adopt=True)

    async def _ask(self, members: Sequence[Member], patient: bool) -> dict[str, FrontStatus | None]:
        """Everybody's status. `patient`: a silent member would turn an update back, so it is asked again."""
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

    def _decide(
        self,
        owner: str,
        epoch: int,
        records: tuple[Record, ...],
        members: Sequence[Member],
        reports: dict[str, FrontStatus | None],
        *,
        adopt: bool,
    ) -> Found:
        known = tuple(recovery.KnownMember(m.replica, m.incarnation, m.url, m.config_hash) for m in members)
        journal = recovery.Journal(records, known, epoch - 1, self._journal.last_serial())
        found = recovery.recover(self._settings.fleet, journal, reports, adopt=adopt)
        if found.state.epoch > epoch:
            self._journal.claim(owner, found.state.epoch - 1)
        going_on, ended = self._sort(found.state, records)
        return Found(found.state, found.effects, going_on, ended, found.refusal)

    def _sort(self, state: FleetState, records: tuple[Record, ...]) -> tuple[tuple[Request, ...], tuple[Ended, ...]]:
        """Of the requests without a receipt: which go on, and how the others ended."""
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


def result_of(ended: Ended, state: FleetState) -> Result:
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
