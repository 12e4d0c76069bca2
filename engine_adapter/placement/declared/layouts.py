"""How one parameter is cut over the ranks: what a declared placement says instead of guessing from shapes.

Every kind cuts along one dimension. The local tensor is the kind's parts one after the other (or interleaved); each
part is one contiguous run of that part's full tensor. Sizes are in elements along that dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class LayoutError(ValueError):
    """This rank cannot hold its share as declared. `code`: one of `updater.core.errors.CODES`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Run:
    """`full`: length of the whole part. This rank holds [start, start + length) of it, locally at `offset`.

    `step`: distance between neighbours in the local tensor (2 for interleaved gate and up).
    """

    part: str
    full: int
    start: int
    length: int
    offset: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """One part, cut along `dim`: column parallel is `Sharded(0)`, row parallel is `Sharded(1)`.

    `uneven`: lengths that the size does not divide are cut as `torch.chunk` does (ceil-sized chunks, the last ones
    shorter or empty); otherwise they are refused.
    """

    dim: int = 0
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """`count` heads of `head_dim` along `dim`. With fewer heads than ranks each head lies on neighbouring ranks.

    Also for vectors of per-head norms: they follow their heads, a head is never split.
    """

    count: int
    head_dim: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Merged:
    """Several column-parallel parts in one parameter, each cut by itself: gate and up, or fused keys and values.

    `sizes`: full length of each part; empty: all equal. `interleaved`: neighbours of the local tensor are one element
    of each part in turn; one tensor that holds all parts is then interleaved too, and concatenated otherwise.
    """

    parts: tuple[str, ...] = ("gate", "up")
    sizes: tuple[int, ...] = ()
    dim: int = 0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QKV:
    """Query, key and value heads in one parameter; key and value heads are replicated when there are fewer of them
    than ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    parts: tuple[str, str, str] = ("q", "k", "v")
    dim: int = 0


@dataclass(frozen=True, slots=True)
class PaddedVocab:
    """`rows` real rows of a table of `padded` rows, cut evenly; the rest is filled with zeros on the ranks that hold
    it. `padded` 0: rows rounded up to a multiple of `multiple`."""

    rows: int
    padded: int = 0
    multiple: int = 64
    dim: int = 0

    @property
    def total(self) -> int:
        return self.padded or -(-self.rows // self.multiple) * self.multiple


Plain = Replicated | Sharded | Heads | Merged | QKV | PaddedVocab


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts stacked along a new first dimension. `inner`: how one expert is laid out.

    `parallel`: `tp` - every rank holds a cut of all experts (with `inner` Replicated: all of them whole); `ep` - rank
    r holds experts [r * count / size, ...) whole.
    """

    count: int
    inner: Plain = Replicated()
    parallel: Literal["tp", "ep"] = "tp"


Layout = Plain | Experts


def parts_of(layout: Layout) -> tuple[str, ...]:
    """Names of the parts, in local order; one empty name for kinds of a single part."""
    if isinstance(layout, Experts):
        return parts_of(layout.inner)
    return layout.parts if isinstance(layout, Merged | QKV) else ("",)


def experts_of(layout: Layout, rank: int, size: int) -> range | None:
    """Indexes of the experts that this rank holds, or None for a parameter without experts."""
    if not isinstance(layout, Experts):
        return None
    if layout.parallel == "tp":
        return range(layout.count)
    if layout.count % size:
        raise LayoutError("placement_refused", f"{layout.count} experts cannot be dealt evenly to {size} ranks")
    share = layout.count // size
    return range(rank * share, (rank + 1) * share)


def runs(layout: Plain, local: int, source: int | None, rank: int, size: int) -> tuple[Run, ...]:
    """The run of every part on this rank.

    `local`: length of the local tensor along the dimension. `source`: length of the source tensor if it holds the
    whole of a single part (needed by uneven cuts only).
    """
    match layout:
        case Replicated():
            return (Run("", local, 0, local, 0),)
        case Sharded():
            return (_sharded(layout, local, source, rank, size),)
        case Heads():
            run = _heads("", layout.count, layout.head_dim, 0, rank, size)
            return _fitting((run,), local)
        case Merged():
            return _fitting(_merged(layout, local, rank, size), local)
        case QKV():
            return _fitting(_qkv(layout, rank, size), local)
        case PaddedVocab():
            return (_padded(layout, local, rank, size),)


def _fitting(found: tuple[Run, ...], local: int) -> tuple[Run, ...]:
    total = sum(run.length for run in found)
    if total != local:
        raise LayoutError("tensor_shape", f"the layout puts {total} on this rank, its parameter has {local}")
    return found


def _sharded(layout: Sharded, local: int, source: int | None, rank: int, size: int) -> Run:
    if not layout.uneven:
        return Run("", local * size, rank * local, local, 0)
    full = local * size if source is None else source
    chunk = -(-full // size)
    start = min(rank * chunk, full)
    length = min(full, start + chunk) - start
    if length != local:
        raise LayoutError("tensor_shape", f"chunk {rank} of {full} over {size} has {length}, the parameter {local}")
    return Run("", full, start, length, 0)


def _heads(part: str, count: int, head_dim: int, offset: int, rank: int, size: int) -> Run:
    if count % size == 0:
        share, first = count // size, rank * (count // size)
    elif size % count == 0:
        share, first = 1, rank // (size // count)
    else:
        raise LayoutError("placement_refused", f"{count} heads of part {part!r} over {size} ranks would split a head")
    return Run(part, count * head_dim, first * head_dim, share * head_dim, offset)


def _qkv(layout: QKV, rank: int, size: int) -> tuple[Run, ...]:
    if layout.heads % size:
        raise LayoutError("placement_refused", f"{layout.heads} query heads cannot be cut over {size} ranks")
    found: list[Run] = []
    for part, count in zip(layout.parts, (layout.heads, layout.kv_heads, layout.kv_heads), strict=True):
        offset = sum(run.length for run in found)
        found.append(_heads(part, count, layout.head_dim, offset, rank, size))
    return tuple(found)


def _merged(layout: Merged, local: int, rank: int, size: int) -> tuple[Run, ...]:
    count = len(layout.parts)
    if layout.sizes and (len(layout.sizes) != count or any(full % size for full in layout.sizes)):
        raise LayoutError("placement_refused", f"parts of {list(layout.sizes)} cannot be cut evenly over {size} ranks")
    if not layout.sizes and local % count:
        raise LayoutError("tensor_shape", f"{local} is not a multiple of {count} equal parts")
    shares = [full // size for full in layout.sizes] or [local // count] * count
    if layout.interleaved:
        if len(set(shares)) > 1:
            raise LayoutError("placement_refused", "interleaved parts must have equal sizes")
        offsets, step = list(range(count)), count
    else:
        offsets, step = [sum(shares[:i]) for i in range(count)], 1
    return tuple(
        Run(part, share * size, rank * share, share, offset, step)
        for part, share, offset in zip(layout.parts, shares, offsets, strict=True)
    )


def _padded(layout: PaddedVocab, local: int, rank: int, size: int) -> Run:
    if layout.total % size or layout.total < layout.rows:
        raise LayoutError("placement_refused", f"{layout.total} padded rows cannot be cut over {size} ranks")
    share = layout.total // size
    if share != local:
        raise LayoutError("tensor_shape", f"{share} padded rows per rank, the parameter has {local}")
    start = min(rank * share, layout.rows)
    return Run("", layout.rows, start, min(layout.rows, start + share) - start, 0)
