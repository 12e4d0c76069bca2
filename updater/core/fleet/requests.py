"""The request that each phase sends to one participant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from updater.core.fleet.effects import Label, Send
from updater.core.fleet.state import Fleet, Member, Phase, Transaction
from updater.core.fleet.table import TABLE
from updater.core.participant import (
    DiscardRequest,
    Fence,
    FenceRequest,
    InvalidateRequest,
    JoinRequest,
    PauseRequest,
    PlanRequest,
    ResumeRequest,
    StageRequest,
    VerifyRequest,
)


def _plan(state: Fleet, update: Transaction, fence: Fence) -> PlanRequest:
    policy = update.policy
    return PlanRequest(
        fence=fence,
        kind=update.kind,
        update=update.update,
        version=str(update.version),
        offer=update.offer,
        manifest=update.manifest,
        digest=update.digest,
        in_flight=policy.in_flight,
        cache=policy.cache,
        install=policy.install,
        require_digests=policy.require_digests,
        allow_narrowing=policy.allow_narrowing,
        allow_nonfinite=policy.allow_nonfinite,
        allow_suspicious=policy.allow_suspicious,
        layouts=policy.layouts,
        require_config=policy.require_config,
        allow_config=policy.allow_config,
    )


def _pause(state: Fleet, update: Transaction, fence: Fence) -> PauseRequest:
    # The lease starts when admission closes, so it has to outlive the slowest quiesce of the fleet.
    policy = update.policy
    return PauseRequest(fence, policy.in_flight, policy.quiesce_s, policy.quiesce_s + policy.pause_lease_s)


def _resume(state: Fleet, update: Transaction, fence: Fence) -> ResumeRequest:
    published = state.phase is Phase.RESUMING
    label = update.label if published else live(state)
    return ResumeRequest(fence, published, str(label.version), label.digest)


_BUILDERS: dict[str, Callable[[Fleet, Transaction, Fence], Any]] = {
    "plan": _plan,
    "stage": lambda state, update, fence: StageRequest(fence, update.policy.deadline_s),
    "verify": lambda state, update, fence: VerifyRequest(fence, update.policy.deadline_s, update.digests),
    "pause": _pause,
    "install": lambda state, update, fence: FenceRequest(fence),
    "invalidate": lambda state, update, fence: InvalidateRequest(fence, update.policy.cache),
    "restore": lambda state, update, fence: FenceRequest(fence),
    "resume": _resume,
    "discard": lambda state, update, fence: DiscardRequest(fence),
}


def live(state: Fleet) -> Label:
    """What serves. An update cannot begin before something does."""
    if state.live is None:
        raise LookupError("nothing is live yet")
    return state.live.label


def phase_request(state: Fleet, update: Transaction, member: Member) -> Send:
    """What the current phase sends to `member`."""
    verb = TABLE[state.phase].verb
    fence = state.fence(update.serial, update.attempt, member.incarnation)
    return Send(member.replica, verb, _BUILDERS[verb](state, update, fence))


def first_word(state: Fleet, member: Member) -> Send:
    """`lead`: what every front hears before anything else (I11). The same each time it is said."""
    return Send(member.replica, "lead", FenceRequest(state.fence(0, 0, member.incarnation)))


def join_request(state: Fleet, serial: int, member: Member) -> Send:
    label = live(state)
    fence = state.fence(serial, 0, member.incarnation)
    return Send(member.replica, "join", JoinRequest(fence, str(label.version), label.digest))
