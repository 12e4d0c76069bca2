"""Two sets of tensors trade their bytes in place, through one small bounce buffer, and can always go either way.

The cursor and the bounce buffer outlive a failure: a chunk that was interrupted is finished from where it stood, so
that every chunk is either old or new, and the rest goes on or comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from engine_adapter.placement.regions import blocks

CHUNK_BYTES = 512 << 10

Pair = tuple[torch.Tensor, torch.Tensor]


class Exchange:
    """`pairs`: (live, spare) tensors of equal shape, dtype, device and strides; which of the two is live is the same.

    `moved` chunks, counted from the first, hold the other side's bytes. Allocates only here.
    """

    def __init__(self, pairs: Sequence[Pair], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._spans = [_span(first, second, chunk_bytes) for first, second in pairs if first.numel()]
        self._chunks = [(span, k) for span in self._spans for k in range(span.count)]
        self._bounce = {
            device: torch.empty(chunk_bytes, dtype=torch.uint8, device=device).fill_(0)
            for device in sorted({first.device for first, _ in pairs}, key=str)
        }
        self.moved = 0
        self._open: tuple[int, bool] | None = None  # the chunk in the middle, and whether it ends up moved
        self._step = 0  # of that chunk: 1 the bounce holds the first's bytes, 2 the first holds the second's

    @property
    def chunks(self) -> int:
        return len(self._chunks)

    @property
    def bounce_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._bounce.values())

    def forward(self) -> None:
        """Until every chunk is moved. After an exception: call again, or `backward`."""
        with one_thread():
            self._finish_open()
            while self.moved < len(self._chunks):
                self._trade(self.moved, moves=True)
        self._synchronise()

    def backward(self) -> None:
        """Until no chunk is moved. After an exception: call again, or `forward`."""
        with one_thread():
            self._finish_open()
            while self.moved:
                self._trade(self.moved - 1, moves=False)
        self._synchronise()

    def settle(self) -> None:
        """What is live now is the new beginning. Raises RuntimeError in the middle."""
        if self._open is not None or self.moved not in (0, len(self._chunks)):
            raise RuntimeError("an exchange in the middle cannot be settled")
        self.moved = 0

    def _trade(self, index: int, *, moves: bool) -> None:
        self._open, self._step = (index, moves), 0
        self._finish_open()

    def _finish_open(self) -> None:
        """Every step may be repeated until the next one begins: its source is still whole."""
        if self._open is None:
            return
        index, moves = self._open
        span, k = self._chunks[index]
        first, second = span.pair(k)
        bounce = _shaped(self._bounce[first.device], first)
        if self._step == 0:
            bounce.copy_(first)
            self._step = 1
        if self._step == 1:
            first.copy_(second)
            self._step = 2
        second.copy_(bounce)
        self.moved, self._open = (index + 1 if moves else index), None

    def _synchronise(self) -> None:
        for device in self._bounce:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class _Dense:
    """All bytes of two dense tensors, in chunks."""

    first: torch.Tensor
    second: torch.Tensor
    chunk: int

    @property
    def count(self) -> int:
        return -(-self.first.numel() // self.chunk)

    def pair(self, k: int) -> Pair:
        low, high = k * self.chunk, (k + 1) * self.chunk
        return self.first[low:high], self.second[low:high]


@dataclass(frozen=True, slots=True)
class _Strided:
    """Tensors with gaps, whose bytes belong to other tensors: element by element, in blocks."""

    pairs: tuple[Pair, ...]

    @property
    def count(self) -> int:
        return len(self.pairs)

    def pair(self, k: int) -> Pair:
        return self.pairs[k]


def _span(first: torch.Tensor, second: torch.Tensor, chunk: int) -> _Dense | _Strided:
    if is_dense(first) and is_dense(second) and first.stride() == second.stride():
        return _Dense(raw_bytes(first), raw_bytes(second), chunk)
    limit = chunk // first.element_size()
    return _Strided(tuple((first[cut], second[cut]) for cut in blocks(first.shape, limit)))


def _shaped(bounce: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    used = bounce[: like.numel() * like.element_size()]
    return used if like.dtype == torch.uint8 and like.dim() == 1 else used.view(like.dtype).view(like.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in one piece of memory without gaps or overlap, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a flat view of bytes."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (prod(tensor.shape) * size,), (1,))
    return flat


@contextmanager
def one_thread() -> Iterator[None]:
    """Copies on this thread alone: a second one makes an exchange many times slower on a busy machine."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
