"""Where sender and receivers find each other, and how a connection is made.

`host:port` is TCP. `@name` is an abstract Unix socket and leaves nothing in any file system; a path is one for
containers that share a folder but no network namespace. Of Unix sockets both sides let only processes of their own
user in.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from transports.stream.connection import RECEIVER_LIMIT, SENDER_LIMIT, Connection
from transports.stream.guards import close_on_fork
from updater.core.errors import Aborted, Failure, refuse

_LONGEST = 107
_RETRY_S = 0.02
#: One attempt of TCP, in seconds.
_ATTEMPT_S = 1.0
#: What the kernel keeps for us while a sender is busy.
_BACKLOG = 1024
_TCP_HINT = (
    "sender_options: host is an address of this machine (advertise: the one that receivers are given), port one that "
    "is free; 0 takes any free one"
)
_UNIX_HINT = (
    "sender_options: folder is one that exists here, may be written, and has a short path; without it none is used"
)
#: No descriptor or memory for another connection: what waits goes on waiting.
_LATER = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Arrivals(Protocol):
    """Where a sender gets its connections from: by listening, as here, or by calling its receivers itself."""

    @property
    def address(self) -> str:
        """For the offer."""

    @property
    def lasting(self) -> bool:
        """It is the same in every session: the port was chosen."""

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int:
        """Readable when there may be connections."""

    def accept(self) -> list[Connection]:
        """All that there are by now."""

    def close(self) -> None: ...


#: (address, deadline of the monotonic clock, asked often and may raise) -> a connection to a sender. Raises Aborted
#: `peer_lost`, `peer_timeout`, `stream_mismatch`.
Dial = Callable[[str, float, Callable[[], None]], Connection]


class _Listener:
    """A listening socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        close_on_fork(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def accept(self) -> list[Connection]:
        found: list[Connection] = []
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno in _LATER or self.closed:
                    return found
                continue  # it has hung up already
            if self._admits(sock):
                found.append(Connection(sock, RECEIVER_LIMIT))
            else:
                sock.close()

    def drop(self) -> None:
        self._sock.close()

    def close(self) -> None:
        self._sock.close()

    def _admits(self, sock: socket.socket) -> bool:
        raise NotImplementedError


class TcpListener(_Listener):
    """`port` 0: any free one. `advertise`: the host of the address, where that is another one. Raises Rejected
    `transport_unsupported` where this machine does not let a sender listen there.
    """

    def __init__(self, host: str, port: int, advertise: str = "") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with _listening(join_address(host, port), _TCP_HINT):
            sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        super().__init__(sock)
        self.lasting = bool(port)
        self.address = join_address(advertise or host, self._sock.getsockname()[1])

    def _admits(self, sock: socket.socket) -> bool:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True


class UnixListener(_Listener):
    """`address`: as of `fresh_address`. Raises Rejected `transport_unsupported` where it is taken or cannot be."""

    lasting = False

    def __init__(self, address: str) -> None:
        self.address = address
        self._path = "" if address.startswith("@") else address
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _listening(address, _UNIX_HINT):
                sock.bind(_name(address))
                if self._path:
                    os.chmod(self._path, 0o600)
                sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        super().__init__(sock)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._path:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)

    def _admits(self, sock: socket.socket) -> bool:
        return owner_of(sock) == os.getuid()


@contextmanager
def _listening(address: str, hint: str) -> Iterator[None]:
    """ValueError: a name or a number that no socket takes."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise refuse("transport_unsupported", f"a sender cannot listen at {address}: {why}", hint=hint) from None


def dial_tcp(address: str, deadline: float, check: Callable[[], None]) -> Connection:
    """A `Dial` of `host:port`."""
    host, port = split_address(address)
    while True:
        check()
        left = max(min(_ATTEMPT_S, deadline - time.monotonic()), 0.01)
        try:
            sock = socket.create_connection((host, port), timeout=left)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise Aborted(Failure("peer_timeout", f"no sender answers at {address}")) from None
            continue
        except OSError as error:  # a sender listens before it is offered
            raise Aborted(Failure("peer_lost", f"no sender at {address}: {error.strerror or error}")) from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(sock, SENDER_LIMIT)


def dial_unix(address: str, deadline: float, check: Callable[[], None]) -> Connection:
    """A `Dial` of a Unix socket: `peer_lost` also where another user listens."""
    try:
        name = _name(address)
    except ValueError as error:
        raise Aborted(Failure("stream_mismatch", str(error))) from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        while not _connected(sock, name, address):
            check()
            if time.monotonic() >= deadline:
                raise Aborted(Failure("peer_timeout", f"the sender at {address} let no connection in"))
            select.poll().poll(_RETRY_S * 1000)
        if owner_of(sock) != os.getuid():
            raise Aborted(Failure("peer_lost", f"{address} belongs to another user"))
    except BaseException:
        sock.close()
        raise
    return Connection(sock, SENDER_LIMIT)


def _connected(sock: socket.socket, name: str, address: str) -> bool:
    try:
        sock.connect(name)
    except BlockingIOError:  # its queue is full
        return False
    except OSError as error:
        why = f"nothing listens at {address}: {os.strerror(error.errno or 0)}"
        raise Aborted(Failure("peer_lost", why)) from None
    return True


def fresh_address(folder: str | None = None) -> str:
    """Of a Unix socket: abstract, or a path in `folder`."""
    name = f"liveweights-{os.getpid()}-{secrets.token_hex(8)}"
    return f"@{name}" if folder is None else os.path.join(os.path.abspath(folder), name)


def _name(address: str) -> str:
    """Raises ValueError."""
    name = "\0" + address[1:] if address.startswith("@") else address
    if not address.startswith(("@", "/")) or len(address) < 2 or len(name.encode()) > _LONGEST:
        raise ValueError(f"{address!r} is neither @name nor an absolute path of at most {_LONGEST} bytes")
    return name


def owner_of(sock: socket.socket) -> int:
    """User of the process at the other end of a Unix socket, as the kernel knows it."""
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def split_address(address: str) -> tuple[str, int]:
    """Raises Aborted `peer_lost`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise Aborted(Failure("peer_lost", f"{address!r} is not host:port"))
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
