"""A second model beside the one that serves: what building it must not touch, and how it is tied like the first.

While the engine serves no request: vLLM's current configuration and torch's default dtype are global to the process.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn


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


def tie_alike(module: nn.Module, live_model: nn.Module) -> None:
    """vLLM may tie two layers after it compared what it loaded; a second model is tied without a load."""
    first: dict[int, str] = {}
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in live_model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and name in known and other in known and known[name] is not known[other]:
            path, _, key = name.rpartition(".")
            module.get_submodule(path)._parameters[key] = module.get_parameter(other)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What vLLM's layers take as their dtype while they are made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
