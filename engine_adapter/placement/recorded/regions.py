"""What recorded rows cover, what they leave uncovered, and tied copies among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_adapter.placement.boxes import merge, subtract
from engine_adapter.placement.recorded.twin import TwinTensor
from engine_adapter.placement.rows import CarryRow, CopyRow, Placement, Row
from transports.base import Box
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Holes:
    """Uncovered regions per tensor."""

    boxes: Mapping[str, tuple[Box, ...]]

    @classmethod
    def of(cls, rows: Iterable[Row], tensors: Mapping[str, TwinTensor]) -> Holes:
        written: dict[str, list[Box]] = {}
        for row in rows:
            written.setdefault(row.target, []).append(row.target_box)
        return cls({name: left_of([Box.whole(entry.shape)], written.get(name, ())) for name, entry in tensors.items()})

    def meet(self, target: str, box: Box) -> bool:
        return any(hole.meet(box) is not None for hole in self.boxes.get(target, ()))

    def carried(self, start: Placement | None) -> list[CarryRow]:
        """Rows for the holes; with `start`, only where its holes were (its other holes stay open)."""
        if start is None:
            return [CarryRow(name, box) for name, boxes in self.boxes.items() for box in boxes]
        found = []
        for row in start.rows:
            if isinstance(row, CarryRow):
                common = (row.target_box.meet(hole) for hole in self.boxes.get(row.target, ()))
                found += [CarryRow(row.target, box) for box in merge(box for box in common if box is not None)]
        return found


def left_of(boxes: Iterable[Box], taken: Iterable[Box]) -> tuple[Box, ...]:
    """The parts of `boxes` (disjoint) that no box of `taken` touches. Empty boxes are dropped."""
    left = [box for box in boxes if box.numel]
    for each in merge(taken):
        left = [piece for box in left for piece in subtract(box, each)]
        if not left:
            return ()
    return tuple(merge(left))


def drop_ties(
    rows: Iterable[Row], tensors: Mapping[str, TwinTensor], specs: Mapping[str, TensorSpec]
) -> tuple[list[Row], dict[str, str]]:
    """`rows` without those of a tied copy that a loader writes over its twin; alias -> canonical name."""
    ordered = list(rows)
    regions: dict[str, dict[str, list[tuple[Box, Box, tuple[int, ...] | None]]]] = {}
    for row in ordered:
        if isinstance(row, CopyRow) and tensors[row.target].aliases:
            found = regions.setdefault(row.target, {}).setdefault(row.source, [])
            found.append((row.source_box, row.target_box, row.permute))
    redundant: dict[str, str] = {}
    for target, sources in regions.items():
        aliases = [name for name in sources if _spelled(name, tensors[target].aliases)]
        for alias in aliases:
            same = [name for name in sources if name not in aliases and sources[name] == sources[alias]]
            if same:
                _check_tie(alias, same[0], specs)
                redundant[alias] = same[0]
    return [row for row in ordered if not (isinstance(row, CopyRow) and row.source in redundant)], redundant


def ignored_ties(
    unused: Iterable[str], rows: Iterable[Row], tensors: Mapping[str, TwinTensor], specs: Mapping[str, TensorSpec]
) -> dict[str, str]:
    """Of the names that a loader took and did not load: alias -> the name that feeds the same parameter.

    Raises `Rejected` where they have another shape or dtype.
    """
    feeds: dict[str, str] = {}
    for row in rows:
        if isinstance(row, CopyRow):
            feeds.setdefault(row.target, row.source)
    found: dict[str, str] = {}
    for name in sorted(unused):
        target = next((t for t, entry in tensors.items() if t in feeds and _spelled(name, entry.aliases)), None)
        if target is not None:
            _check_tie(name, feeds[target], specs)
            found[name] = feeds[target]
    return found


def lone_ties(rows: Iterable[Row], tensors: Mapping[str, TwinTensor]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(source, all names of what it feeds) of tied copies that came without the canonical tensor. Sorted."""
    found: dict[str, tuple[str, ...]] = {}
    for row in rows:
        aliases = tensors[row.target].aliases
        if not isinstance(row, CopyRow) or _spelled(row.source, (row.target,)):
            continue
        if _spelled(row.source, aliases):
            found[row.source] = (row.target, *aliases)
    return tuple(sorted(found.items()))


def _spelled(name: str, aliases: Iterable[str]) -> bool:
    """Whether a checkpoint name is one of these parameter names, up to a prefix of whole parts."""
    return any(name == a or name.endswith("." + a) or a.endswith("." + name) for a in aliases)


def _check_tie(alias: str, canonical: str, specs: Mapping[str, TensorSpec]) -> None:
    mine, other = specs[alias], specs[canonical]
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        raise Rejected(Failure("tensor_shape", f"tied copy of {canonical} with another shape or dtype", tensor=alias))
