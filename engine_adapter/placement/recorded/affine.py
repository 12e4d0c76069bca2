"""An array of coordinates in parts that step evenly: from a traced parameter back to regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

#: Class of an element that nothing was written to. Constants have classes far below it, see `constant_class`.
UNWRITTEN = -1
_CONSTANTS = -(1 << 40)


def constant_class(value: int) -> int:
    """The stand-in of a small whole constant in an array of coordinates."""
    return _CONSTANTS + value


@dataclass(frozen=True, slots=True)
class AffinePart:
    """A box whose element at `i` holds coordinate `first + sum(i * stride)`.

    `source`: index of the source that the coordinates lie in, None for a constant or unwritten region (`first` is
    its class then).
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    source: int | None
    first: int
    stride: tuple[int, ...]


def affine_parts(coordinates: torch.Tensor, bases: Sequence[int]) -> Iterator[AffinePart]:
    """Parts that tile `coordinates` (int64, any shape). Source `k` owns coordinates from `bases[k]` on, ascending."""
    if not coordinates.numel():
        return
    edges = torch.tensor(bases, dtype=torch.int64)
    owner = torch.searchsorted(edges, coordinates, right=True) - 1
    classes = torch.where(coordinates >= 0, owner, coordinates)
    yield from _parts(coordinates, classes, (0,) * coordinates.dim(), 0)


def _parts(values: torch.Tensor, classes: torch.Tensor, start: tuple[int, ...], dim: int) -> Iterator[AffinePart]:
    if dim == values.dim():
        yield _part(values, classes, start)
        return
    for begin, count in _runs(values, classes, dim):
        piece = (values.narrow(dim, begin, count), classes.narrow(dim, begin, count))
        yield from _parts(*piece, (*start[:dim], start[dim] + begin, *start[dim + 1 :]), dim + 1)


def _runs(values: torch.Tensor, classes: torch.Tensor, dim: int) -> Iterator[tuple[int, int]]:
    """Longest runs along `dim` over which every line steps by the same amount and stays in its class."""
    length = values.shape[dim]
    if length == 1:
        yield 0, 1
        return
    lines = values.movedim(dim, 0).reshape(length, -1)
    kinds = classes.movedim(dim, 0).reshape(length, -1)
    steps = lines[1:] - lines[:-1]
    even = (steps == steps[:, :1]).all(1) & (kinds[1:] == kinds[:-1]).all(1)
    firsts, evens = steps[:, 0].tolist(), even.tolist()
    begin = 0
    for i in range(1, length):
        opening = begin == i - 1
        if not evens[i - 1] or (not opening and firsts[i - 1] != firsts[i - 2]):
            yield begin, i - begin
            begin = i
    yield begin, length - begin


def _part(values: torch.Tensor, classes: torch.Tensor, start: tuple[int, ...]) -> AffinePart:
    origin = (0,) * values.dim()
    first, kind = int(values[origin]), int(classes[origin])
    stride = tuple(
        int(values[tuple(int(d == dim) for d in range(values.dim()))]) - first if values.shape[dim] > 1 else 0
        for dim in range(values.dim())
    )
    return AffinePart(start, tuple(values.shape), None if kind < 0 else kind, first, stride)
