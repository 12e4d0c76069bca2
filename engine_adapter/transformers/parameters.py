"""Every tensor of a module tree that a checkpoint feeds, and how to make the forward pass read another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine_adapter.base import Parameter


def collect(model: nn.Module) -> dict[str, Parameter]:
    """Name -> parameter, in the module tree's order; ties once, under the first name. Non-persistent buffers (rotary
    tables) are computed, not fed."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = {}
    for name, tensor, rebind in _fed(model):
        key = _local(tensor).data_ptr()
        names.setdefault(key, []).append(name)
        first.setdefault(key, (tensor, rebind))
    return {
        found[0]: Parameter(found[0], _local(first[key][0]), first[key][1], tuple(found[1:]))
        for key, found in names.items()
    }


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> the tensor as the module holds it (a DTensor where it is sharded), for placements."""
    return {name: tensor for name, tensor, _ in _fed(model)}


def _fed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, _rebinder(parameter)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer, _rebinder(buffer)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank, sharing storage, outside autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.data


def _rebinder(tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A tied tensor is one object under several names, so one call serves all of them."""

    def rebind(new: torch.Tensor) -> None:
        old = _local(tensor)
        if (new.shape, new.dtype, new.device, new.stride()) != (old.shape, old.dtype, old.device, old.stride()):
            raise ValueError(f"rebind needs {_form(old)}, got {_form(new)}")
        if isinstance(tensor, DTensor):
            tensor._local_tensor = new
        else:
            tensor.data = new

    return rebind


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.stride()
