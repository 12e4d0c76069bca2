"""One post-processed layer: what processing makes of its weights, on a twin, and how the live layer takes it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine_adapter.vllm.twins.equal import StateComparison, is_code, same_bytes
from engine_adapter.vllm.twins.table import Method

#: Names of the parameters and of the attributes that a state consists of.
Form = tuple[frozenset[str], frozenset[str]]

_TREE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class LayerState:
    """What is installed together. `parameters`: data of processed parameters, None for one that was dropped.

    `attributes`: everything else that processing made, by attribute of the layer, also as a parameter that no
    checkpoint feeds. `twin`: whose objects these are.
    """

    parameters: Mapping[str, torch.Tensor | None]
    attributes: Mapping[str, Any]
    twin: int | None = None

    def compared(self, other: LayerState) -> StateComparison:
        found = StateComparison()
        found.compare(dict(self.parameters), dict(other.parameters), "parameters")
        found.compare(dict(self.attributes), dict(other.attributes), "attributes")
        return found

    @property
    def form(self) -> Form:
        return frozenset(self.parameters), frozenset(self.attributes)

    @property
    def is_code(self) -> bool:
        """Whether nothing here was computed from weights."""
        return not self.parameters and all(is_code(value) for value in self.attributes.values())


class LayerTwin:
    """A second layer with its own quant method, as it is between its construction and its first load.

    A build runs the engine's own processing on it and hands out what came of it; the objects of the last state that
    was handed out belong to the code that holds it, until `build` is called again.
    """

    def __init__(self, index: int, layer: nn.Module, method: Method, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the model, which vLLM makes torch's default while it loads one."""
        self.layer, self._index, self._method, self._dtype = layer, index, method, dtype
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[key] = _like(parameter, torch.empty_like(parameter, device="meta"))
        self._pristine = [(holder, _entries(holder)) for holder in self._holders()]

    def build(self, tensors: Mapping[str, torch.Tensor]) -> LayerState:
        """The state for these tensors, by name of the layer's parameter, which are copied and not kept."""
        self._reset(self._pristine)
        fed: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            like = self.layer._parameters[key]
            if like is None or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{key}: {tuple(tensor.shape)} {tensor.dtype} is not what the layer loads")
            parameter = _like(like, tensor.detach().clone())
            self.layer._parameters[key] = parameter
            fed[key] = (parameter, tensor)
        before = attributes_of(self.layer)
        with torch.no_grad():
            self._process()
        return self._harvest(before, fed)

    def _process(self) -> None:
        if not self._method.packs_by_default_dtype:
            _process(self.layer)
            return
        with PackedFor(self._dtype) as packing:
            _process(self.layer)
        if not packing.made:
            raise ValueError("vLLM packed it in another way than the one that was tested")

    def _harvest(self, before: Mapping[str, Any], fed: Mapping[str, tuple[nn.Parameter, torch.Tensor]]) -> LayerState:
        parameters: dict[str, torch.Tensor | None] = {}
        for key, (given, tensor) in fed.items():
            held = self.layer._parameters.get(key)
            if held is not given or key in self._method.aliased or not same_bytes(given.data, tensor):
                parameters[key] = None if held is None else held.data
        made = {k: p.data for k, p in self.layer._parameters.items() if p is not None and k not in fed}
        after = attributes_of(self.layer)
        made |= {key: value for key, value in after.items() if key not in before or value is not before[key]}
        made |= {key: after[key] for key in self._method.carried}
        self._reset(self._pristine[:1])  # the copies that processing left as they were are of no use
        return LayerState(parameters, made, self._index)

    def _holders(self) -> list[Any]:
        return [self.layer] + [_at(self.layer, path) for path in self._method.stateful]

    @staticmethod
    def _reset(holders: list[tuple[Any, dict[str, Any]]]) -> None:
        for holder, entries in holders:
            vars(holder).clear()
            vars(holder).update({key: _copied(value) for key, value in entries.items()})


class LiveLayer:
    """The layer that serves. `current`: the state that it reads."""

    def __init__(self, layer: nn.Module, like: LayerState) -> None:
        """`like`: a state of its twin, which says what belongs to one. Raises KeyError where the layer lacks some.

        Parameters that processing made become plain attributes: no loader is to look for them in a checkpoint.
        """
        parameters = {key: layer._parameters.get(key) for key in like.parameters}
        for key in like.attributes:
            if (held := layer._parameters.get(key)) is not None:
                del layer._parameters[key]
                setattr(layer, key, held.data)
        attributes = attributes_of(layer)
        self._layer = layer
        self.current = LayerState(
            {key: None if held is None else held.data for key, held in parameters.items()},
            {key: attributes[key] for key in like.attributes},
        )

    def bind(self, state: LayerState) -> None:
        """May be repeated. Parameter objects stay and get new data; other attributes are replaced."""
        for key, data in state.parameters.items():
            held = self._layer._parameters.get(key)
            if held is not None and data is not None:
                held.data = data
        for key, value in state.attributes.items():
            setattr(self._layer, key, value)
        self.current = state


def _process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()


def attributes_of(layer: nn.Module) -> dict[str, Any]:
    """Attributes, buffers and submodules by name; parameters are looked at apart."""
    return {
        **{key: value for key, value in vars(layer).items() if key not in _TREE},
        **layer._buffers,
        **layer._modules,
    }


def _entries(holder: Any) -> dict[str, Any]:
    return {key: _copied(value) for key, value in vars(holder).items()}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else value


def _at(layer: nn.Module, path: str) -> Any:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class, with the same attributes (weight loaders), over other data."""
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, False)
    vars(made).update(vars(parameter))
    return made


_MAKER, _ARGUMENT = "create_onednn_scaled_mm_handler", "output_type"


class PackedFor(TorchFunctionMode):
    """Inside, oneDNN kernels for int8 that this thread makes are packed for `dtype`.

    `made`: how many. None means that vLLM packs in another way, and for whatever dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.made = dtype, 0
        self._maker: Any = getattr(torch.ops._C, _MAKER, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = list(args), dict(kwargs or {})
        if func is self._maker:
            self.made += 1
            at = [argument.name for argument in func.default._schema.arguments].index(_ARGUMENT)
            if at < len(given):
                given[at] = self._dtype
            else:
                named[_ARGUMENT] = self._dtype
        return func(*given, **named)
