"""The seam of a transport: a source of named tensors that can be read region by region."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from updater.protocol.manifest import Manifest, TensorSpec

if TYPE_CHECKING:  # a front knows boxes and messages, and needs no torch
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: `start` and `size` per dimension, in elements. 0-d tensors: empty tuples."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor: `tensor[box.slices()]` is the region as a view."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.size) and all(
            0 <= a and 0 <= n and a + n <= limit for a, n, limit in zip(self.start, self.size, shape, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """The common region, or None where it is empty. Two 0-d boxes meet in their one element."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(high - low for low, high in zip(start, stop, strict=True)))

    def within(self, origin: Box) -> Box:
        """This region in the coordinates of `origin`, which contains it."""
        return Box(tuple(a - o for a, o in zip(self.start, origin.start, strict=True)), self.size)


@dataclass(frozen=True, slots=True)
class Read:
    """Bring region `box` of tensor `name` into `target`.

    `target`: any strided view with the box's sizes after `permute` is applied to the region (None: as it is), up to
    dimensions of size one; dtype of the source, or another one that the placement's owner allowed (the reader casts
    by `copy_`).
    """

    name: str
    box: Box
    target: torch.Tensor
    permute: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReadReport:
    bytes_asked: int  # asked for by read calls
    bytes_delivered: int  # of the boxes, in the source's dtype
    seconds: float


class Cancelled(Exception):
    """`should_stop` said so."""


class Source(Protocol):
    """An opened, structurally checked source. Opening reads headers and never tensor bytes.

    Every method raises `updater.core.errors.LiveweightsError` with the file and tensor named.
    """

    kind: str

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Names as an engine's loader would see them (cleaned of trainer wrappers)."""

    @property
    def manifest(self) -> Manifest | None:
        """The manifest that came with the source, names cleaned the same way, or None."""

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def read(
        self,
        reads: Sequence[Read],
        *,
        progress: Callable[[int], None] = lambda _bytes: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadReport:
        """Fill every target. On return all bytes have landed. `should_stop` is asked at least every 16 MiB."""

    def recheck(self) -> None:
        """Raise `source_changed` if what was opened is no longer what lies there."""

    def close(self) -> None: ...
