"""What a front needs of whatever holds its ranks, and how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_adapter.rank.messages import RankHello
from updater.core.dtypes import Rules
from updater.core.errors import Failure
from updater.core.participant import (
    FenceRequest,
    InvalidateRequest,
    JoinRequest,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    Progress,
    ResumeRequest,
    StageReply,
    StageRequest,
    VerifyReply,
    VerifyRequest,
)


@dataclass(frozen=True, slots=True)
class WorkDeadlines:
    """Seconds that one fan-out to all ranks may take; staging, verifying and pausing bring their own."""

    plan_s: float = 120.0
    commit_s: float = 30.0  # install, restore, invalidate, resume: milliseconds of work
    discard_s: float = 60.0  # waits for a cancelled stage to end
    start_s: float = 600.0
    audit_s: float = 600.0


class RankVerbs(Protocol):
    """All ranks as one thing, one method per `Work` of the machine: `rank_work.RankWork`, and `ReloadRanks` of vLLM.

    Each raises LiveweightsError, and then no rank works on it any more.
    """

    dtypes: Rules
    """That the tensors of the start checkpoint are held in; empty where that is not known."""

    @property
    def hellos(self) -> tuple[RankHello, ...]:
        """How the ranks introduced themselves, in rank order, once they are there."""

    async def replay_start(self) -> str:
        """Before anything else: the start checkpoint is what is live. Returns its content digest."""

    async def join(self, request: JoinRequest) -> None: ...

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
