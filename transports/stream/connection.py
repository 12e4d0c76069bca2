"""Messages over a connected socket that never blocks, and waiting for several of them at once.

Of any stream socket, and the same on both ends: which side made the connection is not seen here.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from transports.stream.guards import close_on_fork
from transports.stream.messages import Message, decode, encode
from updater.protocol import wire

#: Before each frame: its length in bytes, big-endian.
HEAD_BYTES = 4
#: What a receiver may say at once, and what a sender may (plans of very many tensors).
RECEIVER_LIMIT = 1 << 20
SENDER_LIMIT = 256 << 20
_READ = 1 << 20
_DESCRIPTORS = 16


class ConnectionClosed(Exception):
    """The other side has closed the connection, or died."""


class Connection:
    """`limit`: bytes of the longest frame that is taken. Open files may come with frames of a Unix socket."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._limit = limit
        unix = sock.family == socket.AF_UNIX
        self._control = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize) if unix else 0
        self._in = bytearray()
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.descriptors: deque[int] = deque()  # that came; the one that takes it closes it
        self.truncated = False  # a descriptor came that this process could not hold
        self.spoilt: wire.WireError | None = None  # what came is no message: nothing after it is read
        self.ended = False  # the other side has hung up; there may be messages from before that
        self.closed = False
        close_on_fork(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def host(self) -> str:
        """This side's address on the way to the other side. Of TCP."""
        return str(self._sock.getsockname()[0])

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def post(self, message: Message | bytes, descriptors: Sequence[int] = ()) -> None:
        """Send now what the socket takes, the rest in `flush`. Bytes: a message encoded once for many."""
        body = message if isinstance(message, bytes) else encode(message)
        self._out.append((memoryview(len(body).to_bytes(HEAD_BYTES, "big") + body), descriptors))
        self.flush()

    def flush(self) -> None:
        """A broken connection drops what is unsent: reading will tell."""
        while self._out:
            data, descriptors = self._out[0]
            try:
                sent = self._sock.sendmsg([data], _rights(descriptors))
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            self._out.popleft()
            if sent < len(data):
                self._out.appendleft((data[sent:], ()))

    def messages(self) -> list[Message]:
        """What has come since the last call. When that is nothing, raises `wire.WireError` for what is no message, and
        ConnectionClosed when nothing can come any more.
        """
        found: list[Message] = []
        try:
            while self.spoilt is None and not self.ended and self._read():
                pass
            while self.spoilt is None and (frame := self._frame()) is not None:
                found.append(decode(frame))
        except wire.WireError as error:
            self.spoilt = error
        if not found and self.spoilt is not None:
            raise self.spoilt
        if not found and self.ended:
            raise ConnectionClosed
        return found

    def close(self) -> None:
        """Again: nothing. Says nothing."""
        if not self.closed:
            self.closed = True
            self._sock.close()
            self._out.clear()
            while self.descriptors:
                os.close(self.descriptors.popleft())

    def drop(self) -> None:
        self._sock.close()

    def _read(self) -> bool:
        try:
            data, control, flags, _ = self._sock.recvmsg(_READ, self._control, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
            return False
        self.truncated = self.truncated or bool(flags & socket.MSG_CTRUNC)
        for level, kind, raw in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(raw[: len(raw) - len(raw) % numbers.itemsize])
                self.descriptors.extend(numbers)
        self._in += data
        self.ended = not data
        return bool(data) and len(self._in) <= HEAD_BYTES + self._limit

    def _frame(self) -> bytes | None:
        if len(self._in) < HEAD_BYTES:
            return None
        size = int.from_bytes(self._in[:HEAD_BYTES], "big")
        if size > self._limit:
            raise wire.WireError("frame", "length", f"{size} bytes, at most {self._limit} are taken")
        if len(self._in) < HEAD_BYTES + size:
            return None
        frame = bytes(self._in[HEAD_BYTES : HEAD_BYTES + size])
        del self._in[: HEAD_BYTES + size]
        return frame


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


class Waitable(Protocol):
    def fileno(self) -> int: ...


W = TypeVar("W", bound=Waitable)


def wait(what: Iterable[W], timeout_s: float) -> list[W]:
    """Those with something to read, or that were hung up; unsent messages go on meanwhile. None: time is over.

    `what`: connections, what has one as its `connection`, and anything else with a descriptor.
    """
    by_number = {each.fileno(): each for each in what if each.fileno() >= 0}
    poll = select.poll()
    ready = []
    for number, each in by_number.items():
        connection = _connection(each)
        poll.register(number, select.POLLIN | (select.POLLOUT if connection and connection.unsent else 0))
        if connection and connection.spoilt:
            ready.append(each)
    for number, event in poll.poll(0.0 if ready else max(0.0, timeout_s) * 1000):
        each = by_number[number]
        connection = _connection(each)
        if event & select.POLLOUT and connection:
            connection.flush()
        if event & ~select.POLLOUT and each not in ready:
            ready.append(each)
    return ready


def _connection(each: object) -> Connection | None:
    found = each if isinstance(each, Connection) else getattr(each, "connection", None)
    return found if isinstance(found, Connection) else None


class Waker:
    """Wakes a thread that waits, from any other."""

    def __init__(self) -> None:
        self._number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # a number that was closed may be another file's by now

    def fileno(self) -> int:
        return self._number

    def set(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._number >= 0:
                os.eventfd_write(self._number, 1)

    def clear(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._number >= 0:
                os.eventfd_read(self._number)

    def close(self) -> None:
        with self._lock:
            if self._number >= 0:
                os.close(self._number)
                self._number = -1
