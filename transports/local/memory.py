"""The seam between the protocol and a kind of memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from transports.local.messages import BufferDescriptor, DeviceBuffer, FileBuffer, Hello
from updater.core.errors import Failure


class SenderBuffer(Protocol):
    """Memory that the sender fills and receivers read."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8, all of it."""

    def describe(self) -> tuple[FileBuffer | DeviceBuffer, tuple[int, ...]]:
        """For one receiver, which will open it once; with the descriptors that go along."""

    def abandon(self, descriptor: BufferDescriptor) -> None:
        """The process that was given this is dead and has not let go."""

    def close(self) -> None:
        """The sender's part of it; a receiver's mapping lives on."""


class SenderMemory(Protocol):
    kind: str

    def check(self) -> None:
        """Raises Rejected `transport_unsupported` with advice where this process cannot share."""

    def allocate(self, nbytes: int) -> SenderBuffer:
        """Reserved, not promised. Raises Aborted `no_space`, `transport_unsupported`."""

    def accepts(self, hello: Hello) -> Failure | None:
        """Why this receiver could not open what would be described to it."""

    def filled(self) -> None:
        """Return when what was written to buffers can be seen by others."""

    def collect(self) -> None:
        """Take back what receivers have let go of since."""


class ReceiverMemory(Protocol):
    def greeting(self) -> tuple[tuple[str, ...], int]:
        """(devices, handle format) of a `Hello`. Raises Aborted `transport_unsupported`."""

    def open(self, descriptor: BufferDescriptor, files: Sequence[int]) -> torch.Tensor:
        """uint8 of `descriptor.nbytes`, unmapped when the last reference is gone; `files`: its descriptors, which stay
        the caller's. Raises Aborted `stream_mismatch`, `no_space`, `transport_unsupported`.
        """

    def files_of(self, descriptor: BufferDescriptor) -> int:
        """How many descriptors come with it."""

    def taking(self) -> AbstractContextManager[None]:
        """Around copies out of a buffer: when it is left they are done, also on a device."""
