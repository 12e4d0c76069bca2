"""The tensor digest: 64 bits, position sensitive, additive over disjoint regions (docs/digest.md has the formula)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import torch

from transports.base import Box
from transports.dtypes import DTYPE_NAMES, byte_box, byte_shape, carrier, itemsize

MASK = (1 << 64) - 1
ROW_SEED = 0x4C57_524F_5753_0001
COLUMN_SEED = 0x4C57_434F_4C53_0002
CONSTANT = 0x9E37_79B9_7F4A_7C15

_TILE_WORDS = 1 << 17  # one megabyte of int64: near the second cache of a core, and large beside a call's cost
_PAD = 24  # words between the rows of a tile, so that rows of a power of two do not fall on the same cache lines
_TABLE = 1 << 18  # multipliers kept for the first so many rows and columns
_JOIN_BELOW = 64
_SCRATCH_WORDS = _TILE_WORDS + (_TILE_WORDS >> 2)

_kept = threading.local()


def region_digest(region: torch.Tensor, shape: Sequence[int], dtype: str, box: Box) -> int:
    """Digest of `region`, which is `source[box]` of a tensor of `shape` (elements) and safetensors `dtype`.

    `region`: any strided view with the box's sizes (packed types: its bytes), of the source's item size. The digests
    of disjoint boxes of one tensor add up, modulo 2^64, to the digest of their union. Returns a uint64 as int; an
    empty region gives 0. Raises ValueError where box, shape, dtype and region do not fit together.
    """
    whole, part = byte_shape(shape, dtype), byte_box(box, shape, dtype)
    if not box.fits(shape) or tuple(region.shape) != part.size or region.element_size() != itemsize(dtype):
        raise ValueError(f"region {tuple(region.shape)} of {region.dtype} is not box {box} of {dtype} {tuple(shape)}")
    if region.numel() == 0:
        return 0
    view = _View.of(whole, itemsize(dtype))
    items = region.detach().view(carrier(view.item)) if region.dtype != carrier(view.item) else region.detach()
    return sum(_piece_digest(view, items, part, lead, trail) for lead, trail in view.pieces(items, part)) & MASK


def tensor_digest(tensor: torch.Tensor, dtype: str | None = None, shape: Sequence[int] | None = None) -> int:
    """Digest of a whole tensor. `dtype`: its safetensors name, if torch's own does not say (packed bytes).

    `shape`: its shape in elements, for packed types only. A rank's parameter digest is this over its own parameter.
    """
    name = DTYPE_NAMES[tensor.dtype] if dtype is None else dtype
    sizes = tuple(tensor.shape) if shape is None else tuple(shape)
    return region_digest(tensor, sizes, name, Box.whole(sizes))


def to_hex(digest: int) -> str:
    """16 lower-case hex digits."""
    return f"{digest & MASK:016x}"


def from_hex(text: str) -> int:
    """The inverse of `to_hex`. Raises ValueError."""
    if len(text) != 16:
        raise ValueError(f"not 16 hex digits: {text!r}")
    return int(text, 16)


def add(*digests: int) -> int:
    """The digest of a disjoint union."""
    return sum(digests) & MASK


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as rows of `columns` items: dimensions before `split` number the rows, the others the columns."""

    shape: tuple[int, ...]
    split: int
    item: int

    @classmethod
    def of(cls, shape: tuple[int, ...], item: int) -> _View:
        split = max(len(shape) - 1, 0)
        if len(shape) >= 3:
            while split > 0 and prod(shape[split:]) < _JOIN_BELOW:
                split -= 1
        return cls(shape, split, item)

    @property
    def columns(self) -> int:
        return prod(self.shape[self.split :])

    def pieces(self, region: torch.Tensor, box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """(row slices of the region, fixed leading column indexes): each leaves one run of columns per row.

        Nearly always a single piece. Rows that do not flatten to one stride are taken apart along their outermost
        dimensions, and joined columns along all but the innermost partial one.
        """
        trailing = range(self.split, len(self.shape))
        partial = [at for at in trailing if box.size[at] != self.shape[at]]
        fixed = range(self.split, max(partial)) if partial else range(0)
        for trail in product(*(range(box.size[at]) for at in fixed)):
            for lead in _row_blocks(region, self.split, len(trail)):
                yield lead, trail


def _row_blocks(region: torch.Tensor, split: int, fixed: int) -> Iterator[tuple[slice, ...]]:
    """Slices over the first `split` dimensions whose rest flattens to rows of one stride."""
    outer = split
    while outer > 0 and _flattens(region, outer - 1, split):
        outer -= 1
    for index in product(*(range(region.shape[at]) for at in range(outer))):
        yield tuple(slice(at, at + 1) for at in index) + (slice(None),) * (split - outer)


def _flattens(region: torch.Tensor, first: int, stop: int) -> bool:
    """Whether dimensions first to stop - 1 are one dimension in memory."""
    sizes, strides = region.shape[first:stop], region.stride()[first:stop]
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(kept[at][1] == kept[at + 1][0] * kept[at + 1][1] for at in range(len(kept) - 1))


def _piece_digest(view: _View, region: torch.Tensor, box: Box, lead: tuple[slice, ...], trail: tuple[int, ...]) -> int:
    """One piece: a set of rows times one run of columns."""
    here = (*lead, *(slice(at, at + 1) for at in trail))
    part = region[here] if here else region
    start = [a + (s.start or 0) for a, s in zip(box.start, here, strict=False)] + list(box.start[len(here) :])
    rows = _row_multipliers(view, start, part, region.device)
    column = 0
    for at in range(view.split, len(view.shape)):
        column = column * view.shape[at] + start[at]
    width = prod(part.shape[view.split :])
    matrix = part.reshape(rows.numel(), width) if part.is_contiguous() else _flat(part, view.split, rows.numel(), width)
    run = _Run(column * view.item, width * view.item, view.item)
    data = _words_digest(matrix, rows, run)
    return data + CONSTANT * run.element_weight(region.device) * int(rows.sum())


def _flat(part: torch.Tensor, split: int, rows: int, width: int) -> torch.Tensor:
    """(rows, width) without a copy where the strides allow it, else with one."""
    if _flattens(part, 0, split) and _flattens(part, split, part.dim()):
        return part.as_strided((rows, width), (_stride(part, 0, split), _stride(part, split, part.dim())))
    return part.reshape(rows, width)


def _stride(part: torch.Tensor, first: int, stop: int) -> int:
    """Stride of the flattened dimensions first to stop - 1: that of the innermost one with more than one index."""
    for at in reversed(range(first, stop)):
        if part.shape[at] != 1:
            return part.stride(at)
    return 1


def _row_multipliers(view: _View, start: Sequence[int], part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A(r) of the rows of `part`, in its order."""
    sizes = tuple(part.shape[: view.split])
    count = prod(sizes)
    first = 0
    for at in range(view.split):
        first = first * view.shape[at] + start[at]
    inner = sizes[1:] == view.shape[1 : view.split]
    if inner:  # consecutive row numbers
        return multipliers(ROW_SEED, first, count, device)
    numbers = torch.zeros((1,) * view.split, dtype=torch.int64, device=device)
    for at in range(view.split):
        steps = torch.arange(start[at], start[at] + sizes[at], dtype=torch.int64, device=device)
        weight = prod(view.shape[at + 1 : view.split])
        numbers = numbers + (steps * weight).reshape([-1 if at == dim else 1 for dim in range(view.split)])
    return _mix(ROW_SEED, numbers.reshape(-1))


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `start` to `start + size` of a row."""

    start: int
    size: int
    item: int

    @property
    def first_word(self) -> int:
        return self.start // 4

    @property
    def words(self) -> int:
        return -(-(self.start + self.size) // 4) - self.first_word

    @property
    def aligned(self) -> bool:
        return self.start % 4 == 0 and self.size % 4 == 0

    def element_weight(self, device: torch.device) -> int:
        """Sum over the present elements of B(their word) * 2^(8 * their byte in the word)."""
        total = 0
        for low in range(0, self.words, _TILE_WORDS):
            count = min(_TILE_WORDS, self.words - low)
            total += int(multipliers(COLUMN_SEED, self.first_word + low, count, device).sum())
        per_word = sum(1 << (8 * byte) for byte in range(0, 4, min(self.item, 4)))
        return total * per_word - self._absent()

    def _absent(self) -> int:
        """The same of the elements of the first and last word that lie outside the run."""
        last = self.first_word + self.words - 1
        outside = [(self.first_word, byte) for byte in range(0, self.start % 4, self.item)]
        outside += [(last, byte) for byte in range((self.start + self.size - 1) % 4 + 1, 4, self.item)]
        return sum(multiplier(COLUMN_SEED, word) << (8 * byte) for word, byte in outside)


def _words_digest(matrix: torch.Tensor, rows: torch.Tensor, run: _Run) -> int:
    """Sum of A(r) * B(j) * w(r, j) over the words of one run, tile by tile."""
    direct = run.aligned and (run.item == 4 or _word_view(matrix))
    words = matrix.view(torch.int32) if direct and run.item != 4 else matrix
    across = min(run.words, _TILE_WORDS)
    down = max(1, min(rows.numel(), _TILE_WORDS // across))
    work = _scratch(down, across + _PAD, matrix.device)
    total = 0
    for low in range(0, run.words, across):
        wide = min(across, run.words - low)
        columns = multipliers(COLUMN_SEED, run.first_word + low, wide, matrix.device)
        strip = words[:, low : low + wide] if direct else matrix
        room = work[:, :wide]
        weigh = _Rows(columns) if matrix.device.type == "cpu" and down >= 8 else _Tiles(columns)
        for part, weights in zip(torch.split(strip, down), torch.split(rows, down), strict=True):
            tile = room[: part.shape[0]]
            tile.copy_(part if direct else _padded(part, run, low, wide))
            weigh.add(tile, weights)
        total += weigh.total()
    return total


def _scratch(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Room for a tile. Kept per thread: a fresh two megabytes would cost more in page faults than a small tensor."""
    size = rows * columns
    if size > _SCRATCH_WORDS or device.type != "cpu":
        return torch.empty((rows, columns), dtype=torch.int64, device=device)
    room: torch.Tensor | None = getattr(_kept, "room", None)
    if room is None:
        room = _kept.room = torch.empty(_SCRATCH_WORDS, dtype=torch.int64)
    return room[:size].view(rows, columns)


class _Rows:
    """rows^T * tile, added up over tiles and multiplied with the columns once: the fastest order on CPUs."""

    def __init__(self, columns: torch.Tensor) -> None:
        self._columns = columns
        self._sums = torch.zeros_like(columns)

    def add(self, tile: torch.Tensor, rows: torch.Tensor) -> None:
        self._sums.addmv_(tile.t(), rows)

    def total(self) -> int:
        return int(torch.dot(self._sums, self._columns))


class _Tiles:
    """tile * columns, then rows: for few rows, and for devices without an integer matrix product."""

    def __init__(self, columns: torch.Tensor) -> None:
        self._columns = columns
        self._sum = torch.zeros((), dtype=torch.int64, device=columns.device)

    def add(self, tile: torch.Tensor, rows: torch.Tensor) -> None:
        if tile.device.type == "cpu":
            self._sum += torch.dot(torch.mv(tile, self._columns), rows)
        else:
            self._sum += (tile.mul_(self._columns).sum(dim=1) * rows).sum()

    def total(self) -> int:
        return int(self._sum)


def _word_view(matrix: torch.Tensor) -> bool:
    """Whether rows of items of another size can be looked at as 32-bit words without a copy."""
    ratio = max(4 // matrix.element_size(), 1)
    return (
        matrix.stride(1) == 1
        and (matrix.shape[0] == 1 or matrix.stride(0) % ratio == 0)
        and matrix.storage_offset() % ratio == 0
        and matrix.data_ptr() % 4 == 0
    )


def _padded(rows: torch.Tensor, run: _Run, low: int, wide: int) -> torch.Tensor:
    """Words low to low + wide of the run, with zeros for the bytes of the first and last word outside it."""
    if rows.element_size() == 8:
        return rows.contiguous().view(torch.int32)[:, low : low + wide]
    ratio = max(4 // run.item, 1)
    shift = run.start % 4 // run.item
    first, last = low * ratio - shift, (low + wide) * ratio - shift
    begin, end = max(first, 0), min(last, run.size // run.item)
    padded = torch.zeros((rows.shape[0], wide * ratio), dtype=rows.dtype, device=rows.device)
    padded[:, begin - first : end - first] = rows[:, begin:end]
    return padded.view(torch.int32)


def multipliers(seed: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd int64 multipliers of indexes first to first + count - 1."""
    if first + count <= _TABLE:
        size = 1 << max(first + count - 1, 1023).bit_length()
        return _table(seed, size, device)[first : first + count]
    return _mix(seed, torch.arange(first, first + count, dtype=torch.int64, device=device))


@lru_cache(maxsize=64)
def _table(seed: int, size: int, device: torch.device) -> torch.Tensor:
    return _mix(seed, torch.arange(size, dtype=torch.int64, device=device))


def _mix(seed: int, index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of seed + index, made odd, on wrapping int64."""
    z = index + _signed(seed + 0x9E37_79B9_7F4A_7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58_476D_1CE4_E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D0_49BB_1331_11EB)
    return (z ^ _shift(z, 31)) | 1


def multiplier(seed: int, index: int) -> int:
    """One multiplier, as uint64."""
    z = (seed + index + 0x9E37_79B9_7F4A_7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return (z ^ (z >> 31)) | 1


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
