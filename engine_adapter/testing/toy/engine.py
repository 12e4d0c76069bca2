"""The toy engine: one rank of a small real decoder, through the same seam as every other engine.

Matrix of in-flight modes and cache policies (supported: +, refused by every engine: x):

| | reset | namespace | keep |
|---|---|---|---|
| drain | + | + | + old blocks are hit by new requests: the caller asked for it |
| abort | + | + | + as above |
| recompute | + | + | x |
| keep | x | + running requests end on their own keys and values, which are never shared | + as above |

Without `namespaced` the column `namespace` is refused.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from engine_adapter.base import Derived, EngineSpec, GenerateRequest, Parameter, PausePoint, TokenEvent
from engine_adapter.placement.declared.rules import targets_of
from engine_adapter.placement.rows import Placement
from engine_adapter.rank.channel import ENGINE_FAILED
from engine_adapter.testing.toy.cache import PrefixCache
from engine_adapter.testing.toy.config import ToyConfig, ToyOptions
from engine_adapter.testing.toy.faults import Faults
from engine_adapter.testing.toy.gate import PauseGate
from engine_adapter.testing.toy.model import ToyModel, ToyRanks
from engine_adapter.testing.toy.pace import Pace
from engine_adapter.testing.toy.placement import toy_placement
from engine_adapter.testing.toy.scheduler import ToyScheduler
from engine_adapter.testing.toy.slicer import expected_parameters
from updater.core.errors import refuse
from updater.core.policy import CachePolicy, Capabilities, InFlight
from updater.protocol.manifest import TensorSpec

_SPOTS = tuple((mode, policy) for mode in InFlight for policy in CachePolicy)
_REFUSED = ((InFlight.KEEP, CachePolicy.RESET), (InFlight.RECOMPUTE, CachePolicy.KEEP))


def build_toy(spec: EngineSpec) -> ToyEngine:
    """`EngineFactory`: named `engine_adapter.testing:build_toy`. Options: `config.ToyOptions`.

    Loads the checkpoint at `spec.model` and meets its peers at `spec.rendezvous`. Raises `Rejected` for sizes
    that do not divide over the ranks and ValueError for unknown options.
    """
    torch.set_num_threads(1)
    return ToyEngine(spec)


class ToyEngine:
    """A `RankEngine`. Everything a rank of a real engine does to itself at a load, it does here at the start."""

    name = "toy"

    def __init__(self, spec: EngineSpec) -> None:
        self.rank, self.size = spec.rank, spec.size
        self.options = ToyOptions.parse(spec.options)
        self.config = ToyConfig.load(spec.model)
        weights = expected_parameters(spec.model, spec.rank, spec.size, self.options)
        self._ranks = ToyRanks(spec, self.options.collective_timeout_s)
        self.model = ToyModel(self.config, self.options, self._ranks, weights)
        o = self.options
        self.cache = PrefixCache(o.tiers.split(","), o.blocks, o.block_size, o.namespaced)
        self._scheduler = ToyScheduler(self.model, self.cache, o.max_running)
        self._faults = Faults(o.fault, spec.rank)
        self._pace = Pace(o.pace if spec.rank == 0 else "")
        self._placements = 0
        self._replaced: torch.Tensor | None = None
        self._parameters = {name: self._parameter(name, tensor) for name, tensor in weights.items()}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._gate = PauseGate()
        self._step = 0
        self._loop: threading.Thread | None = None
        self._emit: Callable[[TokenEvent], None] = lambda _event: None

    # ----- what the staging thread asks

    @property
    def capabilities(self) -> Capabilities:
        cells = tuple(
            cell
            for cell in _SPOTS
            if cell not in _REFUSED and (self.options.namespaced or cell[1] is not CachePolicy.NAMESPACE)
        )
        notes = () if self.options.namespaced else ("cache=namespace: cache keys carry no version",)
        return Capabilities(cells=cells, notes=notes)

    @property
    def failure(self) -> str | None:
        return self._gate.failure

    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    def derived(self) -> tuple[Derived, ...]:
        return tuple(map(self._faulty, self.model.derived()))

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        with self._faults.around("placement"):
            self._placements += 1
            targets = targets_of(self._parameters)
            defect = self._placements >= self.options.defect_from and self.options.defect_rank in (-1, self.rank)
            return toy_placement(specs, targets, self.config, self.options, self.rank, self.size, defect=defect)

    def running_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

    def completed_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return asdict(ToyConfig()) | dict(config)

    def tokenizer_folder(self) -> str:
        return ""

    # ----- what the control thread asks

    def start(self, emit: Callable[[TokenEvent], None]) -> None:
        if self._loop is not None:
            raise RuntimeError("already started")
        self._emit = emit
        self._loop = threading.Thread(target=self._run, name=f"toy-loop-{self.rank}", daemon=True)
        self._loop.start()

    def pause(self, deadline_s: float) -> PausePoint:
        with self._faults.around("pause"):
            if self._loop is not None:
                self._gate.pause(deadline_s)
            skew = self.options.step_skew if self.rank else 0
            return PausePoint.at(self._step + skew, self._scheduler.held())

    def unpause(self, deadline_s: float) -> None:
        with self._faults.around("unpause"):
            self._rot()
            if self._loop is not None:
                self._gate.unpause(deadline_s)

    def reset_cache(self) -> Mapping[str, bool]:
        with self._faults.around("reset_cache"):
            return self.cache.clear(self.options.cache_refuses, self.options.cache_lies)

    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        with self._faults.around("set_version"):
            self._scheduler.version = version
            self.cache.enter(version, digest, cache)

    def submit(self, request: GenerateRequest) -> None:
        with self._faults.around("submit"):
            if not request.prompt or any(not 0 <= token < self.config.vocab_size for token in request.prompt):
                raise refuse("bad_request", "a prompt is one or more token ids of the vocabulary")
            if len(request.prompt) > self.options.context:
                # Scores of a forward pass take the square of this in memory.
                raise refuse("bad_request", f"a prompt has at most {self.options.context} tokens")
            self._inbox.append(("new", request))
            self._gate.wake()

    def cancel(self, request_id: str) -> None:
        self._inbox.append(("cancel", request_id))
        self._gate.wake()

    def sleep(self) -> None:
        """While paused: give up the contents of all memory, also of buffers that no checkpoint holds."""
        for tensor in [*self.model.parameters.values(), *self.model.buffers.values()]:
            tensor.fill_(float("nan"))

    def wake(self) -> None:
        """Buffers are computed again; parameters are rubbish until an update brings all of them."""
        self.model.buffers = self.model.fresh_buffers()

    def stop(self, deadline_s: float) -> None:
        """All ranks enter. Raises TimeoutError if the loop does not end."""
        self._gate.stop()
        if self._loop is not None:
            self._loop.join(deadline_s)
            if self._loop.is_alive():
                raise TimeoutError("the loop did not end")
        self._ranks.close()

    # ----- the loop

    def _run(self) -> None:
        try:
            if self.rank == 0:
                self._lead()
            else:
                self._follow()
        except Exception as error:
            # A rank without its loop can neither serve nor be paused: with peers the process ends, and the front
            # learns of it from the child process.
            traceback.print_exc(file=sys.stderr)
            self._gate.fail(error)
            for request_id in self._scheduler.held():
                self._emit(TokenEvent(request_id, (), self._scheduler.version, "error", error=str(error)))
            if self.size > 1:
                os._exit(ENGINE_FAILED)

    def _lead(self) -> None:
        """Rank 0: take what came in, decide what the next step is, tell the others, do it."""
        beat = self.options.collective_timeout_s / 4
        while not self._gate.stopping:
            if self._gate.wanted:
                self._stand_still(beat)
                continue
            new, gone = self._drain_inbox()
            if not (new or gone or self._scheduler):
                self._gate.idle(self._inbox, beat)
                if not self._inbox:
                    self._ranks.schedule({"kind": "idle"})
                continue
            self._work(self._ranks.schedule({"kind": "step", "new": [asdict(r) for r in new], "gone": gone}))
        self._ranks.schedule({"kind": "stop"})

    def _stand_still(self, beat: float) -> None:
        self._ranks.schedule({"kind": "pause"})
        self._gate.hold()
        while not self._gate.wait_wanted(beat):
            self._ranks.schedule({"kind": "pause"})
        self._ranks.schedule({"kind": "idle"})
        self._gate.leave()

    def _follow(self) -> None:
        while True:
            message = self._ranks.schedule(None)
            if message["kind"] == "stop":
                return
            if message["kind"] == "pause":
                self._gate.hold()
                continue
            # Rank 0 went on; this rank goes on when its own control thread says so.
            if self._gate.held:
                if not self._gate.wait_wanted(self.options.collective_timeout_s):
                    raise TimeoutError("rank 0 went on, this rank was never told to")
                self._gate.leave()
            if message["kind"] == "step":
                self._work(message)

    def _drain_inbox(self) -> tuple[list[GenerateRequest], list[str]]:
        new: list[GenerateRequest] = []
        gone: list[str] = []
        while self._inbox:
            kind, what = self._inbox.popleft()
            if kind == "new":
                new.append(what)
            else:
                gone.append(what)
        return new, gone

    def _work(self, message: dict[str, Any]) -> None:
        """One step, the same on every rank."""
        self._scheduler.add(_request(fields) for fields in message["new"])
        events = self._scheduler.cancel(message["gone"])
        if self._scheduler:
            with self._faults.around("step"):
                self._pace.wait()
                if self.options.step_ms:
                    time.sleep(self.options.step_ms / 1000)  # how slow this engine is, not a synchronisation
                events += self._scheduler.step()
            self._step += 1
        if self.rank == 0:
            for event in events:
                self._emit(event)

    # ----- small things

    def _rot(self) -> None:
        """The defect `rot`: memory changes unseen when the engine goes on after an install."""
        if not self.options.rot or self._replaced is None or self.rank != self.options.rot_rank:
            return
        live = next(iter(self.model.parameters.values()))
        victim = live if self.options.rot == "live" else self._replaced
        victim.view(-1).view(torch.uint8)[0] ^= 1
        self._replaced = None

    def _parameter(self, name: str, tensor: torch.Tensor) -> Parameter:
        def rebind(other: torch.Tensor) -> None:
            with self._faults.around("rebind"):
                self._replaced = self.model.parameters[name]
                self.model.parameters[name] = other

        tied = name == "model.embed_tokens.weight" and self.config.tie_word_embeddings
        return Parameter(name, tensor, rebind, aliases=("lm_head.weight",) if tied else ())

    def _faulty(self, derived: Derived) -> Derived:
        def build(tensors: Mapping[str, torch.Tensor]) -> object:
            with self._faults.around("build"):
                return derived.build(tensors)

        def bind(state: object) -> None:
            with self._faults.around("bind"):
                derived.bind(state)

        return replace(derived, build=build, bind=bind)


def _request(fields: dict[str, Any]) -> GenerateRequest:
    lists = {name: tuple(fields[name]) for name in ("prompt", "stop_token_ids")}
    return GenerateRequest(**{**fields, **lists})
