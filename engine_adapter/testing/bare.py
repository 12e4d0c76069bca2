"""Ranks without an engine: parameters, rules and a rank agent in this process, for tests of placement and staging.

`BareEngine` implements `RankEngine` over plain tensors and serves nothing; `BareReplica` orders the agents of all its
ranks as a front would, without its state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from engine_adapter.base import Derived, GenerateRequest, Parameter, PausePoint, TokenEvent
from engine_adapter.placement.atoms import Combined, combine, make_cuts
from engine_adapter.placement.coverage import check_sources
from engine_adapter.placement.declared.rules import Rules, declare, targets_of
from engine_adapter.placement.rows import Placement
from engine_adapter.placement.values import WireTensor
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.messages import (
    RankCheckPrevious,
    RankDiscard,
    RankInstall,
    RankPause,
    RankPlan,
    RankResume,
    RankStage,
    RankVerify,
)
from transports.base import Source
from updater.core.errors import Aborted
from updater.core.participant import DiskOffer, Offer
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.protocol.manifest import TensorSpec

_DEADLINE_S = 3600.0  # a bound that only a hang reaches

Shapes = Mapping[str, tuple[int, ...]]


class BareEngine:
    """One rank. `shapes`: local shapes of its parameters; `bound`: what a forward pass would read.

    `calls` records pauses, labels and cache resets in order. `before_rebind(name)` and `before_label(version)` may
    raise, to fail an install where a test wants it.
    """

    name = "bare"

    def __init__(
        self,
        shapes: Shapes,
        rules: Rules,
        rank: int = 0,
        size: int = 1,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        derived: Sequence[Derived] = (),
        placement: Callable[[Mapping[str, TensorSpec]], Placement] | None = None,
    ) -> None:
        self.rank, self.size, self.rules = rank, size, rules
        kinds, ties = dtypes or {}, aliases or {}
        self.bound = {name: torch.zeros(shape, dtype=kinds.get(name, torch.bfloat16)) for name, shape in shapes.items()}
        self._parameters = {
            name: Parameter(name, tensor, self._rebinder(name), ties.get(name, ()))
            for name, tensor in self.bound.items()
        }
        self._derived = tuple(derived)
        self._placement = placement
        self.paused = False
        self.calls: list[str] = []
        self.before_rebind: Callable[[str], None] = lambda _name: None
        self.before_label: Callable[[str], None] = lambda _version: None
        self.tiers = {"prefix": True}

    def _rebinder(self, name: str) -> Callable[[torch.Tensor], None]:
        def rebind(tensor: torch.Tensor) -> None:
            self.before_rebind(name)
            self.bound[name] = tensor

        return rebind

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cells=((InFlight.DRAIN, CachePolicy.RESET),))

    @property
    def failure(self) -> str | None:
        return None

    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    def derived(self) -> tuple[Derived, ...]:
        return self._derived

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        if self._placement is not None:
            return self._placement(specs)
        return declare(specs, targets_of(self._parameters), self.rules, self.rank, self.size)

    def start(self, emit: Callable[[TokenEvent], None]) -> None:
        self.calls.append("start")

    def pause(self, deadline_s: float) -> PausePoint:
        self.calls.append("pause")
        self.paused = True
        return PausePoint(0, "")

    def unpause(self, deadline_s: float) -> None:
        self.calls.append("unpause")
        self.paused = False

    def reset_cache(self) -> Mapping[str, bool]:
        self.calls.append("reset")
        return dict(self.tiers)

    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        self.before_label(version)
        self.calls.append(f"label {version}")

    def submit(self, request: GenerateRequest) -> None:
        raise NotImplementedError("a bare engine serves nothing")

    def cancel(self, request_id: str) -> None:
        """Nothing runs."""

    def stop(self, deadline_s: float) -> None:
        self.calls.append("stop")


class BareReplica:
    """Agents of all ranks of one replica. `open_source(rank)` gives every rank its own source."""

    def __init__(
        self, engines: Sequence[BareEngine], open_source: Callable[[int], Source], **agent_options: Any
    ) -> None:
        self.engines = list(engines)
        self.open_source = open_source
        self.agents = [
            RankAgent(engine, open_source=partial(self._open, rank), **agent_options)
            for rank, engine in enumerate(engines)
        ]

    def _open(self, rank: int, offer: Offer, roots: tuple[str, ...], manifest: str, number: int) -> Source:
        return self.open_source(rank)

    def vote(self, serial: int, *, allow_suspicious: Sequence[str] = (), **plan: Any) -> Combined:
        """Plan, stage and verify on every rank; what they hold together. Raises `LiveweightsError`."""
        plans = [agent.plan(RankPlan(serial, DiskOffer(""), (), "", **plan)) for agent in self.agents]
        tensors: tuple[WireTensor, ...] = plans[0].tensors
        boxes = [reply.boxes for reply in plans]
        lost = check_sources(tensors, boxes)
        if lost:
            raise Aborted(*lost)
        cuts = make_cuts(tensors, boxes)
        for agent in self.agents:
            agent.stage(RankStage(serial, _DEADLINE_S))
        replies = [agent.verify(RankVerify(serial, cuts, _DEADLINE_S)) for agent in self.agents]
        return combine(tensors, plans[0].redundant, cuts, replies, allow_suspicious)

    def stage(self, serial: int, **plan: Any) -> Combined:
        """The same, raising `Aborted` with the failures of a vote that is no."""
        found = self.vote(serial, **plan)
        if found.failures:
            raise Aborted(*found.failures)
        return found

    def check_previous(self, serial: int, version: str, digest: str) -> None:
        for agent in self.agents:
            agent.check_previous(RankCheckPrevious(serial, version, digest))

    def pause(self, serial: int) -> None:
        for agent in self.agents:
            agent.pause(RankPause(serial, _DEADLINE_S))

    def install(
        self, serial: int, version: str, digest: str, mode: InstallMode = InstallMode.FLIP, attempt: int = 1
    ) -> None:
        for agent in self.agents:
            agent.install(RankInstall(serial, attempt, mode, version, digest, CachePolicy.RESET))

    def resume(self, serial: int) -> None:
        for agent in self.agents:
            agent.resume(RankResume(serial, _DEADLINE_S))

    def discard(self, serial: int) -> None:
        for agent in self.agents:
            agent.discard(RankDiscard(serial))

    def update(self, serial: int, version: str, mode: InstallMode = InstallMode.FLIP, **plan: Any) -> Combined:
        """One whole update. A no of the vote is discarded and raised."""
        try:
            found = self.stage(serial, **plan)
        except Exception:
            self.discard(serial)
            raise
        self.switch(serial, version, found.observed, mode)
        return found

    def switch(self, serial: int, version: str, digest: str, mode: InstallMode = InstallMode.FLIP) -> None:
        """Pause, install and resume what was voted."""
        self.pause(serial)
        self.install(serial, version, digest, mode)
        self.resume(serial)
