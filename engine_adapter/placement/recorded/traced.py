"""Coordinate tracing: reading a mapping off a loader that copies through temporaries.

Recording sees only that bytes of unknown origin arrive. Here the sources are real int64 tensors whose elements are
codes of their own coordinates, and the parameters int64 tensors of their shapes. Transposed, concatenated, indexed or
reshaped, an element keeps its code; what was calculated has none. Two runs with unrelated codes, positive and
negative, must agree, so that arithmetic, sorting or clamping cannot pass for a mapping by luck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_adapter.placement.casts import Cast, cast_between
from engine_adapter.placement.recorded.affine import UNWRITTEN, affine_parts, constant_class
from engine_adapter.placement.recorded.twin import LOADER_ERRORS, Twin, meta_tensors, storage_of
from engine_adapter.placement.recorded.views import NotBoxes, Strided, boxes_of, pieces_of
from engine_adapter.placement.recorded.writes import Storages, tensors_in, written_by
from engine_adapter.placement.rows import CopyRow, FillRow, Row
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec

#: Elements of sources and parameters together that are traced at once: eight bytes each, a few times over.
LIMIT = 1 << 28

#: Operations that ask for the values of a tensor.
_LOOKS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"})

_MASK = (1 << 62) - 1
_ODD = 0x1B873593CC9E2D51 & _MASK
_INVERSE = pow(_ODD, -1, 1 << 62)


class Computed(RuntimeError):
    """Not a mapping of elements."""


@dataclass(frozen=True, slots=True)
class CoordinateCode:
    """A bijection of coordinates to 62-bit numbers of one sign. `shift` makes two codes unrelated."""

    shift: int
    negative: bool

    @property
    def blank(self) -> int:
        """What an element holds that nothing was written to: no code."""
        return -(1 << 62) - 40_503 if not self.negative else (1 << 62) + 40_503

    def encode(self, coordinates: torch.Tensor) -> torch.Tensor:
        mixed = coordinates + self.shift
        mixed = ((mixed ^ (mixed >> 31)) * _ODD) & _MASK
        mixed = mixed ^ (mixed >> 31)
        return -1 - mixed if self.negative else mixed

    def decode(self, values: torch.Tensor) -> torch.Tensor:
        """Coordinates; of what is no code, any number that is most likely none either."""
        mixed = -1 - values if self.negative else values
        held = mixed & _MASK
        back = held ^ (held >> 31)
        back = (back * _INVERSE) & _MASK
        back = back ^ (back >> 31)
        return torch.where(mixed == held, back - self.shift, -1)


CODES = (CoordinateCode(0x2545F4914F6C, False), CoordinateCode(0x369DEA0F31A5, True))


def trace(
    twin: Twin,
    specs: Mapping[str, TensorSpec],
    sources: Collection[str],
    targets: Collection[str],
    limit: int = LIMIT,
) -> list[Row]:
    """Rows of `targets`, fed by `sources` and no others; the rest of `specs` is handed over on meta.

    Regions that stay unwritten get no row.

    Raises `Rejected`: `placement_refused` for every target of the group, if what arrives is computed.
    """
    try:
        traced = {name: spec for name, spec in specs.items() if name in sources}
        return _Trace(twin, specs, traced, tuple(targets)).run(limit)
    except Computed as error:
        names = ", ".join(sorted(sources))
        why = f"the loader computes it from {names}: {error}"
        raise Rejected(*(Failure("placement_refused", why, tensor=target) for target in targets)) from None


@dataclass(slots=True)
class _Trace:
    twin: Twin
    every: Mapping[str, TensorSpec]
    specs: Mapping[str, TensorSpec]  # of the traced sources
    targets: tuple[str, ...]

    def run(self, limit: int) -> list[Row]:
        count = sum(spec.numel for spec in self.specs.values())
        count += sum(self.twin.tensors[target].tensor.numel() for target in self.targets)
        if count > limit:
            raise Computed(f"{count} elements are too many to trace")
        first, second = (self._load(marks) for marks in CODES)
        rows: list[Row] = []
        for target in self.targets:
            if not torch.equal(first[target], second[target]):
                raise Computed("the result depends on values")
            rows += self._rows(target, first[target])
        return rows

    def _bases(self) -> dict[str, int]:
        bases, position = {}, 0
        for name, spec in self.specs.items():
            bases[name] = position
            position += spec.numel
        return bases

    def _load(self, marks: CoordinateCode) -> dict[str, torch.Tensor]:
        """Global coordinates per target, or classes of what is none (`affine`)."""
        sources = {
            name: marks.encode(torch.arange(base, base + self.specs[name].numel)).reshape(self.specs[name].shape)
            for name, base in self._bases().items()
        }
        rest = meta_tensors({name: spec for name, spec in self.every.items() if name not in self.specs})
        handed = {name: sources[name] if name in sources else rest[name] for name in self.every}
        with self.twin.restored(), torch.no_grad():
            made = self.twin.substitute(self.targets, lambda old: torch.full(old.shape, marks.blank))
            log = _CoordinateLog(sources, made)
            try:
                with log:
                    self.twin.load(iter(handed.items()))
            except LOADER_ERRORS as error:
                raise Computed(log.why or f"{type(error).__name__}: {error}") from None
        if log.why:  # also if the loader went on
            raise Computed(log.why)
        self._check_casts(log.casts)
        total = sum(spec.numel for spec in self.specs.values())
        return {name: _classified(marks, tensor, total) for name, tensor in made.items()}

    def _check_casts(self, casts: Collection[torch.dtype]) -> None:
        """A cast on the way must be exact, or the one that the row makes in the end."""
        finals = {self.twin.tensors[target].tensor.dtype for target in self.targets}
        for dtype in casts:
            for spec in self.specs.values():
                exact = cast_between(spec.dtype, DTYPE_NAMES.get(dtype, "?")) in (Cast.SAME, Cast.WIDEN)
                if not exact and finals != {dtype}:
                    raise Computed(f"{spec.dtype} goes through {dtype}")

    def _rows(self, target: str, coordinates: torch.Tensor) -> Iterator[Row]:
        held = coordinates[coordinates >= 0]
        seen = torch.zeros(sum(spec.numel for spec in self.specs.values()), dtype=torch.bool)
        seen[held] = True
        if int(seen.sum()) != held.numel():
            raise Computed("an element goes to several places")
        owner = Strided.contiguous(self.twin.tensors[target].shape)
        bases = self._bases()
        names = [name for name, spec in self.specs.items() if spec.numel]
        for part in affine_parts(coordinates, [bases[name] for name in names]):
            offset = sum(a * step for a, step in zip(part.start, owner.stride, strict=True))
            view = Strided(offset, part.size, owner.stride)
            if part.source is None:
                if part.first != UNWRITTEN:
                    value = float(part.first - constant_class(0))
                    yield from (FillRow(target, box, value) for box in boxes_of(owner, view))
                continue
            name = names[part.source]
            read = Strided(part.first - bases[name], part.size, part.stride)
            try:
                found = pieces_of(Strided.contiguous(self.specs[name].shape), read, owner, view)
            except NotBoxes as error:
                raise Computed(str(error)) from None
            yield from (CopyRow(name, each.source, target, each.target, each.permute) for each in found)


def _classified(marks: CoordinateCode, values: torch.Tensor, total: int) -> torch.Tensor:
    """Raises Computed where an element is neither a coordinate nor blank nor a small whole constant."""
    found = marks.decode(values)
    is_coordinate = (found >= 0) & (found < total)
    is_blank = values == marks.blank
    is_constant = ~is_coordinate & ~is_blank & (values.abs() < 1 << 16)
    if not bool((is_coordinate | is_blank | is_constant).all()):
        raise Computed("an element is no element of a source")
    found = torch.where(is_constant, values + constant_class(0), found)
    return torch.where(is_blank, UNWRITTEN, found)


class _CoordinateLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets casts keep codes, and stops what is no copying. `why`: what was stopped; empty if nothing was."""

    def __init__(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: set[torch.dtype] = set()
        self.why = ""
        self._storages = Storages()
        self._targets = {self._own(name, tensor) for name, tensor in targets.items()}
        for name, tensor in sources.items():
            self._own(name, tensor)

    def _own(self, name: str, tensor: torch.Tensor) -> int:
        key = self._storages.learn(tensor, frozenset((name,)))
        self._storages.made.add(key)
        return key

    def _stop(self, why: str) -> None:
        self.why = self.why or why
        raise Computed(why)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = dict(kwargs or {})
        name = func._schema.name
        given = list(tensors_in((*args, *options.values())))
        sources = self._storages.sources_of(given)
        if sources and name in _LOOKS:
            self._stop("the loader looks at values")
        if name == "aten::_to_copy" and self._storages.sources_of(args[:1]):
            self._keep_codes(args[0], options)
        for tensor in written_by(func, args, options):
            self._check_write(func, name, tensor, args)
            self._storages.learn(tensor, sources)
        result = func(*args, **options)
        for tensor in tensors_in((result,)):
            if storage_of(tensor) not in self._storages.fed:
                self._storages.made.add(self._storages.learn(tensor, sources))
        return result

    def _keep_codes(self, source: torch.Tensor, options: dict[str, Any]) -> None:
        dtype = options.get("dtype")
        if source.dtype == torch.int64 and dtype not in (None, torch.int64):
            self.casts.add(dtype)
            options["dtype"] = torch.int64

    def _check_write(self, func: Any, name: str, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        self._storages.guard(func, tensor)
        if storage_of(tensor) not in self._targets or len(args) < 2:
            return
        value = args[1]
        if isinstance(value, torch.Tensor) and name == "aten::copy_" and value.dtype != torch.int64:
            self._stop(f"a value of {value.dtype} is copied")
        if isinstance(value, float) and not value.is_integer():
            self._stop(f"{name} of a fraction")
