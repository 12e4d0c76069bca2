"""What is asked of all ranks, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_adapter.rank.channel import BytesStaged, RankLabel
from engine_adapter.rank.messages import RankPlanReply, RankStageReply
from engine_adapter.replica.admission import Gate
from engine_adapter.replica.agreement import AgreedPlan
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.testing.requests import HandEngine
from updater.core.errors import Aborted, Failure
from updater.core.participant import (
    DiskOffer,
    Fence,
    JoinRequest,
    Kind,
    PlanRequest,
    Progress,
    StageRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode


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
