"""Which post-processed layers of vLLM can be updated: every entry has been run against a fresh load, bit for bit.

A type that is not listed is refused when a rank joins; nothing is guessed. docs/vllm-layers.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"


@dataclass(frozen=True, slots=True)
class Method:
    """How layers of one quant method are rebuilt.

    `stateful`: dotted attributes of the layer whose objects the method changes while it processes weights; those
    without a dot are installed with the layer's state. `runs(layer, attributes, x)`: what a state whose kernels cannot
    be read back answers to x, [rows, elements of a row of `weight`]; None where everything can be read.
    """

    stateful: tuple[str, ...] = ()
    runs: Callable[[Any, Mapping[str, Any], torch.Tensor], torch.Tensor] | None = None

    @property
    def carried(self) -> tuple[str, ...]:
        return tuple(path for path in self.stateful if "." not in path)


def _packed_linear(layer: Any, attributes: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """The product alone: a bias is an ordinary parameter, handed over at every call."""
    product: torch.Tensor = attributes["cpu_linear"](x, layer.weight, None)
    return product


METHODS: Mapping[str, Method] = {
    f"{_LAYERS}.linear.UnquantizedLinearMethod": Method(runs=_packed_linear),
    f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod": Method(runs=_packed_linear),
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": Method(stateful=("quant_method",)),
}

#: Layers whose own hook after a load computes nothing from weights, if that of their backend (`impl`) does nothing.
HOOKS = frozenset({f"{_LAYERS}.attention.attention.Attention"})

#: Objects that hold what Python cannot look into: two of them are compared by what they compute.
OPAQUE = frozenset({"vllm._custom_ops.CPUDNNLGEMMHandler"})


def qualified(kind: type) -> str:
    """`package.module.Name` of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"
