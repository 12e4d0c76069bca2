"""Every tensor of a module tree that a checkpoint feeds, and how to make the forward pass read another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine_adapter.base import Parameter


def collect(model: nn.Module, *, empty: bool = True) -> dict[str, Parameter]:
    """Name -> parameter, in the module tree's order; ties once, under the first name. Non-persistent buffers (rotary
    tables) are computed, not fed. `empty`: whether tensors without an element count; they may stand for packed ones."""
    names: dict[int, list[str]] = {}
    holders: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in fed(model):
        local = _local(tensor)
        if not (empty or local.numel()):
            continue
        key = local.data_ptr() if local.numel() else -id(tensor)
        names.setdefault(key, []).append(name)
        holders.setdefault(key, {})[id(tensor)] = tensor
    return {
        found[0]: Parameter(
            found[0], _local(next(iter(holders[key].values()))), _rebinder(holders[key]), tuple(found[1:])
        )
        for key, found in names.items()
    }


def fed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the tensor as the module holds it: a DTensor where it is sharded)."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank, sharing storage, outside autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _rebinder(holders: dict[int, torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """For all tensor objects over one storage: ties are usually one object, but need not be. The objects stay (loaders
    and kernels hold them); the storage behind them changes.
    """
    forms = {_form(_local(tensor)) for tensor in holders.values()}

    def rebind(new: torch.Tensor) -> None:
        if forms != {_form(new)}:
            raise ValueError(f"rebind needs {sorted(map(str, forms))}, got {_form(new)}")
        for tensor in holders.values():
            if isinstance(tensor, DTensor):
                tensor._local_tensor = new
            else:
                tensor.data = new

    return rebind


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()
