"""The proof of a rank: the spare read back through the placement, in the coordinates of the source tensors.

A digest of a rank's own memory is made piece by piece, so that a thread that needs the core gets it soon: the tensor
digest is additive over disjoint regions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine_adapter.placement.boxes import Cuts, cells_within, first_overlap
from engine_adapter.placement.casts import Cast
from engine_adapter.placement.regions import pieces, source_region
from engine_adapter.placement.rows import CopyRow
from engine_adapter.placement.values import AtomDigest, TensorCuts
from engine_adapter.rank.plan import CancelToken, Plan
from transports.base import Box, Cancelled, Read
from transports.digest import add, region_digest, tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES, carrier, is_packed
from transports.stream import StreamSource
from updater.core.errors import Aborted, Failure
from updater.protocol.manifest import TensorSpec

_BLOCK = 1 << 20  # elements of a temporary, where one is needed


@dataclass(frozen=True, slots=True)
class ReadBack:
    """`atoms`: every cell that this rank holds, once per copy. `parameters`: parameter digests of the spare."""

    atoms: tuple[AtomDigest, ...]
    parameters: Mapping[str, int]


def read_back(plan: Plan, spare: Mapping[str, torch.Tensor], cuts: Sequence[TensorCuts], stop: CancelToken) -> ReadBack:
    """Raises `LiveweightsError`: cuts that do not fit, bytes that are not the cast of the source's, time."""
    return _Reader(plan, spare, {each.name: each.cuts for each in cuts}, stop).run()


@dataclass(slots=True)
class _Cell:
    digest: int = 0
    volume: int = 0


