"""Views: a row's region of a parameter, and the same region seen in the coordinates of the source tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from engine_adapter.placement.rows import CopyRow
from transports.base import Box


def target_region(parameter: torch.Tensor, row: CopyRow) -> torch.Tensor:
    """The view that the row writes, with the sizes of the source region after `permute`: what a `Read` wants."""
    return parameter[row.target_box.slices()].view(_moved(row))


def source_region(parameter: torch.Tensor, row: CopyRow) -> torch.Tensor:
    """The same bytes as a view with the sizes of `row.source_box`: reads the parameter back as the source tensor."""
    region = target_region(parameter, row)
    if row.permute is None:
        return region
    back = sorted(range(len(row.permute)), key=row.permute.__getitem__)
    return region.permute(back)


def _moved(row: CopyRow) -> tuple[int, ...]:
    size = row.source_box.size
    return size if row.permute is None else tuple(size[dim] for dim in row.permute)


def blocks(size: Sequence[int], limit: int) -> list[tuple[slice, ...]]:
    """Slices that cut a region of `size` into pieces of at most about `limit` elements, along leading dimensions."""
    total = prod(size)
    if total <= limit or not size:
        return [tuple(slice(0, n) for n in size)]
    row = total // size[0]
    if row >= limit and len(size) > 1:
        return [(slice(i, i + 1), *rest) for i in range(size[0]) for rest in blocks(size[1:], limit)]
    step = max(1, limit // max(row, 1))
    rest = tuple(slice(0, n) for n in size[1:])
    return [(slice(low, min(size[0], low + step)), *rest) for low in range(0, size[0], step)]


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """`box` in pieces of at most about `limit` elements, in the coordinates that `box` has."""
    for cut in blocks(box.size, limit):
        start = tuple(origin + piece.start for origin, piece in zip(box.start, cut, strict=True))
        yield Box(start, tuple(piece.stop - piece.start for piece in cut))
