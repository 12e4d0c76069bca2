"""Strided views as boxes: what one copy between two views means in coordinates of the tensors that own the storage.

Pure arithmetic of offsets, sizes and strides, all counted in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transports.base import Box

#: Rows of one copy above which a mapping counts as no mapping of boxes.
LIMIT = 1 << 16


class NotBoxes(ValueError):
    """The copy is not made of (few enough) boxes."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a storage. For one that owns it: dimensions do not overlap (contiguous, transposed or padded)."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def contiguous(cls, size: Sequence[int]) -> Strided:
        stride, step = [], 1
        for side in reversed(size):
            stride.append(step)
            step *= side
        return cls(0, tuple(size), tuple(reversed(stride)))

    @property
    def extent(self) -> tuple[int, int]:
        """First element and one past the last, in the storage."""
        if 0 in self.size:
            return self.offset, self.offset
        last = sum((side - 1) * step for side, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + last + 1

    def dim_of(self, stride: int) -> int | None:
        """The dimension along which neighbours are `stride` apart."""
        sides = enumerate(zip(self.size, self.stride, strict=True))
        return next((dim for dim, (side, step) in sides if side > 1 and step == stride), None)

    def coordinates(self, position: int) -> list[int]:
        """Where the element at `position` of the storage is. Raises NotBoxes if it is none of this tensor's."""
        rest, at = position - self.offset, [0] * len(self.size)
        for dim in sorted(range(len(self.size)), key=lambda dim: -self.stride[dim]):
            if self.size[dim] > 1:
                at[dim], rest = divmod(rest, self.stride[dim])
        if rest or any(not 0 <= a < side for a, side in zip(at, self.size, strict=True)):
            raise NotBoxes("a view leaves its tensor")
        return at


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` elements (or inner loops), `source` and `target` apart."""

    count: int
    source: int
    target: int

    def first(self, count: int) -> Loop:
        return Loop(count, self.source, self.target)


@dataclass(frozen=True, slots=True)
class ViewPiece:
    """One box of the source goes to one box of the target. `permute`: as in `CopyRow`."""

    source: Box
    target: Box
    permute: tuple[int, ...] | None


def pieces_of(source_owner: Strided, source: Strided, target_owner: Strided, target: Strided) -> list[ViewPiece]:
    """The boxes of `target.copy_(source)`, in the order of the target; `source` may broadcast. Empty views: none.

    Raises NotBoxes where there are more than `LIMIT`.
    """
    missing = len(target.size) - len(source.size)
    steps = (0,) * missing + tuple(
        0 if side == 1 else step for side, step in zip(source.size, source.stride, strict=True)
    )
    loops = [Loop(*sides) for sides in zip(target.size, steps, target.stride, strict=True)]
    if any(loop.count == 0 for loop in loops):
        return []
    found: list[ViewPiece] = []
    for piece in _split(source_owner, target_owner, _joined(loops), source.offset, target.offset):
        found.append(piece)
        if len(found) > LIMIT:
            raise NotBoxes(f"more than {LIMIT} boxes")
    return found


def boxes_of(owner: Strided, view: Strided) -> list[Box]:
    """The boxes that a view covers."""
    return [piece.target for piece in pieces_of(owner, view, owner, view)]


def _joined(loops: list[Loop]) -> list[Loop]:
    """Outermost first by target; neighbours that step as one loop become one."""
    ordered = sorted((loop for loop in loops if loop.count > 1), key=lambda loop: -loop.target)
    result: list[Loop] = []
    for loop in ordered:
        outer = result[-1] if result else None
        whole = (loop.count * loop.source, loop.count * loop.target)
        if outer is not None and (outer.source, outer.target) == whole:
            result[-1] = loop.first(outer.count * loop.count)
        else:
            result.append(loop)
    return result


def _split(source: Strided, target: Strided, loops: list[Loop], read: int, write: int) -> Iterator[ViewPiece]:
    """Refine until every loop runs along one dimension of both owners, in steps of one."""
    starts = source.coordinates(read), target.coordinates(write)
    dims: list[tuple[int, int]] = []
    for i, loop in enumerate(loops):
        others = [*loops[:i], *loops[i + 1 :]]
        along = source.dim_of(loop.source), target.dim_of(loop.target)
        if along[0] is None or along[1] is None:
            for k in range(loop.count):
                yield from _split(source, target, others, read + k * loop.source, write + k * loop.target)
            return
        for owner, start, dim in zip((source, target), starts, along, strict=True):
            room = owner.size[dim] - start[dim] if dim is not None else 0
            if loop.count <= room:
                continue
            if room == owner.size[dim or 0] and loop.count % room == 0:
                outer = Loop(loop.count // room, loop.source * room, loop.target * room)
                yield from _split(source, target, [*loops[:i], outer, loop.first(room), *loops[i + 1 :]], read, write)
                return
            cut = loop.count - loop.count % room if room == owner.size[dim or 0] else room
            halves = ((0, cut), (cut, loop.count - cut))
            for begin, count in halves:
                inner = [*loops[:i], *([loop.first(count)] if count > 1 else []), *loops[i + 1 :]]
                yield from _split(source, target, inner, read + begin * loop.source, write + begin * loop.target)
            return
        dims.append((along[0], along[1]))
    yield _piece(source, target, starts, loops, dims)


def _piece(
    source: Strided,
    target: Strided,
    starts: tuple[list[int], list[int]],
    loops: list[Loop],
    dims: list[tuple[int, int]],
) -> ViewPiece:
    read, write = [1] * len(source.size), [1] * len(target.size)
    for loop, (from_dim, to_dim) in zip(loops, dims, strict=True):
        if read[from_dim] > 1 or write[to_dim] > 1:
            raise NotBoxes("a view that overlaps itself")
        read[from_dim], write[to_dim] = loop.count, loop.count
    order = [from_dim for from_dim, _ in sorted(dims, key=lambda pair: pair[1])]
    rest = [dim for dim in range(len(source.size)) if dim not in order]
    permute = None if order == sorted(order) else (*order, *rest)
    return ViewPiece(Box(tuple(starts[0]), tuple(read)), Box(tuple(starts[1]), tuple(write)), permute)
