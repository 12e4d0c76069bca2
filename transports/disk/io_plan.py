"""From regions of stored tensors to read requests: which bytes, in which order, straight into which memory.

Pure arithmetic over offsets and strides. A request is a pattern of equal runs in a file, and either an address that
takes them as they are or a strided view that a bucket is copied into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from transports.base import Read
from transports.disk.targets import landing
from transports.dtypes import itemsize
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bytes. `run`: a shorter run is not worth a read call of its own, a longer gap is worth leaving out.

    `request`: of one read call straight into memory. `bucket`: small enough to stay in cache until it is copied out.
    """

    run: int = 16 << 10
    request: int = 8 << 20
    bucket: int = 2 << 20


DEFAULT_LIMITS = ReadLimits()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: `start` is the file offset of its first byte."""

    fd: int
    file: str
    spec: TensorSpec
    start: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """`count` runs of `run` bytes, `pitch` bytes apart, from `offset` of the file."""

    offset: int
    run: int
    count: int = 1
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        return self.run * self.count


@dataclass(frozen=True, slots=True)
class Direct:
    """The runs land at `address`, `step` bytes apart."""

    place: Place
    pattern: Pattern
    address: int
    step: int


@dataclass(frozen=True, slots=True)
class Bucketed:
    """The runs land end to end in a bucket; seen as `dtype` with `target`'s sizes and `strides`, it is copied out."""

    place: Place
    pattern: Pattern
    dtype: torch.dtype
    strides: tuple[int, ...]
    target: torch.Tensor


Request = Direct | Bucketed
_Step = Callable[[int, tuple[int, ...], torch.Tensor], Iterator[Request]]


def requests(place: Place, read: Read, limits: ReadLimits) -> Iterator[Request]:
    """The requests of one read. Raises Aborted `tensor_shape` or `tensor_dtype` where target and box do not fit."""
    return _Planner.of(place, read, limits).split()


def check(place: Place, read: Read) -> None:
    """The same refusals, without making requests."""
    _Planner.of(place, read, DEFAULT_LIMITS)


