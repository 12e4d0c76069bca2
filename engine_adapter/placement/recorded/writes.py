"""Watching a loader write: a dispatch mode that turns copies and fills of known storages into rows.

The mode belongs to the thread that enters it. It lets no operation write a tensor that holds real memory unless the
loader made it meanwhile: a module that a private twin shares with a serving model stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_adapter.placement.recorded.twin import TwinTensor, storage_of, view_of
from engine_adapter.placement.recorded.views import NotBoxes, Strided, boxes_of, pieces_of
from engine_adapter.placement.rows import CopyRow, FillRow, Row
from updater.core.errors import refuse

_COPIES = frozenset({"aten::copy_"})
_FILLS = frozenset({"aten::fill_", "aten::zero_"})
_CONSTANTS = {
    "aten::zeros": 0.0,
    "aten::zeros_like": 0.0,
    "aten::new_zeros": 0.0,
    "aten::ones": 1.0,
    "aten::ones_like": 1.0,
    "aten::new_ones": 1.0,
}
#: Operations that take a constant, and which argument it is.
_VALUES = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}


@dataclass(frozen=True, slots=True)
class Unread:
    """A write that rows cannot say. `sources`: checkpoint tensors that went into it, as far as known."""

    target: str
    why: str
    sources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    owner: Strided
    dtype: torch.dtype


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes, by its schema: in place, `out=`, or a list of them."""
    found: list[torch.Tensor] = []
    for i, name in _written_arguments(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        found += [value] if isinstance(value, torch.Tensor) else list(value or ())
    return found


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor among (nested) arguments or results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@dataclass(slots=True)
class Storages:
    """What is known of storages while a loader runs; they are held, so that no identity is used twice."""

    held: list[torch.UntypedStorage] = field(default_factory=list)
    fed: dict[int, frozenset[str]] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)

    def learn(self, tensor: torch.Tensor, sources: frozenset[str]) -> int:
        key = storage_of(tensor)
        if key not in self.fed:
            self.held.append(tensor.untyped_storage())
        self.fed[key] = self.fed.get(key, frozenset()) | sources
        return key

    def sources_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self.fed.get(storage_of(tensor), frozenset()) for tensor in tensors))

    def guard(self, func: Any, tensor: torch.Tensor) -> None:
        """Raises `Rejected` if `tensor` is real and neither the loader nor we made it."""
        if not tensor.is_meta and storage_of(tensor) not in self.made:
            why = f"the loader writes a tensor outside its model by {func}: shape {list(tensor.shape)}"
            raise refuse("placement_refused", why)


class WriteLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rows in the order they were written. `sources` and `targets` are meta tensors by name.

    `reached`: names of sources that arrived in some target, also in an empty region of it.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, TwinTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[Row] = []
        self.unread: list[Unread] = []
        self.reached: set[str] = set()
        self._storages = Storages()
        self._constants: dict[int, float] = {}
        self._sources: dict[int, _Known] = {}
        self._targets: dict[int, list[_Known]] = {}
        for name, tensor in sources.items():
            key = self._storages.learn(tensor, frozenset((name,)))
            self._sources[key] = _Known(name, view_of(tensor), tensor.dtype)
        for name, entry in targets.items():
            key = self._storages.learn(entry.tensor, frozenset())
            self._targets.setdefault(key, []).append(_Known(name, view_of(entry.tensor), entry.tensor.dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        name = func._schema.name
        written = written_by(func, args, options)
        for tensor in written:
            self._storages.guard(func, tensor)
        for tensor in written:
            self._note(func, name, tensor, args, options)
        result = func(*args, **options)
        self._follow(name, args, options, result)
        return result

    def _note(self, func: Any, name: str, written: torch.Tensor, args: tuple[Any, ...], options: Any) -> None:
        key = storage_of(written)
        sources = self._storages.sources_of(tensors_in((*args, *options.values())))
        if key not in self._targets:
            self._constants.pop(key, None)
            self._storages.learn(written, sources)
            return
        target = self._target(key, written)
        if isinstance(target, str):
            self.unread += [Unread(each.name, target, sources) for each in self._targets[key]]
            return
        why = ""
        try:
            if name in _COPIES:
                why = self._copy(target, written, args[1])
            elif name in _FILLS:
                why = self._fill(target, written, args[1] if len(args) > 1 else 0)
            else:
                why = f"written by {func}"
        except NotBoxes as error:
            why = str(error)
        self.reached |= sources
        if why:
            self.unread.append(Unread(target.name, why, sources))

    def _target(self, key: int, written: torch.Tensor) -> _Known | str:
        begin, end = view_of(written).extent
        known = self._targets[key]
        around = [each for each in known if each.owner.extent[0] <= begin and end <= each.owner.extent[1]]
        if len(around) != 1:
            return "several parameters share its storage"
        if around[0].dtype != written.dtype:
            return f"written through a view of dtype {written.dtype}"
        return around[0]

    def _copy(self, target: _Known, written: torch.Tensor, value: torch.Tensor) -> str:
        key = storage_of(value)
        source = self._sources.get(key)
        if source is None:
            constant = self._constant(value)
            if constant is not None:
                return self._fill(target, written, constant)
            return "the loader computes or rearranges what it copies"
        if source.dtype != value.dtype:
            return f"read through a view of dtype {value.dtype}"
        found = pieces_of(source.owner, view_of(value), target.owner, view_of(written))
        self.rows += [CopyRow(source.name, each.source, target.name, each.target, each.permute) for each in found]
        return ""

    def _fill(self, target: _Known, written: torch.Tensor, value: Any) -> str:
        number = self._constant(value) if isinstance(value, torch.Tensor) else float(value)
        if number is None:
            return "filled with a value that depends on data"
        for box in boxes_of(target.owner, view_of(written)):
            row = FillRow(target.name, box, number)
            if not self._stands(row):
                self.rows.append(row)
        return ""

    def _stands(self, fill: FillRow) -> bool:
        """Whether the same was filled before and nothing was written over it: padding is filled at every load."""
        for row in reversed(self.rows):
            if row == fill:
                return True
            if row.target == fill.target and row.target_box.meet(fill.target_box) is not None:
                return False
        return False

    def _constant(self, value: torch.Tensor) -> float | None:
        if not value.is_meta and value.numel() == 1:
            return float(value)
        return self._constants.get(storage_of(value))

    def _follow(self, name: str, args: tuple[Any, ...], options: Any, result: Any) -> None:
        """Where the bytes of sources go besides targets, and which tensors hold a constant."""
        for tensor in tensors_in((result,)):
            key = storage_of(tensor)
            if key in self._storages.fed:
                continue
            self._storages.learn(tensor, self._storages.sources_of(tensors_in((*args, *options.values()))))
            self._storages.made.add(key)
            if name in _CONSTANTS:
                self._constants[key] = _CONSTANTS[name]
            elif name in _VALUES and len(args) > _VALUES[name]:
                value = args[_VALUES[name]]
                if isinstance(value, int | float):
                    self._constants[key] = float(value)
