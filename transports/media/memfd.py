"""Sealed memory files: reserved before they are mapped, of a size that cannot change, gone with their last holder.

A mapped file that somebody truncates kills its readers with SIGBUS; a sealed one cannot be truncated (memfd_create(2),
fcntl(2) "File Sealing").
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from transports.stream.guards import close_on_fork
from updater.core.errors import Aborted, Failure

F_SEAL_FUTURE_WRITE = 0x0010  # of <linux/fcntl.h>; Python knows it from 3.13 on
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
NAME = "liveweights-bucket"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)
_FAILED = ctypes.c_void_p(-1).value


class SealedFile:
    """`tensor`: uint8, writable here and nowhere else. Raises Aborted `no_space` with what is needed and available."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.closed = False
        available = available_bytes()
        if available is not None and nbytes > available:
            raise _no_space(nbytes, "memory", available)
        try:
            self.number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_space(nbytes, os.strerror(error.errno or 0), available) from None
        try:
            os.posix_fallocate(self.number, 0, nbytes)
            fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, FIXED_SIZE)
            self.tensor: torch.Tensor | None = mapped(self.number, nbytes, writable=True)
            with suppress(OSError):  # before Linux 5.1: receivers map it read-only of their own will
                fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(self.number)
            raise _no_space(nbytes, os.strerror(error.errno or 0), available) from None
        except BaseException:
            os.close(self.number)
            raise
        close_on_fork(self)

    def drop(self) -> None:
        if not self.closed:
            os.close(self.number)

    def close(self) -> None:
        self.tensor = None
        if not self.closed:
            self.closed = True
            os.close(self.number)


def open_sealed(number: int, nbytes: int) -> torch.Tensor:
    """uint8, to be read only. Raises Aborted `stream_mismatch` for a file that could change its size."""
    try:
        seals = fcntl.fcntl(number, fcntl.F_GET_SEALS)
        size = os.fstat(number).st_size
    except OSError as error:
        raise Aborted(Failure("stream_mismatch", f"no memory file: {os.strerror(error.errno or 0)}")) from None
    if seals & FIXED_SIZE != FIXED_SIZE:
        raise Aborted(Failure("stream_mismatch", f"a buffer that could be truncated under us (seals {seals:#x})"))
    if not 0 < nbytes <= size:
        raise Aborted(Failure("stream_mismatch", f"a buffer of {nbytes} bytes in a file of {size}"))
    try:
        return mapped(number, nbytes, writable=False)
    except OSError as error:
        raise _no_space(nbytes, os.strerror(error.errno or 0), available_bytes()) from None


def mapped(number: int, nbytes: int, *, writable: bool) -> torch.Tensor:
    """uint8, unmapped when the last tensor over it is gone. Raises OSError.

    By way of ctypes: torch warns of buffers that Python says are read-only.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, number, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _libc.madvise(address, nbytes, _DONTFORK)  # a forked child that lives on would keep the memory
    array = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(array, _libc.munmap, address, nbytes).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def available_bytes() -> int | None:
    """What this process could still be given: of the machine, and of its control group (version 2) if it has a limit.

    None where Linux does not say.
    """
    known = [each for each in (_machine(), _group(Path("/sys/fs/cgroup"))) if each is not None]
    return min(known, default=None)


def _machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _group(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    return None


def _no_space(nbytes: int, why: str, available: int | None) -> Aborted:
    known = "unknown" if available is None else str(available)
    return Aborted(Failure("no_space", f"a shared buffer needs {nbytes} bytes, available {known}: {why}"))
