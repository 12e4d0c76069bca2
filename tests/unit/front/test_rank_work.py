"""What is asked of all ranks, and in which order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine_adapter.placement.values import AtomDigest, RankVerifyReply, SourceBoxes, WireTensor
from engine_adapter.rank.channel import BytesStaged, RankLabel
from engine_adapter.rank.messages import RankHello, RankPlanReply, RankStageReply
from engine_adapter.replica.admission import Gate
from engine_adapter.replica.agreement import AgreedPlan
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.testing.requests import HandEngine
from transports.base import Box
from updater.core.errors import Aborted, Failure
from updater.core.participant import (
    DiskOffer,
    Fence,
    JoinRequest,
    Kind,
    PlanRequest,
    Progress,
    RankInfo,
    StageRequest,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.testing.fronts import settle


class HandPool:
    """Keeps the verbs; `fail`: the one that is refused. A stage waits for `staged`."""

    size = 2
    hellos = ()

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.asked: list[tuple[str, Any]] = []
        self.staged = asyncio.Event()

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        self.asked.append((verb, request))
        if verb == self.fail:
            raise Aborted(Failure("rank_failed", "as planned"))
        if verb == "stage":
            await self.staged.wait()
        return [RankStageReply(100)] * 2


def work_of(pool: Any) -> RankWork:
    return RankWork(pool, Gate(HandEngine()), "/model", ())


@pytest.mark.parametrize("fail", ["", "label"])
def test_all_ranks_stand_still_before_one_is_relabelled_and_go_on_together(fail: str) -> None:
    async def main() -> None:
        pool = HandPool(fail)
        work = work_of(pool)
        request = JoinRequest(Fence("f", 1, 0, 0, "i"), "0-7", "d7")
        if fail:
            with pytest.raises(Aborted):
                await work.join(request)
        else:
            await work.join(request)
        assert [verb for verb, _ in pool.asked] == ["pause", "label", "resume"]
        assert pool.asked[1][1] == RankLabel("0-7", "d7")

    asyncio.run(main())


def test_progress_is_that_of_the_staging_that_runs() -> None:
    async def main() -> None:
        pool = HandPool()
        work = work_of(pool)
        fence, policy = Fence("f", 1, 4, 0, "i"), (InFlight.DRAIN, CachePolicy.RESET, InstallMode.FLIP)
        request = PlanRequest(fence, Kind.UPDATE, "u", "0-1", DiskOffer("/x"), "", "", *policy, False, (), False)
        reply = RankPlanReply((), (), (), "", 100)
        work._planned = AgreedPlan(request, (reply, reply), (), InstallMode.FLIP)
        assert work.progress() is None
        staging = asyncio.create_task(work.stage(StageRequest(fence, 9.0)))
        await asyncio.sleep(0)
        assert work.progress() == Progress(4, 0, 200)
        work.on_staged(0, BytesStaged(4, 60))
        work.on_staged(1, BytesStaged(3, 99))  # of an earlier one
        assert work.progress() == Progress(4, 60, 200)
        work.on_staged(1, BytesStaged(4, 30))
        work.on_staged(0, BytesStaged(4, 70))
        assert work.progress() == Progress(4, 100, 200)
        work.on_staged(0, BytesStaged(4, 900))  # padding and what is read twice
        assert work.progress() == Progress(4, 200, 200)
        pool.staged.set()
        assert (await staging).bytes_read == 200
        assert work.progress() is None

    asyncio.run(main())


class SeenTensors(tuple[WireTensor, ...]):
    """Tells which threads go over it, and lets them wait until the test allows it."""

    threads: list[int]
    allowed: threading.Event

    def __iter__(self) -> Iterator[WireTensor]:
        self.threads.append(threading.get_ident())
        assert self.allowed.wait(30)
        return super().__iter__()


class PlanPool(HandPool):
    """One rank that holds the one tensor, and votes for it."""

    hellos = (RankHello(RankInfo(0, 1, 1, 1), 1, "hand", Capabilities(((InFlight.DRAIN, CachePolicy.RESET),)), ""),)

    def __init__(self) -> None:
        super().__init__()
        self.tensors = SeenTensors([WireTensor("w", "F32", (4,), "")])
        self.tensors.threads, self.tensors.allowed = [], threading.Event()

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        self.asked.append((verb, request))
        whole = Box.whole((4,))
        if verb == "plan":
            return [RankPlanReply(self.tensors, (SourceBoxes("w", (whole,)),), (), "", 16)]
        return [RankVerifyReply((AtomDigest("w", whole, f"{1:016x}"),), 1, (), ())]


def plan_request(serial: int) -> PlanRequest:
    fence, policy = Fence("f", 1, serial, 0, "i"), (InFlight.DRAIN, CachePolicy.RESET, InstallMode.AUTO)
    return PlanRequest(fence, Kind.UPDATE, "u", "0-1", DiskOffer("/x"), "", "", *policy, False, (), False)


@pytest.mark.case("F50")
def test_coverage_cuts_and_votes_are_worked_out_beside_the_event_loop() -> None:
    async def main() -> None:
        pool = PlanPool()
        pool.tensors.allowed.set()
        work, request = work_of(pool), plan_request(4)
        assert (await work.plan(request)).tensors == 1
        planned = len(pool.tensors.threads)
        assert (await work.verify(VerifyRequest(request.fence, 9.0))).observed
        assert 2 <= planned < len(pool.tensors.threads)
        assert threading.get_ident() not in pool.tensors.threads

    asyncio.run(main())


@pytest.mark.case("F50")
def test_what_was_discarded_while_a_thread_worked_on_it_is_neither_planned_nor_voted_for() -> None:
    async def main() -> None:
        pool = PlanPool()
        work, request = work_of(pool), plan_request(4)
        planning = asyncio.create_task(work.plan(request))
        await settle()
        await work.discard(4)
        pool.tensors.allowed.set()
        with pytest.raises(Aborted, match="discarded"):
            await planning
        assert work._planned is None
        await work.plan(plan_request(5))
        pool.tensors.allowed.clear()
        voting = asyncio.create_task(work.verify(VerifyRequest(plan_request(5).fence, 9.0)))
        await settle()
        await work.discard(5)
        pool.tensors.allowed.set()
        with pytest.raises(Aborted, match="discarded"):
            await voting

    asyncio.run(main())
