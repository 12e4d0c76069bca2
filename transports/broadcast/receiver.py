"""The receiving end of a broadcast: one receiver per update, and the hub that keeps line, group and buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transports.base import Cancelled
from transports.broadcast.forming import Forming
from transports.broadcast.groups import BACKENDS, device_name, settle_device
from transports.broadcast.hearing import Hearing, mismatch
from transports.broadcast.line import Line, call, seats_digest
from transports.broadcast.messages import Answer, Done, End, Formed, Go, Hello, Key, Opening, Ready, group_limit
from transports.broadcast.pending import Broken, Group, Pending, let_go
from transports.buckets import Bucket, Chunk, StreamPlan
from transports.control.channel import SENDER_LIMIT, Alarm, Gone
from transports.control.messages import Goodbye, Waiting
from transports.digest import tensor_digest, to_hex
from updater import wire
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE

#: Until the sender has said its plan: it may still be waiting for others.
MEET_S = 60.0

Take = Callable[[Chunk, torch.Tensor], None]


class BroadcastHub:
    """A `transports.registry.Hub`. `patience_s`: how long to wait for anything from a sender, instead of `MEET_S` and
    of what the sender says about itself.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self.patience_s = patience_s
        self.alarm = Alarm()
        self.line: Line | None = None
        self.group: Group | None = None
        self.group_name = ""
        self.slots: list[torch.Tensor] = []
        self._sender = ("", "")

    def receiver(self, offer: StreamOffer, number: int) -> BroadcastReceiver:
        return BroadcastReceiver(self, offer, number)

    def meet(self, offer: StreamOffer, deadline: float, check: Callable[[], None]) -> Line:
        """The line of the update before, while session and sender are the same and it still stands; else a new one."""
        if self._sender != (offer.address, offer.session):
            self.drop()
        if self.line is not None and not _stands(self.line):
            self.line.close()
            self.line = None
        if self.line is None:
            self.line = call(offer.address, SENDER_LIMIT, deadline, check)
            self._sender = (offer.address, offer.session)
        return self.line

    def make_room(self, group: Group, nbytes: int) -> list[torch.Tensor]:
        """Two buffers, kept while they suffice."""
        if not self.slots or self.slots[0].numel() < nbytes:
            self.slots = []
            self.slots = [group.room(nbytes) for _ in range(2)]
        return self.slots

    def drop(self) -> None:
        """Nothing of what was is used again, memory included: a collective that did not end may still write there."""
        self.slots = []
        self.drop_group()
        if self.line is not None:
            self.line.close()
        self.line, self._sender = None, ("", "")

    def drop_group(self) -> None:
        group, self.group, self.group_name = self.group, None, ""
        let_go(group)

    def close(self) -> None:
        self.drop()
        self.alarm.close()


