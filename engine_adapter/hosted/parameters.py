"""The tensors of an engine's model that a checkpoint feeds, and how to make the forward pass read another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from engine_adapter.base import Parameter


def collect(model: nn.Module) -> dict[str, Parameter]:
    """Name -> parameter, in the module tree's order; ties once, under the first name. Non-persistent buffers (rotary
    tables) are computed, not fed; empty tensors stand for packed ones and are left to the adapter."""
    names: dict[int, list[str]] = {}
    holders: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    for name, module, key, tensor in _fed(model):
        if not tensor.numel():
            continue
        names.setdefault(tensor.data_ptr(), []).append(name)
        holders.setdefault(tensor.data_ptr(), []).append((module, key, tensor))
    return {
        found[0]: Parameter(found[0], holders[at][0][2].detach(), _rebinder(holders[at]), tuple(found[1:]))
        for at, found in names.items()
    }


def _fed(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), module, key, buffer


def _rebinder(holders: list[tuple[nn.Module, str, torch.Tensor]]) -> Callable[[torch.Tensor], None]:
    """The parameter objects stay (loaders and kernels hold them); the storage behind them changes."""
    tensors: list[Any] = list({id(tensor): tensor for _, _, tensor in holders}.values())

    def rebind(tensor: torch.Tensor) -> None:
        for held in tensors:
            held.data = tensor

    return rebind
