"""Unix sockets by address: `@name` is abstract and leaves nothing in any file system; a path is for containers that
share a folder but no network namespace. Both sides let only processes of their own user in.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from transports.base import Cancelled
from transports.control.forks import not_in_children
from updater.core.errors import Aborted, Failure

_LONGEST = 107
_RETRY_S = 0.02


def fresh_address(folder: str | None = None) -> str:
    """Abstract, or a path in `folder`."""
    name = f"liveweights-{os.getpid()}-{secrets.token_hex(8)}"
    return f"@{name}" if folder is None else os.path.join(os.path.abspath(folder), name)


def _name(address: str) -> str:
    """Raises ValueError."""
    name = "\0" + address[1:] if address.startswith("@") else address
    if not address.startswith(("@", "/")) or len(address) < 2 or len(name.encode()) > _LONGEST:
        raise ValueError(f"{address!r} is neither @name nor an absolute path of at most {_LONGEST} bytes")
    return name


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows them."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Listener:
    """Raises OSError where the address is taken or cannot be."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._path = "" if address.startswith("@") else address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.bind(_name(address))
            if self._path:
                os.chmod(self._path, 0o600)
            self._sock.listen(1024)
            not_in_children(self)
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def accept(self) -> list[socket.socket]:
        """All that are waiting and are of this user."""
        found: list[socket.socket] = []
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return found
            except OSError as error:  # out of descriptors: what waits goes on waiting
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return found
                continue
            if peer_of(sock)[1] == os.getuid():
                found.append(sock)
            else:
                sock.close()

    def drop(self) -> None:
        self._sock.close()

    def close(self) -> None:
        if not self.closed:
            self._sock.close()
            if self._path:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)


def connect(address: str, within_s: float, should_stop: Callable[[], bool]) -> socket.socket:
    """Raises Aborted `peer_lost` where none listens or a stranger does, `peer_timeout`, `stream_mismatch` for what
    is no address; Cancelled.
    """
    try:
        name = _name(address)
    except ValueError as error:
        raise Aborted(Failure("stream_mismatch", str(error))) from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _connect(sock, name, address, time.monotonic() + within_s, should_stop)
        if peer_of(sock)[1] != os.getuid():
            raise Aborted(Failure("peer_lost", f"{address} belongs to another user"))
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, name: str, address: str, deadline: float, should_stop: Callable[[], bool]) -> None:
    while True:
        try:
            sock.connect(name)
            return
        except BlockingIOError:  # its queue is full
            if should_stop():
                raise Cancelled from None
            if time.monotonic() >= deadline:
                raise Aborted(Failure("peer_timeout", f"the sender at {address} took no receiver in")) from None
            select.poll().poll(_RETRY_S * 1000)
        except OSError as error:
            raise Aborted(
                Failure("peer_lost", f"no process listens at {address}: {os.strerror(error.errno or 0)}")
            ) from None