class BroadcastReceiver:
    """A `transports.stream.StreamReceiver` of one update."""

    def __init__(self, hub: BroadcastHub, offer: StreamOffer, number: int) -> None:
        self._hub, self._offer, self._number = hub, offer, number
        self._used = False

    def receive(
        self,
        expected: Callable[[StreamPlan], None],
        take: Take,
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        self._used = True
        with self._ending_badly():
            hearing = self._meet(should_stop)
            opening = hearing.next(Opening)
            _judge(opening, expected)
            hearing.line.post(Answer())
            hearing.patience_s = self._hub.patience_s or opening.begin_within_s
            group = self._join(hearing, opening)
            self._hub.make_room(group, opening.plan.room)
            hearing.line.post(Formed())
            received = self._buckets(hearing, group, opening, take, progress)
            end = hearing.next(End)
            if end.buckets != len(opening.plan.buckets):
                raise mismatch(f"{end.buckets} buckets were sent, {len(opening.plan.buckets)} were announced")
            hearing.line.post(Done())
            return received

    def close(self, *, normal: bool) -> None:
        if not normal and self._used:
            self._hub.drop()

    def _meet(self, should_stop: Callable[[], bool]) -> Hearing:
        def check() -> None:
            if should_stop():
                raise Cancelled

        patience_s = self._hub.patience_s or MEET_S
        line = self._hub.meet(self._offer, time.monotonic() + patience_s, check)
        held = self._hub.group_name
        seats = seats_digest(self._offer)
        line.post(Hello(self._offer.session, self._number, seats, held, device_name(), RELEASE))
        return Hearing(line, self._hub.alarm, patience_s, should_stop)

    def _join(self, hearing: Hearing, opening: Opening) -> Group:
        hub = self._hub
        if hub.group is not None and hub.group_name == opening.group:
            return hub.group
        hub.drop_group()
        rank, size, host = self._number + 1, self._offer.receivers + 1, hearing.line.local_host
        make, limit = BACKENDS[opening.backend], group_limit(opening.patience_s)
        forming = Forming(lambda relay: make(relay, rank, size, host, limit), hub.alarm.ring)
        try:
            hub.group, hub.group_name = _formed(hearing, forming), opening.group
        except BaseException:
            forming.give_up()
            raise
        return hub.group

    def _buckets(
        self, hearing: Hearing, group: Group, opening: Opening, take: Take, progress: Callable[[int], None]
    ) -> int:
        """While a bucket travels, the one before is put where it belongs."""
        buckets, before = opening.plan.buckets, None
        if buckets:
            hearing.line.post(Ready(0))
        for bucket in buckets:
            go = hearing.next(Go)
            if (go.bucket, go.nbytes) != (bucket.index, bucket.nbytes):
                planned = f"bucket {bucket.index} of {bucket.nbytes}"
                raise mismatch(f"bucket {go.bucket} of {go.nbytes} bytes was sent where the plan has {planned}")
            hearing.patience_s = self._hub.patience_s or opening.patience_s
            data = self._hub.slots[bucket.index % 2][: bucket.nbytes]
            pending = self._post(hearing, group, data)
            if before is not None:
                self._scatter(hearing, before, take, progress)
            if bucket.index + 1 < len(buckets):
                hearing.line.post(Ready(bucket.index + 1))
            _settle(hearing, pending, bucket)
            if go.digest and go.digest != to_hex(tensor_digest(data)):
                why = f"bucket {bucket.index} is not what was sent: it changed on the way to this rank"
                raise Aborted(Failure("tensor_digest", why))
            before = bucket
        if before is not None:
            self._scatter(hearing, before, take, progress)
        return sum(bucket.nbytes for bucket in buckets)

    def _post(self, hearing: Hearing, group: Group, data: torch.Tensor) -> Pending:
        try:
            return group.broadcast(data, self._hub.alarm.ring)
        except Broken as error:
            raise hearing.blame(error) from None

    def _scatter(self, hearing: Hearing, bucket: Bucket, take: Take, progress: Callable[[int], None]) -> None:
        data = self._hub.slots[bucket.index % 2]
        for chunk in bucket.chunks:
            hearing.check()
            take(chunk, data[chunk.offset : chunk.offset + chunk.nbytes])
        settle_device()
        progress(bucket.nbytes)

    @contextmanager
    def _ending_badly(self) -> Iterator[None]:
        """Whatever goes wrong is said to the sender, and nothing is used again."""
        try:
            yield
        except BaseException as error:
            if self._hub.line is not None:
                self._hub.line.post(Goodbye(_told(error)))
            self._hub.drop()
            raise


def _judge(opening: Opening, expected: Callable[[StreamPlan], None]) -> None:
    """Against the manifest first: cutting a plan of absurd sizes would take for ever."""
    try:
        opening.plan.check()
    except wire.WireError as error:
        raise mismatch(f"{error.where}: {error.why}") from None
    expected(opening.plan)
    if opening.plan.digest != opening.digest:
        raise mismatch("the sender cuts its plan in another way")


def _formed(hearing: Hearing, forming: Forming) -> Group:
    deadline = hearing.deadline()
    while True:
        for key, value in forming.outgoing():
            hearing.line.post(Key(key, value.hex()))
        while hearing.heard:
            message = hearing.next(Key)
            forming.relay.learn(message.name, bytes.fromhex(message.value))
        try:
            group = forming.group()
        except Broken as error:
            raise hearing.blame(error) from None
        if group is not None:
            return group
        hearing.wait(deadline, "the group did not form")


def _settle(hearing: Hearing, pending: Pending, bucket: Bucket) -> None:
    deadline = hearing.deadline()
    while True:
        try:
            if pending.done():
                return
        except Broken as error:
            raise hearing.blame(error) from None
        hearing.wait(deadline, f"bucket {bucket.index} did not arrive", pending.poll_s)


def _stands(line: Line) -> bool:
    """Whether the sender has said nothing since the update before, but that it waited for another receiver."""
    try:
        return all(isinstance(message, Waiting) for message in line.messages())
    except (Gone, wire.WireError):
        return False


def _told(error: BaseException) -> tuple[Failure, ...]:
    if isinstance(error, LiveweightsError):
        return error.failures[:100]
    if isinstance(error, Cancelled):
        return (Failure("client_abort", "its update was given up"),)
    return (Failure("rank_failed", f"{type(error).__name__}: {error}"[:1000]),)
