"""The seam of a medium: what the bytes of a stream travel in, while all that is said goes over connections.

A collective (gloo, nccl) carries each bucket to all receivers at once; shared memory (sealed files, device memory) is
filled once and read by each of them. A sender and a receiver have one end each, and keep it between updates that end
well. Every call returns at once, but for `open` and `join`, which wait by the session they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from transports.buckets import Bucket
from transports.stream.connection import Waker
from transports.stream.messages import Go, Hello, Opening
from updater.core.errors import Failure

if TYPE_CHECKING:
    from transports.stream.receiver_session import ReceiverSession
    from transports.stream.sender_session import Peer, SenderSession


class Broken(Exception):
    """A medium or something under way in it failed, and it does not know through whom. It is not used again."""


class Travelling(Protocol):
    """A bucket that is on its way."""

    #: Seconds after which a side that waits looks again; None: a waker is set when it has ended.
    poll_s: float | None

    def done(self) -> bool:
        """Raises Broken when it has failed."""


class SenderMedium(Protocol):
    """The sender's end. `kind`: of its receivers' `Opening`.

    `lends`: receivers read the sender's own buffers, so that one is free again only when all of them have put away what
    lay in it. `alike`: what is posted reaches every receiver, so that all must have the same plan.
    """

    @property
    def kind(self) -> Literal["gloo", "nccl", "file", "device"]: ...

    lends: bool
    alike: bool

    def check(self) -> None:
        """Raises Rejected `transport_unsupported` with advice where this process cannot use it."""

    def accepts(self, hello: Hello) -> Failure | None:
        """Why this receiver could not take part."""

    def prepare(self, session: SenderSession, buffers: int, nbytes: int) -> str:
        """Keep what is there, if it will do for these receivers and so many buffers of `nbytes` bytes; its name.

        Raises Aborted `no_space`, `transport_unsupported`.
        """

    def open(self, session: SenderSession, deadline: float) -> None:
        """Every receiver agreed: bring in those that do not hold it yet. Raises Aborted."""

    def heard(self, session: SenderSession, peer: Peer) -> bool:
        """Take the keys that a receiver has said; False: it should not have."""

    @property
    def buffers(self) -> int:
        """How many there are."""

    def room(self, buffer: int, nbytes: int) -> torch.Tensor:
        """uint8 memory to be filled: the first bytes of a buffer."""

    def filled(self) -> None:
        """Return when what was written to buffers can be seen by others."""

    def post(self, buffer: int, nbytes: int, notify: Callable[[], None]) -> Travelling | None:
        """The receivers have been told. None: it is there. Raises Broken."""

    def left(self, peer: Peer, *, alive: bool) -> None:
        """A receiver is gone, and has let go of everything, or died."""

    def drop(self) -> None:
        """Nothing of it is used again."""


class ReceiverMedium(Protocol):
    """One receiver's end, of one connection. `held`: name of what it holds, or empty. `wakers`: what its other threads
    wake the receiver by.
    """

    held: str
    wakers: tuple[Waker, ...]

    def greeting(self) -> tuple[tuple[str, ...], int]:
        """(devices, handle format) of a `Hello`. Raises Aborted `transport_unsupported`."""

    def join(self, session: ReceiverSession, opening: Opening) -> None:
        """Until this side is in, with room for the plan's buckets. Raises Aborted, Cancelled."""

    def post(self, bucket: Bucket, go: Go) -> Travelling | None:
        """None: it is there. Raises Broken; Aborted `stream_mismatch` where it cannot lie."""

    def data(self, bucket: Bucket, go: Go) -> torch.Tensor:
        """What has arrived. The memory is used again when the sender has been told `Ready`."""

    def taking(self) -> AbstractContextManager[None]:
        """Around copies out of `data`: when it is left they are done, also on a device."""

    def drop(self) -> None:
        """Nothing of it is used again."""
