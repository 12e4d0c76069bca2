"""One rank of a vLLM engine, seen from inside its worker process: implements `engine_adapter.base.RankEngine`.

vLLM generates, schedules and pauses by itself, and the front asks it to through the engine client; what is here is
what only the worker knows: its tensors, their placement, and where it stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from engine_adapter.base import Derived, EngineSpec, GenerateRequest, Parameter, PausePoint, TokenEvent
from engine_adapter.parameters import collect
from engine_adapter.placement.rows import Placement
from engine_adapter.vllm.building import recorded_placements
from engine_adapter.vllm.configs import ServerConfig
from engine_adapter.vllm.connectors import connectors, named
from engine_adapter.vllm.settings import SparePlace
from engine_adapter.vllm.twins.layers import processed_layers
from updater.core.errors import Failure, LiveweightsError, refuse
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.protocol.manifest import TensorSpec

#: Docs: docs/vllm.md.
CELLS = (
    (InFlight.DRAIN, CachePolicy.RESET),
    (InFlight.DRAIN, CachePolicy.NAMESPACE),
    (InFlight.DRAIN, CachePolicy.KEEP),
    (InFlight.ABORT, CachePolicy.RESET),
    (InFlight.ABORT, CachePolicy.NAMESPACE),
    (InFlight.ABORT, CachePolicy.KEEP),
    (InFlight.RECOMPUTE, CachePolicy.RESET),
    (InFlight.KEEP, CachePolicy.NAMESPACE),
)
NOTES = (
    "in_flight=recompute goes with cache=reset: vLLM recomputes what runs only when it drops its blocks",
    "in_flight=keep goes with cache=namespace: with one namespace, blocks of a request that spans versions would be"
    " shared with later ones",
)


class VllmRankEngine(ServerConfig):
    """`worker`: vLLM's own, with its model loaded. Made while the engine serves no request."""

    name = "vllm"

    def __init__(self, worker: Any, spec: EngineSpec) -> None:
        super().__init__(worker.vllm_config.model_config)
        self.rank, self.size = spec.rank, spec.size
        self._worker = worker
        model = worker.get_model()
        self._placements = recorded_placements(worker.vllm_config, model)
        layers = processed_layers(model, worker.vllm_config, self._placements.fresh)
        # Ours come last: a packed expert has the shape of the one that a checkpoint holds.
        self._parameters = {**collect(model, empty=False), **layers.parameters}
        self._derived = layers.derived
        self._steps = 0
        self._stood: tuple[int, PausePoint] | None = None
        self._lock = threading.Lock()
        model.register_forward_pre_hook(self._count)
        eager = bool(worker.vllm_config.model_config.enforce_eager)
        self.host_spare = spec.options.get("spare") == SparePlace.HOST
        may_move = eager and not self.host_spare
        install = (InstallMode.FLIP, InstallMode.EXCHANGE) if may_move else (InstallMode.EXCHANGE,)
        self._addresses = None if eager else _addresses(model)
        tiers = connectors(worker.vllm_config, named(str(spec.options.get("allow_kv_connector", ""))))
        notes = (*NOTES, *tiers.notes(CELLS))
        self._capabilities = Capabilities(cells=tiers.cells(CELLS), install=install, notes=notes)

    def _count(self, *_call: Any) -> None:
        self._steps += 1

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def failure(self) -> str | None:
        """vLLM ends a worker that failed, and the front sees its socket close."""
        return None

    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    def derived(self) -> tuple[Derived, ...]:
        return self._derived

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        return self._placements.placement(specs)

    def stand(self, number: int) -> None:
        """On the worker's own thread, between two steps, while the scheduler is paused. `number`: of this pause."""
        runner = self._worker.model_runner
        point = PausePoint.at(self._steps, sorted(str(request) for request in getattr(runner, "requests", ())))
        with self._lock:
            self._stood = (number, point)

    def pause(self, deadline_s: float) -> PausePoint:
        """The front has paused the scheduler and had every rank note where it stands."""
        with self._lock:
            stood, self._stood = self._stood, None
        if stood is None:
            raise LiveweightsError(Failure("wrong_phase", "the engine is not paused", rank=self.rank))
        return stood[1]

    def unpause(self, deadline_s: float) -> None:
        """The front lets the scheduler go on."""

    def reset_cache(self) -> Mapping[str, bool]:
        """Every cache tier of vLLM belongs to its scheduler: the front resets them."""
        return {}

    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        """vLLM's core labels tokens: the front tells it, while the scheduler is paused. Where addresses were captured,
        the install must have left every one as it was.
        """
        if self._addresses is None:
            return
        found = _addresses(self._worker.get_model())
        moved = [name for name, address in self._addresses.items() if found.get(name) != address]
        if moved:
            why = "its address changed, and compiled code holds the old one"
            raise LiveweightsError(*(Failure("rank_failed", why, rank=self.rank, tensor=name) for name in moved))

    def start(self, emit: Callable[[TokenEvent], None]) -> None:
        """vLLM serves already."""

    def submit(self, request: GenerateRequest) -> None:
        raise refuse("mode_unsupported", "requests go to vLLM's own routes")

    def cancel(self, request_id: str) -> None:
        raise refuse("mode_unsupported", "requests go to vLLM's own routes")

    def stop(self, deadline_s: float) -> None:
        """vLLM ends its workers itself."""


def _addresses(model: Any) -> dict[str, int]:
    """Of every parameter and buffer."""
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}
    return found | {name: buffer.data_ptr() for name, buffer in model.named_buffers(remove_duplicate=False)}
