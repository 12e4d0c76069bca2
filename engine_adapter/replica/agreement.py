"""What the ranks of a replica answered: what must agree between them, and what it means when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_adapter.placement.values import RankVerifyReply, TensorCuts, WireTensor
from engine_adapter.rank.messages import (
    RankAuditReply,
    RankHello,
    RankInvalidateReply,
    RankPauseReply,
    RankPlanReply,
    RankStatusReply,
)
from updater.core.errors import Aborted, Failure, Rejected, refuse
from updater.core.participant import NOT_COMPARED, Compared, PlanRequest, StreamOffer
from updater.core.policy import InstallMode
from updater.protocol.model_document import ModelDocument, compare

_UNLIKE = "the replayed start checkpoint differs from the live bytes"
_LOADED = (
    "start the engine on a folder that nothing changes meanwhile, and have it load the weights that lie there (no"
    " --load-format dummy)"
)


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """What planning left behind for staging and verifying."""

    request: PlanRequest | None  # None: the replay of the start checkpoint
    replies: tuple[RankPlanReply, ...]
    cuts: tuple[TensorCuts, ...]
    install: InstallMode


def first_seat(request: PlanRequest) -> int:
    """Number of this replica's first receiver; 0 where nothing is streamed."""
    if not isinstance(request.offer, StreamOffer):
        return 0
    try:
        return request.offer.first_of(request.fence.incarnation)
    except LookupError:
        raise refuse("bad_request", "the stream's offer has no seats for this replica") from None


def with_digests(planned: AgreedPlan, digests: dict[str, str]) -> AgreedPlan:
    """What the trainer promised only when its stream was sealed counts like what the manifest promised."""
    if not digests:
        return planned
    first = planned.replies[0]
    tensors = tuple(replace(each, digest=digests.get(each.name, each.digest)) for each in first.tensors)
    return replace(planned, replies=(replace(first, tensors=tensors), *planned.replies[1:]))


def require_digests(tensors: tuple[WireTensor, ...]) -> None:
    if not all(tensor.digest for tensor in tensors):
        raise refuse("manifest_required", "the policy requires digests, and the source brings none or not all")


def same_build(hellos: Sequence[RankHello]) -> None:
    """Raises Rejected unless every rank runs the same engine on the same config."""
    kinds = {(hello.engine, hello.config_hash, hello.capabilities) for hello in hellos}
    if len(kinds) > 1:
        raise Rejected(
            *(
                Failure("config_mismatch", f"runs {hello.engine} on config {hello.config_hash[:16]}", rank=rank)
                for rank, hello in enumerate(hellos)
            )
        )


def all_as_live(replies: Sequence[RankVerifyReply]) -> None:
    """Raises Rejected unless the start checkpoint, replayed, gave every rank its live bytes."""
    differing = [
        Failure("placement_refused", _UNLIKE, rank=rank, tensor=name, hint=_LOADED)
        for rank, reply in enumerate(replies)
        for name in reply.changed
    ]
    if differing:
        raise Rejected(*differing)


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


def all_cleared(replies: Sequence[RankInvalidateReply]) -> None:
    """Raises Aborted unless every tier of every rank's cache is empty."""
    left = [
        Failure("cache_not_reset", f"the cache tier {tier.name!r} did not clear", rank=rank)
        for rank, reply in enumerate(replies)
        for tier in reply.tiers
        if not tier.cleared
    ]
    if left:
        raise Aborted(*left)


def mismatches(what: str, replies: Sequence[RankAuditReply]) -> tuple[Failure, ...]:
    return tuple(
        Failure("tensor_digest", f"{what} bytes are not what was voted", rank=rank, tensor=name)
        for rank, reply in enumerate(replies)
        for name in reply.mismatched
    )


def warnings(replies: Sequence[RankPlanReply]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for reply in replies for text in reply.warnings))


def not_proven(
    version: str, hellos: Sequence[RankHello], audits: Sequence[RankAuditReply], states: Sequence[RankStatusReply]
) -> tuple[Failure, ...]:
    """Why it is not known that every rank holds `version`, whole and as it was voted. Nothing: it is."""
    failures = list(mismatches("live", audits))
    for rank, (audit, state, hello) in enumerate(zip(audits, states, hellos, strict=True)):
        if audit.checked < hello.info.parameters:
            failures.append(Failure("rank_failed", "knows no digests to compare its live bytes with", rank=rank))
        if state.live_version != version:
            failures.append(Failure("expected_mismatch", f"holds {state.live_version}, not {version}", rank=rank))
    return tuple(failures)


def check_config(
    theirs: ModelDocument | None, hellos: tuple[RankHello, ...], request: PlanRequest
) -> tuple[tuple[str, ...], Compared]:
    """(warnings, what was compared). None: what comes was compared when it was published first.

    Raises Rejected: `config_mismatch` with every key, `config_required`.
    """
    if theirs is None:
        return (), NOT_COMPARED
    found = compare(theirs, hellos[0].model or ModelDocument(), request.allow_config)
    if found.refused:
        raise Rejected(*found.refused)
    if request.require_config and found.compared.config != "engine":
        side = "source" if theirs.config is None else "engine"
        raise refuse("config_required", f"the policy requires a config that is compared, and the {side} has none")
    return found.warnings, found.compared
