"""A replica in this process's event loop with real rank processes, and a coordinator played by hand over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from engine_adapter.rank.messages import RankDigests
from engine_adapter.replica.launch import ENGINES, FrontSettings, Replica
from engine_adapter.replica.lifecycle import STANDALONE
from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from engine_adapter.testing.toy.pace import steps_held
from engine_adapter.testing.toy.reference import ToyReference
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import (
    MESSAGES,
    DiscardRequest,
    DiskOffer,
    Fence,
    FenceRequest,
    FrontStatus,
    InvalidateRequest,
    Kind,
    PauseRequest,
    PlanRequest,
    ResumeRequest,
    StageRequest,
    StatusRequest,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode
from updater.core.replica.state import LeaseTimer
from updater.protocol import problems, wire


def toy_settings(model: Path, tp: int = 1, **changes: Any) -> FrontSettings:
    """A toy replica on a free port; it opens by itself. `changes`: fields of `FrontSettings`."""
    base = FrontSettings(model=model, tp=tp, port=0, factory=ENGINES["toy"], roots=(model.parent,), replica="toy")
    return replace(base, **changes)


@asynccontextmanager
async def running_replica(
    settings: FrontSettings, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Replica]:
    """Started, admitted and serving; stopped, with no process left, at the end. `clock`: for its leases.

    Raises LiveweightsError with the replica's own failure if it does not start.
    """
    replica = Replica(settings, clock)
    stop = asyncio.Event()
    life = asyncio.create_task(replica.run(stop))
    joined = asyncio.create_task(replica.joined.wait())
    try:
        await asyncio.wait({life, joined}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            raise LiveweightsError(replica.face.failure or Failure("internal", "the replica ended without a word"))
        yield replica
    finally:
        joined.cancel()
        stop.set()
        await life


class HandCoordinator:
    """Sends the verbs of the contract and keeps the fence. Raises LiveweightsError for a refusal."""

    def __init__(self, replica: Replica, token: str = "") -> None:
        self.replica = replica
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.AsyncClient(base_url=replica.url, headers=headers, timeout=200.0, trust_env=False)
        self.epoch = 1

    async def __aenter__(self) -> HandCoordinator:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.client.aclose()

    def fence(self, serial: int, attempt: int = 0, **changes: Any) -> Fence:
        return replace(Fence(STANDALONE, self.epoch, serial, attempt, self.replica.incarnation), **changes)

    async def call(self, verb: str, request: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        response = await self.client.post(f"/participant/v1/{verb}", content=wire.encode(request), headers=headers)
        if response.status_code != 200:
            raise problems.error_of(response.status_code, response.json())
        return wire.decode(MESSAGES[verb][1], response.content)

    async def lead(self, later: int = 1) -> FrontStatus:
        """Speak as the next life of a coordinator from now on, or as one that comes `later`."""
        self.epoch += later
        status: FrontStatus = await self.call("lead", FenceRequest(self.fence(0)))
        return status

    async def status(self) -> FrontStatus:
        status: FrontStatus = await self.call("status", StatusRequest())
        return status

    async def until(self, reached: Callable[[FrontStatus], bool]) -> FrontStatus:
        """The first status that is so. The caller's deadline bounds it; each question is a round trip."""
        status = await self.status()
        while not reached(status):
            status = await self.status()
        return status

    async def plan(self, serial: int, path: Path | None, version: str, **changes: Any) -> Any:
        request = PlanRequest(
            fence=self.fence(serial),
            kind=Kind.UPDATE,
            update=version,
            version=version,
            offer=DiskOffer(str(path)) if path is not None else None,
            manifest="",
            digest="",
            in_flight=InFlight.DRAIN,
            cache=CachePolicy.RESET,
            install=InstallMode.AUTO,
            require_digests=False,
            allow_narrowing=(),
            allow_nonfinite=False,
        )
        return await self.call("plan", replace(request, **changes))

    async def stage(self, serial: int, deadline_s: float = 120.0) -> Any:
        return await self.call("stage", StageRequest(self.fence(serial), deadline_s))

    async def verify(self, serial: int, deadline_s: float = 120.0) -> Any:
        return await self.call("verify", VerifyRequest(self.fence(serial), deadline_s))

    async def prepare(self, serial: int, path: Path | None, version: str, **changes: Any) -> Any:
        """Plan, stage, verify: the vote."""
        await self.plan(serial, path, version, **changes)
        await self.stage(serial)
        return await self.verify(serial)

    async def pause(
        self,
        serial: int,
        attempt: int = 1,
        *,
        in_flight: InFlight = InFlight.DRAIN,
        quiesce_s: float = 120.0,
        lease_s: float = 120.0,
    ) -> Any:
        return await self.call("pause", PauseRequest(self.fence(serial, attempt), in_flight, quiesce_s, lease_s))

    async def install(self, serial: int, attempt: int = 1) -> Any:
        return await self.call("install", FenceRequest(self.fence(serial, attempt)))

    async def invalidate(self, serial: int, attempt: int = 1, cache: CachePolicy = CachePolicy.RESET) -> Any:
        return await self.call("invalidate", InvalidateRequest(self.fence(serial, attempt), cache))

    async def restore(self, serial: int, attempt: int = 1) -> Any:
        return await self.call("restore", FenceRequest(self.fence(serial, attempt)))

    async def resume(self, serial: int, attempt: int, published: bool, version: str, digest: str) -> Any:
        return await self.call("resume", ResumeRequest(self.fence(serial, attempt), published, version, digest))

    async def discard(self, serial: int, attempt: int = 0) -> Any:
        return await self.call("discard", DiscardRequest(self.fence(serial, attempt)))

    async def update(
        self,
        serial: int,
        path: Path | None,
        version: str,
        *,
        in_flight: InFlight = InFlight.DRAIN,
        cache: CachePolicy = CachePolicy.RESET,
        **changes: Any,
    ) -> str:
        """A whole publication. Returns the content digest that was voted."""
        vote = await self.prepare(serial, path, version, in_flight=in_flight, cache=cache, **changes)
        await self.pause(serial, in_flight=in_flight)
        await self.install(serial)
        await self.invalidate(serial, cache=cache)
        await self.resume(serial, 1, True, version, vote.observed)
        observed: str = vote.observed
        return observed

    async def complete(self, prompt: list[int], max_tokens: int = 8, **members: Any) -> dict[str, Any]:
        """A completion. Raises LiveweightsError for a problem document."""
        body: Mapping[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **members}
        response = await self.client.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise problems.error_of(response.status_code, response.json())
        answer: dict[str, Any] = response.json()
        return answer


