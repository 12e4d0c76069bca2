"""One update as its sender sees it: waiting for receivers, hearing them, posting buckets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from transports.buckets import Bucket, StreamPlan
from transports.stream.addresses import Arrivals
from transports.stream.connection import Connection, ConnectionClosed, Waker, wait
from transports.stream.failures import FailureAttribution, named
from transports.stream.medium import Broken, SenderMedium, Travelling
from transports.stream.messages import AHEAD, Agreed, Close, Go, Hello, Key, Message, Ready, Waiting, encode
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.protocol import wire

#: After a medium broke: how long to wait for what a receiver has to say about it.
LAST_WORDS_S = 1.0
_WAITING = encode(Waiting())


class SenderSession:
    """`plans`: of every receiver, by its number. `aborted`: the reason for which this update is to end, or empty.
    `sign_s`: how often receivers hear that the sender waits. `posted`: buckets.
    """

    def __init__(
        self,
        offer: StreamOffer,
        plans: Mapping[int, StreamPlan],
        medium: SenderMedium,
        waker: Waker,
        aborted: Callable[[], str],
        sign_s: float,
    ) -> None:
        self.offer = offer
        self.plans = plans
        self.waker = waker
        self.peers: dict[int, Peer] = {}
        self.posted = 0
        self.medium, self._aborted, self._sign_s = medium, aborted, sign_s
        self._signed = time.monotonic()
        self._travelling: Travelling | None = None
        self._asked: Bucket | None = None
        self._lying: dict[int, list[tuple[Peer, int]]] = {}  # buffer -> who reads it, and when each has

    @property
    def buckets(self) -> int:
        """Of the longest plan."""
        return max((len(plan.buckets) for plan in self.plans.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Of the largest bucket."""
        return max((plan.room for plan in self.plans.values()), default=0)

    def meet(self, peers: dict[int, Peer]) -> None:
        self.peers = peers
        for number, peer in peers.items():
            peer.plan = self.plans[number]

    def room(self, bucket: Bucket, deadline: float) -> torch.Tensor:
        """Memory to be filled, free of what lay there. Raises Aborted."""
        self.hear_now()
        self._takers(bucket)
        if self.medium.lends:
            readers = dict(self._lying.get(self._buffer, ()))
            self.until(lambda peer: peer.taken >= readers.get(peer, 0), deadline, "did not put away the bucket before")
        self._asked = bucket
        return self.medium.room(self._buffer, bucket.nbytes)

    def post(self, bucket: Bucket, digest: Callable[[torch.Tensor], str], deadline: float) -> None:
        """When the bucket before has left, and all its receivers have room for this one."""
        takers, buffer = self._takers(bucket), self._buffer
        if bucket is not self._asked and bucket != self._asked:
            raise mismatch(f"no room was asked for, for bucket {bucket.index}")
        self.medium.filled()
        data = self.medium.room(buffer, bucket.nbytes)
        go = encode(Go(bucket.index, bucket.nbytes, digest(data), buffer if self.medium.lends else 0))
        del data
        self.settle(deadline)
        self.until(lambda peer: peer not in takers or peer.has_room, deadline, f"has no room for bucket {bucket.index}")
        for peer in takers:
            peer.connection.post(go)
        try:
            self._travelling = self.medium.post(buffer, bucket.nbytes, self.waker.set)
        except Broken as error:
            raise self.broke(error) from None
        for peer in takers:
            peer.sent += 1
        self._lying[buffer] = [(peer, peer.sent) for peer in takers]
        self._asked = None
        self.posted += 1

    def settle(self, deadline: float) -> None:
        """Until the bucket under way has left."""
        while self._travelling is not None:
            try:
                if self._travelling.done():
                    self._travelling = None
                    return
                self.hear(self.wait(self.peers.values(), deadline, self._travelling.poll_s))
            except Broken as error:
                raise self.broke(error) from None
            except TimeoutError:
                why = f"did not take bucket {self.posted - 1}"
                raise named(self.offer, "peer_timeout", self._behind(), why) from None

    def until(self, true: Callable[[Peer], bool], deadline: float, why: str) -> None:
        """Raises Aborted `peer_timeout` with every receiver of which it is not true in time."""
        while late := [number for number, peer in self.peers.items() if not true(peer)]:
            try:
                self.hear(self.wait(self.peers.values(), deadline))
            except TimeoutError:
                raise named(self.offer, "peer_timeout", late, why) from None

    def tell(self, message: Message, but: Peer | None = None) -> None:
        frame = encode(message)
        for peer in self.peers.values():
            if peer is not but:
                peer.connection.post(frame)

    def wait(
        self, what: Iterable[Peer | Arrivals], deadline: float, at_most: float | None = None
    ) -> list[Peer | Arrivals]:
        """Those with something to say; none after `at_most` seconds, when something happened in another thread, or now
        and then, all receivers having been told that it is this sender who waits.

        Raises TimeoutError when time is over, Aborted when told to end: `client_abort`, or why a receiver has left,
        which is what made the other thread tell it.
        """
        watched = list(what)
        left = deadline - time.monotonic()
        ready = wait([*watched, self.waker], min(left, self._sign_s if at_most is None else at_most))
        if self.waker in ready:
            self.waker.clear()
        if reason := self._aborted():
            failures = self._last_words(watched)
            raise failures.error() if failures.known else Aborted(Failure("client_abort", reason))
        if not ready and time.monotonic() >= deadline:
            raise TimeoutError
        self._sign(watched)
        return [each for each in ready if not isinstance(each, Waker)]

    def hear_now(self) -> None:
        """Without waiting: a receiver that is gone is noticed while a trainer fills a buffer."""
        with suppress(TimeoutError):
            self.hear(self.wait(self.peers.values(), time.monotonic()))

    def hear(self, ready: Iterable[Peer | Arrivals]) -> None:
        """Raises Aborted when one of them gave up, is gone, or talks nonsense."""
        failures = FailureAttribution(self.offer)
        for peer in ready:
            if isinstance(peer, Peer):
                self.hear_one(peer, failures)
        if failures:
            raise failures.error()

    def broke(self, error: Broken) -> Aborted:
        """A medium tells that it broke, and not through whom: those who are gone or give up have a moment to be seen.
        If all that is heard is that it broke, it was one of those who did not get on.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        failures = FailureAttribution(self.offer)
        with suppress(TimeoutError):
            while not failures.known:
                try:
                    ready = self.wait([peer for peer in self.peers.values() if not peer.left], deadline)
                except Aborted as told:
                    return told
                for peer in ready:
                    if isinstance(peer, Peer):
                        self.hear_one(peer, failures)
        if not failures.known:
            for number in self._behind():
                failures.seen(number, "peer_lost", f"did not get on, and the group broke: {error}")
        return failures.error()

    @property
    def _buffer(self) -> int:
        """The one whose turn it is."""
        return self.posted % max(self.medium.buffers, 1)

    def _takers(self, bucket: Bucket) -> list[Peer]:
        """The receivers that it is for. Raises Aborted `stream_mismatch` if it is the next bucket of no plan."""
        takers = [peer for peer in self.peers.values() if peer.awaits(bucket)]
        if not takers:
            raise mismatch(f"bucket {bucket.index} of {bucket.nbytes} bytes is not the next one of the plan")
        return takers

    def _sign(self, what: Iterable[Peer | Arrivals]) -> None:
        now = time.monotonic()
        if now - self._signed < self._sign_s:
            return
        self._signed = now
        for peer in {*what, *self.peers.values()}:
            if isinstance(peer, Peer) and peer.hello is not None and not (peer.answered and peer.done):
                peer.connection.post(_WAITING)

    def _last_words(self, what: Iterable[Peer | Arrivals]) -> FailureAttribution:
        failures = FailureAttribution(self.offer)
        for peer in what:
            if isinstance(peer, Peer) and peer.hello is not None:
                failures.hear(peer.number, peer.connection.messages)
        return failures

    def hear_one(self, peer: Peer, failures: FailureAttribution) -> bool:
        """Take what a receiver says; False: what is wrong with it was noted. One that said yes to the plan goes on at
        once, so it may have said more.
        """
        try:
            for message in peer.connection.messages():
                if isinstance(message, Close):
                    peer.left = True
                    self.medium.left(peer, alive=True)
                    failures.left(peer.number, message.failures)
                    return False
                if not peer.note(message) or (peer.keys and not self.medium.heard(self, peer)):
                    failures.seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
                    return False
        except ConnectionClosed:
            self.medium.left(peer, alive=False)
            failures.seen(peer.number, "peer_lost", "closed its connection")
            return False
        except wire.WireError as error:
            failures.seen(peer.number, "stream_mismatch", f"said what is no message: {error}")
            return False
        return True

    def _behind(self) -> list[int]:
        """Receivers that have not shown to be through with what was posted; all, if every one has."""
        late = [number for number, peer in self.peers.items() if not peer.has_room]
        return late or list(self.peers)


def mismatch(why: str) -> Aborted:
    return Aborted(Failure("stream_mismatch", why))


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `plan`: what this receiver gets; `sent`: buckets of it that were posted; `taken`: that it has put
    away, or -1 before it is in place; `left`: it has said Close; `keys`: that its side of
    the medium has said and the sender's has not heard.
    """

    connection: Connection
    hello: Hello | None = None
    answered: bool = False
    plan: StreamPlan = field(default_factory=lambda: StreamPlan(()))
    sent: int = 0
    taken: int = -1
    left: bool = False
    keys: deque[Key] = field(default_factory=deque)

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def number(self) -> int:
        return self.hello.number if self.hello is not None else -1

    @property
    def joined(self) -> bool:
        return self.taken >= 0

    @property
    def has_room(self) -> bool:
        return self.joined and self.sent < self.taken + AHEAD

    @property
    def done(self) -> bool:
        """It has everything."""
        return self.taken == len(self.plan.buckets)

    def awaits(self, bucket: Bucket) -> bool:
        """Whether this bucket is the next one of its plan."""
        return self.sent < len(self.plan.buckets) and self.plan.buckets[self.sent] == bucket

    def next_update(self) -> None:
        self.hello, self.answered, self.sent, self.taken = None, False, 0, -1
        self.keys.clear()

    def note(self, message: Message) -> bool:
        """Whether it may say that now. Hello and Close are not heard here."""
        if isinstance(message, Agreed) and not self.answered:
            self.answered = True
        elif isinstance(message, Key) and self.answered and not self.joined:
            self.keys.append(message)
        elif isinstance(message, Ready) and self.answered and message.taken == self.taken + 1 <= self.sent:
            self.taken += 1
        else:
            return False
        return True

    def hang_up(self, *failures: Failure) -> None:
        """Tell why and close. Never waits."""
        if not self.connection.closed:
            self.connection.post(Close(failures))
            self.connection.close()
