"""Placement inside a worker: recorded from the engine's own loaders on a private twin of the model.

The twin is built once, at join, on the meta device: it holds no memory, shares no module with the live model and is
registered nowhere. Recording for another checkpoint later runs on any thread while the engine serves and touches the
twin alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine_adapter.placement.recorded.record import StartCheckpoint, place
from engine_adapter.placement.recorded.twin import Twin
from engine_adapter.placement.rows import Placement
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec

_KEPT = 8  # placements of other specs than the start's


class RecordedPlacements:
    """Placements of one rank. The first specs asked for are those of the checkpoint that the engine started on.

    `kv_heads`: of every layer; 0 where they are not the same everywhere.
    """

    def __init__(self, twin: Twin, rank: int, size: int, kv_heads: int = 0) -> None:
        self._twin, self.rank, self.size, self._kv_heads = twin, rank, size, kv_heads
        self._start: StartCheckpoint | None = None
        self._placements: dict[str, Placement] = {}
        self._lock = threading.Lock()

    @property
    def fresh(self) -> nn.Module:
        """The twin: built as the live model was, on meta, and never loaded or processed."""
        return self._twin.module

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Name -> other names, of every tensor that the start checkpoint's placement writes or carries."""
        if self._start is None:
            return {}
        names = dict.fromkeys(row.target for row in self._start.placement.rows)
        return {name: self._twin.tensors[name].aliases for name in names}

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        """Rows for `specs`, remembered by names, dtypes and shapes. Raises Rejected with every failure."""
        key = fingerprint(specs)
        with self._lock:
            if key not in self._placements:
                found = place(self._twin, specs, self.rank, self.size, self._start)
                self._remember(key, specs, replace(found, kv_heads=self._kv_heads))
            return self._placements[key]

    def _remember(self, key: str, specs: Mapping[str, TensorSpec], found: Placement) -> None:
        if self._start is None:
            self._start = StartCheckpoint(dict(specs), found)
        elif len(self._placements) > _KEPT:
            del self._placements[list(self._placements)[1]]  # the oldest but the start's
        self._placements[key] = found


def fingerprint(specs: Mapping[str, TensorSpec]) -> str:
    """SHA-256 hex over the sorted lines `name dtype shape`."""
    lines = sorted(f"{name} {spec.dtype} {list(spec.shape)}\n" for name, spec in specs.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def meta_twin(build: Callable[[], Any], live_model: nn.Module) -> Twin:
    """A second model on meta, tied as the live one is. Call on the thread that loaded it, before it serves.

    `build`: makes a module like the live one, with `load_weights`, on the device that torch is set to. Quantisation is
    kept: a quantised checkpoint feeds the parameters of quantised layers. Raises Rejected (`placement_refused`) where
    none can be built, or where building it changed the live model.
    """
    before = _entries(live_model)
    module = _built(build)
    _part(module, live_model)
    tie_alike(module, live_model)
    _drop_memory(module)
    if _entries(live_model) != before:
        raise Rejected(Failure("placement_refused", "building the twin changed the live model"))
    return Twin(module, module.load_weights)


def _built(build: Callable[[], Any]) -> Any:
    """On meta; a constructor that reads values of what it makes (slopes of ALiBi) gets real tables, and empty weights
    on meta. Raises Rejected if that cannot be either.
    """
    error: RuntimeError | None = None
    for where in (torch.device("meta"), _EmptyOnMeta()):
        try:
            with where:
                return build()
        except RuntimeError as raised:  # NotImplementedError: values on meta
            error = raised
    raise Rejected(Failure("placement_refused", f"no twin of this model can be built: {error}"))


class _EmptyOnMeta(TorchFunctionMode):
    """Weights are made by `torch.empty`; whatever else is made stays where it was asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **({**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}))


def tie_alike(module: nn.Module, live_model: nn.Module) -> None:
    """An engine may tie two layers after it compared what it loaded; a second model is tied without a load."""
    first: dict[int, str] = {}
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in live_model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and name in known and other in known and known[name] is not known[other]:
            path, _, key = name.rpartition(".")
            module.get_submodule(path)._parameters[key] = module.get_parameter(other)


def _part(module: nn.Module, live_model: nn.Module) -> None:
    """An engine may hand out one rotary table to all layers that ask for the same: an empty module in its place."""
    live = {id(each) for each in live_model.modules()}
    for owner in [each for each in module.modules() if id(each) not in live]:
        for key, child in owner._modules.items():
            if id(child) in live:
                owner._modules[key] = nn.Module()


def _drop_memory(module: nn.Module) -> None:
    """Parameters and persistent buffers that ask for a device by name are moved to meta as well."""
    made: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        holders: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for key, tensor in ((key, tensor) for holder in holders for key, tensor in holder.items()):
            if tensor is None or tensor.is_meta or key in owner._non_persistent_buffers_set:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = tensor.data.to("meta").as_subclass(type(tensor))
                made[id(tensor)].__dict__.update(tensor.__dict__)
            holder = owner._parameters if key in owner._parameters else owner._buffers
            holder[key] = made[id(tensor)]  # type: ignore[assignment]


def _entries(model: nn.Module) -> dict[str, dict[str, int]]:
    """Every module's attributes, parameters, buffers and children, by identity."""
    return {
        name: {
            key: id(value)
            for held in (module.__dict__, module._parameters, module._buffers, module._modules)
            for key, value in held.items()
        }
        for name, module in model.named_modules()
    }


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What an engine's layers take as their dtype while they are made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
