"""A second model beside the one that serves: how vLLM builds it, what that must not touch, and what is recorded on it.

While the engine serves no request: vLLM's current configuration and torch's default dtype are global to the process.
"""

from __future__ import annotations

import copy
from collections import Counter
from importlib import import_module
from typing import Any

from torch import nn

from engine_adapter.hosted.meta_twin import RecordedPlacements, default_dtype, meta_twin
from updater.core.errors import Failure, Rejected


def recorded_placements(vllm_config: Any, live_model: nn.Module) -> RecordedPlacements:
    """`vllm_config`: of the worker; `live_model`: loaded from it, not serving yet.

    Raises Rejected: `adapter_unsupported` for what one recording cannot describe (LoRA, rebalanced or dealt experts,
    pipeline stages, draft models), `placement_refused` where there can be no twin.
    """
    check_supported(vllm_config)
    twin = meta_twin(lambda: build(vllm_config), live_model)
    state: Any = import_module("vllm.distributed")
    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    heads = getattr(vllm_config.model_config.hf_text_config, "num_key_value_heads", 0)
    kv_heads = heads if isinstance(heads, int) else 0  # a list: not the same in every layer
    return RecordedPlacements(twin, int(rank), int(size), kv_heads)


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


def build(vllm_config: Any) -> Any:
    """The model as vLLM builds it, not loaded, registered nowhere, on the device that the caller has set."""
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    with default_dtype(vllm_config.model_config.dtype):
        return loading.initialize_model(_unregistered(vllm_config))


def _unregistered(vllm_config: Any) -> Any:
    """A copy whose layers register in dictionaries of its own, and that compiles nothing."""
    config, compilation = copy.copy(vllm_config), copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    compilation.enabled_custom_ops, compilation.disabled_custom_ops = Counter(), Counter()
    compilation.mode = type(compilation.mode)(0)
    config.compilation_config = compilation
    return config
