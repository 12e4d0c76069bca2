"""One update as a receiver sees it, over one connection: whatever says the right things at the other end feeds it.

Every wait is cut into moments, in which it may be told to stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from transports.base import Cancelled
from transports.buckets import Bucket, Chunk, StreamPlan
from transports.digest import tensor_digest, to_hex
from transports.stream.connection import Connection, ConnectionClosed, Waker, wait
from transports.stream.medium import Broken, ReceiverMedium, Travelling
from transports.stream.messages import (
    Agreed,
    Buffers,
    Close,
    End,
    Go,
    Hello,
    Key,
    Message,
    Opening,
    Ready,
    Waiting,
    seats_digest,
)
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE
from updater.protocol import wire

#: Until the sender has said its plan, in seconds: it may still be waiting for others.
MEET_S = 60.0
#: How long any wait lasts at most before `should_stop` is asked again, in seconds.
SLICE_S = 0.05
#: After a medium broke: how long to wait for what the sender has to say about it, in seconds.
_LAST_WORDS_S = 1.0
M = TypeVar("M", Opening, Key, Buffers, Go, End)

Take = Callable[[Chunk, torch.Tensor], None]


class ReceiverSession:
    """`patience_s`: how long to wait for a sender that gives no sign. None: `MEET_S`, and then as long as the
    sender asks for, which is never exceeded.
    """

    def __init__(
        self,
        connection: Connection,
        medium: ReceiverMedium,
        offer: StreamOffer,
        number: int,
        patience_s: float | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.connection, self.medium = connection, medium
        self.offer, self.number = offer, number
        self._own_s, self._should_stop = patience_s, should_stop
        self._patience_s = MEET_S if patience_s is None else patience_s
        self._heard: deque[Message] = deque()  # all of it from before the sender's last word
        self._signed = float("-inf")  # when the sender last said that it waits for another receiver
        self._ended: Aborted | None = None  # its last word

    def run(self, expected: Callable[[StreamPlan], None], take: Take, progress: Callable[[int], None]) -> int:
        """From hello to the end; bytes received. As `StreamReceiver.receive`."""
        devices, handle_format = self.medium.greeting()
        self.connection.post(
            Hello(
                self.offer.session,
                self.number,
                seats_digest(self.offer),
                self.medium.held,
                devices,
                handle_format,
                f"torch {torch.__version__}",
                RELEASE,
            )
        )
        opening = self.next(Opening)
        _judge(opening, expected)
        self.connection.post(Agreed())
        self._wait_at_most(opening.begin_within_s)
        self.medium.join(self, opening)
        self.connection.post(Ready(0))
        received = self._take_buckets(opening, take, progress)
        end = self.next(End)
        if end.buckets != len(opening.plan.buckets):
            raise mismatch(f"{end.buckets} buckets were sent, {len(opening.plan.buckets)} were announced")
        return received

    def _wait_at_most(self, told_s: float) -> None:
        self._patience_s = told_s if self._own_s is None else min(self._own_s, told_s)

    def deadline(self) -> float:
        return time.monotonic() + self._patience_s

    def heard(self, kind: type[M]) -> M | None:
        """What has been said already. Raises Aborted `stream_mismatch` if it is of another kind."""
        if not self._heard:
            return None
        message = self._heard.popleft()
        if not isinstance(message, kind):
            raise mismatch(f"the sender said {message.kind} where {kind.__name__.lower()} was due")
        return message

    def next(self, kind: type[M]) -> M:
        """The sender's next message. Raises as `heard` and `wait`."""
        deadline = self.deadline()
        while (message := self.heard(kind)) is None:
            self.wait(deadline, f"it said nothing for {self._patience_s:g} s")
        return message

    def wait(self, deadline: float, late: str, at_most: float | None = None) -> None:
        """Until something happened, or for a moment. Raises Aborted `peer_lost`, `peer_timeout`, Cancelled."""
        self._check()
        self._check_end()
        deadline = max(deadline, self._signed + self._patience_s)
        left = max(deadline - time.monotonic(), 0.0)
        watched: list[Connection | Waker] = [self.connection, *self.medium.wakers]
        ready = wait(watched, min(SLICE_S if at_most is None else at_most, left))
        for each in ready:
            if isinstance(each, Waker):
                each.clear()
            else:
                self._hear()
        if not self._heard:  # a plan that came before the end is judged all the same
            self._check_end()
        if not ready and time.monotonic() >= deadline:
            raise Aborted(Failure("peer_timeout", f"the sender is too slow: {late}"))

    def broke(self, error: Broken) -> Aborted:
        """Why a medium broke. The sender sees all receivers, and may know through whom."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                self.wait(deadline + _LAST_WORDS_S, "")
            except Aborted as found:
                return found
        return self._ended or Aborted(Failure("peer_lost", f"the group broke: {error}"))

    def _take_buckets(self, opening: Opening, take: Take, progress: Callable[[int], None]) -> int:
        """While a bucket travels, the one before is put where it belongs; one that is there already, at once."""
        before: tuple[Bucket, Go] | None = None
        for bucket in opening.plan.buckets:
            go = self.next(Go)
            if (go.bucket, go.nbytes) != (bucket.index, bucket.nbytes):
                planned = f"bucket {bucket.index} of {bucket.nbytes}"
                raise mismatch(f"bucket {go.bucket} of {go.nbytes} bytes was sent where the plan has {planned}")
            self._wait_at_most(opening.patience_s)
            try:
                travelling = self.medium.post(bucket, go)
            except Broken as error:
                raise self.broke(error) from None
            if travelling is None:
                self._put_away(bucket, go, take, progress)
                continue
            if before is not None:
                self._put_away(*before, take, progress)
            self._settle(travelling, bucket)
            before = bucket, go
        if before is not None:
            self._put_away(*before, take, progress)
        return sum(bucket.nbytes for bucket in opening.plan.buckets)

    def _settle(self, travelling: Travelling, bucket: Bucket) -> None:
        deadline = self.deadline()
        while True:
            try:
                if travelling.done():
                    return
            except Broken as error:
                raise self.broke(error) from None
            self.wait(deadline, f"bucket {bucket.index} did not arrive", travelling.poll_s)

    def _put_away(self, bucket: Bucket, go: Go, take: Take, progress: Callable[[int], None]) -> None:
        data = self.medium.data(bucket, go)
        with self.medium.taking():
            if go.digest and go.digest != to_hex(tensor_digest(data)):
                why = f"bucket {bucket.index} is not what was sent: it changed on the way to this rank"
                raise Aborted(Failure("tensor_digest", why))
            for chunk in bucket.chunks:
                self._check()
                take(chunk, data[chunk.offset : chunk.offset + chunk.nbytes])
        del data
        self.connection.post(Ready(bucket.index + 1))
        progress(bucket.nbytes)

    def _check(self) -> None:
        """Raises Cancelled."""
        if self._should_stop():
            raise Cancelled

    def _check_end(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _hear(self) -> None:
        try:
            for message in self.connection.messages():
                if isinstance(message, Close):
                    self._ended = Aborted(*(message.failures or (Failure("peer_lost", "the sender gave no reason"),)))
                    return
                if isinstance(message, Waiting):
                    self._signed = time.monotonic()
                else:
                    self._heard.append(message)
        except ConnectionClosed:
            self._ended = Aborted(Failure("peer_lost", "the sender closed its connection"))
        except wire.WireError as error:
            self._ended = mismatch(f"the sender said what is no message: {error}")


def _judge(opening: Opening, expected: Callable[[StreamPlan], None]) -> None:
    """Against the manifest first: cutting a plan of absurd sizes would take for ever."""
    try:
        opening.plan.check()
    except wire.WireError as error:
        raise mismatch(f"{error.where}: {error.why}") from None
    expected(opening.plan)
    if opening.plan.digest != opening.digest:
        raise mismatch("the sender cuts its plan in another way")


def mismatch(why: str) -> Aborted:
    return Aborted(Failure("stream_mismatch", why))
