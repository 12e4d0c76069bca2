"""The rank processes of one engine under a test's direct control: what a front orders, without its state machine.

Everything here goes through the shipped pieces: `ranks.RankPool`, `rank.main`, `rank.agent`. Only the order of verbs
and the moment of each are the test's.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.placement.atoms import Combined, combine, make_cuts
from engine_adapter.placement.coverage import check_sources
from engine_adapter.placement.values import RankVerifyReply
from engine_adapter.rank.channel import CancelRequest, StartServing
from engine_adapter.rank.messages import (
    CacheTier,
    RankCheckPrevious,
    RankDigests,
    RankDiscard,
    RankInstall,
    RankInvalidate,
    RankPause,
    RankPauseReply,
    RankPlan,
    RankPlanReply,
    RankRestore,
    RankResume,
    RankStage,
    RankStatus,
    RankStatusReply,
    RankVerify,
)
from engine_adapter.replica.ranks import PoolSettings, RankPool
from updater.core.errors import Aborted, Failure
from updater.core.participant import DiskOffer
from updater.core.policy import CachePolicy, InstallMode
from updater.core.version import START

_DEADLINE_S = 120.0  # only a hang reaches it


@dataclass(slots=True)
class HarnessReply:
    """What one request has got so far. `versions`: the label of the weights that made each token."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagedVote:
    """The vote on what lies in the spares of all ranks."""

    serial: int
    digest: str
    plans: tuple[RankPlanReply, ...]
    votes: tuple[RankVerifyReply, ...]
    combined: Combined


