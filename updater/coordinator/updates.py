"""The updates that run, as the coordinator's clients see them: state, lease, times, watchers, and the
receipt at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from updater.coordinator.clock import Clock, Timer
from updater.coordinator.journal.journal import JournalError, RequestRow
from updater.coordinator.sources import UNSEEN, SourceSeen
from updater.coordinator.watching import EventLog
from updater.core.errors import IN_RECEIPT, grouped, worth_a_retry
from updater.core.fleet.effects import Outcome, Result
from updater.core.fleet.state import Phase, Transaction
from updater.core.participant import NOT_COMPARED, Compared, Kind, PlanReply, VerifyReply
from updater.protocol import wire
from updater.protocol.answers import MemberState, Pause, ProgressState, Receipt, UpdateState

_SHORTENED = "this receipt is old: members, times and warnings are no longer kept"
_RESTARTED = "the coordinator was restarted meanwhile: not all times of this update are known"


@dataclass(frozen=True, slots=True)
class VoteSummary:
    """`observed`: content digest per member. `phases_ms`: of the phases up to the vote. `source`: what was read, as it
    looked before it was planned. Empty: nothing was settled.
    """

    proof: str = ""
    bytes_read: int = 0
    tensors: int = 0
    tensors_changed: int = 0
    install: str = ""
    observed: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)
    source: SourceSeen = UNSEEN
    compared: Compared = NOT_COMPARED


def facts_of(
    update: Transaction,
    plans: Mapping[str, PlanReply],
    observed: Mapping[str, str],
    phases_ms: Mapping[str, float],
    source: SourceSeen,
) -> VoteSummary:
    """Of an update that all members have voted for."""
    replies = plans.values()
    return VoteSummary(
        proof=update.proof,
        bytes_read=update.bytes_read,
        tensors=max((plan.tensors for plan in replies), default=0),
        tensors_changed=update.tensors_changed,
        install=next((plan.install.value for plan in replies), ""),
        observed=dict(observed),
        warnings=tuple(dict.fromkeys([*(line for plan in replies for line in plan.warnings), *update.warnings])),
        phases_ms=dict(phases_ms),
        source=source,
        compared=update.compared,
    )


#: Phases in which fronts are shut, and the part of the pause that each one counts to.
_PARTS = {
    Phase.DECIDING: "decide",
    Phase.INSTALLING: "install",
    Phase.INVALIDATING: "invalidate",
    Phase.PUBLISHING: "publish",
    Phase.RESUMING: "resume",
    Phase.RESTORING: "restore",
    Phase.REOPENING: "restore",
}


@dataclass(slots=True)
class PhaseTimer:
    """Seconds per phase. A phase that is entered again (a later attempt) adds up."""

    started: float
    spent: dict[Phase, float] = field(default_factory=dict)
    _phase: Phase | None = None
    _since: float = 0.0

    def enter(self, phase: Phase, now: float) -> None:
        """The machine is in `phase` from `now` on."""
        self.leave(now)
        self._phase, self._since = phase, now
        self.spent.setdefault(phase, 0.0)

    def leave(self, now: float) -> None:
        """The phase that runs ends `now`; nothing is counted until the next one begins."""
        if self._phase is not None:
            self.spent[self._phase] += now - self._since
        self._phase = None

    def phases_ms(self, now: float) -> dict[str, float]:
        """Milliseconds of every phase that was entered, the running one up to `now`."""
        running = {self._phase: now - self._since} if self._phase is not None else {}
        return {
            phase.value: round(1e3 * (seconds + running.get(phase, 0.0)), 3) for phase, seconds in self.spent.items()
        }

    def pause(self) -> Pause | None:
        """The breakdown, or None if nothing was ever shut. Call it after `leave`."""
        if Phase.PAUSING not in self.spent:
            return None
        parts = dict.fromkeys(_PARTS.values(), 0.0)
        for phase, part in _PARTS.items():
            parts[part] += self.spent.get(phase, 0.0)
        quiesce, pause = self.spent[Phase.PAUSING], sum(parts.values())
        return Pause(
            closed_ms=round(1e3 * (quiesce + pause), 3),
            quiesce_ms=round(1e3 * quiesce, 3),
            pause_ms=round(1e3 * pause, 3),
            **{f"{part}_ms": round(1e3 * seconds, 3) for part, seconds in parts.items()},
        )


class Lease:
    """A client's promise to come back. Checked when a message is handled, not only by its timer."""

    def __init__(self, clock: Clock, seconds: float, expired: Callable[[], None]) -> None:
        self._clock, self._seconds, self._expired = clock, seconds, expired
        self._end = 0.0
        self._timer: Timer | None = None
        self.renew()

    def renew(self) -> None:
        self.cancel()
        self._end = self._clock.now() + self._seconds
        self._timer = self._clock.call_later(self._seconds, self._expired)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left(self) -> float:
        """Seconds until it ends, 0 when it has."""
        return max(0.0, self._end - self._clock.now())


