"""How a stream is cut: whole tensors in the sender's order, packed into buckets, large ones split.

Pure arithmetic. Sender and receivers cut the same plan and must arrive at the same buckets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from transports.base import Box
from transports.dtypes import byte_shape, itemsize
from updater.protocol import wire
from updater.protocol.manifest import DTYPE_BITS, TensorSpec

#: Every chunk begins at a multiple of this in its bucket, so that it can be seen as its dtype.
ALIGN = 64
BUCKET_BYTES = 512 << 20
SMALLEST_BUCKET = 1 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of one tensor whose bytes lie end to end, row-major, at `offset` of its bucket.

    `box`: in the tensor's coordinates; the last dimension of packed types counts bytes (`dtypes.byte_shape`).
    """

    name: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels at once. `nbytes`: with the gaps between its chunks."""

    index: int
    chunks: tuple[Chunk, ...]
    nbytes: int


@dataclass(frozen=True)
class StreamPlan:
    """What the sender is going to send, in its order. The first thing that travels; checked before anything else."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = BUCKET_BYTES

    def check(self) -> None:
        """Raises `wire.WireError`: sizes that make no sense, repeated names, unknown dtypes."""
        if self.bucket_bytes < SMALLEST_BUCKET:
            raise wire.WireError("StreamPlan", "bucket_bytes", f"{self.bucket_bytes} is below {SMALLEST_BUCKET}")
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            raise wire.WireError("StreamPlan", "tensors", "a name is repeated")
        for spec in self.tensors:
            if spec.dtype not in DTYPE_BITS or any(size < 0 for size in spec.shape):
                raise wire.WireError("StreamPlan", f"tensors.{spec.name}", f"{spec.dtype} {spec.shape}")

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(_cut(self.tensors, self.bucket_bytes))

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex of order, sizes, dtypes and cuts: equal on both sides or nothing is sent."""
        text = wire.encode(self)
        cuts = ";".join(f"{b.index}:{b.nbytes}:{','.join(map(_cut_as_text, b.chunks))}" for b in self.buckets)
        return hashlib.sha256(text + cuts.encode()).hexdigest()

    @property
    def room(self) -> int:
        """Bytes of the largest bucket: what one buffer has to hold."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Payload, without gaps."""
        return sum(spec.nbytes for spec in self.tensors)


#: Of an update: one for every receiver, or each receiver's own by its number.
Plans = StreamPlan | Mapping[int, StreamPlan]


def _cut(tensors: Sequence[TensorSpec], limit: int) -> Iterator[Bucket]:
    index, size = 0, 0
    chunks: list[Chunk] = []
    for spec in tensors:
        for box, nbytes in _Pieces(spec).split(limit - _aligned(size), limit):
            offset = _aligned(size)
            if chunks and offset + nbytes > limit:
                yield Bucket(index, tuple(chunks), size)
                index, chunks, offset = index + 1, [], 0
            chunks.append(Chunk(spec.name, box, offset, nbytes))
            size = offset + nbytes
    if chunks:
        yield Bucket(index, tuple(chunks), size)


def _cut_as_text(chunk: Chunk) -> str:
    return f"{chunk.name}{chunk.box.start}{chunk.box.size}@{chunk.offset}+{chunk.nbytes}"


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class _Pieces:
    """Regions of one tensor that are contiguous in row-major order."""

    def __init__(self, spec: TensorSpec) -> None:
        self.shape = byte_shape(spec.shape, spec.dtype)
        self.item = itemsize(spec.dtype)

    def split(self, room: int, limit: int) -> Iterator[tuple[Box, int]]:
        """(region, bytes) in order; the first takes at most `room` if that is worth it, every one at most `limit`."""
        whole = prod(self.shape) * self.item
        if whole == 0:
            return
        if whole <= room or (whole <= limit and room < limit // 2):
            yield Box.whole(self.shape), whole
            return
        dim = next(at for at in range(len(self.shape)) if self._row(at) <= limit)
        row = self._row(dim)
        first = room // row if room >= limit // 2 else 0
        for corner in product(*(range(size) for size in self.shape[:dim])):
            at = 0
            while at < self.shape[dim]:
                count = min(first or limit // row, self.shape[dim] - at)
                first = 0
                size = (*(1 for _ in corner), count, *self.shape[dim + 1 :])
                yield Box((*corner, at, *(0 for _ in self.shape[dim + 1 :])), size), count * row
                at += count

    def _row(self, dim: int) -> int:
        """Bytes of one index of dimension `dim`."""
        return prod(self.shape[dim + 1 :]) * self.item
