"""Streams to every rank at once over a process group of their own, wherever the ranks are.

What is agreed travels as JSON over one TCP connection per receiver; only bucket bytes travel in the group.
"""

from __future__ import annotations

from typing import Any

from transports.buckets import BUCKET_BYTES
from transports.media.collective import CollectiveReceiver, CollectiveSender, MakeGroup
from transports.stream.addresses import TcpListener, dial_tcp
from transports.stream.messages import LONGEST_PATIENCE_S
from transports.stream.receiver import MediumHub
from transports.stream.sender import PATIENCE_S, MediumSender

__all__ = ["BroadcastHub", "BroadcastSender"]


class BroadcastSender(MediumSender):
    """`host`, `port`: where it listens (port 0: any free one); `advertise`: the host that receivers are given, where
    that is another one. `backend`: "gloo", or "nccl" (experimental). `bucket_bytes`: for the caller that makes the
    plan. `make_group`: in place of the backend's. `patience_s`, `digests`: as of `MediumSender`.

    Listens at once. Raises OSError, Rejected `transport_unsupported`.
    """

    kind = "broadcast"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str = "",
        backend: Any = "gloo",
        bucket_bytes: int = BUCKET_BYTES,
        patience_s: float = PATIENCE_S,
        digests: bool = False,
        make_group: MakeGroup | None = None,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        medium = CollectiveSender(backend, advertise or host, min(patience_s, LONGEST_PATIENCE_S), make_group)
        super().__init__(medium, lambda: TcpListener(host, port, advertise), patience_s=patience_s, digests=digests)


class BroadcastHub(MediumHub):
    """`patience_s`: how long to wait for a sender that gives no sign. None: 60 s, and then as long as
    the sender asks for, which is never exceeded.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        super().__init__(CollectiveReceiver, dial_tcp, patience_s)
