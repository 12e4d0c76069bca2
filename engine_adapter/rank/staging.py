"""The staging half of a rank: plan, stage, vote, audit. Touches the spare and never a live tensor; serving goes on.

All verbs run on one thread of their own, one at a time; `cancel` may be called from anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from engine_adapter.placement.regions import target_region
from engine_adapter.placement.rows import CopyRow
from engine_adapter.placement.spelling import Proved
from engine_adapter.placement.values import BlankTensor, RankVerifyReply
from engine_adapter.rank.messages import (
    NamedDigest,
    RankAudit,
    RankAuditReply,
    RankCheckPrevious,
    RankDigests,
    RankDigestsReply,
    RankDone,
    RankPlan,
    RankPlanReply,
    RankStage,
    RankStageReply,
    RankVerify,
)
from engine_adapter.rank.plan import CancelToken, Opener, Plan, dtypes_held, make_plan, replay
from engine_adapter.rank.readback import parameter_digests, read_back
from engine_adapter.rank.state import RankState, failed, wrong_phase
from transports.digest import to_hex
from transports.scans import has_normal, is_zero, judged
from updater.core.dtypes import compact
from updater.core.errors import Aborted
from updater.core.participant import SpareState

_FOREVER = float("inf")


class StagingHalf:
    """`poison`: fill the spare with NaN before every staging; without it only where no digests are promised.

    `tell(serial, bytes)` hears now and then how far a staging is. `awaited`: whether another verb waits for the thread.
    """

    def __init__(
        self,
        state: RankState,
        open_source: Opener,
        poison: bool,
        tell: Callable[[int, int], None],
        awaited: Callable[[], bool],
    ) -> None:
        self._state = state
        self._tell, self._awaited = tell, awaited
        self._open_source = open_source
        self._poison = poison
        self._planning: tuple[int, threading.Event] | None = None

    def cancel(self, serial: int) -> None:
        """Make a running plan, stage or verify of `serial` end soon, with `client_abort`."""
        plan = self._state.plan
        for running in (self._planning, plan and (plan.request.serial, plan.cancelled)):
            if running and running[0] == serial:
                running[1].set()

    def plan(self, request: RankPlan) -> RankPlanReply:
        """Opens the source and proves the placement; the spare and its state stay as they are."""
        state = self._state
        with state.staging:
            if state.plan is not None and state.plan.request == request and not state.plan.closed:
                return state.plan.reply
            cancelled = threading.Event()
            if request.serial == state.discarded:  # it waited its turn and was overtaken (I6)
                cancelled.set()
                raise self._endless(cancelled.is_set).error()
            state.drop_plan()
            self._planning = (request.serial, cancelled)
            try:
                plan = make_plan(state.engine, state.spare.live, request, self._open_source, state.proved)
                plan.cancelled = cancelled
                if cancelled.is_set():
                    plan.close()
                    raise self._endless(cancelled.is_set).error()
                state.plan = plan
                if request.start:
                    state.proved = Proved(plan.specs, plan.placement, plan.stated)
                    held = dtypes_held(plan.placement, state.spare.live, state.derived.feeds)
                    plan.reply = replace(plan.reply, dtypes=compact(held))
            finally:
                self._planning = None
            return plan.reply

    def stage(self, request: RankStage) -> RankStageReply:
        """Spends `previous`, replays the rows. A failure leaves the state `staging`, until `discard`."""
        state = self._state
        with state.staging:
            plan = state.planned(request.serial)
            if state.stage_reply is not None:
                return state.stage_reply
            state.refuse_unsettled()
            stop = self._stop(plan, request.deadline_s)
            stop.check()
            state.spare.set_state(SpareState.STAGING, serial=request.serial)
            state.spare_digests = state.voted = None
            state.derived.drop()
            if self._poison or not plan.sees_gaps:
                state.spare.poison()
            meter = Meter(lambda done: self._tell(request.serial, done), state.clock)
            state.stage_reply = RankStageReply(replay(plan, state.spare.live, state.spare.spare, stop, meter))
            return state.stage_reply

    def verify(self, request: RankVerify) -> RankVerifyReply:
        """Reads the spare back and builds what is derived from it. On return the spare is `staged` and the source is
        closed.
        """
        state = self._state
        with state.staging:
            if state.verified is not None and state.verified[0] == request:
                return state.verified[1]
            plan = state.planned(request.serial)
            if state.stage_reply is None:
                raise wrong_phase(f"update {request.serial} is not staged here")
            stop = self._stop(plan, request.deadline_s)
            reply, digests = self._verified(plan, request, stop)
            state.derived.build(state.spare.spare, stop.check)
            state.spare_digests = digests
            state.spare.set_state(SpareState.STAGED, serial=request.serial)
            state.vote(request.serial)
            state.verified = (request, reply)
            plan.close()
            return reply

    def _verified(self, plan: Plan, request: RankVerify, stop: CancelToken) -> tuple[RankVerifyReply, dict[str, int]]:
        state = self._state
        plan.source.recheck()
        spare = state.spare.spare
        proof = read_back(plan, spare, request.cuts, stop)
        if state.live_digests is None or plan.request.start:
            state.live_digests = parameter_digests(state.spare.live, stop)
        reply = RankVerifyReply(
            atoms=proof.atoms,
            parameters=len(proof.parameters),
            changed=differing(proof.parameters, state.live_digests),
            zero=tuple(sorted(name for name, tensor in spare.items() if tensor.numel() and is_zero(tensor))),
            blank=blank_sources(plan, state.spare.live, spare, stop),
        )
        return reply, dict(proof.parameters)

    def check_previous(self, request: RankCheckPrevious) -> RankDone:
        """Rollback's vote: `no_rollback` unless the spare still holds what was live under this label."""
        state = self._state
        with state.staging:
            spare = state.spare
            held = (spare.state, spare.version)
            if held != (SpareState.PREVIOUS, request.version) or spare.digest not in ("", request.digest):
                raise failed("no_rollback", f"the spare is {spare.state.value} {spare.version or '-'}")
            found = parameter_digests(spare.spare, self._endless())
            if state.spare_digests is None or differing(found, state.spare_digests):
                state.empty_spare()
                raise failed("no_rollback", "the spare's bytes are no longer what they were when they were live")
            state.vote(request.serial)
            return RankDone()

    def audit(self, request: RankAudit) -> RankAuditReply:
        """Digests `live` or `spare` again. A spare that differs is no way back any more.

        No verb waits for it: an install, restore or discard, or the next staging verb, ends it, and it then has checked
        nothing.
        """
        state, stop = self._state, threading.Event()
        with state.staging:
            state.auditing = stop
            of_live = request.what == "live"
            known = state.live_digests if of_live else state.spare_digests
            tensors = state.spare.live if of_live else state.spare.spare
        if known is None:
            return RankAuditReply(0, ())
        try:
            found = parameter_digests(tensors, self._endless(lambda: stop.is_set() or self._awaited()))
        except Aborted:
            return RankAuditReply(0, ())
        with state.staging:
            if stop.is_set():  # what was read may be half of either side
                return RankAuditReply(0, ())
            wrong = differing(found, known)
            if wrong and not of_live:
                state.empty_spare()
            return RankAuditReply(len(found), wrong)

    def digests(self, request: RankDigests) -> RankDigestsReply:
        """Parameter digests of what is live, freshly computed."""
        with self._state.staging:
            found = parameter_digests(self._state.spare.live, self._endless())
            return RankDigestsReply(tuple(NamedDigest(name, to_hex(value)) for name, value in found.items()))

    def _stop(self, plan: Plan, deadline_s: float) -> CancelToken:
        return CancelToken(plan.cancelled.is_set, self._state.clock() + deadline_s, self._state.clock)

    def _endless(self, cancelled: Callable[[], bool] = lambda: False) -> CancelToken:
        """For work over this rank's own memory, which ends by itself."""
        return CancelToken(cancelled, _FOREVER, self._state.clock)


