"""Carrying out read requests: `preadv` from several threads into the memory that keeps the bytes. Nothing is mapped.

A mapped file that somebody truncates kills the process that touches it; a read that comes up short is an error that
names the file and the byte.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from transports.base import Cancelled, Read, ReadReport
from transports.disk.io_plan import (
    DEFAULT_LIMITS,
    Bucketed,
    Direct,
    Pattern,
    Place,
    ReadLimits,
    Request,
    check,
    requests,
)
from updater.core.errors import Aborted, Failure, LiveweightsError

_Preadv = Callable[[int, list[memoryview], int], int]
_VECTORS = 512  # buffers of one preadv; the system's limit is 1024


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """`threads`: 0 takes one per core, at most four. `drop_cache`: tell the system that the pages are not needed again.

    `poison`: overwrite every bucket after use, so that a view of it that somebody kept shows at once.
    """

    threads: int = 0
    limits: ReadLimits = DEFAULT_LIMITS
    drop_cache: bool = False
    poison: bool = False

    @property
    def workers(self) -> int:
        return self.threads or min(4, os.cpu_count() or 1)


def read_all(
    pairs: Sequence[tuple[Place, Read]],
    options: ReaderOptions,
    progress: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> ReadReport:
    """Fill the target of every read. `progress` gets increments in bytes, one call at a time.

    Raises Cancelled, or Aborted: `tensor_shape`, `tensor_dtype` before anything is read, then `file_truncated` or
    `read_failed` with the file and the offset. Targets are then half written.
    """
    began = time.perf_counter()
    for place, read in pairs:
        check(place, read)
    ordered = sorted((one for pair in pairs for one in requests(*pair, options.limits)), key=_position)
    batches = _batched(ordered, options.limits.request)
    pinned = any(read.target.device.type == "cuda" for _, read in pairs)
    work = _Work(batches, options, pinned, progress, should_stop)
    work.run()
    delivered = sum(_box_bytes(place, read) for place, read in pairs)
    return ReadReport(work.asked, delivered, time.perf_counter() - began)


def bytes_to_ask(pairs: Sequence[tuple[Place, Read]], options: ReaderOptions) -> int:
    """What `read_all` would ask for."""
    return sum(one.pattern.nbytes for pair in pairs for one in requests(*pair, options.limits))


def _box_bytes(place: Place, read: Read) -> int:
    whole = place.spec.numel
    return place.spec.nbytes * read.box.numel // whole if whole else 0


def _position(request: Request) -> tuple[int, int]:
    return (request.place.fd, request.pattern.offset)


def _batched(ordered: Sequence[Request], limit: int) -> Iterator[list[Request]]:
    """Neighbours in the file that go straight to memory share a read call; everything else stands alone."""
    batch: list[Request] = []
    size = end = 0
    for request in ordered:
        single = isinstance(request, Direct) and request.pattern.count == 1
        follows = bool(batch) and batch[-1].place.fd == request.place.fd and request.pattern.offset == end
        fits = size + request.pattern.nbytes <= limit and len(batch) < _VECTORS
        if batch and not (single and follows and fits):
            yield batch
            batch, size = [], 0
        batch.append(request)
        size += request.pattern.nbytes
        end = request.pattern.offset + request.pattern.nbytes if single else -1
    if batch:
        yield batch


class _Work:
    """The batches of one `read_all` and the threads that share them."""

    def __init__(
        self,
        batches: Iterator[list[Request]],
        options: ReaderOptions,
        pinned: bool,
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._batches = batches
        self._options = options
        self._pinned = pinned
        self._progress = progress
        self._should_stop = should_stop
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.asked = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._worker, daemon=True) for _ in range(self._options.workers - 1)]
        for thread in threads:
            thread.start()
        try:
            self._worker()
        except BaseException as error:  # an interrupt: the others must not go on writing to the targets
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _worker(self) -> None:
        bucket = _Bucket(self._options.limits.bucket, self._pinned, self._options.poison)
        batch: list[Request] | None = None
        try:
            while (batch := self._next()) is not None:
                _carry_out(batch, bucket)
                self._account(batch)
        except (LiveweightsError, Cancelled) as error:
            self._fail(error)
        except Exception as error:  # a thread has no caller: the boundary of this rank's reading
            where = batch[0].place if batch else None
            text = f"{type(error).__name__}: {error}"
            self._fail(Aborted(Failure("read_failed", text, file=where.file if where else "")))

    def _next(self) -> list[Request] | None:
        with self._lock:
            if self._error is not None:
                return None
            if self._should_stop():
                raise Cancelled
            return next(self._batches, None)

    def _account(self, batch: list[Request]) -> None:
        size = sum(request.pattern.nbytes for request in batch)
        if self._options.drop_cache:
            first, last = batch[0], batch[-1].pattern
            end = last.offset + (last.count - 1) * last.pitch + last.run
            os.posix_fadvise(first.place.fd, first.pattern.offset, end - first.pattern.offset, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.asked += size
            self._progress(size)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error


class _Bucket:
    """Memory of one thread, made when first needed."""

    def __init__(self, size: int, pinned: bool, poison: bool) -> None:
        self._size = size
        self._pinned = pinned
        self._poison = poison
        self._bytes: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes

    def done(self) -> None:
        if self._poison and self._bytes is not None:
            self._bytes.fill_(0xAB)


def _carry_out(batch: list[Request], bucket: _Bucket) -> None:
    first = batch[0]
    if isinstance(first, Bucketed):
        _through_bucket(first, bucket)
    elif first.pattern.count > 1:
        _runs(first.place, first.pattern, first.address, first.step)
    else:
        buffers = [_memory(one.address, one.pattern.run) for one in batch if isinstance(one, Direct)]
        fill(first.place, buffers, first.pattern.offset)


def _through_bucket(request: Bucketed, bucket: _Bucket) -> None:
    room = bucket.take()
    _runs(request.place, request.pattern, room.data_ptr(), request.pattern.run)
    typed = room[: request.pattern.nbytes].view(request.dtype)
    request.target.copy_(typed.as_strided(request.target.shape, request.strides))
    bucket.done()


def _runs(place: Place, pattern: Pattern, address: int, step: int) -> None:
    """Read the runs of a pattern to `address`, `step` bytes apart."""
    memory = _memory(address, (pattern.count - 1) * step + pattern.run)
    run, count = pattern.run, pattern.count
    if pattern.pitch == run or count == 1:  # one stretch of the file
        for low in range(0, count, _VECTORS):
            buffers = [memory[at * step : at * step + run] for at in range(low, min(low + _VECTORS, count))]
            fill(place, buffers, pattern.offset + low * run)
        return
    fd, offset, pitch, preadv = place.fd, pattern.offset, pattern.pitch, os.preadv
    for at in range(count):
        view = memory[at * step : at * step + run]
        where = offset + at * pitch
        try:
            got = preadv(fd, (view,), where)
        except OSError:
            got = 0
        if got != run:
            fill(place, [view[got:]], where + got)


def fill(place: Place, buffers: list[memoryview], offset: int, preadv: _Preadv = os.preadv) -> None:
    """Read until every buffer is full, however little one call brings. `preadv`: as `os.preadv`.

    Raises Aborted where the file ends or fails first. The list is used up.
    """
    while buffers:
        try:
            got = preadv(place.fd, buffers, offset)
        except OSError as error:
            raise _failure(place, "read_failed", f"{error.strerror} at byte {offset}") from None
        if got == 0:
            raise _failure(place, "file_truncated", f"ends at byte {offset}")
        offset += got
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _failure(place: Place, code: str, message: str) -> Aborted:
    return Aborted(Failure(code, message, tensor=place.spec.name, file=place.file))


def _memory(address: int, size: int) -> memoryview:
    """Writable bytes at an address whose owner the caller keeps alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
