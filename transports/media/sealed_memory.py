"""Sealed memory files as shared buffers: the kernel counts who has them open."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transports.media.memfd import SealedFile, open_sealed
from transports.media.shared_buffers import SharedBufferReceiver, SharedBufferSender
from transports.stream.messages import BufferDescriptor, FileBuffer
from updater.core.errors import Aborted, Failure


class SealedBuffer:
    """A `SenderBuffer`."""

    def __init__(self, nbytes: int) -> None:
        self._file = SealedFile(nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        if self._file.tensor is None:
            raise Aborted(Failure("internal", "a closed buffer"))
        return self._file.tensor

    def describe(self) -> tuple[FileBuffer, tuple[int, ...]]:
        return FileBuffer(self._file.nbytes), (self._file.number,)

    def abandon(self, descriptor: BufferDescriptor) -> None:
        """A dead process has it open no longer."""

    def close(self) -> None:
        self._file.close()


class SealedMemorySender(SharedBufferSender):
    kind = "file"

    def allocate(self, nbytes: int) -> SealedBuffer:
        return SealedBuffer(nbytes)


class SealedMemoryReceiver(SharedBufferReceiver):
    def open(self, descriptor: BufferDescriptor, files: Sequence[int]) -> torch.Tensor:
        if not isinstance(descriptor, FileBuffer):
            raise Aborted(Failure("stream_mismatch", f"a {descriptor.kind} buffer in a stream over shared memory"))
        return open_sealed(files[0], descriptor.nbytes)
