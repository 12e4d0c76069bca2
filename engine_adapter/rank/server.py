"""One rank's end of the channel to its front: reads calls, runs them on the right thread, answers every one.

Verbs of `STAGING_VERBS` run one at a time on a thread of low priority, because serving goes on meanwhile; every other
verb runs on the thread that reads. This is the rank boundary: whatever a verb raises becomes a `Refused`.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from engine_adapter.rank.agent import STAGING_VERBS
from engine_adapter.rank.channel import ChannelClosed, ChannelError, Frame, FrameKind, RankChannel
from engine_adapter.rank.control_messages import CALLS
from engine_adapter.rank.messages import Refused
from transports.base import Cancelled
from updater.core.errors import Failure, LiveweightsError
from updater.protocol import wire

_STAGING_NICENESS = 10


def failures_of(error: BaseException) -> tuple[Failure, ...]:
    """What a raised exception says, typed."""
    if isinstance(error, LiveweightsError):
        return error.failures
    if isinstance(error, TimeoutError):
        return (Failure("phase_timeout", f"out of time: {error}"),)
    if isinstance(error, Cancelled):
        return (Failure("client_abort", "cancelled by the front"),)
    if isinstance(error, MemoryError):
        return (Failure("no_space", f"out of memory: {error}"),)
    return (Failure("rank_failed", f"{type(error).__name__}: {error}"),)


class RankServer:
    """`handle(verb, request)` returns the reply of `CALLS[verb]` or raises."""

    def __init__(self, channel: RankChannel, handle: Callable[[str, Any], Any]) -> None:
        self._channel = channel
        self._handle = handle
        self._staging: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.stopping = False

    def run(self) -> None:
        """Until `stop` was called by a verb, or until the front is gone."""
        threading.Thread(target=self._stage_loop, name="staging", daemon=True).start()
        try:
            while not self.stopping:
                frame = self._channel.receive()
                if frame.header.verb in STAGING_VERBS:
                    self._staging.put(frame)
                else:
                    self.answer(frame)
        except ChannelClosed:
            return
        finally:
            self.stop()

    def awaited(self) -> bool:
        """Whether a staging verb waits for the one that runs."""
        return not self._staging.empty()

    def stop(self) -> None:
        """No further call is read; what runs ends by itself."""
        self.stopping = True
        self._staging.put(None)

    def event(self, verb: str, message: Any) -> None:
        """Tell the front something unasked. A front that is gone ends `run`; other threads have nothing to add."""
        try:
            self._channel.send(Frame.of(FrameKind.EVENT, 0, verb, message))
        except ChannelClosed:
            return

    def _stage_loop(self) -> None:
        # Linux keeps niceness per thread: serving goes first while weights are staged.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _STAGING_NICENESS)
        while (frame := self._staging.get()) is not None:
            try:
                self.answer(frame)
            except ChannelClosed:
                return

    def answer(self, frame: Frame) -> None:
        """Run one call and send what came of it. Raises ChannelClosed."""
        verb, number = frame.header.verb, frame.header.id
        try:
            request_type, _ = CALLS[verb]
            reply = self._handle(verb, wire.decode(request_type, frame.body))
            answer = Frame.of(FrameKind.REPLY, number, verb, reply)
        except ChannelClosed:
            raise
        except Exception as error:  # the rank boundary
            if not isinstance(error, LiveweightsError | Cancelled | TimeoutError):
                traceback.print_exc()
            answer = Frame.of(FrameKind.REFUSED, number, verb, Refused(failures_of(error)))
        try:
            self._channel.send(answer)
        except ChannelError as error:  # too long for a frame: the front must not wait for it
            refused = Refused((Failure("body_too_large", str(error)),))
            self._channel.send(Frame.of(FrameKind.REFUSED, number, verb, refused))
