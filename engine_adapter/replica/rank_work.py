"""What the front lets all ranks do for one verb, and what must agree between them before the verb counts as done.

Every method raises `LiveweightsError` with the rank named; the front turns that into the machine's `Failed`. State
kept here is per serial and only what the ranks answered: plans, cuts, the install mode.
"""

from __future__ import annotations

import asyncio
import time

from engine_adapter.placement.atoms import Combined, checked_cuts, combine
from engine_adapter.placement.values import RankVerifyReply
from engine_adapter.rank.channel import BytesStaged, RankLabel, StartServing
from engine_adapter.rank.messages import (
    RankAudit,
    RankAuditReply,
    RankCheckPrevious,
    RankDiscard,
    RankHello,
    RankInstall,
    RankInvalidate,
    RankInvalidateReply,
    RankPause,
    RankPauseReply,
    RankPlan,
    RankPlanReply,
    RankRestore,
    RankResume,
    RankStage,
    RankStageReply,
    RankStatus,
    RankStatusReply,
    RankVerify,
)
from engine_adapter.replica.admission import AdmissionController
from engine_adapter.replica.agreement import (
    AgreedPlan,
    agree,
    all_as_live,
    all_cleared,
    check_config,
    first_seat,
    mismatches,
    not_proven,
    require_digests,
    same_build,
    warnings,
    with_digests,
)
from engine_adapter.replica.interfaces import WorkDeadlines
from engine_adapter.replica.ranks import RankCalls
from updater.core.dtypes import Rules, merged
from updater.core.errors import Aborted, Failure, Rejected, refuse
from updater.core.participant import (
    DiskOffer,
    FenceRequest,
    InvalidateRequest,
    JoinRequest,
    Kind,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    Progress,
    ResumeRequest,
    StageReply,
    StageRequest,
    StreamOffer,
    VerifyReply,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode, Policy
from updater.core.version import START

_PROOFS_KEPT = 8  # live, kept, staged, and a few that were given up


class RankWork:
    """One replica's ranks as one thing. `warnings`: what every receipt says of this replica.

    What grows with the number of tensors (coverage, cuts, the sum of the votes) is worked out by a thread, from replies
    that nothing changes any more: streams of the same event loop go on meanwhile.
    """

    def __init__(
        self,
        pool: RankCalls,
        gate: AdmissionController,
        model: str,
        roots: tuple[str, ...],
        deadlines: WorkDeadlines | None = None,
        *,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._model = model
        self._roots = roots
        self._deadlines = deadlines or WorkDeadlines()
        self._warnings = warnings
        self._planned: AgreedPlan | None = None
        self._staging: dict[int, int] = {}  # bytes read, by rank
        self._discarded = -1  # the last serial that was
        self._staging_serial = 0  # of the staging that runs, or 0
        self._stale_before = (0, 0, False)  # serial and attempt of the last install, and what the gate said before it
        self.dtypes: Rules = ()  # that the start checkpoint's tensors are held in
        self._proofs: dict[str, str] = {}  # content digest -> what its bytes were compared with when they came

    @property
    def hellos(self) -> tuple[RankHello, ...]:
        return self._pool.hellos

    # --- start

    async def replay_start(self) -> str:
        """Admit the placement: the start checkpoint, replayed, must give the live bytes. Returns its content digest."""
        same_build(self.hellos)
        deadline = self._deadlines.start_s
        plan = RankPlan(
            serial=0,
            offer=DiskOffer(self._model),
            roots=(self._model, *self._roots),
            manifest="",
            start=True,
            known=True,  # by the live bytes, which the replay is compared with
        )
        planned = await self._fan_out_plan(plan, None, InstallMode.AUTO)
        self.dtypes = merged(reply.dtypes for reply in planned.replies)
        await self._pool.call("stage", RankStage(0, deadline), deadline_s=deadline)
        combined, verified = await self._verify(planned, 0, deadline)
        all_as_live(verified)
        await self._pool.call("discard", RankDiscard(0), deadline_s=self._deadlines.discard_s)
        await self._pool.call("start", StartServing(str(START), combined.observed), deadline_s=deadline)
        self._planned = None
        return combined.observed

    async def join(self, request: JoinRequest) -> None:
        """The live bytes are the fleet's: carry its label from now on.

        All ranks stand still before one is relabelled, and until all are: a rank that pauses and goes on by
        itself leaves the others waiting for a pause that is over.
        """
        deadline = self._deadlines.commit_s
        await self._pool.call("pause", RankPause(0, deadline), deadline_s=deadline)
        try:
            await self._pool.call("label", RankLabel(request.version, request.digest), deadline_s=deadline)
        finally:
            await self.unpause(0)

    # --- the transaction

    async def plan(self, request: PlanRequest) -> PlanReply:
        began = time.monotonic()
        capabilities = self.hellos[0].capabilities
        policy = Policy(in_flight=request.in_flight, cache=request.cache, install=request.install)
        transport = request.offer.kind if request.offer is not None else "disk"
        unsupported = capabilities.refuses(policy, transport)
        if unsupported is not None:
            raise refuse("mode_unsupported", f"this engine does not support {unsupported}", hint=capabilities.offers())
        install = capabilities.install[0] if request.install is InstallMode.AUTO else request.install
        if request.kind is Kind.ROLLBACK:
            self._planned = AgreedPlan(request, (), (), install)
            seconds = time.monotonic() - began
            return PlanReply(request.fence, "", 0, 0, install, warnings=self._warnings, seconds=seconds)
        if request.offer is None:
            raise refuse("bad_request", "an update needs an offer")
        rank_plan = RankPlan(
            serial=request.fence.serial,
            offer=request.offer,
            first=first_seat(request),
            roots=self._roots,
            manifest=request.manifest,
            allow_narrowing=request.allow_narrowing,
            allow_nonfinite=request.allow_nonfinite,
            known=request.kind is Kind.CATCH_UP,
            layouts=request.layouts,
        )
        planned = await self._fan_out_plan(rank_plan, request, install)
        first = planned.replies[0]
        if request.require_digests and not isinstance(request.offer, StreamOffer):  # a stream's may come at its end
            require_digests(first.tensors)
        notes, compared = check_config(first.model, self.hellos, request)
        self._planned = planned
        return PlanReply(
            fence=request.fence,
            manifest_digest=first.manifest_digest,
            tensors=len(first.tensors),
            bytes_to_read=sum(reply.bytes_to_read for reply in planned.replies),
            install=install,
            warnings=(*self._warnings, *warnings(planned.replies), *notes),
            seconds=time.monotonic() - began,
            compared=compared,
        )

    async def _fan_out_plan(self, plan: RankPlan, request: PlanRequest | None, install: InstallMode) -> AgreedPlan:
        replies: list[RankPlanReply] = await self._pool.call("plan", plan, deadline_s=self._deadlines.plan_s)
        if len({reply.manifest_digest for reply in replies}) > 1:
            raise refuse("source_changed", "the ranks did not see the same manifest")
        tensors, boxes = replies[0].tensors, [reply.boxes for reply in replies]
        cuts = await asyncio.to_thread(checked_cuts, tensors, boxes)
        self._refuse_overtaken(plan.serial)
        return AgreedPlan(request, tuple(replies), cuts, install)

    async def stage(self, request: StageRequest) -> StageReply:
        began = time.monotonic()
        self._planned_for(request.fence.serial)
        self._staging, self._staging_serial = {}, request.fence.serial
        try:
            replies: list[RankStageReply] = await self._pool.call(
                "stage", RankStage(request.fence.serial, request.deadline_s), deadline_s=request.deadline_s
            )
        finally:
            self._staging_serial = 0
        return StageReply(request.fence, sum(reply.bytes_read for reply in replies), time.monotonic() - began)

    def on_staged(self, rank: int, staged: BytesStaged) -> None:
        """What a rank says of its staging while it runs."""
        if staged.serial == self._staging_serial:
            self._staging[rank] = staged.done

    def progress(self) -> Progress | None:
        """Of the staging that runs."""
        if not self._staging_serial or self._planned is None:
            return None
        total = sum(reply.bytes_to_read for reply in self._planned.replies)
        return Progress(self._staging_serial, min(sum(self._staging.values()), total), total)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        began = time.monotonic()
        serial = request.fence.serial
        planned = self._planned_for(serial)
        plan = planned.request
        if plan is not None and plan.kind is Kind.ROLLBACK:
            check = RankCheckPrevious(serial, plan.version, plan.digest)
            await self._pool.call("check_previous", check, deadline_s=request.deadline_s)
            proof = self._proofs.get(plan.digest, "structure_only")
            return VerifyReply(request.fence, plan.digest, proof, 0, seconds=time.monotonic() - began)
        planned = with_digests(planned, dict(request.digests))
        if plan is not None and plan.require_digests:
            require_digests(planned.replies[0].tensors)
        combined, _ = await self._verify(planned, serial, request.deadline_s)
        return VerifyReply(
            fence=request.fence,
            observed=combined.observed,
            proof=combined.proof,
            tensors_changed=combined.changed,
            warnings=combined.warnings,
            seconds=time.monotonic() - began,
        )

    async def _verify(
        self, planned: AgreedPlan, serial: int, deadline_s: float
    ) -> tuple[Combined, list[RankVerifyReply]]:
        """What the spares of all ranks hold together, and what each said. Raises Rejected with every mismatch."""
        message = RankVerify(serial, planned.cuts, deadline_s)
        replies: list[RankVerifyReply] = await self._pool.call("verify", message, deadline_s=deadline_s)
        first = planned.replies[0]
        allowed = () if planned.request is None else planned.request.allow_suspicious
        combined = await asyncio.to_thread(combine, first.tensors, first.redundant, planned.cuts, replies, allowed)
        self._refuse_overtaken(serial)
        if combined.failures:
            raise Rejected(*combined.failures)
        self._proofs.pop(combined.observed, None)
        self._proofs[combined.observed] = combined.proof
        for digest in list(self._proofs)[:-_PROOFS_KEPT]:
            del self._proofs[digest]
        return combined, replies

    async def pause(self, request: PauseRequest, digest: str, aborted: int, requeued: int) -> PauseReply:
        """Quiesce, stop every rank between two steps, and demand that they stand at the same one (hazard 15)."""
        began = time.monotonic()
        end = began + request.quiesce_s
        await self._gate.quiesce(request.in_flight, request.quiesce_s)
        left = max(0.05, end - time.monotonic())
        serial = request.fence.serial
        replies: list[RankPauseReply] = await self._pool.call("pause", RankPause(serial, left), deadline_s=left)
        agree(replies, serial)
        return PauseReply(
            fence=request.fence,
            staged_serial=serial,
            staged_digest=digest,
            step=replies[0].step,
            asleep=any(reply.asleep for reply in replies),
            aborted=aborted,
            requeued=requeued,
            seconds=time.monotonic() - began,
        )

    async def install(self, request: FenceRequest, plan: PlanRequest, digest: str) -> None:
        planned = self._planned_for(request.fence.serial)
        message = RankInstall(
            serial=request.fence.serial,
            attempt=request.fence.attempt,
            mode=planned.install,
            version=plan.version,
            digest=digest,
            cache=plan.cache,
        )
        if self._stale_before[:2] != (message.serial, message.attempt):
            self._stale_before = (message.serial, message.attempt, self._gate.stale)
        self._gate.stale = plan.cache is CachePolicy.KEEP
        await self._pool.call("install", message, deadline_s=self._deadlines.commit_s)

    async def invalidate(self, request: InvalidateRequest) -> None:
        await self._clear(request.fence.serial, request.fence.attempt, request.cache)

    async def _clear(self, serial: int, attempt: int, cache: CachePolicy) -> None:
        message = RankInvalidate(serial, attempt, cache)
        replies: list[RankInvalidateReply] = await self._pool.call(
            "invalidate", message, deadline_s=self._deadlines.commit_s
        )
        if cache is CachePolicy.RESET:
            all_cleared(replies)
            self._gate.stale = False

    async def restore(self, serial: int, attempt: int, version: str, digest: str) -> None:
        """Old bytes, label and namespace back where that attempt was installed; then its staging goes (I6)."""
        message = RankRestore(serial, attempt, version, digest)
        if self._stale_before[:2] == (serial, attempt):
            self._gate.stale = self._stale_before[2]
        await self._pool.call("restore", message, deadline_s=self._deadlines.commit_s)
        await self.discard(serial)

    async def resume(self, request: ResumeRequest) -> None:
        if request.published:
            self._gate.before_switch(request.version)
        await self.unpause(request.fence.serial)

    async def unpause(self, serial: int) -> None:
        deadline = self._deadlines.commit_s
        await self._pool.call("resume", RankResume(serial, deadline), deadline_s=deadline)

    async def discard(self, serial: int) -> None:
        self._discarded = serial
        await self._pool.call("discard", RankDiscard(serial), deadline_s=self._deadlines.discard_s)
        if self._planned is not None and self._planned_serial == serial:
            self._planned = None

    def _refuse_overtaken(self, serial: int) -> None:
        """Raises Aborted where this update was discarded while a thread worked on what its ranks said (I6)."""
        if serial == self._discarded:
            raise Aborted(Failure("client_abort", f"update {serial} was discarded"))

    def cancel(self, serial: int) -> None:
        self._pool.cancel_staging(serial)

    async def audit(self, what: str) -> tuple[Failure, ...]:
        """Failures of a background check of `live` or `spare` against what was voted."""
        replies: list[RankAuditReply] = await self._pool.call(
            "audit", RankAudit(what), deadline_s=self._deadlines.audit_s
        )
        return mismatches(what, replies)

    # --- asked by an operator

    async def readmit(self, unsettled: tuple[int, int] | None, serial: int, version: str, digest: str) -> None:
        """Every rank proves that it holds `version`, and forgets what was computed meanwhile. They run afterwards.

        `unsettled`: (serial, attempt) of an installation that is taken back first; `serial`: whose staging goes.
        """
        if unsettled is not None:
            await self.restore(*unsettled, version, digest)
        await self.discard(serial)
        await self._prove_live(version)
        # Requests that were ended when the gate broke down have to leave the engine, which has to run for that.
        await self.unpause(serial)
        await self._gate.quiesce(InFlight.ABORT, self._deadlines.commit_s)
        deadline = self._deadlines.commit_s
        await self._pool.call("pause", RankPause(serial, deadline), deadline_s=deadline)
        try:
            await self._clear(serial, 0, CachePolicy.RESET)
        finally:
            await self.unpause(serial)

    async def _prove_live(self, version: str) -> None:
        deadline = self._deadlines.audit_s
        audits: list[RankAuditReply] = await self._pool.call("audit", RankAudit("live"), deadline_s=deadline)
        states: list[RankStatusReply] = await self._pool.call("status", RankStatus(), deadline_s=deadline)
        failures = not_proven(version, self.hellos, audits, states)
        if failures:
            raise Aborted(*failures)

    async def serve_installed(self, serial: int, attempt: int, version: str) -> None:
        """Serve what is installed: no block of older weights may be left, whatever the update's policy was (I5)."""
        await self._clear(serial, attempt, CachePolicy.RESET)
        self._gate.before_switch(version)
        await self.unpause(serial)

    @property
    def _planned_serial(self) -> int:
        request = self._planned.request if self._planned is not None else None
        return request.fence.serial if request is not None else 0

    def _planned_for(self, serial: int) -> AgreedPlan:
        if self._planned is None or self._planned_serial != serial:
            raise refuse("wrong_phase", f"nothing is planned for serial {serial}")
        return self._planned