@dataclass(slots=True, eq=False)
class Update:
    """One update in flight. `done` is set when `receipt` is there and durable, or the coordinator stopped.

    `facts`: what its vote settled, also if a former coordinator saw it. `restarted`: its times began before this life.
    `manifests`: names of the files that it may need. `source`: what it reads, as it looked before it was planned.
    """

    id: str
    body_hash: str
    body: str
    kind: Kind
    version: str
    created: float  # wall clock
    timeline: PhaseTimer
    serial: int = 0
    attempt: int = 0
    phase: str = "queued"
    lease: Lease | None = None
    progress: ProgressState | None = None
    receipt: Receipt | None = None
    plans: dict[str, PlanReply] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)
    facts: VoteSummary = field(default_factory=VoteSummary)
    restarted: bool = False
    manifests: set[str] = field(default_factory=set)
    source: SourceSeen = UNSEEN
    done: asyncio.Event = field(default_factory=asyncio.Event)
    events: EventLog = field(default_factory=EventLog)

    def heard(self, replica: str, reply: Any) -> None:
        """Keep what a reply says and the machine does not carry to the end."""
        if isinstance(reply, PlanReply):
            self.plans[replica] = reply
        elif isinstance(reply, VerifyReply):
            self.observed[replica] = reply.observed

    def state(self, now: float) -> UpdateState:
        return UpdateState(
            id=self.id,
            serial=self.serial,
            kind=self.kind.value,
            version=self.version,
            phase=self.phase,
            attempt=self.attempt,
            lease_left_s=self.lease.left if self.lease is not None else None,
            phases_ms=self.timeline.phases_ms(now),
            progress=self.progress,
            receipt=self.receipt,
        )

    def end(self, receipt: Receipt | None) -> None:
        """End all watchers with the receipt, or with None when the coordinator stops."""
        self.receipt = receipt
        if self.lease is not None:
            self.lease.cancel()
        if receipt is not None:
            self.phase = "ended"
            self.events.tell("receipt", receipt)
        self.events.end()
        self.done.set()


def receipt_of(
    update: Update, result: Result, members: Mapping[str, MemberState], now: float, ended_at: float
) -> Receipt:
    """The receipt of an update that just ended. `members`: the coordinator's view of each, before this result."""
    update.timeline.leave(now)
    pause, facts = update.timeline.pause(), update.facts
    update_ms = 1e3 * (ended_at - update.created if update.restarted else now - update.timeline.started)
    plans = update.plans.values()
    told = (*facts.warnings, *(line for plan in plans for line in plan.warnings), *result.warnings)
    return Receipt(
        id=update.id,
        serial=update.serial or result.serial,
        kind=result.kind.value,
        outcome=result.outcome.value,
        reason=result.reason or None,
        failures=list(result.failures[:IN_RECEIPT]),
        failures_count=len(result.failures),
        groups=list(grouped(result.failures)),
        retryable=worth_a_retry(result.failures, update.plans),
        version=str(result.version) if result.version is not None else update.version,
        live_version=str(result.live.version) if result.live is not None else None,
        rollback_to=str(result.rollback_to.version) if result.rollback_to is not None else None,
        manifest_digest=result.manifest_digest,
        observed=dict(update.observed) or facts.observed,
        proof=_proof(result.proof or facts.proof),
        compared=result.compared if result.compared != NOT_COMPARED else facts.compared,
        install=next((plan.install.value for plan in plans), facts.install),
        bytes_read=result.bytes_read or facts.bytes_read,
        tensors=max((plan.tensors for plan in plans), default=facts.tensors),
        tensors_changed=result.tensors_changed or facts.tensors_changed,
        warnings=list(dict.fromkeys((*told, *((_RESTARTED,) if update.restarted else ())))),
        attempts=result.attempts,
        aborted_requests=result.aborted_requests,
        requeued_requests=result.requeued_requests,
        phases_ms={**facts.phases_ms, **update.timeline.phases_ms(now)},
        pause=pause,
        update_ms=round(update_ms, 3),
        pause_share=round(pause.pause_ms / update_ms, 6) if pause is not None and update_ms > 0 else None,
        members=[_after(members[fact.replica], fact.standing, result) for fact in result.members],
        started_at=update.created,
        ended_at=ended_at,
    )


def _after(member: MemberState, standing: str, result: Result) -> MemberState:
    """A member as the result leaves it: one that stands `ok` has acknowledged the reopening."""
    if standing != "ok":
        return member.model_copy(update={"state": standing})
    live = result.live
    changes: dict[str, Any] = {"state": "open"}
    if live is not None:
        changes |= {"live_version": str(live.version), "live_digest": live.digest}
    if result.outcome is Outcome.COMMITTED and result.rollback_to is not None:
        changes |= {"spare": "previous", "spare_version": str(result.rollback_to.version)}
    return member.model_copy(update=changes)


def _proof(text: str) -> Any:
    return text if text in ("digests", "structure_only") else ""


def shortened(receipt: str) -> str:
    """What stays of a receipt for a long time: how the update ended. JSON text in and out."""
    whole = Receipt.model_validate_json(receipt)
    less = {"members": [], "observed": {}, "phases_ms": {}, "warnings": [_SHORTENED], "failures": whole.failures[:1]}
    return whole.model_copy(update=less).model_dump_json()


def request_of(update: Update) -> RequestRow:
    """What the journal keeps of an update from its beginning on."""
    return RequestRow(update.id, update.serial, update.kind.value, update.body_hash, update.body, update.created, None)


def settled(request: RequestRow) -> VoteSummary:
    """The journaled facts of an update. Raises JournalError if they cannot be read."""
    if request.facts is None:
        return VoteSummary()
    try:
        return wire.decode(VoteSummary, request.facts)
    except wire.WireError as error:
        raise JournalError(f"what was settled of {request.id!r} cannot be read: {error}") from None


def ended_update(request: RequestRow, receipt: Receipt) -> Update:
    """An update of the past, as its receipt tells it."""
    update = past_update(request)
    update.version, update.attempt = receipt.version, receipt.attempts
    update.end(receipt)
    return update


def past_update(request: RequestRow, now: float = 0.0) -> Update:
    kind, created, timeline = Kind(request.kind), request.created, PhaseTimer(now)
    return Update(request.id, request.body_hash, request.body, kind, "", created, timeline, serial=request.serial)
