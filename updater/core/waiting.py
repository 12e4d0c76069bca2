"""Why a member does not serve, and what would end that: for people, from what the machine already knows."""

from __future__ import annotations

from updater.core.errors import Failure
from updater.core.participant import DiskOffer, FrontState, FrontStatus, StreamOffer
from updater.core.state import FleetState, Member, Standing, Transaction

_CURES = {
    "joining": "wait: it proves its weights, or catches up",
    "closing": "wait: a publication is under way",
    "paused": "wait: a publication is under way",
    "installing": "wait: a publication is under way",
    "installed": "wait for the coordinator; `liveweights release` if it does not come back",
    "invalidated": "wait for the coordinator; `liveweights release` if it does not come back",
    "restoring": "wait: a publication is being taken back",
    "quarantined": "`liveweights readmit` the replica, or restart it",
    "broken": "restart the replica: a rank or its engine is dead, so `liveweights readmit` does not help",
    "orphaned": "wait: it joins again; or `liveweights release` it",
    "lost": "wait for it or restart it; once it is dead: DELETE /v1/fleet/replicas/ID?confirm_dead=true",
}


def cure(state: str) -> str:
    """What ends a state of a member, empty for one that serves."""
    return _CURES.get(state, "")


def shown(member: Member, status: FrontStatus | None, heard: bool) -> str:
    """The state that people see: the front's own word, unless the coordinator knows better. `heard`: it answered the
    last time it was asked.
    """
    if status is None:
        return member.standing.value
    if member.standing is Standing.QUARANTINED and status.state is FrontState.BROKEN:
        return FrontState.BROKEN.value
    trusted = member.standing in (Standing.OK, Standing.JOINING) or (member.unled and heard)
    return status.state.value if trusted else member.standing.value


def obstacle(state: FleetState, member: Member) -> Failure | None:
    """Why a joiner is not admitted, or a member not spoken to; None while it is on its way."""
    if member.foreign is not None:
        return member.foreign
    if member.standing is not Standing.JOINING:
        return None
    if state.hold is not None:
        return state.hold
    if member.why is not None:
        return member.why
    serving = state.live
    if serving is None or member.live == serving.label.digest or isinstance(serving.offer, DiskOffer):
        return None
    came = "was published by a stream" if serving.offer is not None else "is the checkpoint that the fleet started on"
    return Failure(
        "no_source",
        f"its weights (digest {member.live}) are not the live ones (version {serving.label.version}, digest"
        f" {serving.label.digest}), and what is live {came}: there is nothing to catch up from",
        replica=member.replica,
    )


def left_behind(state: FleetState, update: Transaction) -> tuple[str, ...]:
    """Warnings of a stream that begins: members without a part in it cannot have its bytes later."""
    if not isinstance(update.offer, StreamOffer):
        return ()
    seated = {replica for replica, _ in update.participants}
    return tuple(
        f"{member.replica} is {member.standing.value} and takes no part: it cannot catch up on what comes by a stream,"
        " and serves again with the first update after its restart"
        for member in state.members
        if member.replica not in seated
    )
