"""A device that is not there, over memory files that any process of this user can open by handle; and a sender that
says what a test wants.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from transports.buckets import StreamPlan
from transports.control.channel import RECEIVER_LIMIT, wait
from transports.local.addresses import Listener, fresh_address
from transports.local.device import HANDLE_BYTES, PLAIN, Exported
from transports.local.line import Line
from transports.local.memfd import mapped
from transports.local.messages import Answer, Hello, Message, StreamOpening

__all__ = ["FakeDevice", "ScriptedSender"]

M = TypeVar("M", bound=Message)

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


class ScriptedSender:
    """The sending end of one connection, message by message, right or wrong. `session`: what it calls itself."""

    def __init__(self, session: str = "scripted") -> None:
        self.session = session
        self._listener = Listener(fresh_address())
        self.channel: Line | None = None
        self._heard: deque[Message] = deque()

    @property
    def address(self) -> str:
        return self._listener.address

    def meet(self, plan: StreamPlan, digest: str | None = None, patience_s: float = 60.0) -> Answer:
        """Take the first receiver in, say the plan, hear what it thinks of it."""
        while self.channel is None:
            wait([self._listener], 10.0)
            for sock in self._listener.accept():
                self.channel = Line(sock, RECEIVER_LIMIT)
        self.hear(Hello)
        self.say(StreamOpening(plan, plan.digest if digest is None else digest, patience_s))
        return self.hear(Answer)

    def say(self, message: Message | bytes, descriptors: Sequence[int] = ()) -> None:
        self._met().post(message, descriptors)

    def hear(self, kind: type[M]) -> M:
        """The next message. Raises RuntimeError for one of another kind, `Gone`."""
        channel = self._met()
        while not self._heard:
            wait([channel], 10.0)
            self._heard.extend(channel.messages())
        message = self._heard.popleft()
        if not isinstance(message, kind):
            raise RuntimeError(f"{message.kind} instead of {kind.__name__}")
        return message

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self._listener.close()

    def _met(self) -> Line:
        if self.channel is None:
            raise RuntimeError("no receiver was met")
        return self.channel
