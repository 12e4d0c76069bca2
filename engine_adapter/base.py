"""What an engine author supplies, once per rank process. Nothing here knows of transactions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine_adapter.placement.rows import Placement
from updater.core.policy import CachePolicy, Capabilities
from updater.protocol.manifest import TensorSpec

if TYPE_CHECKING:  # a front knows boxes and messages, and needs no torch
    import torch


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of this rank that a checkpoint feeds.

    `local`: the plain local tensor, sharing storage with what the forward pass reads. `rebind` makes the forward
    pass read another tensor of equal shape, dtype, device and strides instead (about a microsecond; only while the
    engine is paused). Tied parameters appear once; `aliases` lists the other names.
    """

    name: str
    local: torch.Tensor
    rebind: Callable[[torch.Tensor], None]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Derived:
    """Something computed from parameters (a cached float32 head, a packed kernel), which must follow every install.

    `feeds`: names of the parameters that it is computed from. `build(tensors)`: the state for one side's tensors of
    these names, computed on the staging thread before the vote, while the engine serves: it touches nothing live and
    keeps no reference to `tensors`, whose bytes may be exchanged. The same bytes give an equal state. What it raises
    refuses the update. `bind(state)`: make the forward pass use a state; microseconds, may be repeated, called only
    while the engine is paused. `bound()`: the state in use; asked once, before the engine starts.
    """

    name: str
    feeds: tuple[str, ...]
    build: Callable[[Mapping[str, torch.Tensor]], object]
    bind: Callable[[object], None]
    bound: Callable[[], object]


@dataclass(frozen=True, slots=True)
class PausePoint:
    """Where a rank stands: must be equal on all ranks of a replica."""

    step: int
    running: str  # hash of the ids of the requests that the scheduler holds

    @classmethod
    def at(cls, step: int, ids: Iterable[str]) -> PausePoint:
        """`ids`: in an order that is the same on every rank."""
        return cls(step, hashlib.sha256("\n".join(ids).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Greedy unless `temperature` > 0. Token ids in, token ids out."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request, in order. `version`: the label of the weights that made them, read on the rank.

    `finish_reason`: None while it runs, then `stop`, `length`, `abort` or `error` (with `error`).
    """

    request_id: str
    tokens: tuple[int, ...]
    version: str
    finish_reason: str | None = None
    error: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a rank process is told to build. `rendezvous`: path of a FileStore shared by the ranks of this
    replica; an empty file at first, that no process may replace or remove.

    `options` are the engine's own (for example `num_blocks`, `dtype`).
    """

    rank: int
    size: int
    model: str
    rendezvous: str
    options: dict[str, str | int | float | bool]


class RankEngine(Protocol):
    """One rank of an engine.

    Threads: `parameters`, `placement` and `capabilities` are called from the staging thread while the engine
    serves; `pause`, `unpause`, `reset_cache` and everything between from the control thread; `submit` and `cancel`
    on rank 0 only, from the control thread; `emit` is called from the engine's own thread.
    """

    rank: int
    size: int
    name: str

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def failure(self) -> str | None:
        """Why this rank can neither serve nor pause any more, or None. Looked at a few times a second, from a thread of
        its own; the process then ends, so that its front does not go on failing every request.
        """

    def parameters(self) -> Mapping[str, Parameter]:
        """Every tensor that a checkpoint must feed. The same mapping for the life of the process."""

    def derived(self) -> tuple[Derived, ...]:
        """What must follow the parameters. Asked once, before `start`."""

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        """Rows for this rank. Pure: touches no weight."""

    def start(self, emit: Callable[[TokenEvent], None]) -> None:
        """Begin to serve. Called once, after the placement was admitted."""

    def pause(self, deadline_s: float) -> PausePoint:
        """Stop between two steps; on return no forward runs and none starts before `unpause`. All ranks enter.

        Raises TimeoutError after `deadline_s`, and is then not paused.
        """

    def unpause(self, deadline_s: float) -> None: ...

    def reset_cache(self) -> Mapping[str, bool]:
        """While paused: tier name -> really empty. Every tier the engine has."""

    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        """While paused: the label that `TokenEvent.version` carries and the namespace of new cache entries (I3)."""

    def submit(self, request: GenerateRequest) -> None: ...

    def cancel(self, request_id: str) -> None:
        """The request ends with `finish_reason="abort"` and the tokens it has, soon."""

    def stop(self, deadline_s: float) -> None: ...


@runtime_checkable
class KnowsConfig(Protocol):
    """What an engine can say of model configs beyond the file that it started on. Any engine may leave it out: then the
    file is what it runs on, and a key that one of two configs lacks is not judged.
    """

    def running_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`config`: what its start folder's files say, a quantisation under `quantization_config`; empty where there is
        no such file. The same as the engine runs on it, where it was told to read it otherwise.
        """

    def completed_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same config with what the engine's config class fills in. May raise for one that it cannot read."""

    def tokenizer_folder(self) -> str:
        """Where its tokenizer lies, if not in its start folder; else empty."""


@runtime_checkable
class PlacesSpare(Protocol):
    """An engine whose second copy of the weights may have to lie in host memory. Any engine may leave it out."""

    host_spare: bool


#: Named as `package.module:function` on a rank process's command line; the module is imported in that process only.
EngineFactory = Callable[[EngineSpec], RankEngine]
