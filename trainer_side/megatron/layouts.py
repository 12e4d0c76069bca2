"""The ways in which a rank's parameter lies in tensors of the checkpoint.

A layout cuts one local tensor to fragments. Each says which region of which checkpoint tensor it is, so that digests
and gathering need to know nothing else. Views only: nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from trainer_side.megatron.coordinates import Geometry, Seat
from transports.base import Box


@dataclass(frozen=True, slots=True)
class LayoutCut:
    """`pieces`, stacked along dimension 0, are region `box` of a checkpoint tensor of `shape`.

    `target`: which of the rule's names. `expert`: number within the rank, where one parameter holds several.
    """

    target: int
    shape: tuple[int, ...]
    box: Box
    pieces: tuple[torch.Tensor, ...]
    expert: int = 0


@dataclass(frozen=True, slots=True)
class LayoutPlace:
    """What a layout may know beside the tensor. `local_experts`: how many of them one rank holds."""

    seat: Seat
    geometry: Geometry
    local_experts: int = 0


Layout = Callable[[torch.Tensor, LayoutPlace], Iterator[LayoutCut]]


class Unfit(ValueError):
    """The parameter's shape is not what its layout says."""


def whole(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """The same on every rank of the seat: norms, the router, biases of row-parallel layers."""
    yield LayoutCut(0, tuple(tensor.shape), Box.whole(tensor.shape), (tensor,))


def rows(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """Column-parallel (Megatron's word for a cut along the output): dimension 0 over the ranks."""
    yield _rows(0, tensor, place.seat)


def columns(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """Row-parallel: dimension 1 over the ranks."""
    yield _columns(0, tensor, place.seat)


def vocabulary(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """Dimension 0 over the ranks, and the padding at its end belongs to no rank."""
    count, seat = tensor.shape[0], place.seat
    real = place.geometry.vocabulary or count * seat.size
    if real > count * seat.size:
        raise Unfit(f"{count * seat.size} rows are fewer than a vocabulary of {real}")
    start = min(count * seat.rank, real)
    size = min(count, real - start)
    if size:
        shape, box = _row_region(tensor, real, start, size)
        yield LayoutCut(0, shape, box, (tensor[:size],))


def gate_up(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """Each rank holds its rows of the gate, then its rows of the up projection."""
    if not place.geometry.gated:
        raise Unfit("the model's config has no gated linear unit: nothing to split")
    if tensor.shape[0] % 2:
        raise Unfit(f"{tensor.shape[0]} rows do not split into gate and up")
    for target, half in enumerate(tensor.chunk(2)):
        yield _rows(target, half, place.seat)


def query_key_value(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """Rows of the fused tensor: for each group of heads its queries, its key, its value; cut evenly over the ranks.

    Also right where a rank's share ends inside a group, which Megatron does with fewer groups than ranks.
    """
    geometry, seat = place.geometry, place.seat
    queries, head = geometry.heads // geometry.groups * geometry.head_size, geometry.head_size
    count = tensor.shape[0]
    if count * seat.size != geometry.groups * (queries + 2 * head):
        raise Unfit(f"{count * seat.size} rows are not {geometry.groups} groups of {queries} + {head} + {head}")
    held: tuple[list[tuple[int, torch.Tensor]], ...] = ([], [], [])
    low, high = count * seat.rank, count * (seat.rank + 1)
    for target, at, start, size in _group_runs(geometry.groups, (queries, head, head)):
        first, last = max(start, low), min(start + size, high)
        if first < last:
            held[target].append((at + first - start, tensor[first - low : last - low]))
    for target, width in enumerate((queries, head, head)):
        if held[target]:
            pieces = tuple(piece for _at, piece in held[target])
            # Runs of one kind follow each other in the checkpoint, whatever lies between them here.
            size = sum(piece.shape[0] for piece in pieces)
            shape, box = _row_region(tensor, width * geometry.groups, held[target][0][0], size)
            yield LayoutCut(target, shape, box, pieces)


def grouped_fc1(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """`GroupedMLP.weight1`: its memory is [experts, hidden, gate and up of this rank], transposed to the checkpoint."""
    for expert, matrix in enumerate(_stacked(tensor, place, (tensor.shape[0], -1))):
        for cut in gate_up(matrix, place):
            yield LayoutCut(cut.target, cut.shape, cut.box, cut.pieces, expert)


def grouped_fc2(tensor: torch.Tensor, place: LayoutPlace) -> Iterator[LayoutCut]:
    """`GroupedMLP.weight2`: its memory is [experts, intermediate of this rank, hidden], transposed too."""
    for expert, matrix in enumerate(_stacked(tensor, place, (-1, tensor.shape[1]))):
        cut = _columns(0, matrix, place.seat)
        yield LayoutCut(0, cut.shape, cut.box, cut.pieces, expert)


#: Layout by the name that rules use, and the dimension that Megatron's own attributes must name (None: any).
LAYOUTS: Mapping[str, tuple[Layout, int | None]] = {
    "whole": (whole, -1),
    "rows": (rows, 0),
    "columns": (columns, 1),
    "vocabulary": (vocabulary, 0),
    "gate_up": (gate_up, 0),
    "query_key_value": (query_key_value, 0),
    "grouped_fc1": (grouped_fc1, None),
    "grouped_fc2": (grouped_fc2, None),
}


def check_partition(tensor: torch.Tensor, dimension: int | None, seat: Seat) -> None:
    """Raise Unfit where Megatron says that the parameter is cut along another dimension than the layout does.

    The dimension is never guessed from shapes: square matrices fit both.
    """
    if dimension is None or seat.size == 1 or not hasattr(tensor, "tensor_model_parallel"):
        return
    said = int(getattr(tensor, "partition_dim", -1)) if tensor.tensor_model_parallel else -1
    if said != dimension:
        raise Unfit(f"megatron partitions dimension {said}, its rule {dimension} (-1: not at all)")


def _rows(target: int, tensor: torch.Tensor, seat: Seat) -> LayoutCut:
    count = tensor.shape[0]
    shape, box = _row_region(tensor, count * seat.size, count * seat.rank, count)
    return LayoutCut(target, shape, box, (tensor,))


def _columns(target: int, tensor: torch.Tensor, seat: Seat) -> LayoutCut:
    if tensor.dim() != 2:
        raise Unfit(f"shape {list(tensor.shape)} is not a matrix")
    count, across = tensor.shape
    box = Box((0, across * seat.rank), (count, across))
    return LayoutCut(target, (count, across * seat.size), box, (tensor,))


def _row_region(tensor: torch.Tensor, total: int, start: int, size: int) -> tuple[tuple[int, ...], Box]:
    """Shape of the checkpoint tensor, and its rows `start` to `start + size`."""
    rest = tuple(tensor.shape[1:])
    return (total, *rest), Box((start, *(0 for _ in rest)), (size, *rest))


def _group_runs(groups: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(kind, first row in the checkpoint's tensor, first row in the fused one, rows) in the fused order."""
    starts = tuple(pairwise(accumulate(sizes, initial=0)))
    for group in range(groups):
        for kind, (start, stop) in enumerate(starts):
            yield kind, group * sizes[kind], group * sum(sizes) + start, stop - start


def _stacked(tensor: torch.Tensor, place: LayoutPlace, inner: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Expert by expert, as the checkpoint has them: [out, in]."""
    count = place.local_experts
    if not count or tensor.dim() != 2 or tensor.numel() % count or not tensor.is_contiguous():
        raise Unfit(f"shape {list(tensor.shape)} does not hold {count} experts")
    yield from (matrix.t() for matrix in tensor.view(count, *inner))
