"""What planning leaves behind for staging and verifying, and what a stream adds to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_adapter.rank.messages import RankPlanReply, TensorCuts, WireTensor
from updater.core.errors import refuse
from updater.core.participant import PlanRequest, StreamOffer
from updater.core.policy import InstallMode


@dataclass(frozen=True, slots=True)
class Planned:
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


def with_digests(planned: Planned, digests: dict[str, str]) -> Planned:
    """What the trainer promised only when its stream was sealed counts like what the manifest promised."""
    if not digests:
        return planned
    first = planned.replies[0]
    tensors = tuple(replace(each, digest=digests.get(each.name, each.digest)) for each in first.tensors)
    return replace(planned, replies=(replace(first, tensors=tensors), *planned.replies[1:]))


def require_digests(tensors: tuple[WireTensor, ...]) -> None:
    if not all(tensor.digest for tensor in tensors):
        raise refuse("manifest_required", "the policy requires digests, and the source brings none or not all")
