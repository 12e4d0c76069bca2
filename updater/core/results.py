"""What an update leaves behind: its records in the journal, and its result."""

from __future__ import annotations

from updater.core.effects import MemberFacts, Outcome, Record, RecordKind, Result
from updater.core.state import FleetState, Member, Transaction


def record(state: FleetState, update: Transaction, kind: RecordKind) -> Record:
    """The line of the journal that a phase waits for."""
    return Record(
        kind=kind,
        epoch=state.epoch,
        serial=update.serial,
        attempt=update.attempt,
        update=update.update,
        body_hash=update.body_hash,
        op=update.kind,
        version=update.version,
        digest=update.digest,
        manifest_digest=update.manifest_digest,
        members=update.participants,
        offer=update.offer,
        manifest=update.manifest,
        policy=update.policy,
    )


def result(state: FleetState, update: Transaction, outcome: Outcome) -> Result:
    """What the update came to, of all members."""
    reason = update.failures[0].code if update.failures and outcome is not Outcome.COMMITTED else ""
    participants = dict(update.participants)
    return Result(
        update=update.update,
        serial=update.serial,
        attempts=update.attempt,
        kind=update.kind,
        outcome=outcome,
        reason=reason,
        failures=update.failures,
        version=update.version,
        digest=update.digest,
        manifest_digest=update.manifest_digest,
        proof=update.proof,
        bytes_read=update.bytes_read,
        tensors_changed=update.tensors_changed,
        warnings=update.warnings,
        aborted_requests=update.aborted_requests,
        requeued_requests=update.requeued_requests,
        members=tuple(_facts(member, participants) for member in state.members),
        live=state.live.label if state.live else None,
        rollback_to=state.rollback_to,
        compared=update.compared,
    )


def _facts(member: Member, participants: dict[str, str]) -> MemberFacts:
    took_part = participants.get(member.replica) == member.incarnation
    return MemberFacts(member.replica, member.incarnation, member.standing.value, took_part)
