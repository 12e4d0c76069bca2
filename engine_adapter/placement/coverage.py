"""The two coverages, proved before the first byte moves.

Destination (each rank for itself): every element of every parameter has exactly one last writer. Source (the front,
over all ranks): every element of every tensor lands on at least one rank, and on equally many ranks as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_adapter.placement.boxes import adjoin, cells, cells_within, cuts_of, first_overlap, merge, uncovered
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow, Placement
from engine_adapter.placement.values import SourceBoxes, WireTensor
from transports.base import Box
from updater.core.errors import Failure
from updater.protocol.manifest import TensorSpec


def check_rows(
    placement: Placement, specs: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> list[Failure]:
    """Rows that cannot be replayed: unknown names, regions outside, unequal regions."""
    failures: list[Failure] = []
    for row in placement.rows:
        why = _bad_target(row.target, row.target_box, shapes)
        name = row.target
        if isinstance(row, CopyRow) and not why:
            why, name = _bad_source(row, specs), row.source
        if why:
            failures.append(Failure("placement_refused", why, rank=placement.rank, tensor=name))
    return failures


def _bad_target(target: str, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if target not in shapes:
        return "a row writes a parameter that this rank does not have"
    return "" if box.fits(shapes[target]) else f"a row writes {box} of a parameter of shape {list(shapes[target])}"


def _bad_source(row: CopyRow, specs: Mapping[str, TensorSpec]) -> str:
    spec = specs.get(row.source)
    if spec is None:
        return "a row reads a tensor that the source does not have"
    if not row.source_box.fits(spec.shape):
        return f"a row reads {row.source_box} of a tensor of shape {list(spec.shape)}"
    order = range(len(spec.shape)) if row.permute is None else row.permute
    if sorted(order) != list(range(len(spec.shape))):
        return f"{list(order)} is not a permutation of the dimensions"
    moved = [row.source_box.size[dim] for dim in order]
    if [side for side in moved if side != 1] != [side for side in row.target_box.size if side != 1]:
        return f"region {moved} does not fit region {list(row.target_box.size)} of {row.target}"
    return ""


def check_destination(placement: Placement, shapes: Mapping[str, tuple[int, ...]]) -> list[Failure]:
    """Every element of every parameter has one last writer. Assumes that `check_rows` found nothing.

    A copied or carried region may lie over an earlier fill (padding is filled first); nothing may lie over a copied
    or carried region: a region written twice is computed, not copied.
    """
    written: dict[str, list[CopyRow | FillRow | CarryRow]] = {name: [] for name in shapes}
    for row in placement.rows:
        written[row.target].append(row)
    failures: list[Failure] = []
    for name, rows in written.items():
        hole = uncovered(shapes[name], [row.target_box for row in rows])
        if hole is not None:
            why = f"no row writes {list(hole.start)} to {list(hole.stop)} of shape {list(shapes[name])}"
            failures.append(Failure("tensor_unwritten", why, rank=placement.rank, tensor=name))
        why = _written_twice(rows)
        if why:
            failures.append(Failure("placement_refused", why, rank=placement.rank, tensor=name))
    return failures


def _written_twice(rows: Sequence[CopyRow | FillRow | CarryRow]) -> str:
    lasting = [row for row in rows if not isinstance(row, FillRow)]
    pair = None if _partition(lasting) else first_overlap([row.target_box for row in lasting])
    if pair is not None:
        first, second = (getattr(lasting[i], "source", "a carried region") for i in pair)
        return f"{first} and {second} write the same region"
    earlier: list[Box] = []
    for row in rows:
        if not isinstance(row, FillRow):
            earlier.append(row.target_box)
        elif any(first_overlap([row.target_box, box]) is not None for box in earlier):
            return "a fill lies over a copied region"
    return ""


def _partition(rows: Sequence[CopyRow | CarryRow]) -> bool:
    """The quick answer of the common case: all boxes join to one, and so no two overlap."""
    return len(merge(row.target_box for row in rows)) == 1


def source_boxes(placement: Placement) -> tuple[SourceBoxes, ...]:
    """The distinct regions of every source tensor that this rank holds, sorted by name.

    Regions that a placement took apart only to spread them out (interleaved parts) are joined; neighbours that stay
    neighbours in the parameter were told apart on purpose (query and key heads of one fused tensor) and stay apart.
    """
    held: dict[str, list[list[CopyRow]]] = {}
    for row in placement.rows:
        if isinstance(row, CopyRow):
            groups = held.setdefault(row.source, [])
            if not groups or _continues(groups[-1][-1], row):
                groups.append([])
            groups[-1].append(row)
    found = []
    for name in sorted(held):
        boxes = (box for group in held[name] for box in merge(dict.fromkeys(row.source_box for row in group)))
        found.append(SourceBoxes(name, tuple(dict.fromkeys(boxes))))
    return tuple(found)


def _continues(first: CopyRow, second: CopyRow) -> bool:
    return (
        first.target == second.target
        and adjoin(first.source_box, second.source_box)
        and adjoin(first.target_box, second.target_box)
    )


def check_sources(tensors: Sequence[WireTensor], boxes: Sequence[Sequence[SourceBoxes]]) -> list[Failure]:
    """`boxes[r]`: what rank r holds. Every element on at least one rank, all elements of a region on equally many.

    Equally many per region and not per tensor: a fused tensor of query, key and value heads lies once and several
    times where key and value heads are replicated.
    """
    held = [{each.name: each.boxes for each in rank} for rank in boxes]
    failures: list[Failure] = []
    for tensor in tensors:
        of_ranks = [rank.get(tensor.name, ()) for rank in held]
        cuts = cuts_of(tensor.shape, [box for rank in of_ranks for box in rank])
        counts = dict.fromkeys(cells(cuts), 0)
        regions = {box: list(cells_within(cuts, box)) for rank in of_ranks for box in rank if box.numel}
        for rank in of_ranks:
            for cell in {cell for box in rank for cell in regions.get(box, ())}:
                counts[cell] += 1
        lost = next((cell for cell, count in counts.items() if count == 0), None)
        uneven = next((box for box, inside in regions.items() if len({counts[cell] for cell in inside}) > 1), None)
        if lost is not None:
            why = f"{list(lost.start)} to {list(lost.stop)} of shape {list(tensor.shape)} lands on no rank"
            failures.append(Failure("tensor_unwritten", why, tensor=tensor.name))
        elif uneven is not None:
            why = f"parts of {list(uneven.start)} to {list(uneven.stop)} lie on different numbers of ranks"
            failures.append(Failure("placement_refused", why, tensor=tensor.name))
    return failures
