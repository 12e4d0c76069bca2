"""A connected Unix socket for the messages of this protocol."""

from __future__ import annotations

from transports.control.channel import Channel
from transports.local.messages import Message, decode


class Line(Channel[Message]):
    """A `Channel` of these messages."""

    def _decode(self, frame: bytes) -> Message:
        return decode(frame)
