"""Post-processed layers: weights that vLLM packs after a load, updated by way of a twin of the layer.

A packed kernel (`layer.cpu_linear`, experts in a grouped layout) holds no byte of a checkpoint. The parameters of such
a layer are therefore kept in load format beside it, staged and verified like all others, and the vote builds the packed
state from them on a twin: a second layer with its own quant method, which runs the engine's own processing. An install
swaps states. There are two twins, so that one can be built on while the other's objects serve.

Nothing here is called while the engine serves, but for the builds: they run on the staging thread, read no current
configuration of vLLM (a process-global) and touch only their twin. They make kernels and run none: oneDNN kernels of a
process share a scratchpad, which is the forward pass's then. Comparing by output is therefore done at join alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from engine_adapter.base import Derived, Parameter
from engine_adapter.hosted.meta_twin import default_dtype, tie_alike
from engine_adapter.vllm.building import build
from engine_adapter.vllm.twins.equal import is_code
from engine_adapter.vllm.twins.layer import ProcessedLayer
from engine_adapter.vllm.twins.state import attributes_of
from engine_adapter.vllm.twins.table import HOOKS, METHODS, Method, qualified
from updater.core.errors import Failure, Rejected

_NEEDS_EAGER = "a compiled model keeps the old kernel"
_EAGER = "start vLLM with --enforce-eager"


@dataclass(frozen=True, slots=True)
class ProcessedLayers:
    """`parameters`: in load format, holding the start checkpoint; they take the place of the model's own tensors of
    these names. `derived`: the layers' packed states.
    """

    parameters: Mapping[str, Parameter]
    derived: tuple[Derived, ...]


def processed_layers(model: nn.Module, vllm_config: Any, fresh: nn.Module) -> ProcessedLayers:
    """Find them and prove that their twins make of the start checkpoint what the live layers hold.

    `model`: loaded by vLLM from `vllm_config`, not serving yet; `fresh`: the same model, built and never loaded, whose
    tensors may be on meta. Call on the thread that loaded it. Where a layer may be packed, reads the checkpoint once
    more, through vLLM's own loader, and needs memory for two more models meanwhile. Raises Rejected
    (`placement_refused`) naming every layer of a type that was not tested, or that its twin does not reproduce.
    """
    methods = _methods(model)
    if not any(may_be_packed(model.get_submodule(name), fresh.get_submodule(name), methods[name]) for name in methods):
        return ProcessedLayers({}, ())
    twins = (twin_model(vllm_config), twin_model(vllm_config))
    for twin in twins:
        tie_alike(twin, model)
    load_start(twins[0], vllm_config)
    names = _canonical_names(twins[0])
    start = {name: parameter.data for name, parameter in twins[0].named_parameters(remove_duplicate=False)}
    dtype = vllm_config.model_config.dtype
    layers = [ProcessedLayer(name, model, twins, method, names, dtype) for name, method in methods.items()]
    failures = [failure for layer in layers for failure in layer.prove(start)]
    packed = [layer for layer in layers if layer.packed]
    failures += shared(layers) + _compiled(packed, vllm_config)
    if failures:
        raise Rejected(*failures)
    raw = {name: _held(name, start[name]) for layer in packed for name in layer.raw}
    raw |= {name: _held(name, tensor) for layer in packed for name, tensor in layer.replaced.items()}
    return ProcessedLayers(raw, tuple(layer.derived() for layer in packed))


def check_compiled(model: nn.Module, vllm_config: Any) -> None:
    """What `processed_layers` would refuse of a compiled model, seen without a twin: before the server listens.

    `model`: loaded and processed. Raises Rejected (`placement_refused`).
    """
    packed = [name for name, module in model.named_modules() if _is_packed(module)]
    if packed and _is_compiled(vllm_config):
        why = f"one of {len(packed)} layers that vLLM packed for this processor: {_NEEDS_EAGER}"
        raise Rejected(Failure("placement_refused", why, tensor=packed[0], hint=_EAGER))


def _is_packed(layer: nn.Module) -> bool:
    """Weights left empty, or kept by a quant method that packs on CPU without a trace in the parameters."""
    method = METHODS.get(qualified(type(getattr(layer, "quant_method", None))))
    if method is None:
        return False
    held = [parameter for parameter in layer._parameters.values() if parameter is not None]
    on_cpu = all(parameter.device.type == "cpu" for parameter in held)
    return any(not parameter.numel() for parameter in held) or (bool(method.stateful) and on_cpu)


def may_be_packed(live: nn.Module, fresh: nn.Module, method: Method) -> bool:
    """Whether something that serves may not be the bytes that a checkpoint feeds.

    False where the parameters have kept their form and nothing else was made of them: that their bytes are the
    checkpoint's is then what the replay at join proves.
    """
    if method.stateful or forms(live) != forms(fresh):
        return True
    before = attributes_of(fresh)
    made = (value for key, value in attributes_of(live).items() if key not in before)
    return not all(is_code(value) for value in made)


def forms(layer: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    """Shape and dtype of every parameter."""
    return {key: None if held is None else (held.shape, held.dtype) for key, held in layer._parameters.items()}


def twin_model(vllm_config: Any) -> nn.Module:
    """A second model as vLLM builds it, its weights not loaded, registered nowhere."""
    with torch.device("cpu"):
        return cast(nn.Module, build(vllm_config)).eval()


def load_start(twin: nn.Module, vllm_config: Any) -> None:
    """Fill a twin as vLLM fills a model, without the processing that follows."""
    loaders: Any = import_module("vllm.model_executor.model_loader")
    configs: Any = import_module("vllm.config")
    with default_dtype(vllm_config.model_config.dtype), configs.set_current_vllm_config(vllm_config):
        loaders.get_model_loader(vllm_config.load_config).load_weights(twin, vllm_config.model_config)


def _methods(model: nn.Module) -> dict[str, Method]:
    """Layer -> entry of the table, for every layer that vLLM processes after a load."""
    found: dict[str, Method] = {}
    failures: list[Failure] = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and qualified(type(method)) in METHODS:
            found[name] = METHODS[qualified(type(method))]
            if what := found[name].untested(module):
                failures.append(Failure("placement_refused", f"{what}: never tested: docs/vllm-layers.md", tensor=name))
        elif hasattr(method, "process_weights_after_loading"):
            why = f"layers of {qualified(type(method))} were never tested: docs/vllm-layers.md"
            failures.append(Failure("placement_refused", why, tensor=name))
        if hasattr(module, "process_weights_after_loading") and not name.endswith("quant_method"):
            impl = getattr(module, "impl", None)
            if qualified(type(module)) not in HOOKS or not does_nothing(impl):
                what = qualified(type(module)) + (f" over {qualified(type(impl))}" if impl is not None else "")
                why = f"the processing of {what} after a load was never tested: docs/vllm-layers.md"
                failures.append(Failure("placement_refused", why, tensor=name))
    if failures:
        raise Rejected(*failures)
    return found


def does_nothing(impl: object) -> bool:
    """Whether an attention backend's own hook is the empty one of its base class."""
    backend: Any = import_module("vllm.v1.attention.backend")
    hook = getattr(type(impl), "process_weights_after_loading", None)
    return hook is not None and hook is backend.AttentionImplBase.process_weights_after_loading


