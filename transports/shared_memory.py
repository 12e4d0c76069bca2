"""Streams to ranks of the same machine, through memory that sender and receivers share: one copy, into the spare.

The buffers are sealed memory files without a name, passed over a Unix socket: a killed process leaves nothing
behind.
"""

from __future__ import annotations

from transports.media.sealed_memory import SealedMemoryReceiver, SealedMemorySender
from transports.stream.addresses import UnixListener, dial_unix, fresh_address
from transports.stream.messages import PATIENCE_S, Patience
from transports.stream.receiver import MediumHub
from transports.stream.sender import MediumSender

__all__ = ["SharedMemoryHub", "SharedMemorySender"]


class SharedMemorySender(MediumSender):
    """`patience_s`: how long receivers wait for a sender that gives no sign. `digests`: send one with every bucket,
    which names the side that spoiled it and costs a look at every byte on both. `folder`: for the socket, where sender
    and receivers share a folder but no network namespace; else it is an abstract one, which leaves nothing even after
    a crash.
    """

    kind = "shared_memory"

    def __init__(self, *, patience_s: Patience = PATIENCE_S, digests: bool = False, folder: str | None = None) -> None:
        medium = SealedMemorySender()
        super().__init__(medium, lambda: UnixListener(fresh_address(folder)), patience_s=patience_s, digests=digests)


class SharedMemoryHub(MediumHub):
    """`patience_s`: how long to wait for a sender that gives no sign. None: 60 s, and then as long as
    the sender asks for, which is never exceeded.
    """

    def __init__(self, *, patience_s: float | None = None) -> None:
        super().__init__(SealedMemoryReceiver, dial_unix, patience_s)
