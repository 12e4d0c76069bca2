"""The updates that run, as the coordinator's clients see them: state, lease, watchers, and the receipt at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from updater import wire
from updater.coordinator.clock import Clock, Timer
from updater.coordinator.facts import Facts
from updater.coordinator.sources import UNSEEN, Seen
from updater.coordinator.timeline import Timeline
from updater.core.effects import Outcome, Result
from updater.core.errors import IN_RECEIPT, grouped, worth_a_retry
from updater.core.participant import NOT_COMPARED, Compared, Kind, PlanReply, VerifyReply
from updater.schemas import ComparedBody, FailureBody, GroupBody, MemberState, ProgressState, Receipt, UpdateState

_SHORTENED = "this receipt is old: members, times and warnings are no longer kept"
_RESTARTED = "the coordinator was restarted meanwhile: not all times of this update are known"
#: What one watcher may fall behind before it is cut off.
WATCH_LIMIT = 1000


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
    timeline: Timeline
    serial: int = 0
    attempt: int = 0
    phase: str = "queued"
    lease: Lease | None = None
    progress: ProgressState | None = None
    receipt: Receipt | None = None
    plans: dict[str, PlanReply] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    restarted: bool = False
    manifests: set[str] = field(default_factory=set)
    source: Seen = UNSEEN
    done: asyncio.Event = field(default_factory=asyncio.Event)
    watchers: set[asyncio.Queue[tuple[str, dict[str, Any]] | None]] = field(default_factory=set)

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

    def tell(self, name: str, data: dict[str, Any]) -> None:
        """Queue an event for all watchers. A watcher whose queue is full is dropped."""
        for watcher in list(self.watchers):
            if watcher.qsize() >= WATCH_LIMIT:
                self.watchers.discard(watcher)
                watcher.put_nowait(None)
            else:
                watcher.put_nowait((name, data))

    def end(self, receipt: Receipt | None) -> None:
        """End all watchers with the receipt, or with None when the coordinator stops."""
        self.receipt = receipt
        if self.lease is not None:
            self.lease.cancel()
        if receipt is not None:
            self.phase = "ended"
            self.tell("receipt", receipt.model_dump(mode="json"))
        for watcher in self.watchers:
            watcher.put_nowait(None)
        self.watchers.clear()
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
        failures=[failure_body(failure) for failure in result.failures[:IN_RECEIPT]],
        failures_count=len(result.failures),
        groups=[GroupBody.model_validate(wire.plain(group)) for group in grouped(result.failures)],
        retryable=worth_a_retry(result.failures, update.plans),
        version=str(result.version) if result.version is not None else update.version,
        live_version=str(result.live.version) if result.live is not None else None,
        rollback_to=str(result.rollback_to.version) if result.rollback_to is not None else None,
        manifest_digest=result.manifest_digest,
        observed=dict(update.observed) or facts.observed,
        proof=_proof(result.proof or facts.proof),
        compared=_compared(result.compared if result.compared != NOT_COMPARED else facts.compared),
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


def failure_body(failure: Any) -> FailureBody:
    """A core `Failure` as the API shows it."""
    return FailureBody(
        code=failure.code,
        message=failure.message,
        replica=failure.replica,
        rank=failure.rank,
        tensor=failure.tensor,
        file=failure.file,
        hint=failure.hint,
    )


def _compared(compared: Compared) -> ComparedBody:
    return ComparedBody(config=compared.config, tokenizer=compared.tokenizer, quantisation=compared.quantisation)


def _proof(text: str) -> Any:
    return text if text in ("digests", "structure_only") else ""


def shortened(receipt: str) -> str:
    """What stays of a receipt for a long time: how the update ended. JSON text in and out."""
    whole = Receipt.model_validate_json(receipt)
    less = {"members": [], "observed": {}, "phases_ms": {}, "warnings": [_SHORTENED], "failures": whole.failures[:1]}
    return whole.model_copy(update=less).model_dump_json()
