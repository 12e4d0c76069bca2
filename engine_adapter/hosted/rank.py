"""A rank that lives on a thread beside an engine's own worker, and connects to its front."""

from __future__ import annotations

import os
import socket
import threading

from engine_adapter.hosted.pool import Attach
from engine_adapter.rank.channel import Frame, FrameKind, RankChannel
from engine_adapter.rank.host import Engine, RankHost

_CONNECT_S = 30.0


class AttachedRank(RankHost[Engine]):
    """`channel`: see `connected`."""

    def __init__(self, channel: RankChannel) -> None:
        super().__init__(channel)
        self._channel = channel

    def serve(self, token: str, rank: int, size: int) -> None:
        """Introduce this worker to the front, then answer it on a thread of our own. Raises ChannelClosed."""
        self._channel.send(Frame.of(FrameKind.EVENT, 0, "attach", Attach(token, rank, size, os.getpid())))
        threading.Thread(target=self._serve, name="liveweights", daemon=True).start()

    def _serve(self) -> None:
        self.server.run()
        self.close()

    def close(self) -> None:
        """The front is gone, or another one came."""
        self.server.stop()
        self._channel.close()
        if self._built is not None:
            self.agent.close()


def connected(address: str) -> RankChannel:
    """To the front's socket. Raises OSError."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(_CONNECT_S)
    ours.connect(address)
    ours.settimeout(None)
    return RankChannel(ours)
