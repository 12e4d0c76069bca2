"""One tensor that holds several, as a declared layout says: where each element of a part lies in the whole, and the
rows of a proved placement rewritten from one spelling to the other.

Nothing is taken from what a loader does with the other spelling: rows come from the proved one, boxes from the layout.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_adapter.placement.rows import CopyRow
from transports.base import Box
from updater.core.policy import SourceLayout
from updater.protocol.manifest import TensorSpec

_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)(?=\.|$)")
#: Parts in the order in which every known trainer fuses them.
_ORDERS = (("q", "k", "v"), ("query", "key", "value"), ("gate", "up"), ("w1", "w3"))
_STACKED = (SourceLayout.STACKED, SourceLayout.STACKED_TRANSPOSED)


class FusionError(ValueError):
    """The layout does not say how these tensors lie in that one."""


@dataclass(frozen=True, slots=True)
class FusedPiece:
    """`length` neighbours along the fused dimension: from `part` on in the part, from `whole` on in the whole."""

    part: int
    whole: int
    length: int


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One tensor inside the whole. `expert`: its index in the leading dimension, or None if there is none.

    `pieces`: ordered by `part`.
    """

    name: str
    expert: int | None
    pieces: tuple[FusedPiece, ...]


@dataclass(frozen=True, slots=True)
class Fusion:
    """`whole`: name of the tensor that holds the parts. `dim`: the fused dimension, in coordinates of a part.

    `dims`: how many dimensions a part has. `transposed`: the last two of them lie the other way round in the whole.
    """

    whole: str
    dim: int
    dims: int
    transposed: bool
    parts: Mapping[str, FusedPart]

    def fused(self, row: CopyRow) -> Iterator[CopyRow]:
        """A row that reads a part, as rows that read the whole."""
        part = self.parts[row.source]
        low, high = _range(row.source_box, self.dim)
        for piece in _overlapping(part.pieces, low, high):
            first, last = max(low, piece.part), min(high, piece.part + piece.length)
            cut = _cut(row, self.dim, first, last - first)
            box = _at(cut.source_box, self.dim, piece.whole + first - piece.part)
            yield replace(cut, source=self.whole, source_box=self._outer(part, box), permute=self._outward(part, cut))

    def split(self, row: CopyRow) -> Iterator[CopyRow]:
        """A row that reads the whole, as rows that read parts."""
        lead = next(iter(self.parts.values())).expert is not None
        dim = self._whole_dim(self.dim, lead)
        low, high = _range(row.source_box, dim)
        experts = range(*_range(row.source_box, 0)) if lead else None
        for part in self.parts.values():
            if experts is not None and part.expert not in experts:
                continue
            mine = row if part.expert is None else _cut(row, 0, part.expert, 1)
            for piece in part.pieces:
                first, last = max(low, piece.whole), min(high, piece.whole + piece.length)
                if first < last:
                    cut = _cut(mine, dim, first, last - first)
                    inner = self._inner(cut.source_box, lead)
                    box = _at(inner, self.dim, piece.part + first - piece.whole)
                    yield replace(cut, source=part.name, source_box=box, permute=self._inward(lead, cut))

    def _whole_dim(self, dim: int, lead: bool) -> int:
        """Of the whole, for a dimension of a part."""
        last = self.dims - 1
        swapped = {last: last - 1, last - 1: last}.get(dim, dim) if self.transposed else dim
        return swapped + lead

    def _outer(self, part: FusedPart, box: Box) -> Box:
        start, size = _swapped(box) if self.transposed else (box.start, box.size)
        return Box(start, size) if part.expert is None else Box((part.expert, *start), (1, *size))

    def _inner(self, box: Box, lead: bool) -> Box:
        inner = Box(box.start[1:], box.size[1:]) if lead else box
        return Box(*_swapped(inner)) if self.transposed else inner

    def _outward(self, part: FusedPart, row: CopyRow) -> tuple[int, ...] | None:
        lead = part.expert is not None
        moved = row.permute or tuple(range(self.dims))
        found = (*((0,) if lead else ()), *(self._whole_dim(dim, lead) for dim in moved))
        return None if found == tuple(range(len(found))) else found

    def _inward(self, lead: bool, row: CopyRow) -> tuple[int, ...] | None:
        back = {self._whole_dim(dim, lead): dim for dim in range(self.dims)}
        moved = row.permute or tuple(range(self.dims + lead))
        found = tuple(back[dim] for dim in moved if dim in back)
        return None if found == tuple(range(self.dims)) else found


