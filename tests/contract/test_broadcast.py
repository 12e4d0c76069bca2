"""The stream suite over a broadcast."""

from __future__ import annotations

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.stream_contract import StreamContract


class TestBroadcast(StreamContract):
    def sender(self) -> BroadcastSender:
        return BroadcastSender(patience_s=5.0)

    def hub(self, stall_s: float) -> BroadcastHub:
        return BroadcastHub(patience_s=stall_s)