def _canonical_names(twin: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the first of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in twin.named_parameters(remove_duplicate=False)}


def shared(layers: list[ProcessedLayer]) -> list[Failure]:
    """Every parameter that one layer packs away and that is tied to another layer's."""
    users: dict[str, list[ProcessedLayer]] = {}
    for layer in layers:
        for feed in layer.feeds.values():
            users.setdefault(feed, []).append(layer)
    return [
        Failure("placement_refused", f"its {name} is tied to another layer's and packed", tensor=layer.name)
        for layer in layers
        for name in layer.raw
        if len(users[name]) > 1
    ]


def _compiled(packed: list[ProcessedLayer], vllm_config: Any) -> list[Failure]:
    """A compiled graph holds the kernels that it was traced with."""
    if not _is_compiled(vllm_config):
        return []
    why = f"packed by vLLM: {_NEEDS_EAGER}"
    return [Failure("placement_refused", why, tensor=layer.name, hint=_EAGER) for layer in packed]


def _is_compiled(vllm_config: Any) -> bool:
    return int(vllm_config.compilation_config.mode or 0) != 0


def _held(name: str, tensor: torch.Tensor) -> Parameter:
    """No forward pass reads it: rebinding it is nothing."""
    return Parameter(name, tensor, lambda _tensor: None)
