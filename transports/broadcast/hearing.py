"""How a receiver hears its sender: every wait is cut into moments, in which it may be told to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transports.base import Cancelled
from transports.broadcast.line import SLICE_S, Line
from transports.broadcast.messages import Answer, Done, End, Formed, Go, Hello, Key, Message, Opening, Ready
from transports.broadcast.pending import Broken
from transports.control.channel import Alarm, Gone, wait
from transports.control.messages import Goodbye, Waiting
from updater import wire
from updater.core.errors import Aborted, Failure

#: After a group broke: how long to wait for the sender's word why.
_LAST_WORDS_S = 1.0
M = TypeVar("M", Hello, Opening, Answer, Key, Formed, Ready, Go, End, Done)


class Hearing:
    """Of one update. `patience_s`: how long to wait for a sender that gives no sign. `heard`: what it said and no call
    has taken yet, all of it from before its last word.
    """

    def __init__(self, line: Line, alarm: Alarm, patience_s: float, should_stop: Callable[[], bool]) -> None:
        self.line = line
        self.patience_s = patience_s
        self.heard: deque[Message] = deque()
        self._alarm, self._should_stop = alarm, should_stop
        self._signed = float("-inf")  # when it last said that it waits for another receiver
        self._ended: Aborted | None = None  # its last word

    def deadline(self) -> float:
        return time.monotonic() + self.patience_s

    def check(self) -> None:
        """Raises Cancelled."""
        if self._should_stop():
            raise Cancelled

    def next(self, kind: type[M]) -> M:
        """The sender's next message. Raises Aborted `stream_mismatch` if it is another one, and as `wait`."""
        deadline = self.deadline()
        while not self.heard:
            self.wait(deadline, f"it said nothing for {self.patience_s:g} s")
        message = self.heard.popleft()
        if not isinstance(message, kind):
            raise mismatch(f"the sender said {message.kind} where {kind.__name__.lower()} was due")
        return message

    def wait(self, deadline: float, late: str, at_most: float | None = None) -> None:
        """Until something happened, or for a moment. Raises Aborted `peer_lost`, `peer_timeout`, Cancelled."""
        self.check()
        self._check_end()
        deadline = max(deadline, self._signed + self.patience_s)
        left = max(deadline - time.monotonic(), 0.0)
        ready = wait((self.line, self._alarm), min(SLICE_S if at_most is None else at_most, left))
        if self._alarm in ready:
            self._alarm.hush()
        if self.line in ready:
            self._hear()
        if not self.heard:  # a plan that came before the end is judged all the same
            self._check_end()
        if not ready and time.monotonic() >= deadline:
            raise Aborted(Failure("peer_timeout", f"the sender is too slow: {late}"))

    def blame(self, error: Broken) -> Aborted:
        """Why a group broke. The sender sees all receivers, and may know through whom."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                self.wait(deadline + _LAST_WORDS_S, "")
            except Aborted as found:
                return found
        return self._ended or Aborted(Failure("peer_lost", f"the group broke: {error}"))

    def _check_end(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _hear(self) -> None:
        try:
            for message in self.line.messages():
                if isinstance(message, Goodbye):
                    self._ended = Aborted(*(message.failures or (Failure("peer_lost", "the sender gave no reason"),)))
                    return
                if isinstance(message, Waiting):
                    self._signed = time.monotonic()
                else:
                    self.heard.append(message)
        except Gone:
            self._ended = Aborted(Failure("peer_lost", "the sender closed its connection"))
        except wire.WireError as error:
            self._ended = mismatch(f"the sender said what is no message: {error}")


def mismatch(why: str) -> Aborted:
    return Aborted(Failure("stream_mismatch", why))
