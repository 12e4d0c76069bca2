"""Rows of one source tensor: its parts, experts and cut, as regions of the source and of the local parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_adapter.placement.declared.layouts import (
    Experts,
    Layout,
    LayoutError,
    Merged,
    PaddedVocab,
    Plain,
    Replicated,
    Run,
    experts_of,
    runs,
)
from engine_adapter.placement.declared.names import Shard
from engine_adapter.placement.rows import CopyRow, FillRow, Row
from transports.base import Box
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter lies, declared or learned from the parameter itself."""

    layout: Layout
    rank: int
    size: int


def rows_of(spec: TensorSpec, shard: Shard, parameter: str, local: tuple[int, ...], cut: Cut) -> list[Row]:
    """Rows that bring `spec` (which holds `shard`) into `parameter` of local shape `local`. Raises LayoutError."""
    layout, rank, size = cut.layout, cut.rank, cut.size
    if not isinstance(layout, Experts):
        return _plain_rows(spec, spec.shape, shard.part, parameter, local, layout, rank, size, (), ())
    mine = experts_of(layout, rank, size) or range(0)
    if not local or local[0] != len(mine):
        raise LayoutError("tensor_shape", f"{len(mine)} experts on this rank, the parameter's first dimension differs")
    inner_rank, inner_size = (rank, size) if layout.parallel == "tp" else (0, 1)
    stacked = shard.expert is None
    if stacked and (not spec.shape or spec.shape[0] != layout.count):
        held = spec.shape[0] if spec.shape else 0
        extra = f"expert {layout.count} is one too many" if held > layout.count else f"expert {held} is missing"
        raise LayoutError("tensor_shape", f"{held} stacked experts instead of {layout.count}: {extra}")
    if shard.expert is not None and shard.expert not in mine:
        return []
    shape = spec.shape[1:] if stacked else spec.shape
    lead_source: Lead = ((mine.start, len(mine)),) if stacked else ()
    lead_target: Lead = ((0, len(mine)),) if stacked else (((shard.expert or 0) - mine.start, 1),)
    return _plain_rows(
        spec, shape, shard.part, parameter, local[1:], layout.inner, inner_rank, inner_size, lead_source, lead_target
    )


Lead = tuple[tuple[int, int], ...]  # (start, size) of leading dimensions


def _plain_rows(
    spec: TensorSpec,
    shape: tuple[int, ...],
    part: str,
    parameter: str,
    local: tuple[int, ...],
    layout: Plain,
    rank: int,
    size: int,
    lead_source: Lead,
    lead_target: Lead,
) -> list[Row]:
    if isinstance(layout, Replicated):
        if shape != local and not (_scalar(shape) and _scalar(local)):
            raise LayoutError("tensor_shape", f"shape {list(shape)}, and no axis is declared for the parameter")
        return [
            CopyRow(spec.name, _lead(lead_source, Box.whole(shape)), parameter, _lead(lead_target, Box.whole(local)))
        ]
    dim = layout.dim
    if len(shape) != len(local) or dim >= len(shape) or _without(shape, dim) != _without(local, dim):
        raise LayoutError("tensor_shape", f"shape {list(shape)} does not fit a cut along dimension {dim}")
    found = runs(layout, local[dim], shape[dim] if not part else None, rank, size)
    held = [run for run in found if not part or run.part == part]
    if sum(run.full for run in held) != shape[dim]:
        raise LayoutError("tensor_shape", f"length {shape[dim]} along {dim}, declared {sum(run.full for run in held)}")
    rows: list[Row] = []
    for source_run, target_run in _segments(layout, held):
        source = _lead(lead_source, _cut(shape, dim, *source_run))
        rows.append(CopyRow(spec.name, source, parameter, _lead(lead_target, _cut(local, dim, *target_run))))
    if isinstance(layout, PaddedVocab) and held[0].length < local[dim]:
        tail = _cut(local, dim, held[0].length, local[dim] - held[0].length)
        rows.insert(0, FillRow(parameter, _lead(lead_target, tail), 0.0))
    return [row for row in rows if row.target_box.numel]


Segment = tuple[tuple[int, int], tuple[int, int]]  # (start, length) in the source and in the target


def _segments(layout: Plain, held: list[Run]) -> Iterator[Segment]:
    if isinstance(layout, Merged) and layout.interleaved and len(held) > 1:
        count, first = len(held), held[0]
        yield (first.start * count, first.length * count), (0, first.length * count)
        return
    base = 0
    for run in held:
        if run.step == 1:
            yield (base + run.start, run.length), (run.offset, run.length)
        else:
            for i in range(run.length):
                yield (base + run.start + i, 1), (run.offset + i * run.step, 1)
        base += run.full


def _cut(shape: tuple[int, ...], dim: int, start: int, length: int) -> Box:
    corner = (0,) * dim + (start,) + (0,) * (len(shape) - dim - 1)
    return Box(corner, (*shape[:dim], length, *shape[dim + 1 :]))


def _lead(lead: Lead, box: Box) -> Box:
    return Box(tuple(a for a, _ in lead) + box.start, tuple(n for _, n in lead) + box.size)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _scalar(shape: tuple[int, ...]) -> bool:
    return all(side == 1 for side in shape)