def differing(found: Mapping[str, int], known: Mapping[str, int]) -> tuple[str, ...]:
    """Names whose digest is not the known one."""
    return tuple(sorted(name for name, digest in found.items() if known.get(name) != digest))


#: Seconds between two words.
EVERY_S = 0.25


class Meter:
    """Called with increments of bytes, one call at a time. `tell` hears the sum."""

    def __init__(self, tell: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._done, self._last = 0, clock()

    def __call__(self, count: int) -> None:
        self._done += count
        now = self._clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._tell(self._done)


def blank_sources(
    plan: Plan, live: Mapping[str, torch.Tensor], spare: Mapping[str, torch.Tensor], stop: CancelToken
) -> tuple[BlankTensor, ...]:
    """Sorted by name. A sound tensor is left at its first few elements, so this costs next to nothing.

    Nothing is judged where the content is known already.
    """
    if plan.request.known:
        return ()
    rows: dict[str, list[CopyRow]] = {}
    for row in plan.placement.rows:
        if isinstance(row, CopyRow) and row.source_box.numel:
            rows.setdefault(row.source, []).append(row)
    found = []
    for name, mine in sorted(rows.items()):
        spec = plan.specs[name]
        if not judged(spec):
            continue
        stop.check()
        if not any(has_normal(target_region(spare[row.target], row), spec.dtype) for row in mine):
            normal = any(has_normal(target_region(live[row.target], row), spec.dtype) for row in mine)
            found.append(BlankTensor(name, normal))
    return tuple(found)
