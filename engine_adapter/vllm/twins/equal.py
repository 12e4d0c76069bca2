"""Whether two processed states are equal: tensors byte by byte, everything else by structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from engine_adapter.vllm.twins.table import OPAQUE, qualified

_VALUES = (bool, int, float, complex, str, bytes, type(None), Enum, type, torch.dtype, torch.device, torch.Size, range)


@dataclass(slots=True)
class StateComparison:
    """`differing`, `opaque`: paths where two states differ, and where only a run can tell."""

    differing: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    #: Pairs that were met, held so that no address is used twice.
    _seen: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)

    def compare(self, first: Any, second: Any, path: str) -> None:
        """Add what differs between two values below `path`."""
        if first is second or (id(first), id(second)) in self._seen:
            return
        self._seen[id(first), id(second)] = (first, second)
        if type(first) is not type(second):
            self.differing.append(path)
        elif qualified(type(first)) in OPAQUE:
            self.opaque.append(path)
        elif isinstance(first, torch.Tensor):
            if not same_bytes(first, second):
                self.differing.append(path)
        elif isinstance(first, _VALUES):
            if first != second:
                self.differing.append(path)
        elif isinstance(first, FunctionType):
            self._functions(first, second, path)
        elif isinstance(first, MethodType):
            self.compare(first.__func__, second.__func__, path)
            self.compare(first.__self__, second.__self__, f"{path}.__self__")
        else:
            self._containers(first, second, path)

    def _functions(self, first: FunctionType, second: FunctionType, path: str) -> None:
        if first.__code__ is not second.__code__:
            self.differing.append(path)
            return
        parts = (first.__defaults__, first.__kwdefaults__, _cells(first))
        others = (second.__defaults__, second.__kwdefaults__, _cells(second))
        for part, other in zip(parts, others, strict=True):
            self.compare(part, other, path)

    def _containers(self, first: Any, second: Any, path: str) -> None:
        if isinstance(first, Mapping):
            self._entries(dict(first), dict(second), path)
        elif isinstance(first, (list, tuple)):
            self._entries(dict(enumerate(first)), dict(enumerate(second)), path)
        elif isinstance(first, (set, frozenset)):
            if first != second:
                self.differing.append(path)
        elif hasattr(first, "__dict__") and not isinstance(first, (BuiltinFunctionType, ModuleType)):
            self._entries(vars(first), vars(second), path)
        elif first != second:
            self.differing.append(path)

    def _entries(self, first: Mapping[Any, Any], second: Mapping[Any, Any], path: str) -> None:
        if first.keys() != second.keys():
            self.differing.append(path)
            return
        for key, value in first.items():
            self.compare(value, second[key], f"{path}.{key}")


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype, shape, layout and every byte (NaN included)."""
    if (first.dtype, first.shape, first.stride(), first.device) != (
        second.dtype,
        second.shape,
        second.stride(),
        second.device,
    ):
        return False
    left, right = first.detach().contiguous(), second.detach().contiguous()
    if not left.numel():
        return True
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def is_code(value: Any) -> bool:
    """Whether a value is the same whatever the weights were: a plain value, or a function that closes over nothing."""
    if isinstance(value, FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return isinstance(value, (*_VALUES, BuiltinFunctionType))


def _cells(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
