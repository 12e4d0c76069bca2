"""Shared memory as a medium, of any kind: the sender fills two buffers, and every receiver copies out of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

from transports.buckets import Bucket
from transports.stream.connection import Connection, Waker
from transports.stream.messages import BufferDescriptor, Buffers, DeviceBuffer, FileBuffer, Go, Hello, Opening
from transports.stream.receiver_session import ReceiverSession, mismatch
from transports.stream.sender_session import Peer, SenderSession
from updater.core.errors import Aborted, Failure


class SenderBuffer(Protocol):
    """Memory that the sender fills and receivers read."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8, all of it."""

    def describe(self) -> tuple[FileBuffer | DeviceBuffer, tuple[int, ...]]:
        """For one receiver, which will open it once; with the descriptors that go along."""

    def abandon(self, descriptor: BufferDescriptor) -> None:
        """The receiver that was given this is dead and has not let go."""

    def close(self) -> None:
        """The sender's part of it; a receiver's mapping lives on."""


class SharedBufferSender:
    """A `SenderMedium` of any kind of memory. Buffers are kept while they suffice; a receiver that holds the set is
    given none again.
    """

    kind: Literal["file", "device"]
    lends, alike = True, False

    def __init__(self) -> None:
        self._buffers: list[SenderBuffer] = []
        self._name = ""
        self._given: dict[Peer, list[tuple[SenderBuffer, BufferDescriptor]]] = {}

    def allocate(self, nbytes: int) -> SenderBuffer:
        """Reserved, not promised. Raises Aborted `no_space`, `transport_unsupported`."""
        raise NotImplementedError

    def collect(self) -> None:
        """Take back what receivers have let go of since. The kernel does so with files."""

    def check(self) -> None:
        """Every Linux can share files."""

    def accepts(self, hello: Hello) -> Failure | None:
        return None

    def filled(self) -> None:
        """Memory of the CPU is seen by all who are told of it through a socket."""

    @property
    def buffers(self) -> int:
        return len(self._buffers)

    def prepare(self, session: SenderSession, buffers: int, nbytes: int) -> str:
        if len(self._buffers) < buffers or any(each.tensor.numel() < nbytes for each in self._buffers):
            self._drop_buffers()
            self._name = secrets.token_hex(8)
            for _ in range(buffers):
                self._buffers.append(self.allocate(nbytes))
        return self._name

    def open(self, session: SenderSession, deadline: float) -> None:
        for peer in session.peers.values():
            if peer.plan.buckets and peer.hello is not None and peer.hello.held != self._name:
                self._give(peer)

    def heard(self, session: SenderSession, peer: Peer) -> bool:
        return False

    def room(self, buffer: int, nbytes: int) -> torch.Tensor:
        return self._buffers[buffer].tensor[:nbytes]

    def post(self, buffer: int, nbytes: int, notify: Callable[[], None]) -> None:
        """It lies there."""

    def left(self, peer: Peer, *, alive: bool) -> None:
        for buffer, descriptor in self._given.pop(peer, ()):
            if not alive:
                buffer.abandon(descriptor)

    def drop(self) -> None:
        self._given.clear()
        self._drop_buffers()

    def _give(self, peer: Peer) -> None:
        described = [(buffer, *buffer.describe()) for buffer in self._buffers]
        self._given[peer] = [(buffer, descriptor) for buffer, descriptor, _ in described]
        files = [number for *_, numbers in described for number in numbers]
        peer.connection.post(Buffers(tuple(descriptor for _, descriptor, _ in described)), files)

    def _drop_buffers(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._name = [], ""
        self.collect()


class SharedBufferReceiver:
    """A `ReceiverMedium` of any kind of memory: the sender's buffers, mapped here."""

    wakers: tuple[Waker, ...] = ()

    def __init__(self) -> None:
        self.held = ""
        self._buffers: list[torch.Tensor] = []

    def open(self, descriptor: BufferDescriptor, files: Sequence[int]) -> torch.Tensor:
        """uint8 of `descriptor.nbytes`, unmapped when the last reference is gone; `files`: its descriptors, which stay
        the caller's. Raises Aborted `stream_mismatch`, `no_space`, `transport_unsupported`.
        """
        raise NotImplementedError

    def greeting(self) -> tuple[tuple[str, ...], int]:
        return (), 0

    def join(self, session: ReceiverSession, opening: Opening) -> None:
        """Nothing comes where there is no bucket."""
        if self.held != opening.name:
            self.held = ""
            self._buffers.clear()
            if opening.plan.buckets:
                self.map(session.next(Buffers), session.connection)
                self.held = opening.name

    def map(self, message: Buffers, connection: Connection) -> None:
        """In place of what was mapped. Raises Aborted."""
        self._buffers.clear()
        for descriptor in message.buffers:
            files = _files(connection, isinstance(descriptor, FileBuffer))
            try:
                self._buffers.append(self.open(descriptor, files))
            finally:
                for number in files:
                    os.close(number)

    def post(self, bucket: Bucket, go: Go) -> None:
        room = self._buffers[go.buffer].numel() if go.buffer < len(self._buffers) else -1
        if go.offset + go.nbytes > room:
            raise mismatch(f"bucket {go.bucket} lies outside of its buffer")

    def data(self, bucket: Bucket, go: Go) -> torch.Tensor:
        return self._buffers[go.buffer][go.offset : go.offset + go.nbytes]

    def taking(self) -> AbstractContextManager[None]:
        """Copies from CPU memory have read it when they return, also those to a device."""
        return nullcontext()

    def drop(self) -> None:
        self.held = ""
        self._buffers.clear()


def _files(connection: Connection, count: int) -> list[int]:
    held = connection.descriptors
    if count > len(held):
        if connection.truncated:
            why = "this process may open no more files (ulimit -n): a shared buffer's descriptor was lost"
            raise Aborted(Failure("no_space", why))
        raise mismatch("a shared buffer came without its descriptor")
    return [held.popleft() for _ in range(count)]
