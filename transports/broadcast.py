"""Streams to every rank at once over a process group of their own, wherever the ranks are.

What is agreed travels as JSON over one TCP connection per receiver; only bucket bytes travel in the group.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from transports.media.collective import CollectiveReceiver, CollectiveSender, MakeGroup
from transports.stream.addresses import TcpListener, dial_tcp
from transports.stream.messages import LONGEST_PATIENCE_S, PATIENCE_S, Patience
from transports.stream.receiver import MediumHub
from transports.stream.sender import MediumSender

__all__ = ["BroadcastHub", "BroadcastSender"]


class BroadcastSender(MediumSender):
    """`host`, `port`: where it listens (port 0: any free one); `advertise`: the host that receivers are given, where
    that is another one. `backend`: "gloo", or "nccl" (experimental). `make_group`: in place of the
    backend's. `patience_s`, `digests`: as of `MediumSender`.

    Listens at once. Raises Rejected `transport_unsupported`.
    """

    kind = "broadcast"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: Annotated[int, Field(ge=0, le=65535)] = 0,
        *,
        advertise: str = "",
        backend: Literal["gloo", "nccl"] = "gloo",
        patience_s: Patience = PATIENCE_S,
        digests: bool = False,
        make_group: MakeGroup | None = None,
    ) -> None:
        medium = CollectiveSender(backend, advertise or host, min(patience_s, LONGEST_PATIENCE_S), make_group)
        super().__init__(medium, lambda: TcpListener(host, port, advertise), patience_s=patience_s, digests=digests)


class BroadcastHub(MediumHub):
    """`patience_s`: how long to wait for a sender that gives no sign. None: 60 s, and then as long as
    the sender asks for, which is never exceeded.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        super().__init__(CollectiveReceiver, dial_tcp, patience_s)