@dataclass(slots=True)
class _Reader:
    plan: Plan
    spare: Mapping[str, torch.Tensor]
    cuts: Mapping[str, Cuts]
    stop: CancelToken
    #: (source, copy number) -> cell -> what was added so far
    found: dict[tuple[str, int], dict[Box, _Cell]] = field(default_factory=lambda: defaultdict(dict))
    whole: dict[str, int] = field(default_factory=dict)

    def run(self) -> ReadBack:
        rows = self.plan.placement.rows
        numbers = copy_numbers([row for row in rows if isinstance(row, CopyRow)])
        position = 0
        for i, row in enumerate(rows):
            if not isinstance(row, CopyRow):
                continue
            self.stop.check()
            self._row(row, self.plan.casts.get(i, Cast.SAME), numbers[position])
            position += 1
        for alias in self.plan.own_redundant:
            spec = self.plan.specs[alias]
            if isinstance(self.plan.source, StreamSource):  # digested as it passed
                self._add_whole(spec, self.plan.source.arrived(alias))
                continue
            for box, block in self._from_source(spec, Box.whole(spec.shape)):
                self._add(spec, box, block, 0)
        missing = {name: tensor for name, tensor in self.spare.items() if name not in self.whole}
        return ReadBack(self._atoms(), self.whole | parameter_digests(missing, self.stop))

    def _row(self, row: CopyRow, cast: Cast, number: int) -> None:
        if not row.source_box.numel:
            return
        spec, parameter = self.plan.specs[row.source], self.spare[row.target]
        region = source_region(parameter, row)
        if cast is Cast.SAME:
            total = self._add(spec, row.source_box, region, number)
            if row.permute is None and row.source_box == Box.whole(spec.shape) and spec.shape == tuple(parameter.shape):
                self.whole[row.target] = total  # the same bytes in the same coordinates: no second pass
        elif cast is Cast.WIDEN:
            for box, block in _blocks(row.source_box, region):
                self.stop.check()
                self._add(spec, box, _cast_back(spec, block), number)
        else:
            # What was lost cannot be read back: the source is read again, its cast must be what lies in the spare,
            # and its bytes are what the manifest is asked about.
            for box, wire in self._from_source(spec, row.source_box):
                here = region[box.within(row.source_box).slices()]
                _demand_equal(spec, wire.to(here.dtype), here)
                self._add(spec, box, wire, number)

    def _add(self, spec: TensorSpec, box: Box, region: torch.Tensor, number: int) -> int:
        """Digest `region`, which is `box` of the source, cell by cell; returns the sum."""
        grid = self.cuts.get(spec.name)
        if grid is None or tuple(marks[-1] for marks in grid) != spec.shape:
            raise _bad_cuts(spec.name)
        total = 0
        cells = self.found[spec.name, number]
        for cell in cells_within(grid, box):
            common = cell.meet(box)
            if common is None:
                continue
            part = region[common.within(box).slices()]
            digest = region_digest_until(part, spec.shape, spec.dtype, common, self.stop)
            entry = cells.setdefault(cell, _Cell())
            entry.digest, entry.volume = add(entry.digest, digest), entry.volume + common.numel
            total = add(total, digest)
        return total

    def _add_whole(self, spec: TensorSpec, digest: int) -> None:
        """A tensor that this rank held only while it passed: one cell, or it cannot be told apart."""
        whole = Box.whole(spec.shape)
        if list(cells_within(self.cuts[spec.name], whole)) != [whole]:
            raise _bad_cuts(spec.name)
        self.found[spec.name, 0][whole] = _Cell(digest, whole.numel)

    def _atoms(self) -> tuple[AtomDigest, ...]:
        atoms = []
        for (name, _), cells in sorted(self.found.items()):
            for box, entry in cells.items():
                if entry.volume != box.numel:
                    raise _bad_cuts(name)
                atoms.append(AtomDigest(name, box, to_hex(entry.digest)))
        return tuple(atoms)

    def _from_source(self, spec: TensorSpec, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        for part in pieces(box, _BLOCK):
            block = torch.empty(part.size, dtype=TORCH_DTYPES[spec.dtype])
            try:
                self.plan.source.read([Read(spec.name, part, block)], should_stop=self.stop)
            except Cancelled:
                raise self.stop.error() from None
            yield part, block


def copy_numbers(rows: Sequence[CopyRow]) -> list[int]:
    """For every row, which copy of its source it belongs to: rows of one copy do not overlap in the source.

    More than one copy on a rank comes from a tensor that feeds several parts; copies must agree like those of
    different ranks.
    """
    by_source: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_source[row.source].append(i)
    result = [0] * len(rows)
    for indexes in by_source.values():
        if first_overlap([rows[i].source_box for i in indexes]) is None:
            continue
        copies: list[list[Box]] = []
        for i in indexes:
            box = rows[i].source_box
            free = (n for n, held in enumerate(copies) if all(first_overlap([box, other]) is None for other in held))
            number = next(free, len(copies))
            if number == len(copies):
                copies.append([])
            copies[number].append(box)
            result[i] = number
    return result


def _blocks(box: Box, region: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    for part in pieces(box, _BLOCK):
        yield part, region[part.within(box).slices()]


def _cast_back(spec: TensorSpec, block: torch.Tensor) -> torch.Tensor:
    back = block.to(TORCH_DTYPES[spec.dtype])
    _demand_equal(spec, back.to(block.dtype), block)
    return back


def _demand_equal(spec: TensorSpec, wanted: torch.Tensor, here: torch.Tensor) -> None:
    kind = carrier(here.element_size())
    if not torch.equal(wanted.to(here.device).contiguous().view(kind), here.contiguous().view(kind)):
        raise Aborted(Failure("tensor_digest", "the spare does not hold the cast of the source", tensor=spec.name))


def _bad_cuts(name: str) -> Aborted:
    return Aborted(Failure("placement_refused", "the cuts do not fit the regions of this rank", tensor=name))


#: Bytes between two looks at the stop: a few milliseconds of work, and large beside what a call costs.
PIECE_BYTES = 16 << 20


def parameter_digests(tensors: Mapping[str, torch.Tensor], stop: CancelToken) -> dict[str, int]:
    """The digest of every tensor in its own coordinates. Raises `Aborted` soon after `stop` says so."""
    return {name: parameter_digest(tensor, stop) for name, tensor in tensors.items()}


def parameter_digest(tensor: torch.Tensor, stop: CancelToken, piece_bytes: int = PIECE_BYTES) -> int:
    """`tensor_digest`, under a stop."""
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if is_packed(dtype):  # a piece must not cut a byte
        stop.check()
        return tensor_digest(tensor)
    return region_digest_until(tensor, shape, dtype, Box.whole(shape), stop, piece_bytes)


def region_digest_until(
    region: torch.Tensor, shape: Sequence[int], dtype: str, box: Box, stop: CancelToken, piece_bytes: int = PIECE_BYTES
) -> int:
    """`transports.digest.region_digest`, under a stop. Packed types are digested in one piece."""
    if region.nbytes <= piece_bytes or is_packed(dtype):
        stop.check()
        return region_digest(region, shape, dtype, box)
    total = 0
    for piece in pieces(box, piece_bytes // region.element_size()):
        stop.check()
        total = add(total, region_digest(region[piece.within(box).slices()], shape, dtype, piece))
    return total
