"""Which post-processed layers of vLLM can be updated: every entry has been run against a fresh load, bit for bit.

A type that is not listed is refused when a rank joins; nothing is guessed. docs/vllm-layers.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"
_COMPRESSED = f"{_LAYERS}.quantization.compressed_tensors"


@dataclass(frozen=True, slots=True)
class Method:
    """How layers of one quant method are rebuilt.

    `stateful`: dotted attributes of the layer whose objects the method changes while it processes weights; those
    without a dot are installed with the layer's state. `runs(layer, attributes, x)`: what a state whose kernels cannot
    be read back answers to x, [rows, elements of a row of `weight`]; None where everything can be read.
    `untested(layer)`: what of a loaded layer was never run here, or empty. `aliased`: parameters whose memory a kernel
    goes on reading. `packs_by_default_dtype`: whether kernels are packed for torch's default dtype. `constant`: whether
    an update may change nothing of what processing makes.
    """

    stateful: tuple[str, ...] = ()
    runs: Callable[[Any, Mapping[str, Any], torch.Tensor], torch.Tensor] | None = None
    untested: Callable[[Any], str] = lambda _layer: ""
    aliased: tuple[str, ...] = ()
    packs_by_default_dtype: bool = False
    constant: bool = False

    @property
    def carried(self) -> tuple[str, ...]:
        return tuple(path for path in self.stateful if "." not in path)


def _packed_linear(layer: Any, attributes: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """The product alone: a bias is an ordinary parameter, handed over at every call."""
    product: torch.Tensor = attributes["cpu_linear"](x, layer.weight, None)
    return product


def _scaled_linear(layer: Any, attributes: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """The product without a bias, of activations that are quantised on the way."""
    product: torch.Tensor = attributes["scheme"].apply_weights(layer, x, None)
    return product


def _untested_scheme(layer: Any) -> str:
    """Other schemes, other kernels, and int8 kernels that are no oneDNN's (AMX has its own)."""
    kernel = getattr(layer.scheme, "kernel", None)
    found = (qualified(type(layer.scheme)), qualified(type(kernel)))
    if found != INT8:
        return " with ".join(found)
    return "" if hasattr(kernel, "dnnl_handler") else f"{found[1]} without a oneDNN kernel"


def _untested_cache(layer: Any) -> str:
    """Scales matter where the cache is quantised; every other layer of such a checkpoint has them as placeholders."""
    if layer.kv_cache_dtype == "auto" and layer.quant_method.quant_config.kv_cache_scheme is None:
        return ""
    return f"a KV cache of {layer.kv_cache_dtype} with scales of the checkpoint"


#: The scheme of compressed-tensors whose layers can be updated, and its kernel.
INT8 = (
    f"{_COMPRESSED}.schemes.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8",
    "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel",
)

METHODS: Mapping[str, Method] = {
    f"{_LAYERS}.linear.UnquantizedLinearMethod": Method(runs=_packed_linear),
    f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod": Method(runs=_packed_linear),
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": Method(stateful=("quant_method",)),
    f"{_COMPRESSED}.compressed_tensors.CompressedTensorsLinearMethod": Method(
        stateful=("scheme", "scheme.kernel"),
        runs=_scaled_linear,
        untested=_untested_scheme,
        aliased=("weight_scale",),
        packs_by_default_dtype=True,
    ),
    f"{_COMPRESSED}.compressed_tensors.CompressedTensorsKVCacheMethod": Method(untested=_untested_cache, constant=True),
}

#: Layers whose own hook after a load computes nothing from weights, if that of their backend (`impl`) does nothing.
HOOKS = frozenset({f"{_LAYERS}.attention.attention.Attention"})

#: Objects that hold what Python cannot look into: two of them are compared by what they compute.
OPAQUE = frozenset({"vllm._custom_ops.CPUDNNLGEMMHandler"})


def qualified(kind: type) -> str:
    """`package.module.Name` of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"
