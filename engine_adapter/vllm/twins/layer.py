"""One post-processed layer between its twins and the live one: proved once, then built and bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from engine_adapter.base import Derived
from engine_adapter.vllm.twins.equal import same_bytes
from engine_adapter.vllm.twins.state import Form, LayerState, LayerTwin, LiveLayer
from engine_adapter.vllm.twins.table import Method
from updater.core.errors import Failure

_PROBE_ROWS = 16


class ProcessedLayer:
    """`name`: of the layer in `model` and in both `twins`. `names`: every name of a parameter -> the one that feeds it.
    `dtype`: of the model.

    After `prove`: `raw` are the names of its parameters that the live layer does not hold in load format, `replaced`
    its buffers of which that is true, `packed` says whether any of its state is computed from weights.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        twins: tuple[nn.Module, ...],
        method: Method,
        names: Mapping[str, str],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self._method, self._module = name, method, model.get_submodule(name)
        pair = [twin.get_submodule(name) for twin in twins]
        own = [key for key, parameter in pair[0]._parameters.items() if parameter is not None]
        self.feeds = {key: names[f"{name}.{key}"] for key in own}
        self._dtype = dtype
        self._twins = [LayerTwin(index, layer, method, dtype) for index, layer in enumerate(pair)]
        self._form: Form = (frozenset(), frozenset())
        self._live: LiveLayer | None = None
        self._buffers = {key: held for key, held in pair[0]._buffers.items() if held is not None}
        self.raw: tuple[str, ...] = ()
        self.replaced: Mapping[str, torch.Tensor] = {}
        self.packed = False

    def prove(self, start: Mapping[str, torch.Tensor]) -> list[Failure]:
        """Build the state of the start checkpoint on both twins; what serves must be equal, and they to each other."""
        tensors = {key: start[feed] for key, feed in self.feeds.items()}
        try:
            first, second = (twin.build(tensors) for twin in self._twins)
        except ValueError as error:
            return [self._refused(str(error))]
        self.raw = tuple(self.feeds[key] for key in first.parameters if key in self.feeds)
        self.replaced = {f"{self.name}.{key}": held for key, held in self._buffers.items() if key in first.attributes}
        try:
            self._live = LiveLayer(self._module, first)
        except KeyError as error:
            return [self._refused(f"the live layer lacks {error}")]
        self._form, self.packed = first.form, not first.is_code
        x = _probe(tensors, self._dtype)
        why = self._difference(self._live.current, first, x) or self._difference(first, second, x, "a second twin")
        return [self._refused(why)] if why else []

    def derived(self) -> Derived:
        """The layer's state as a rank agent handles it."""
        return Derived(self.name, tuple(dict.fromkeys(self.feeds.values())), self._build, self._bind, self._bound)

    def _build(self, tensors: Mapping[str, torch.Tensor]) -> LayerState:
        """On the twin whose objects do not serve."""
        live = self._checked()
        twin = self._twins[0 if live.current.twin != 0 else 1]
        state = twin.build({key: tensors[feed] for key, feed in self.feeds.items()})
        if state.form != self._form:
            raise ValueError("these weights are processed into another form than the ones that serve")
        if self._method.constant and live.current.compared(state).differing:
            raise ValueError("the checkpoint changes what was only tested as a constant")
        return state

    def _bind(self, state: object) -> None:
        self._checked().bind(cast(LayerState, state))

    def _bound(self) -> LayerState:
        return self._checked().current

    def _checked(self) -> LiveLayer:
        if self._live is None:
            raise RuntimeError("not proved yet")
        return self._live

    def _difference(self, first: LayerState, second: LayerState, x: torch.Tensor, whom: str = "its twin") -> str:
        found = first.compared(second)
        if found.differing:
            return f"{whom} makes another {', '.join(found.differing[:3])} of the start checkpoint"
        if found.opaque and not self._same_outputs(first, second, x):
            return f"{whom} packs another kernel of the start checkpoint ({found.opaque[0]})"
        return ""

    def _same_outputs(self, first: LayerState, second: LayerState, x: torch.Tensor) -> bool:
        if self._method.runs is None:
            return False
        with torch.no_grad():
            outputs = [self._method.runs(self._module, state.attributes, x) for state in (first, second)]
        return same_bytes(*outputs)

    def _refused(self, why: str) -> Failure:
        return Failure("placement_refused", why, tensor=self.name)


def _probe(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Rows that show a difference of two kernels over `weight`; in `dtype` where that is quantised."""
    weight = tensors.get("weight", torch.empty(0))
    rows = torch.randn(_PROBE_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    return rows.to(weight.dtype if weight.is_floating_point() else dtype)
