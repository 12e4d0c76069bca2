"""One replica of real rank processes with the embedded engine, driven by hand: no front, no coordinator."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.placement.atoms import Combined, combine, make_cuts
from engine_adapter.placement.values import RankVerifyReply
from engine_adapter.rank.channel import CancelRequest, StartServing
from engine_adapter.rank.messages import (
    RankCheckPrevious,
    RankDiscard,
    RankInstall,
    RankInvalidate,
    RankPause,
    RankPauseReply,
    RankPlan,
    RankResume,
    RankStage,
    RankVerify,
)
from engine_adapter.replica.ranks import PoolSettings, RankPool
from updater.core.errors import Failure
from updater.core.participant import DiskOffer
from updater.core.policy import CachePolicy, InstallMode

FACTORY = "engine_adapter.transformers.engine:build"
HANG_S = 120.0  # a guard, never an expectation


@dataclass(slots=True)
class Reply:
    """What came back for one request. `versions`: the label of each token."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    reason: str | None = None
    error: str = ""
    cached: int = 0

    def add(self, event: TokenEvent) -> None:
        self.tokens += event.tokens
        self.versions += [event.version] * len(event.tokens)
        self.reason, self.error, self.cached = event.finish_reason, event.error, event.cached_tokens


class Replica:
    """Start it, then `update`, `generate` and so on. Close it in any case."""

    def __init__(self, model: Path, size: int, **options: str | int | float | bool) -> None:
        self.replies: dict[str, Reply] = {}
        self.deaths: list[Failure] = []
        self._news = asyncio.Condition()
        self._ids, self._serials = itertools.count(), itertools.count(1)
        self._runner = asyncio.Runner()
        options = {"threads": 1, "num_blocks": 128, "start_s": 2 * HANG_S, **options}
        settings = PoolSettings(FACTORY, str(model), size, options, start_s=2 * HANG_S)
        self.pool = RankPool(settings, on_tokens=self._hear, on_death=self.deaths.append)
        self._roots = (str(model.parent),)
        try:
            self._run(self.pool.start())
            _, verified = self.stage(model, 0, start=True)
            self.differs = [name for reply in verified for name in reply.changed]
            self.call("discard", RankDiscard(0))
            self.call("start", StartServing("start", ""))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._run(self.pool.stop(10.0))
        self._runner.close()

    def _run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(2 * HANG_S):
                return await work

        return self._runner.run(bounded())

    def _hear(self, event: TokenEvent) -> None:
        self.replies[event.request_id].add(event)
        asyncio.get_running_loop().create_task(self._ring())

    async def _ring(self) -> None:
        async with self._news:
            self._news.notify_all()

    def call(self, verb: str, request: Any, deadline_s: float = HANG_S) -> list[Any]:
        found: list[Any] = self._run(self.pool.call(verb, request, deadline_s=deadline_s))
        return found

    def first(self, verb: str, request: Any) -> Any:
        """Rank 0 alone."""

        async def one() -> Any:
            return await self.pool.tell_first(verb, request)

        return self._run(one())

    # requests

    def submit(self, prompt: Iterable[int], count: int, **more: Any) -> str:
        request_id = f"r{next(self._ids)}"
        self.replies[request_id] = Reply()
        self.first("submit", GenerateRequest(request_id, tuple(prompt), count, **more))
        return request_id

    def cancel(self, request_id: str) -> None:
        self.first("cancel_request", CancelRequest(request_id))

    def wait(self, request_id: str, tokens: int | None = None) -> Reply:
        """Until it ended, or has at least `tokens`."""
        reply = self.replies[request_id]

        def enough() -> bool:
            return reply.reason is not None or (tokens is not None and len(reply.tokens) >= tokens)

        async def until() -> None:
            async with self._news:
                await self._news.wait_for(enough)

        self._run(until())
        return reply

    def generate(self, prompt: Iterable[int], count: int, **more: Any) -> Reply:
        return self.wait(self.submit(prompt, count, **more))

    def paused_in_the_middle(self, prompts: Iterable[Sequence[int]], count: int, serial: int) -> list[str]:
        """Requests that all have tokens, and more to come, when every rank stands still for `serial`.

        Which step a pause finds depends on how busy the machine is: where one had as good as ended, all are asked
        again. What a rank has made is heard before its answer to the pause, so nothing is taken for unfinished.
        """
        asked = list(prompts)
        while True:
            ids = [self.submit(prompt, count) for prompt in asked]
            for request_id in ids:
                self.wait(request_id, tokens=4)
            self.pause(serial)
            if all(len(self.replies[request_id].tokens) < count - 8 for request_id in ids):
                return ids
            self.resume(serial)
            for request_id in ids:
                self.wait(request_id)

    # updates

    def stage(self, model: Path, serial: int, *, start: bool = False) -> tuple[Combined, list[RankVerifyReply]]:
        plan = RankPlan(serial, DiskOffer(str(model)), self._roots, "", start=start)
        plans = self.call("plan", plan)
        cuts = make_cuts(plans[0].tensors, [reply.boxes for reply in plans])
        self.call("stage", RankStage(serial, HANG_S))
        replies = self.call("verify", RankVerify(serial, cuts, HANG_S))
        combined = combine(plans[0].tensors, plans[0].redundant, cuts, replies)
        assert not combined.failures
        return combined, replies

    def pause(self, serial: int, deadline_s: float = HANG_S) -> list[RankPauseReply]:
        return self.call("pause", RankPause(serial, deadline_s))

    def install(
        self,
        serial: int,
        version: str,
        *,
        mode: InstallMode = InstallMode.FLIP,
        cache: CachePolicy = CachePolicy.RESET,
    ) -> dict[str, bool]:
        """Paused: install and invalidate. Returns the cache tiers that all ranks agree on."""
        self.call("install", RankInstall(serial, 1, mode, version, "", cache))
        replies = self.call("invalidate", RankInvalidate(serial, 1, cache))
        tiers = [{tier.name: tier.cleared for tier in reply.tiers} for reply in replies]
        assert all(each == tiers[0] for each in tiers)
        return tiers[0]

    def resume(self, serial: int) -> None:
        self.call("resume", RankResume(serial, HANG_S))

    def update(self, model: Path, version: str, **how: Any) -> dict[str, bool]:
        """The whole of it, with nothing running."""
        serial = next(self._serials)
        self.stage(model, serial)
        self.pause(serial)
        tiers = self.install(serial, version, **how)
        self.resume(serial)
        return tiers

    def roll_back(self, version: str) -> None:
        serial = next(self._serials)
        self.call("check_previous", RankCheckPrevious(serial, version, ""))
        self.pause(serial)
        self.install(serial, version)
        self.resume(serial)

    def next_serial(self) -> int:
        return next(self._serials)
