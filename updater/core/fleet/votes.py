"""What the fleet machine demands of replies: one by one, and of all of a phase together; and the record and the
result that an update leaves behind.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from updater.core.errors import Failure
from updater.core.fleet.effects import MemberFacts, Outcome, Record, RecordKind, Result
from updater.core.fleet.state import Fleet, Member, Phase, Transaction
from updater.core.participant import Compared, Kind, PauseReply, PlanReply, StageReply, VerifyReply
from updater.core.policy import InstallMode


def objection(phase: Phase, update: Transaction, replica: str, reply: Any) -> Failure | None:
    """Why one reply cannot be accepted, or None."""
    if phase is not Phase.PAUSING or not isinstance(reply, PauseReply):
        return None
    if reply.asleep:
        return Failure("replica_asleep", "asleep at the pause", replica=replica)
    if reply.staged_serial != update.serial:
        return Failure("replica_fenced", f"holds staging of serial {reply.staged_serial}", replica=replica)
    if reply.staged_digest != update.digest:
        return Failure("tensor_digest", "holds other bytes than it voted for", replica=replica)
    return None


def verdict(phase: Phase, update: Transaction) -> tuple[Failure, ...]:
    """What is wrong with all replies of the phase together."""
    replies = update.replies
    if phase is Phase.PLANNING:
        promised = {name: reply.manifest_digest for name, reply in replies if isinstance(reply, PlanReply)}
        return _unequal(promised, "manifest_mismatch", "the members read different manifests")
    if phase is Phase.VERIFYING:
        observed = {name: reply.observed for name, reply in replies if isinstance(reply, VerifyReply)}
        return _unequal(observed, "copies_differ", "the members hold different bytes") or _not_target(update, observed)
    return ()


def _unequal(values: dict[str, str], code: str, message: str) -> tuple[Failure, ...]:
    if len(set(values.values())) <= 1:
        return ()
    return tuple(Failure(code, f"{message}: {value or 'none'}", replica=name) for name, value in values.items())


def _not_target(update: Transaction, observed: dict[str, str]) -> tuple[Failure, ...]:
    """A rollback and a catch-up have to arrive at bytes that are already known."""
    code = "source_changed" if update.kind is Kind.CATCH_UP else "tensor_digest"
    return tuple(
        Failure(code, f"observed {value}, wanted {update.digest}", replica=name)
        for name, value in observed.items()
        if value != update.digest
    )


def collect(phase: Phase, update: Transaction) -> Transaction:
    """What the replies of a finished phase add to the receipt. The vote fixes an update's digest."""
    replies = [reply for _, reply in update.replies]
    warnings = tuple(dict.fromkeys([*update.warnings, *_warnings(replies)]))
    update = replace(update, warnings=warnings)
    if phase is Phase.PLANNING:
        return _collect_plans(update, {name: reply for name, reply in update.replies if isinstance(reply, PlanReply)})
    if phase is Phase.STAGING:
        read = sum(reply.bytes_read for reply in replies if isinstance(reply, StageReply))
        return replace(update, bytes_read=read)
    if phase is Phase.VERIFYING:
        return _collect_votes(update, [reply for reply in replies if isinstance(reply, VerifyReply)])
    if phase is Phase.PAUSING:
        pauses = [reply for reply in replies if isinstance(reply, PauseReply)]
        return replace(
            update,
            aborted_requests=update.aborted_requests + sum(reply.aborted for reply in pauses),
            requeued_requests=update.requeued_requests + sum(reply.requeued for reply in pauses),
        )
    return update


def _warnings(replies: list[Any]) -> list[str]:
    return [text for reply in replies if isinstance(reply, PlanReply | VerifyReply) for text in reply.warnings]


def _collect_plans(update: Transaction, plans: dict[str, PlanReply]) -> Transaction:
    digests = [plan.manifest_digest for plan in plans.values()]
    one_way = frozenset(name for name, plan in plans.items() if plan.install is InstallMode.NONE)
    compared = [plan.compared for plan in plans.values()]
    return replace(
        update,
        manifest_digest=digests[0] if digests else "",
        one_way=one_way,
        compared=functools.reduce(Compared.both, compared) if compared else update.compared,
    )


def _collect_votes(update: Transaction, votes: list[VerifyReply]) -> Transaction:
    proofs = {vote.proof for vote in votes}
    digest = update.digest or (votes[0].observed if votes else "")
    return replace(
        update,
        digest=digest,
        proof=proofs.pop() if len(proofs) == 1 else "structure_only",
        tensors_changed=max((vote.tensors_changed for vote in votes), default=0),
    )


def record(state: Fleet, update: Transaction, kind: RecordKind) -> Record:
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


def result(state: Fleet, update: Transaction, outcome: Outcome) -> Result:
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
