"""The receiver of a stream inside a machine: one connection, the sender's buffers mapped, bucket after bucket."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from transports.base import Cancelled
from transports.buckets import Bucket, Chunk, StreamPlan
from transports.control.channel import Gone, wait
from transports.control.messages import Goodbye, Waiting
from transports.digest import tensor_digest, to_hex
from transports.local.line import Line
from transports.local.memory import ReceiverMemory
from transports.local.messages import (
    PATIENCE_S,
    TOLD,
    Ack,
    Announce,
    Answer,
    Buffers,
    Hello,
    Message,
    StreamOpening,
)
from updater import wire
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE

#: How often a waiting receiver asks whether it should stop.
LOOK_S = 0.05
M = TypeVar("M", bound=Message)


class Link:
    """A connection to a sender with what its session has mapped here. Used by one thread at a time."""

    def __init__(self, channel: Line, memory: ReceiverMemory, address: str, session: str) -> None:
        self.channel = channel
        self.memory = memory
        self.address = address
        self.session = session
        self.buffers: list[torch.Tensor] = []
        self._said: deque[Message] = deque()

    def fileno(self) -> int:
        return self.channel.fileno()

    def map(self, message: Buffers) -> None:
        """In place of what was mapped. Raises Aborted."""
        self.buffers.clear()
        for descriptor in message.buffers:
            files = self._files(self.memory.files_of(descriptor))
            try:
                self.buffers.append(self.memory.open(descriptor, files))
            finally:
                for number in files:
                    os.close(number)

    def hear(self, kind: type[M], within_s: float, should_stop: Callable[[], bool]) -> M:
        """The next message, which must be of this kind; buffers on the way are mapped. `within_s`: how long nothing may
        be said. Raises Aborted, Cancelled.
        """
        while True:
            message = self._next(time.monotonic() + within_s, should_stop)
            if isinstance(message, kind):
                return message
            if isinstance(message, Waiting):
                continue
            if isinstance(message, Buffers):
                self.map(message)
            elif isinstance(message, Goodbye):
                why = "; ".join(failure.message for failure in message.failures)[:1000]
                code = _farewell(message)
                raise Aborted(Failure(code, why or "the sender hung up"))
            else:
                raise Aborted(Failure("stream_mismatch", f"the sender said {message.kind} out of turn"))

    def stands(self) -> bool:
        """Of one that is kept: whether the sender has said nothing since, but that it waited for another receiver."""
        try:
            said = self.channel.messages()
            return not self.channel.ended and all(isinstance(message, Waiting) for message in said)
        except (Gone, wire.WireError):
            return False

    def close(self, *failures: Failure) -> None:
        """Unmap, then say so and why, then hang up."""
        self.buffers.clear()
        if not self.channel.closed:
            self.channel.post(Goodbye(failures))
            self.channel.close()

    def _next(self, deadline: float, should_stop: Callable[[], bool]) -> Message:
        while not self._said:
            if should_stop():
                raise Cancelled
            left = deadline - time.monotonic()
            wait([self.channel], min(max(left, 0.0), LOOK_S))
            try:
                self._said.extend(self.channel.messages())
            except Gone:
                raise Aborted(Failure("peer_lost", "the sender is gone")) from None
            except wire.WireError as error:
                raise Aborted(Failure("stream_mismatch", f"the sender said what is no message: {error}")) from None
            if (
                not self._said and left <= 0
            ):  # and not before having looked: a process that was held up itself blames no peer
                raise Aborted(Failure("peer_timeout", "the sender said nothing in time"))
        return self._said.popleft()

    def _files(self, count: int) -> list[int]:
        held = self.channel.descriptors
        if count > len(held):
            if self.channel.truncated:
                why = "this process may open no more files (ulimit -n): a shared buffer's descriptor was lost"
                raise Aborted(Failure("no_space", why))
            raise Aborted(Failure("stream_mismatch", "a shared buffer came without its descriptor"))
        return [held.popleft() for _ in range(count)]


class Links(Protocol):
    """What a receiver asks of its hub."""

    memory: ReceiverMemory
    patience_s: float | None

    def take(self, offer: StreamOffer, should_stop: Callable[[], bool]) -> Link:
        """A kept one of this session, or a new one. Raises Aborted, Cancelled."""

    def keep(self, link: Link) -> None:
        """Until the next update of its session, or until its sender is gone."""


class LocalReceiver:
    """A `transports.stream.StreamReceiver`."""

    def __init__(self, links: Links, offer: StreamOffer, number: int) -> None:
        self._links = links
        self._offer = offer
        self._number = number
        self._link: Link | None = None
        self._done = False

    def receive(
        self,
        expected: Callable[[StreamPlan], None],
        take: Callable[[Chunk, torch.Tensor], None],
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        memory = self._links.memory
        devices, handle_format = memory.greeting()
        self._link = link = self._links.take(self._offer, should_stop)
        try:
            runtime = f"torch {torch.__version__}"
            session, number = self._offer.session, self._number
            link.channel.post(Hello(session, number, os.getpid(), devices, handle_format, runtime, RELEASE))
            own = self._links.patience_s
            opening = link.hear(StreamOpening, PATIENCE_S if own is None else own, should_stop)
            self._judge(link, opening, expected)
            received = 0
            for bucket in opening.plan.buckets:
                announce = link.hear(Announce, self._patience(opening.patience_s), should_stop)
                data = _located(link.buffers, bucket, announce)
                with memory.taking():
                    _compared(announce, data)
                    _take_all(bucket, data, take, should_stop)
                del data
                link.channel.post(Ack(bucket.index))
                progress(bucket.nbytes)
                received += bucket.nbytes
            self._done = True
            return received
        except BaseException as error:
            self._hang_up(*_reasons(error))
            raise

    def close(self, *, normal: bool) -> None:
        link = self._link
        if link is None:
            return
        if normal and self._done:
            self._link = None
            self._links.keep(link)
        else:
            self._hang_up(Failure("client_abort", "the receiver gave the stream up"))

    def _patience(self, told_s: float) -> float:
        own = self._links.patience_s
        return told_s if own is None else min(own, told_s)

    def _judge(self, link: Link, opening: StreamOpening, expected: Callable[[StreamPlan], None]) -> None:
        try:
            opening.plan.check()
            if opening.plan.digest != opening.digest:
                raise Aborted(Failure("stream_mismatch", "the sender cuts its plan in another way"))
            expected(opening.plan)
        except wire.WireError as error:
            raise self._refused(link, Failure("stream_mismatch", f"{error.where}: {error.why}")) from None
        except LiveweightsError as error:
            raise self._refused(link, *error.failures) from None
        link.channel.post(Answer())

    def _refused(self, link: Link, *failures: Failure) -> Aborted:
        link.channel.post(Answer(failures))
        return Aborted(*failures)

    def _hang_up(self, *failures: Failure) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(*failures)


def _farewell(message: Goodbye) -> str:
    """What is wrong with the stream keeps its code; everything else means that the sender is gone."""
    return next((each.code for each in message.failures if each.code in TOLD), "peer_lost")


def _located(buffers: Sequence[torch.Tensor], bucket: Bucket, announce: Announce) -> torch.Tensor:
    """Raises Aborted `stream_mismatch` for another bucket than the next, or one that does not lie in a buffer."""
    if (announce.bucket, announce.nbytes) != (bucket.index, bucket.nbytes):
        why = f"bucket {announce.bucket} of {announce.nbytes} bytes where {bucket.index} of {bucket.nbytes} was to come"
        raise Aborted(Failure("stream_mismatch", why))
    room = buffers[announce.buffer].numel() if announce.buffer < len(buffers) else -1
    if announce.offset + announce.nbytes > room:
        raise Aborted(Failure("stream_mismatch", f"bucket {announce.bucket} lies outside of its buffer"))
    return buffers[announce.buffer][announce.offset : announce.offset + announce.nbytes]


def _compared(announce: Announce, data: torch.Tensor) -> None:
    """Raises Aborted `tensor_digest`."""
    if announce.digest and to_hex(tensor_digest(data)) != announce.digest:
        raise Aborted(Failure("tensor_digest", f"bucket {announce.bucket} is not what the sender put there"))


def _take_all(
    bucket: Bucket, data: torch.Tensor, take: Callable[[Chunk, torch.Tensor], None], should_stop: Callable[[], bool]
) -> None:
    for chunk in bucket.chunks:
        if should_stop():
            raise Cancelled
        take(chunk, data[chunk.offset : chunk.offset + chunk.nbytes])


def _reasons(error: BaseException) -> tuple[Failure, ...]:
    if isinstance(error, LiveweightsError):
        return error.failures[:100]
    if isinstance(error, Cancelled):
        return (Failure("client_abort", "cancelled"),)
    return (Failure("internal", type(error).__name__),)