#: A prompt of one and a half blocks, so that a repeat hits the prefix cache.
PROMPT = [5, 6, 7, 8, 9, 10]


async def code_of(work: Awaitable[Any]) -> str:
    """The code of the refusal that this must end in. Raises AssertionError where it is not refused."""
    try:
        answer = await work
    except LiveweightsError as error:
        return error.code
    raise AssertionError(f"not refused: {answer}")


@dataclass
class MovedClock:
    """Real seconds, and those that a test adds: no lease ends because a machine is slow."""

    added: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added


@dataclass
class Stage:
    """A toy replica and two checkpoints that a test switches between. Serials and versions only grow."""

    runner: asyncio.Runner
    replica: Replica
    paths: tuple[Path, Path]
    pace: Path
    clock: MovedClock
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(10))
    live: int = 0  # index into paths
    references: dict[int, ToyReference] = field(default_factory=dict)

    def play(self, scene: Callable[[HandCoordinator], Awaitable[None]], deadline_s: float = 200.0) -> None:
        """Run the scene on the replica's own event loop."""

        async def run() -> None:
            async with HandCoordinator(self.replica) as coordinator, asyncio.timeout(deadline_s):
                await scene(coordinator)

        self.runner.run(run())

    def next(self) -> tuple[int, Path, str]:
        """Serial, the checkpoint that is not live, and a fresh version label."""
        serial = next(self.serials)
        return serial, self.paths[1 - self.live], f"0-{serial}"

    def expected(self, index: int, prompt: Sequence[int] = PROMPT, tokens: int = 8) -> list[int]:
        """What the checkpoint answers, by a forward pass written apart from the engine."""
        if index not in self.references:
            self.references[index] = ToyReference.load(self.paths[index])
        return list(self.references[index].generate(prompt, tokens))

    def installed(self) -> None:
        self.live = 1 - self.live

    def later(self, seconds: float) -> None:
        """Inside a scene: so much time passes for the leases, and their timer goes off."""
        self.clock.added += seconds
        front = self.replica.face.front
        if front is not None:
            front.feed(LeaseTimer())

    def steps_held(self) -> AbstractContextManager[Callable[[int], None]]:
        """No request goes on by itself meanwhile: `with stage.steps_held() as allow`."""
        return steps_held(self.pace)

    async def digests(self) -> Any:
        """Of every live parameter of every rank, freshly computed."""
        return await self.replica.pool.call("digests", RankDigests(), deadline_s=120.0)


@contextmanager
def toy_stage(
    folder: Path, options: Mapping[str, str | int | float | bool] | None = None, tp: int = 1, **changes: Any
) -> Iterator[Stage]:
    """A running stage over checkpoints in `folder`; nothing is left of it at the end."""
    torch.set_num_threads(1)  # the ranks need the cores; threads that wait for each other cost this process seconds
    paths = (make_toy_checkpoint(folder / "a", seed=7), make_toy_checkpoint(folder / "b", seed=8))
    pace, clock = folder / "pace", MovedClock()
    os.mkfifo(pace)
    settings = toy_settings(paths[0], tp, options={"pace": str(pace), **(options or {})}, **changes)
    with asyncio.Runner() as runner:
        life = running_replica(settings, clock)
        replica = runner.run(life.__aenter__())
        try:
            yield Stage(runner, replica, paths, pace, clock)
        finally:
            runner.run(life.__aexit__(None, None, None))
