"""The seams of the gate and of the front, played by hand: nothing happens before a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.rank.messages import RankHello
from engine_adapter.replica.admission import Gate
from updater.core.errors import Aborted, Failure
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


class HandEngine:
    """Records what it is told. `refuse_submits`: every submission is refused with `rank_failed`."""

    def __init__(self) -> None:
        self.submitted: dict[str, GenerateRequest] = {}
        self.cancelled: list[str] = []
        self.refuse_submits = False
        self.gate: Gate | None = None
        self._came = asyncio.Event()

    def submit(self, request: GenerateRequest) -> asyncio.Future[Any]:
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.refuse_submits:
            taken.set_exception(Aborted(Failure("rank_failed", "told to refuse", rank=0)))
        else:
            self.submitted[request.request_id] = request
            self._came.set()
            taken.set_result(None)
        return taken

    async def until_submitted(self, count: int) -> None:
        """Until so many requests have come."""
        while len(self.submitted) < count:
            self._came.clear()
            await self._came.wait()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def emit(self, request_id: str, *tokens: int, version: str, finish: str | None = None, cached: int = 0) -> None:
        """One token event to the gate, as a rank would send it."""
        if self.gate is None:
            raise RuntimeError("no gate")
        self.gate.on_tokens(TokenEvent(request_id, tokens, version, finish, cached_tokens=cached))


class HandWork:
    """`front.Ranks` played by hand. `calls`: what was asked, in order.

    `hold(verb)` makes the next call of a verb wait for `release(verb)`, after which `calls` says that it went on;
    `fail[verb]` is raised by every call of it; `mismatched` is what audits find. A vote observes `observed`.
    `undone`, `discarded`: what restores and discards were about.
    """

    hellos: tuple[RankHello, ...] = ()

    def __init__(self, observed: str = "d1") -> None:
        self.observed = observed
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.mismatched: dict[str, tuple[Failure, ...]] = {}
        self.cancelled: list[int] = []
        self.staged: Progress | None = None
        self.undone: list[tuple[int, int]] = []
        self.discarded: list[int] = []
        self._held: dict[str, asyncio.Event] = {}
        self._came = asyncio.Event()

    def hold(self, verb: str) -> None:
        self._held[verb] = asyncio.Event()

    def progress(self) -> Progress | None:
        return self.staged

    def release(self, verb: str) -> None:
        self._held.pop(verb).set()

    async def until_called(self, verb: str) -> None:
        while verb not in self.calls:
            self._came.clear()
            await self._came.wait()

    async def _call(self, verb: str) -> None:
        self.calls.append(verb)
        self._came.set()
        if verb in self._held:
            await self._held[verb].wait()
            self.calls.append(f"{verb} went on")
        if verb in self.fail:
            raise self.fail[verb]

    async def join(self, request: JoinRequest) -> None:
        await self._call("join")

    async def plan(self, request: PlanRequest) -> PlanReply:
        await self._call("plan")
        return PlanReply(request.fence, "", 1, 1, request.install)

    async def stage(self, request: StageRequest) -> StageReply:
        await self._call("stage")
        return StageReply(request.fence, 1, 0.0)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        await self._call("verify")
        return VerifyReply(request.fence, self.observed, "digests", 1)

    async def pause(self, request: PauseRequest, digest: str, aborted: int, requeued: int) -> PauseReply:
        await self._call("pause")
        return PauseReply(request.fence, request.fence.serial, digest, 1, False, aborted, requeued)

    async def install(self, request: FenceRequest, plan: PlanRequest, digest: str) -> None:
        await self._call("install")

    async def invalidate(self, request: InvalidateRequest) -> None:
        await self._call("invalidate")

    async def restore(self, serial: int, attempt: int, version: str, digest: str) -> None:
        await self._call(f"restore {version}")
        self.undone.append((serial, attempt))

    async def resume(self, request: ResumeRequest) -> None:
        await self._call("resume")

    async def discard(self, serial: int) -> None:
        await self._call("discard")
        self.discarded.append(serial)

    async def readmit(self, unsettled: tuple[int, int] | None, serial: int, version: str, digest: str) -> None:
        await self._call(f"readmit {version}")
        if unsettled is not None:
            self.undone.append(unsettled)

    async def serve_installed(self, serial: int, attempt: int, version: str) -> None:
        await self._call(f"serve {version}")

    def cancel(self, serial: int) -> None:
        self.cancelled.append(serial)

    async def audit(self, what: str) -> tuple[Failure, ...]:
        await self._call(f"audit {what}")
        return self.mismatched.get(what, ())
