"""What must agree between the ranks of a replica, and what it means when it does not."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.rank.messages import Hello, RankAuditReply, RankPauseReply, RankPlanReply, RankStatusReply
from updater.core.errors import Aborted, Failure, Rejected


def same_build(hellos: Sequence[Hello]) -> None:
    """Raises Rejected unless every rank runs the same engine on the same config."""
    kinds = {(hello.engine, hello.config_hash, hello.capabilities) for hello in hellos}
    if len(kinds) > 1:
        raise Rejected(
            *(
                Failure("config_mismatch", f"runs {hello.engine} on config {hello.config_hash[:16]}", rank=rank)
                for rank, hello in enumerate(hellos)
            )
        )


def agree(replies: list[RankPauseReply], serial: int) -> None:
    """Raises Aborted unless all ranks stand at one step, with one set of requests, and still hold the staging."""
    if len({(reply.step, reply.running) for reply in replies}) > 1:
        raise Aborted(
            *(
                Failure("rank_steps_differ", f"stopped at step {reply.step}, requests {reply.running}", rank=rank)
                for rank, reply in enumerate(replies)
            )
        )
    lost = [
        Failure("wrong_phase", f"holds the staging of serial {reply.staged_serial}", rank=rank)
        for rank, reply in enumerate(replies)
        if reply.staged_serial != serial
    ]
    if lost:
        raise Aborted(*lost)


def mismatches(what: str, replies: Sequence[RankAuditReply]) -> tuple[Failure, ...]:
    return tuple(
        Failure("tensor_digest", f"{what} bytes are not what was voted", rank=rank, tensor=name)
        for rank, reply in enumerate(replies)
        for name in reply.mismatched
    )


def warnings(replies: Sequence[RankPlanReply]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for reply in replies for text in reply.warnings))


def not_proven(
    version: str, hellos: Sequence[Hello], audits: Sequence[RankAuditReply], states: Sequence[RankStatusReply]
) -> tuple[Failure, ...]:
    """Why it is not known that every rank holds `version`, whole and as it was voted. Nothing: it is."""
    failures = list(mismatches("live", audits))
    for rank, (audit, state, hello) in enumerate(zip(audits, states, hellos, strict=True)):
        if audit.checked < hello.info.parameters:
            failures.append(Failure("rank_failed", "knows no digests to compare its live bytes with", rank=rank))
        if state.live_version != version:
            failures.append(Failure("expected_mismatch", f"holds {state.live_version}, not {version}", rank=rank))
    return tuple(failures)
