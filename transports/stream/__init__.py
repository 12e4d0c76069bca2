"""Weights pushed as a stream: one conversation between one sender and every rank, whatever medium the bytes travel in.

docs/adr/0021-one-stream-protocol.md draws it. What a trainer and an engine use of it is in `transports.stream.source`;
the media are in `transports.media`.
"""

from transports.stream.source import StreamReceiver, StreamSender, StreamSource, pack

__all__ = ["StreamReceiver", "StreamSender", "StreamSource", "pack"]
