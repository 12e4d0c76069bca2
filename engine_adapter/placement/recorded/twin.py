"""The private model that a loader is run on: its tensors by name, and everything put back after a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from engine_adapter.placement.recorded.views import Strided
from transports.dtypes import TORCH_DTYPES
from updater.protocol.manifest import TensorSpec

Pairs = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Pairs], object]

#: What a loader may raise over a tensor that it does not know, or that does not fit.
LOADER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a storage while it is held; addresses are 0 on meta."""
    return int(tensor.untyped_storage()._cdata)


def meta_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """What a loader is given instead of a checkpoint. Dtypes must be torch's."""
    return {n: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta") for n, spec in specs.items()}


def view_of(tensor: torch.Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class TwinTensor:
    """A parameter or a persistent buffer; ties once, under the first name. `sites`: (module, key) that hold it."""

    name: str
    tensor: torch.Tensor
    aliases: tuple[str, ...]
    is_buffer: bool
    sites: tuple[tuple[nn.Module, str], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(slots=True)
class Twin:
    """A model on the meta device that is never run, and its `load_weights`."""

    module: nn.Module
    load: Loader
    tensors: Mapping[str, TwinTensor] = field(init=False)
    #: parameters without a shape: their loader materialises them
    lazy: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = _collect(self.module)
        self.lazy = tuple(name for name, tensor in self.module.named_parameters() if is_lazy(tensor))

    @contextmanager
    def restored(self) -> Iterator[dict[str, str]]:
        """Undo whatever the block does to modules and parameters, other than writes into storages.

        What is yielded is filled at the end: name -> how the tensor was replaced.
        """
        changes: dict[str, str] = {}
        kept = [_KeptModule.of(module) for module in self.module.modules()]
        try:
            yield changes
        finally:
            changes.update(self._replaced(kept))
            for each in kept:
                each.restore()

    def substitute(self, names: Iterable[str], make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inside `restored`: let the modules hold `make(tensor)` under these names, as the same class of parameter."""
        made: dict[str, torch.Tensor] = {}
        for name in names:
            entry = self.tensors[name]
            plain = make(entry.tensor.data)
            stand_in = plain if entry.is_buffer else plain.as_subclass(type(entry.tensor))
            stand_in.__dict__.update(entry.tensor.__dict__)
            for module, key in entry.sites:
                holder: dict[str, Any] = module._buffers if entry.is_buffer else module._parameters
                holder[key] = stand_in
            made[name] = plain
        return made

    def _replaced(self, kept: list[_KeptModule]) -> dict[str, str]:
        names = {id(entry.tensor): name for name, entry in self.tensors.items()}
        return {names[key]: why for each in kept for key, why in each.replaced() if key in names}


@dataclass(frozen=True, slots=True)
class _KeptModule:
    module: nn.Module
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    modules: dict[str, Any]
    #: (tensor, its storage and view, its attributes)
    tensors: tuple[tuple[torch.Tensor, torch.Tensor, dict[str, Any]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> _KeptModule:
        every = (*module._parameters.values(), *module._buffers.values())
        held = [tensor for tensor in every if tensor is not None and not is_lazy(tensor)]
        return cls(
            module,
            dict(module.__dict__),
            dict(module._parameters),
            dict(module._buffers),
            dict(module._modules),
            tuple((tensor, tensor.data, dict(tensor.__dict__)) for tensor in held),
        )

    def replaced(self) -> Iterator[tuple[int, str]]:
        for kept, now in ((self.parameters, self.module._parameters), (self.buffers, self.module._buffers)):
            for key, tensor in kept.items():
                if tensor is not None and now.get(key) is not tensor:
                    yield id(tensor), "the loader puts another tensor in its place"
        for tensor, data, _ in self.tensors:
            if (storage_of(tensor), view_of(tensor)) != (storage_of(data), view_of(data)):
                yield id(tensor), "the loader gives it another storage"

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for kept, now in (
            (self.parameters, self.module._parameters),
            (self.buffers, self.module._buffers),
            (self.modules, self.module._modules),
        ):
            now.clear()
            now.update(kept)
        for tensor, data, attributes in self.tensors:
            if (storage_of(tensor), view_of(tensor)) != (storage_of(data), view_of(data)):
                tensor.data = data
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)


def _collect(module: nn.Module) -> dict[str, TwinTensor]:
    found: dict[tuple[int, Strided], list[tuple[str, torch.Tensor, bool, tuple[nn.Module, str]]]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for held, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for key, tensor in held.items():
                if tensor is None or is_lazy(tensor) or (is_buffer and key in owner._non_persistent_buffers_set):
                    continue
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault((storage_of(tensor), view_of(tensor)), []).append(
                    (name, tensor, is_buffer, (owner, key))
                )
    return {
        group[0][0]: TwinTensor(
            name=group[0][0],
            tensor=group[0][1],
            aliases=tuple(name for name, *_ in group[1:]),
            is_buffer=group[0][2],
            sites=tuple(site for *_, site in group),
        )
        for group in found.values()
    }
