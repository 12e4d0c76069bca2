"""A device that is not there, over memory files that any process of this user can open by handle."""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from transports.media.device_memory import HANDLE_BYTES, PLAIN, Exported
from transports.media.memfd import mapped

__all__ = ["FakeDevice"]

_COUNTERS = 4096


class FakeDevice:
    """`visible`: UUIDs in this process's order; buffers lie on number `index` of them. `newest`: format of handles.
    `kind`: of allocations, as in the second byte of a handle. `unable`: what `refusal` says.

    `opened` and `closed` count in this process. Exports count down as torch's do: in memory that every opener reaches.
    """

    def __init__(
        self,
        visible: Sequence[str] = ("GPU-0",),
        *,
        index: int = 0,
        newest: int = 3,
        kind: int = PLAIN,
        unable: str = "",
    ) -> None:
        self.visible = tuple(visible)
        self.index = index
        self.newest = newest
        self.kind = kind
        self.unable = unable
        self.opened = self.closed = self.copies = 0
        self.opened_on: list[int] = []  # numbers of devices, in this process's order
        self._files: dict[int, _File] = {}
        self._counters = _File(8 * _COUNTERS)
        self._exports = 0

    def refusal(self) -> str:
        return self.unable

    def handle_format(self) -> int:
        return self.newest

    def uuids(self) -> tuple[str, ...]:
        return self.visible

    def uuid(self) -> str:
        return self.visible[self.index]

    def allocate(self, nbytes: int) -> torch.Tensor:
        file = _File(nbytes)
        self._files[file.tensor.data_ptr()] = file
        return file.tensor

    def export(self, tensor: torch.Tensor) -> Exported:
        file = self._files[tensor.untyped_storage().data_ptr()]
        where = struct.pack("<iiq", os.getpid(), file.number, file.nbytes).ljust(HANDLE_BYTES, b"\0")
        number, self._exports = self._exports, self._exports + 1
        self._counts()[number] = 1
        counter = f"/fake.{os.getpid()}.{self._counters.number}".encode()
        return Exported(
            bytes([self.newest, self.kind]) + where, file.nbytes, 0, counter, number, bytes(HANDLE_BYTES), False
        )

    def release(self, exported: Exported) -> None:
        self._counts()[exported.counter_offset] -= 1

    def open(self, index: int, exported: Exported) -> torch.Tensor:
        owner, number, nbytes = struct.unpack_from("<iiq", exported.handle, 2)
        _, pid, counters = exported.counter.decode().split(".")
        tensor = _reach(owner, number, nbytes)
        counts = _reach(int(pid), int(counters), 8 * _COUNTERS).view(torch.int64)
        self.opened += 1
        self.opened_on.append(index)
        weakref.finalize(tensor.untyped_storage(), self._close, counts, exported.counter_offset)
        return tensor

    def filled(self) -> None:
        """The CPU is done when it returns."""

    @contextmanager
    def taking(self, index: int) -> Iterator[None]:
        yield
        self.copies += 1

    def collect(self) -> None:
        """Forget the allocations, if no process has one open."""
        if not self.outstanding():
            self._files.clear()

    def outstanding(self) -> list[int]:
        """Counts of exports that are not zero: still open somewhere, or, below zero, counted down twice."""
        return [int(count) for count in self._counts()[: self._exports] if count]

    def _counts(self) -> torch.Tensor:
        return self._counters.tensor.view(torch.int64)

    def _close(self, counts: torch.Tensor, number: int) -> None:
        counts[number] -= 1
        self.closed += 1


class _File:
    """A memory file, closed with the last reference."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        os.ftruncate(self.number, nbytes)
        self.tensor = mapped(self.number, nbytes, writable=True)


def _reach(pid: int, number: int, nbytes: int) -> torch.Tensor:
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mapped(file, nbytes, writable=True)
    finally:
        os.close(file)
