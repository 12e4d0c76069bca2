"""What a `Work` of the replica machine means for the ranks of a replica."""

from __future__ import annotations

from typing import Any

from engine_adapter.replica.interfaces import Ranks
from updater.core.errors import Aborted, Failure
from updater.core.participant import FrontState, ReleaseTo, ResumeRequest
from updater.core.replica.state import ReplicaState, Work


async def perform(ranks: Ranks, work: Work, state: ReplicaState, stopped: tuple[int, int]) -> Any:
    """Returns what `Done` carries. `state`: as it was when the machine asked. `stopped`: requests that the gate
    aborted and requeued when it closed. Raises LiveweightsError.
    """
    request = work.request
    if work.verb == "readmit" or state.state is FrontState.ORPHANED:  # whatever ends that proves the live bytes first
        await _prove(ranks, work, state)
        return await ranks.join(request) if work.verb == "join" else None
    match work.verb:
        case "join" | "plan" | "stage" | "verify" | "invalidate" | "resume":
            return await getattr(ranks, work.verb)(request)
        case "pause":
            return await ranks.pause(request, state.digest, *stopped)
        case "install" if work.plan is not None:
            return await ranks.install(request, work.plan, state.digest)
        case "restore":
            return await _take_back(ranks, state, _serial(work, state), request.fence.attempt)
        case "discard":
            return await ranks.discard(_serial(work, state))
        case "release" if request.to is ReleaseTo.LIVE:
            return await ranks.serve_installed(*state.key, state.live.version)
        case "release":
            await _take_back(ranks, state, *state.key)
            return await ranks.resume(ResumeRequest(request.fence, False, state.live.version, state.live.digest))
    raise Aborted(Failure("internal", f"the machine asked for {work.verb!r}"))


async def _prove(ranks: Ranks, work: Work, state: ReplicaState) -> None:
    unsettled = state.key if state.old is not None else None
    held = state.old or state.live
    await ranks.readmit(unsettled, _serial(work, state), held.version, held.digest)


async def _take_back(ranks: Ranks, state: ReplicaState, serial: int, attempt: int) -> None:
    """Of a restore, which may come under a later serial than the installation that it undoes."""
    if state.old is not None:
        serial, attempt = state.key
    old = state.old or state.live
    await ranks.restore(serial, attempt, old.version, old.digest)


def _serial(work: Work, state: ReplicaState) -> int:
    """Whose staging the ranks hold. The request may come under a later serial, which ranks never heard of (I6)."""
    if work.plan is not None:
        return work.plan.fence.serial
    serial: int = state.spare.serial or work.request.fence.serial
    return serial
