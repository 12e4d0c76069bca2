"""Streams to ranks of the same machine, through memory that sender and receivers share: one copy, into the spare.

The buffers are sealed memory files without a name, passed over a Unix socket: a killed process leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from transports.local.hub import LocalHub
from transports.local.memfd import SealedFile, open_sealed
from transports.local.messages import PATIENCE_S, BufferDescriptor, DeviceBuffer, FileBuffer, Hello
from transports.local.sender import LocalSender
from updater.core.errors import Aborted, Failure

__all__ = ["SharedMemoryHub", "SharedMemorySender"]


class SharedMemorySender(LocalSender):
    """`patience_s`: how long a receiver waits for each bucket. `digests`: send one with every bucket, which names the
    side that spoiled it and costs a look at every byte on both. `folder`: for the socket, where sender and receivers
    share a folder but no network namespace; else it is an abstract one, which leaves nothing even after a crash.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S, digests: bool = False, folder: str | None = None) -> None:
        super().__init__(_FileSender(), patience_s=patience_s, digests=digests, folder=folder)


class SharedMemoryHub(LocalHub):
    """`patience_s`: how long to wait for a sender that says nothing; None: 30 s, and then as long as it asks for."""

    def __init__(self, *, patience_s: float | None = None) -> None:
        super().__init__(_FileReceiver(), patience_s=patience_s)


class _FileSenderBuffer:
    def __init__(self, nbytes: int) -> None:
        self._file = SealedFile(nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        if self._file.tensor is None:
            raise Aborted(Failure("internal", "a closed buffer"))
        return self._file.tensor

    def describe(self) -> tuple[FileBuffer | DeviceBuffer, tuple[int, ...]]:
        return FileBuffer(self._file.nbytes), (self._file.number,)

    def abandon(self, descriptor: BufferDescriptor) -> None:
        """The kernel counts."""

    def close(self) -> None:
        self._file.close()


class _FileSender:
    kind = "shared_memory"

    def check(self) -> None:
        """Every Linux can."""

    def allocate(self, nbytes: int) -> _FileSenderBuffer:
        return _FileSenderBuffer(nbytes)

    def accepts(self, hello: Hello) -> Failure | None:
        return None

    def filled(self) -> None:
        """Memory of the CPU is seen by all who are told of it through a socket."""

    def collect(self) -> None:
        """The kernel does."""


class _FileReceiver:
    def greeting(self) -> tuple[tuple[str, ...], int]:
        return (), 0

    def open(self, descriptor: BufferDescriptor, files: Sequence[int]) -> torch.Tensor:
        if not isinstance(descriptor, FileBuffer):
            raise Aborted(Failure("stream_mismatch", f"a {descriptor.kind} buffer in a stream over shared memory"))
        return open_sealed(files[0], descriptor.nbytes)

    def files_of(self, descriptor: BufferDescriptor) -> int:
        return 1 if isinstance(descriptor, FileBuffer) else 0

    def taking(self) -> AbstractContextManager[None]:
        """Copies from CPU memory have read it when they return, also those to a device."""
        return nullcontext()