class RankHarness:
    """A started engine that serves its start checkpoint. Use as a context manager; not thread safe.

    Every method raises `updater.core.errors.LiveweightsError` for what a rank refuses.
    """

    def __init__(
        self,
        factory: str,
        model: str | Path,
        size: int,
        options: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._runner = asyncio.Runner()
        self._logs = Path(tempfile.mkdtemp(prefix="liveweights-contract-"))
        self._settings = PoolSettings(factory, str(model), size, dict(options or {}), self._logs, 2 * _DEADLINE_S)
        self._pool = RankPool(self._settings, on_tokens=self._on_tokens, on_death=self._on_death)
        self._serials, self._ids = itertools.count(1), itertools.count(1)
        self._news = asyncio.Event()
        self.deaths: list[Failure] = []
        self.replies: dict[str, HarnessReply] = {}
        self.version, self.digest = str(START), ""
        self.previous: tuple[str, str] | None = None
        self.joined: StagedVote | None = None

    # ----- life

    def __enter__(self) -> RankHarness:
        try:
            self._runner.run(self._pool.start())
            self.joined = self.stage(self._settings.model, start=True)
            differing = sorted({name for vote in self.joined.votes for name in vote.changed})
            if differing:
                raise Aborted(Failure("placement_refused", f"replay differs from live: {differing}"))
            self.call("discard", RankDiscard(self.joined.serial))
            self.digest = self.joined.digest
            self.call("start", StartServing(self.version, self.digest))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """No rank process is left."""
        self._runner.run(self._pool.stop(5.0))
        self._runner.close()
        shutil.rmtree(self._logs, ignore_errors=True)

    @property
    def pids(self) -> tuple[int, ...]:
        return self._pool.pids

    @property
    def size(self) -> int:
        return self._settings.size

    def _on_death(self, failure: Failure) -> None:
        self.deaths.append(failure)
        self._news.set()

    # ----- verbs

    def call(self, verb: str, request: Any, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """To all ranks; replies in rank order."""
        return self._runner.run(self._pool.call(verb, request, deadline_s=deadline_s))

    def plan(self, path: str | Path, *, manifest: str = "", start: bool = False) -> tuple[int, list[RankPlanReply]]:
        """Serial and plans; both coverages are proved."""
        serial, folder = next(self._serials), Path(path).resolve()
        plans: list[RankPlanReply] = self.call(
            "plan", RankPlan(serial, DiskOffer(str(folder)), (str(folder),), manifest, start=start)
        )
        holes = check_sources(plans[0].tensors, [plan.boxes for plan in plans])
        if holes:
            raise Aborted(*holes)
        return serial, plans

    def stage(self, path: str | Path, *, manifest: str = "", start: bool = False) -> StagedVote:
        """Plan, stage, verify. Raises for whatever is wrong with it; serving goes on meanwhile."""
        serial, plans = self.plan(path, manifest=manifest, start=start)
        self.call("stage", RankStage(serial, _DEADLINE_S))
        cuts = make_cuts(plans[0].tensors, [plan.boxes for plan in plans])
        votes: list[RankVerifyReply] = self.call("verify", RankVerify(serial, cuts, _DEADLINE_S))
        combined = combine(plans[0].tensors, plans[0].redundant, cuts, votes)
        if combined.failures:
            raise Aborted(*combined.failures)
        return StagedVote(serial, combined.observed, tuple(plans), tuple(votes), combined)

    def pause(self, serial: int, deadline_s: float = _DEADLINE_S) -> list[RankPauseReply]:
        return self.call("pause", RankPause(serial, deadline_s))

    def install(
        self,
        serial: int,
        version: str,
        digest: str,
        mode: InstallMode = InstallMode.FLIP,
        cache: CachePolicy = CachePolicy.RESET,
    ) -> None:
        """While paused: attempt 1 of `serial`."""
        self.call("install", RankInstall(serial, 1, mode, version, digest, cache))

    def invalidate(self, serial: int, cache: CachePolicy = CachePolicy.RESET) -> list[CacheTier]:
        """Tiers of all ranks."""
        return [tier for reply in self.call("invalidate", RankInvalidate(serial, 1, cache)) for tier in reply.tiers]

    def restore(self, serial: int) -> None:
        self.call("restore", RankRestore(serial, 1, self.version, self.digest))

    def resume(self, serial: int, deadline_s: float = _DEADLINE_S) -> None:
        self.call("resume", RankResume(serial, deadline_s))

    def discard(self, serial: int) -> None:
        self.call("discard", RankDiscard(serial))

    def publish(
        self,
        path: str | Path,
        version: str,
        *,
        manifest: str = "",
        mode: InstallMode = InstallMode.FLIP,
        cache: CachePolicy = CachePolicy.RESET,
    ) -> StagedVote:
        """The whole path of one update that succeeds."""
        staged = self.stage(path, manifest=manifest)
        self.switch(staged.serial, version, staged.digest, mode, cache)
        return staged

    def rollback(self, mode: InstallMode = InstallMode.FLIP, cache: CachePolicy = CachePolicy.RESET) -> None:
        """The kept copy becomes live again."""
        if self.previous is None:
            raise ValueError("nothing was published")
        serial, (version, digest) = next(self._serials), self.previous
        self.call("check_previous", RankCheckPrevious(serial, version, digest))
        self.switch(serial, version, digest, mode, cache)

    def switch(self, serial: int, version: str, digest: str, mode: InstallMode, cache: CachePolicy) -> None:
        """Pause, install, invalidate, resume."""
        self.pause(serial)
        self.install(serial, version, digest, mode, cache)
        self.invalidate(serial, cache)
        self.previous, self.version, self.digest = (self.version, self.digest), version, digest
        self.resume(serial)

    # ----- looking

    def status(self) -> list[RankStatusReply]:
        return self.call("status", RankStatus())

    def digests(self) -> list[dict[str, str]]:
        """Per rank: parameter name -> parameter digest of what is live."""
        return [{each.name: each.digest for each in reply.digests} for reply in self.call("digests", RankDigests())]

    # ----- requests

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Greedy. Returns the request's id."""
        request_id = f"r{next(self._ids)}"
        self.replies[request_id] = HarnessReply()
        request = GenerateRequest(request_id, tuple(prompt), max_tokens)
        self._runner.run(self._first("submit", request))
        return request_id

    def cancel(self, request_id: str) -> None:
        self._runner.run(self._first("cancel_request", CancelRequest(request_id)))

    def wait(self, request_id: str, tokens: int | None = None, deadline_s: float = _DEADLINE_S) -> HarnessReply:
        """Until the request has finished, or has at least `tokens`."""
        reply = self.replies[request_id]

        def enough() -> bool:
            return reply.finish_reason is not None or (tokens is not None and len(reply.tokens) >= tokens)

        self.wait_until(enough, deadline_s)
        return reply

    def wait_until(self, done: Callable[[], bool], deadline_s: float = _DEADLINE_S) -> None:
        """Raises TimeoutError; `done` is asked whenever a rank said something."""

        async def wait() -> None:
            async with asyncio.timeout(deadline_s):
                while not done():
                    self._news.clear()
                    await self._news.wait()

        self._runner.run(wait())

    def generate(self, prompt: Sequence[int], max_tokens: int) -> HarnessReply:
        return self.wait(self.submit(prompt, max_tokens))

    async def _first(self, verb: str, request: Any) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            await self._pool.tell_first(verb, request)

    def _on_tokens(self, event: TokenEvent) -> None:
        reply = self.replies[event.request_id]
        reply.tokens += event.tokens
        reply.versions += [event.version] * len(event.tokens)
        reply.finish_reason = event.finish_reason
        reply.cached_tokens = event.cached_tokens
        self._news.set()