@dataclass(frozen=True, slots=True)
class _Planner:
    """`view`: the target with the dimensions of the box, in the source's order. `direct`: its bytes are the file's."""

    place: Place
    limits: ReadLimits
    item: int
    strides: tuple[int, ...]
    base: int
    sizes: tuple[int, ...]
    view: torch.Tensor
    dtype: torch.dtype
    direct: bool

    @classmethod
    def of(cls, place: Place, read: Read, limits: ReadLimits) -> _Planner:
        found = landing(place.spec, read, place.file)
        strides = _row_major(found.shape)
        base = sum(at * step for at, step in zip(found.box.start, strides, strict=True))
        direct = found.same and found.view.device.type == "cpu"
        item = itemsize(place.spec.dtype)
        return cls(place, limits, item, strides, base, found.box.size, found.view, found.dtype, direct)

    def split(self) -> Iterator[Request]:
        if prod(self.sizes):
            yield from self._sparse(self.base, self.sizes, self.view)

    def _sparse(self, base: int, sizes: tuple[int, ...], view: torch.Tensor) -> Iterator[Request]:
        """Leave out the gaps worth leaving out: one pattern along the innermost dimension that has them."""
        wide = self._wide(sizes)
        if wide is None:
            yield from self._dense(base, sizes, view)
            return
        first = _first(sizes)
        run = self._span(sizes, wide + 1) * self.item
        if first != wide or run > self.limits.bucket:
            yield from self._each(base, sizes, view, first, 1, self._sparse)
            return
        inner = sizes[wide + 1 :]
        whole_run = prod(inner) * self.item == run
        if self.direct and whole_run and view[(0,) * (wide + 1)].is_contiguous():
            yield from self._each(
                base, sizes, view, wide, max(1, self.limits.request // run), partial(self._rows, wide)
            )
        else:
            yield from self._each(
                base, sizes, view, wide, max(1, self.limits.bucket // run), partial(self._gather, wide)
            )

    def _dense(self, base: int, sizes: tuple[int, ...], view: torch.Tensor) -> Iterator[Request]:
        """One stretch of the file, with at most small gaps."""
        span = self._span(sizes, 0)
        first = _first(sizes)
        if self.direct and prod(sizes) == span:
            if view.is_contiguous():
                yield from self._stretch(base * self.item, span * self.item, view.data_ptr())
                return
            if self._target_run(sizes, view, first + 1) * self.item >= self.limits.run:
                inner = self._span(sizes, first + 1) * self.item
                if inner <= self.limits.request and view[(0,) * (first + 1)].is_contiguous():
                    yield from self._each(
                        base, sizes, view, first, self.limits.request // inner, partial(self._rows, first)
                    )
                else:
                    yield from self._each(base, sizes, view, first, 1, self._dense)
                return
        if span * self.item <= self.limits.bucket:
            pattern = Pattern(self.place.start + base * self.item, span * self.item)
            yield Bucketed(self.place, pattern, self.dtype, self.strides, view)
            return
        inner_span = self._span(sizes, first + 1)
        many = (self.limits.bucket // self.item - inner_span) // self.strides[first] + 1
        yield from self._each(base, sizes, view, first, max(1, many), self._dense)

    def _each(
        self, base: int, sizes: tuple[int, ...], view: torch.Tensor, dim: int, many: int, then: _Step
    ) -> Iterator[Request]:
        """`then` on every `many` indexes of one dimension."""
        for low in range(0, sizes[dim], many):
            count = min(many, sizes[dim] - low)
            part = (*sizes[:dim], count, *sizes[dim + 1 :])
            yield from then(base + low * self.strides[dim], part, view.narrow(dim, low, count))

    def _stretch(self, offset: int, nbytes: int, address: int) -> Iterator[Request]:
        for low in range(0, nbytes, self.limits.request):
            size = min(self.limits.request, nbytes - low)
            yield Direct(self.place, Pattern(self.place.start + offset + low, size), address + low, size)

    def _rows(self, dim: int, base: int, sizes: tuple[int, ...], view: torch.Tensor) -> Iterator[Request]:
        """Equal runs along `dim`, contiguous on both sides."""
        yield Direct(self.place, self._pattern(dim, base, sizes), view.data_ptr(), view.stride(dim) * self.item)

    def _gather(self, dim: int, base: int, sizes: tuple[int, ...], view: torch.Tensor) -> Iterator[Request]:
        """Equal runs along `dim` into a bucket, where they lie end to end."""
        pattern = self._pattern(dim, base, sizes)
        strides = (*self.strides[:dim], pattern.run // self.item, *self.strides[dim + 1 :])
        yield Bucketed(self.place, pattern, self.dtype, strides, view)

    def _pattern(self, dim: int, base: int, sizes: tuple[int, ...]) -> Pattern:
        run = self._span(sizes, dim + 1) * self.item
        return Pattern(self.place.start + base * self.item, run, sizes[dim], self.strides[dim] * self.item)

    def _wide(self, sizes: tuple[int, ...]) -> int | None:
        """The innermost dimension between whose indexes lies a gap worth skipping."""
        for dim in reversed(range(len(sizes))):
            if sizes[dim] == 1:
                continue
            run = self._span(sizes, dim + 1)
            gap = (self.strides[dim] - run) * self.item
            if gap >= self.limits.run or (gap > 0 and run * self.item >= self.limits.run):
                return dim
        return None

    def _span(self, sizes: tuple[int, ...], first: int) -> int:
        """Elements from the first to the last one of dimensions `first` and up, ends included."""
        return 1 + sum((sizes[at] - 1) * self.strides[at] for at in range(first, len(sizes)))

    def _target_run(self, sizes: tuple[int, ...], view: torch.Tensor, first: int) -> int:
        """Elements that lie end to end in the target, at most those of dimensions `first` and up."""
        run = 1
        for dim in reversed(range(first, len(sizes))):
            if sizes[dim] == 1:
                continue
            if view.stride(dim) != run:
                break
            run *= sizes[dim]
        return run


def _first(sizes: tuple[int, ...]) -> int:
    """The outermost dimension with more than one index; the last one where there is none."""
    return next((dim for dim, size in enumerate(sizes) if size > 1), max(len(sizes) - 1, 0))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
