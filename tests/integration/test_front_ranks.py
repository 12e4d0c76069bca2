"""Rank processes under a pool: refusals, deaths and deadlines are told by rank, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.rank.messages import RankPause, RankStage, RankStatus
from engine_adapter.replica.ranks import PoolSettings, RankPool
from engine_adapter.testing import make_toy_checkpoint
from updater.core.errors import Failure, LiveweightsError

pytestmark = pytest.mark.engine

TOY = "engine_adapter.testing:build_toy"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy") / "start")


class Heard:
    """What a pool says on its own."""

    def __init__(self) -> None:
        self.tokens: list[TokenEvent] = []
        self.deaths: list[Failure] = []
        self.died = asyncio.Event()

    def death(self, failure: Failure) -> None:
        self.deaths.append(failure)
        self.died.set()


def with_pool(
    model: Path, scene: Callable[[RankPool, Heard], Awaitable[None]], *, size: int = 2, **options: str | int
) -> None:
    """Run the scene over started ranks; afterwards none of them may exist."""

    async def run() -> tuple[int, ...]:
        heard = Heard()
        settings = PoolSettings(TOY, str(model), size, options)
        pool = RankPool(settings, on_tokens=heard.tokens.append, on_death=heard.death)
        await pool.start()
        pids = pool.pids
        try:
            async with asyncio.timeout(200):
                await scene(pool, heard)
        finally:
            await pool.stop(1.0)
        return pids

    assert not any(psutil.pid_exists(pid) for pid in asyncio.run(run()))


async def refused(work: Awaitable[object]) -> tuple[Failure, ...]:
    with pytest.raises(LiveweightsError) as caught:
        await work
    return caught.value.failures


def test_a_killed_rank_is_known_by_its_process_and_fails_every_call(model: Path) -> None:
    async def scene(pool: RankPool, heard: Heard) -> None:
        assert [hello.info.rank for hello in pool.hellos] == [0, 1]
        assert len(await pool.call("status", RankStatus(), deadline_s=60.0)) == 2
        failures = await refused(pool.call("stage", RankStage(3, 60.0), deadline_s=60.0))
        assert {(failure.code, failure.rank) for failure in failures} == {("wrong_phase", 0), ("wrong_phase", 1)}
        assert heard.deaths == []
        os.kill(pool.pids[1], signal.SIGKILL)
        await heard.died.wait()
        assert next((failure.code, failure.rank) for failure in heard.deaths) == ("rank_died", 1)
        failures = await refused(pool.call("status", RankStatus(), deadline_s=60.0))
        assert ("rank_died", 1) in {(failure.code, failure.rank) for failure in failures}

    with_pool(model, scene)


@pytest.mark.case("F43")
def test_a_prompt_that_no_memory_holds_is_refused_and_the_rank_lives(model: Path) -> None:
    async def scene(pool: RankPool, heard: Heard) -> None:
        for number, prompt in enumerate(((1,) * 100_000, (), (10_000_000,))):
            (failure,) = await refused(pool.tell_first("submit", GenerateRequest(f"r{number}", prompt, 1)))
            assert failure.code == "bad_request"
        assert len(await pool.call("status", RankStatus(), deadline_s=60.0)) == 2
        assert heard.deaths == []

    with_pool(model, scene)


def test_a_rank_that_hangs_costs_its_deadline_and_no_more(model: Path) -> None:
    async def scene(pool: RankPool, heard: Heard) -> None:
        # Long enough for rank 0 to answer on a machine that has something else to do.
        failures = await refused(pool.call("pause", RankPause(1, 8.0), deadline_s=8.0))
        assert [(failure.code, failure.rank) for failure in failures] == [("phase_timeout", 1)]

    with_pool(model, scene, fault="hang:before:pause:1:1")


@pytest.mark.parametrize(
    ("factory", "options", "code"),
    [
        ("engine_adapter.testing:no_such_engine", {}, "bad_request"),
        ("engine_adapter.no_such_module:build", {}, "bad_request"),
        (TOY, {"no_such_option": 1}, "rank_failed"),
    ],
)
def test_a_rank_that_cannot_build_its_engine_says_why_and_leaves(
    model: Path, factory: str, options: dict[str, int], code: str
) -> None:
    async def run() -> tuple[int, ...]:
        pool = RankPool(PoolSettings(factory, str(model), 1, options), on_tokens=print, on_death=print)
        failures = await refused(pool.start())
        assert [(failure.code, failure.rank) for failure in failures] == [(code, 0)]
        return pool.pids

    assert not any(psutil.pid_exists(pid) for pid in asyncio.run(run()))


FRONT = """
import asyncio, sys
from engine_adapter.rank.messages import RankPause, RankStatus
from engine_adapter.replica.ranks import PoolSettings, RankPool

async def main():
    settings = PoolSettings({factory!r}, {model!r}, 2, {{"fault": "hang:before:pause:1:1"}})
    pool = RankPool(settings, on_tokens=print, on_death=print)
    await pool.start()
    pausing = asyncio.create_task(pool.call("pause", RankPause(1, 60.0), deadline_s=3600.0))
    await asyncio.sleep(0)
    await pool.tell_first("status", RankStatus())
    print(*pool.pids, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.case("F44")
def test_ranks_do_not_outlive_a_front_that_was_killed(model: Path, tmp_path: Path) -> None:
    """Rank 0 stands idle, rank 1 hangs in a pause and would never look at its channel again. No file is left either."""
    code = FRONT.format(factory=TOY, model=str(model))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert front.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in front.stdout.readline().split()]
        assert len(ranks) == 2
    finally:
        front.kill()
        front.wait()
        assert front.stdout is not None
        front.stdout.close()
    _, alive = psutil.wait_procs(ranks, timeout=100)
    for rank in alive:
        rank.kill()
    assert alive == []
    assert list(tmp_path.iterdir()) == []
