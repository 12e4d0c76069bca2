"""Arithmetic of boxes: intersection, merging, grids. Pure Python; a front uses it without touching a tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product

from transports.base import Box

Cuts = tuple[tuple[int, ...], ...]


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join neighbours that share a whole face, until nothing joins. Never joins boxes that overlap."""
    current = [box for box in boxes if box.numel]
    changed = len(current) > 1
    while changed:
        changed = False
        for dim in range(len(current[0].size)):
            joined = _merge_along(current, dim)
            changed = changed or len(joined) < len(current)
            current = joined
        changed = changed and len(current) > 1
    return sorted(current, key=lambda box: (box.start, box.size))


def _merge_along(boxes: list[Box], dim: int) -> list[Box]:
    def others(box: Box) -> tuple[tuple[int, int], ...]:
        sides = tuple(zip(box.start, box.size, strict=True))
        return sides[:dim] + sides[dim + 1 :]

    ordered = sorted(boxes, key=lambda box: (others(box), box.start[dim], box.size[dim]))
    result: list[Box] = []
    for box in ordered:
        last = result[-1] if result else None
        if last is not None and last.stop[dim] == box.start[dim] and others(last) == others(box):
            size = (*box.size[:dim], last.size[dim] + box.size[dim], *box.size[dim + 1 :])
            result[-1] = Box(last.start, size)
        else:
            result.append(box)
    return result


def adjoin(first: Box, second: Box) -> bool:
    """Whether `second` begins where `first` ends, with a whole face in common."""
    sides = list(zip(first.start, first.stop, second.start, second.stop, strict=True))
    for dim, (_, stop, start, _) in enumerate(sides):
        if stop == start and all((a, b) == (c, d) for i, (a, b, c, d) in enumerate(sides) if i != dim):
            return True
    return False


def cuts_of(shape: Sequence[int], boxes: Iterable[Box]) -> Cuts:
    """Borders of all boxes per dimension, with the ends 0 and the shape."""
    marks = [{0, limit} for limit in shape]
    for box in boxes:
        for seen, low, high in zip(marks, box.start, box.stop, strict=True):
            seen.update((low, high))
    return tuple(tuple(sorted(seen)) for seen in marks)


def cells(cuts: Cuts) -> Iterator[Box]:
    """The cells of the grid, row-major. No dimension: the one cell of a scalar. A dimension of size 0: none."""
    for corner in product(*(list(pairwise(marks)) for marks in cuts)):
        yield Box(tuple(low for low, _ in corner), tuple(high - low for low, high in corner))


def cells_within(cuts: Cuts, box: Box) -> Iterator[Box]:
    """The cells that meet `box`, which is not empty."""
    yield from cells(
        tuple(
            marks[bisect_right(marks, low) - 1 : bisect_left(marks, high) + 1]
            for marks, low, high in zip(cuts, box.start, box.stop, strict=True)
        )
    )


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indexes of two boxes that share an element, or None. Sweeps along the first dimension."""
    if len(boxes) < 2:
        return None
    if not boxes[0].size:
        return (0, 1)
    order = sorted((i for i, box in enumerate(boxes) if box.numel), key=lambda i: boxes[i].start[0])
    active: list[int] = []
    for i in order:
        active = [j for j in active if boxes[j].stop[0] > boxes[i].start[0]]
        for j in active:
            if boxes[i].meet(boxes[j]) is not None:
                return (min(i, j), max(i, j))
        active.append(i)
    return None


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """A region of the tensor that no box touches, or None. Boxes may overlap."""
    whole = Box.whole(shape)
    if not whole.numel:
        return None
    if merge(boxes) == [whole]:
        return None
    holes = [whole]
    for box in boxes:
        holes = [piece for hole in holes for piece in subtract(hole, box)]
        if not holes:
            return None
    return merge(holes)[0]


def subtract(box: Box, other: Box) -> list[Box]:
    """What is left of `box` without `other`, as disjoint boxes."""
    common = box.meet(other)
    if common is None:
        return [box]
    rest: list[Box] = []
    start, stop = list(box.start), list(box.stop)
    for dim in range(len(start)):
        for low, high in ((start[dim], common.start[dim]), (common.stop[dim], stop[dim])):
            if low < high:
                corner = [*start[:dim], low, *start[dim + 1 :]]
                ends = [*stop[:dim], high, *stop[dim + 1 :]]
                rest.append(Box(tuple(corner), tuple(b - a for a, b in zip(corner, ends, strict=True))))
        start[dim], stop[dim] = common.start[dim], common.stop[dim]
    return rest
