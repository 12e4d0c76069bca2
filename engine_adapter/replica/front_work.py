"""What a `Work` of the replica machine means for the ranks of a replica."""

from __future__ import annotations

from typing import Any, Protocol

from updater.core.dtypes import Rules
from updater.core.errors import Aborted, Failure
from updater.core.participant import (
    FenceRequest,
    FrontState,
    InvalidateRequest,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    Progress,
    ReleaseTo,
    ResumeRequest,
    StageReply,
    StageRequest,
    VerifyReply,
    VerifyRequest,
)
from updater.core.replica_state import ReplicaState, Work


class Ranks(Protocol):
    """All ranks as one thing, one method per `Work` of the machine: `rank_work.RankWork`, and `ReloadRanks` of vLLM.

    Each raises LiveweightsError, and then no rank works on it any more.
    """

    dtypes: Rules
    """That the tensors of the start checkpoint are held in; empty where that is not known."""

    async def replay_start(self) -> str:
        """Before anything else: the start checkpoint is what is live. Returns its content digest."""

    async def join(self, version: str, digest: str) -> None: ...

    async def plan(self, request: PlanRequest) -> PlanReply: ...

    async def stage(self, request: StageRequest) -> StageReply: ...

    async def verify(self, request: VerifyRequest) -> VerifyReply: ...

    async def pause(self, request: PauseRequest, digest: str, aborted: int, requeued: int) -> PauseReply: ...

    async def install(self, request: FenceRequest, plan: PlanRequest, digest: str) -> None: ...

    async def invalidate(self, request: InvalidateRequest) -> None: ...

    async def restore(self, serial: int, attempt: int, version: str, digest: str) -> None: ...

    async def resume(self, request: ResumeRequest) -> None: ...

    async def discard(self, serial: int) -> None: ...

    def cancel(self, serial: int) -> None: ...

    def progress(self) -> Progress | None: ...

    async def audit(self, what: str) -> tuple[Failure, ...]: ...

    async def readmit(self, unsettled: tuple[int, int] | None, serial: int, version: str, digest: str) -> None: ...

    async def serve_installed(self, serial: int, attempt: int, version: str) -> None: ...


async def perform(ranks: Ranks, work: Work, state: ReplicaState, stopped: tuple[int, int]) -> Any:
    """Returns what `Done` carries. `state`: as it was when the machine asked. `stopped`: requests that the gate
    aborted and requeued when it closed. Raises LiveweightsError.
    """
    request = work.request
    if state.state is FrontState.ORPHANED:  # whatever ends that proves the live bytes first
        await _prove(ranks, work, state)
        return await ranks.join(request.version, request.digest) if work.verb == "join" else None
    match work.verb:
        case "join":
            return await ranks.join(request.version, request.digest)
        case "plan":
            return await ranks.plan(request)
        case "stage":
            return await ranks.stage(request)
        case "verify":
            return await ranks.verify(request)
        case "pause":
            return await ranks.pause(request, state.digest, *stopped)
        case "install" if work.plan is not None:
            return await ranks.install(request, work.plan, state.digest)
        case "invalidate":
            return await ranks.invalidate(request)
        case "restore":
            return await _take_back(ranks, state, _serial(work, state), request.fence.attempt)
        case "resume":
            return await ranks.resume(request)
        case "discard":
            return await ranks.discard(_serial(work, state))
        case "readmit":
            return await _prove(ranks, work, state)
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