def fusion_of(
    kind: SourceLayout, whole: TensorSpec, parts: Mapping[str, TensorSpec], order: Mapping[str, int], kv_heads: int
) -> Fusion:
    """`parts`: those that this rank knows of. `order`: name -> where it lies in the parameter, where all lie in one.

    `kv_heads`: heads of keys and values, 0 if not known. Raises FusionError.
    """
    dims = {len(spec.shape) for spec in parts.values()}
    if len(dims) != 1:
        raise FusionError("its parts have different numbers of dimensions")
    count = dims.pop()
    lead = len(whole.shape) == count + 1
    if not lead and len(whole.shape) != count:
        raise FusionError(f"shape {list(whole.shape)} does not hold tensors of {count} dimensions")
    if (kind in _STACKED and not lead) or (lead and kind not in (*_STACKED, SourceLayout.INTERLEAVED)):
        raise FusionError(f"{kind.value} does not fit shape {list(whole.shape)} of tensors of {count} dimensions")
    transposed = kind is SourceLayout.STACKED_TRANSPOSED
    if transposed and count < 2:
        raise FusionError("there is nothing to transpose")
    inner = whole.shape[1:] if lead else whole.shape
    if transposed:
        inner = (*inner[:-2], inner[-1], inner[-2])
    found: dict[str, FusedPart] = {}
    dim = 0
    for expert, names in _by_expert(parts, lead).items():
        if expert is not None and expert >= whole.shape[0]:
            raise FusionError(f"expert {expert} of {whole.shape[0]}")
        ordered = _ordered(names, order)
        dim = _dimension([parts[name].shape for name in ordered], inner)
        sizes = [parts[name].shape[dim] if inner else 1 for name in ordered]
        for name, pieces in zip(ordered, _pieces(kind, sizes, kv_heads), strict=True):
            found[name] = FusedPart(name, expert, pieces)
    return Fusion(whole.name, dim, count, transposed, found)


def _by_expert(parts: Mapping[str, TensorSpec], lead: bool) -> dict[int | None, list[str]]:
    groups: dict[int | None, list[str]] = {}
    for name in parts:
        match = _EXPERT.search(name) if lead else None
        if lead and match is None:
            raise FusionError(f"{name} does not say which expert it is")
        groups.setdefault(int(match[1]) if match else None, []).append(name)
    return groups


def _ordered(names: Sequence[str], order: Mapping[str, int]) -> list[str]:
    """By what they are called, else by where they lie in their one parameter."""
    if len(names) == 1:
        return list(names)
    split = [name.split(".") for name in names]
    differ = [column for column in zip(*split, strict=False) if len(set(column)) > 1]
    if len({len(each) for each in split}) == 1 and len(differ) == 1:
        stems = [part.removesuffix("_proj") for part in differ[0]]
        for known in _ORDERS:
            if set(stems) <= set(known):
                return [name for _, name in sorted(zip(map(known.index, stems), names, strict=True))]
    if all(name in order for name in names) and len({order[name] for name in names}) == len(names):
        return sorted(names, key=order.__getitem__)
    raise FusionError(f"nothing says in which order {', '.join(sorted(names))} follow each other")


def _dimension(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int:
    if len(shapes) == 1 and shapes[0] == whole:
        return 0
    for dim in range(len(whole)):
        rest = {shape[:dim] + shape[dim + 1 :] for shape in (*shapes, whole)}
        if len(rest) == 1 and sum(shape[dim] for shape in shapes) == whole[dim]:
            return dim
    raise FusionError(f"{' and '.join(str(list(shape)) for shape in shapes)} do not add up to {list(whole)}")


def _pieces(kind: SourceLayout, sizes: Sequence[int], kv_heads: int) -> list[tuple[FusedPiece, ...]]:
    """For every part, where its runs lie in the whole."""
    if kind is SourceLayout.INTERLEAVED:
        if len(sizes) < 2 or len(set(sizes)) > 1:
            raise FusionError(f"parts of {list(sizes)} cannot be interleaved")
        return [tuple(FusedPiece(i, i * len(sizes) + at, 1) for i in range(sizes[0])) for at in range(len(sizes))]
    groups = 1
    if kind is SourceLayout.BY_KV_HEAD:
        if len(sizes) != 3 or sizes[1] != sizes[2]:
            raise FusionError(f"parts of {list(sizes)} are not queries, keys and values")
        if not kv_heads or any(size % kv_heads for size in sizes):
            raise FusionError("this engine does not say how many heads its keys and values have")
        groups = kv_heads
    shares, starts = [size // groups for size in sizes], [0]
    for share in shares:
        starts.append(starts[-1] + share)
    return [
        tuple(FusedPiece(group * share, group * starts[-1] + start, share) for group in range(groups))
        for share, start in zip(shares, starts, strict=False)
    ]


def _overlapping(pieces: Sequence[FusedPiece], low: int, high: int) -> Iterator[FusedPiece]:
    for piece in pieces[max(0, bisect_right(pieces, low, key=lambda each: each.part) - 1) :]:
        if piece.part >= high:
            return
        if piece.part + piece.length > low:
            yield piece


def _range(box: Box, dim: int) -> tuple[int, int]:
    return (box.start[dim], box.stop[dim]) if box.size else (0, 1)


def _at(box: Box, dim: int, start: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), box.size) if box.size else box


def _swapped(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    start, size = box.start, box.size
    return (*start[:-2], start[-1], start[-2]), (*size[:-2], size[-1], size[-2])


def _cut(row: CopyRow, dim: int, start: int, length: int) -> CopyRow:
    """`row` for `length` elements from `start` on along a dimension of its source, and the same part of its target."""
    source, target = row.source_box, row.target_box
    if not source.size or (source.start[dim], source.size[dim]) == (start, length):
        return row
    moved = row.permute or tuple(range(len(source.size)))
    position = [each for each in moved if source.size[each] != 1].index(dim)
    there = [at for at, size in enumerate(target.size) if size != 1][position]
    return replace(
        row,
        source_box=_side(source, dim, start, length),
        target_box=_side(target, there, target.start[there] + start - source.start[dim], length),
    )


def _side(box: Box, dim: int, start: int, length: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.size[:dim], length, *box.size[dim + 1 :]))
