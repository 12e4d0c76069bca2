"""A TCP connection for messages, how it is made, and what waits on it."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable

from transports.broadcast.messages import Message, decode
from transports.control.channel import Channel
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: How long any wait lasts at most before `should_stop` is asked again.
SLICE_S = 0.1
#: What the kernel keeps for us while a sender is busy.
_BACKLOG = 512


class Line(Channel[Message]):
    """A `Channel` of these messages."""

    def _decode(self, frame: bytes) -> Message:
        return decode(frame)

    @property
    def local_host(self) -> str:
        """This side's address on the way to the other side."""
        return str(self._sock.getsockname()[0])


def listen(host: str, port: int) -> socket.socket:
    """Port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    sock.setblocking(False)
    return sock


def accepted(listener: socket.socket, limit: int) -> list[Line]:
    """All that have called."""
    lines: list[Line] = []
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return lines
        lines.append(Line(_brisk(sock), limit))


def call(address: str, limit: int, deadline: float, check: Callable[[], None]) -> Line:
    """`deadline`: of the monotonic clock. `check` may raise, and is asked often. Raises Aborted `peer_lost`,
    `peer_timeout`.
    """
    host, port = split_address(address)
    while True:
        check()
        try:
            sock = socket.create_connection(
                (host, port), timeout=max(min(SLICE_S * 10, deadline - time.monotonic()), 0.01)
            )
            return Line(_brisk(sock), limit)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise Aborted(Failure("peer_timeout", f"no sender answers at {address}")) from None
        except OSError as error:  # no process listens: a sender listens before it is offered
            raise Aborted(Failure("peer_lost", f"no sender at {address}: {error.strerror or error}")) from None


def _brisk(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def split_address(address: str) -> tuple[str, int]:
    """Raises Aborted `peer_lost`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise Aborted(Failure("peer_lost", f"{address!r} is not host:port"))
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def seats_digest(offer: StreamOffer) -> str:
    """Membership with incarnations, in its order: equal for all, or none of them meet."""
    return hashlib.sha256(b"\n".join(wire.encode(each) for each in offer.seats)).hexdigest()
