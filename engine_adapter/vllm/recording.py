"""Placement inside a vLLM worker: recorded from vLLM's own loaders on a private twin of the model.

The twin is built once, at join, on the meta device: it holds no memory, shares no module with the live model and is
registered nowhere. Only that build sets vLLM's current configuration, which is global to the process; recording for
another checkpoint later runs on any thread while the engine serves and touches the twin alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine_adapter.placement.recorded import Start, place
from engine_adapter.placement.recorded_twin import Twin
from engine_adapter.placement.rows import Placement
from engine_adapter.vllm.building import build, tie_alike
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec

_KEPT = 8  # placements of other specs than the start's


class RecordedPlacements:
    """Placements of one rank. The first specs asked for are those of the checkpoint that the engine started on.

    `vllm_config`: of the worker; `live_model`: loaded from it, not serving yet. Raises Rejected: `adapter_unsupported`
    for what one recording cannot describe (LoRA, rebalanced or dealt experts, pipeline stages, draft models),
    `placement_refused` if building the twin changed the live model.
    """

    def __init__(self, vllm_config: Any, live_model: nn.Module) -> None:
        check_supported(vllm_config)
        self._twin = meta_twin(vllm_config, live_model)
        state: Any = import_module("vllm.distributed")
        self.rank = int(state.get_tensor_model_parallel_rank())
        self.size = int(state.get_tensor_model_parallel_world_size())
        heads = getattr(vllm_config.model_config.hf_text_config, "num_key_value_heads", 0)
        self._kv_heads = heads if isinstance(heads, int) else 0  # a list: not the same in every layer
        self._start: Start | None = None
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
            self._start = Start(dict(specs), found)
        elif len(self._placements) > _KEPT:
            del self._placements[list(self._placements)[1]]  # the oldest but the start's
        self._placements[key] = found


def fingerprint(specs: Mapping[str, TensorSpec]) -> str:
    """SHA-256 hex over the sorted lines `name dtype shape`."""
    lines = sorted(f"{name} {spec.dtype} {list(spec.shape)}\n" for name, spec in specs.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_supported(vllm_config: Any) -> None:
    """Raises Rejected with every part of the configuration that a recording of this rank's model cannot describe."""
    parallel = vllm_config.parallel_config
    found = {
        "LoRA: adapter layers have other names": vllm_config.lora_config is not None,
        "speculative decoding: a draft model has weights of its own": vllm_config.speculative_config is not None,
        "expert rebalancing (EPLB): experts move while the engine serves": parallel.enable_eplb,
        "expert parallelism: a rank's loader drops the other ranks' experts": parallel.enable_expert_parallel,
        "pipeline parallelism: a rank's loader drops the other stages' layers": parallel.pipeline_parallel_size > 1,
    }
    hint = "start vLLM without it"
    failures = [Failure("adapter_unsupported", why, hint=hint) for why, is_on in found.items() if is_on]
    if failures:
        raise Rejected(*failures)


def meta_twin(vllm_config: Any, live_model: nn.Module) -> Twin:
    """A second model on meta, tied as the live one is. Call on the thread that loaded it, before it serves.

    Quantisation is kept: a quantised checkpoint feeds the parameters of quantised layers.
    """
    before = _entries(live_model)
    module = _built(vllm_config)
    _part(module, live_model)
    tie_alike(module, live_model)
    _drop_memory(module)
    if _entries(live_model) != before:
        raise Rejected(Failure("placement_refused", "building the twin changed the live model"))
    return Twin(module, module.load_weights)


def _built(vllm_config: Any) -> Any:
    """On meta; a constructor that reads values of what it makes (slopes of ALiBi) gets real tables, and empty weights
    on meta. Raises Rejected if that cannot be either.
    """
    error: RuntimeError | None = None
    for where in (torch.device("meta"), _EmptyOnMeta()):
        try:
            with where:
                return build(vllm_config)
        except RuntimeError as raised:  # NotImplementedError: values on meta
            error = raised
    raise Rejected(Failure("placement_refused", f"no twin of this model can be built: {error}"))


class _EmptyOnMeta(TorchFunctionMode):
    """Weights are made by `torch.empty`; whatever else is made stays where it was asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **({**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}))


def _part(module: nn.Module, live_model: nn.Module) -> None:
    """vLLM hands out one rotary table to all layers that ask for the same: an empty module in its place."""
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
