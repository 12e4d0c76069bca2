"""One update as its sender sees it: waiting for receivers, hearing them, forming their group, posting buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socket import socket

import torch

from transports.broadcast.forming import Forming, Relay
from transports.broadcast.messages import Key, encode
from transports.broadcast.peers import Peer
from transports.broadcast.pending import Broken, Group, Pending
from transports.buckets import StreamPlan
from transports.control.blame import Blame, named
from transports.control.channel import Alarm, Gone, wait
from transports.control.messages import Goodbye, Waiting
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: After a group broke: how long to wait for somebody's word why.
LAST_WORDS_S = 1.0
_WAITING = encode(Waiting())


class Round:
    """`aborted`: the reason for which this update is to end, or empty. `sign_s`: how often receivers hear that the
    sender waits. `sent`: buckets posted.
    """

    def __init__(
        self, offer: StreamOffer, plan: StreamPlan, alarm: Alarm, aborted: Callable[[], str], sign_s: float
    ) -> None:
        self.offer = offer
        self.plan = plan
        self.peers: dict[int, Peer] = {}
        self.sent = 0
        self._alarm, self._aborted, self._sign_s = alarm, aborted, sign_s
        self._signed = float("-inf")
        self._flying: Pending | None = None
        self._forming: Forming | None = None

    def form(self, make: Callable[[Relay], Group], deadline: float) -> Group:
        """Until this side is in the group; the others say so themselves."""
        self._forming = forming = Forming(make, self._alarm.ring)
        for peer in self.peers.values():
            self._pass_on(peer)
        while True:
            try:
                for key, value in forming.outgoing():
                    self.tell(encode(Key(key, value.hex())))
                group = forming.group()
                if group is not None:
                    self._forming = None
                    return group
                self.hear(self.wait(self.peers.values(), deadline))
            except Broken as error:
                raise self._blame(error) from None
            except TimeoutError:
                late = [number for number, peer in self.peers.items() if not peer.formed]
                raise named(self.offer, "peer_timeout", late, "did not join the group") from None

    def post(self, group: Group, data: torch.Tensor, go: bytes, deadline: float) -> None:
        """When the bucket before has left, and all receivers have room for this one."""
        self.settle(deadline)
        self.until(lambda peer: peer.ready > self.sent, deadline, f"has no room for bucket {self.sent}")
        self.tell(go)
        try:
            self._flying = group.broadcast(data, self._alarm.ring)
        except Broken as error:
            raise self._blame(error) from None
        self.sent += 1

    def settle(self, deadline: float) -> None:
        """Until the bucket under way has left."""
        while self._flying is not None:
            try:
                if self._flying.done():
                    self._flying = None
                    return
                self.hear(self.wait(self.peers.values(), deadline, self._flying.poll_s))
            except Broken as error:
                raise self._blame(error) from None
            except TimeoutError:
                why = f"did not take bucket {self.sent - 1}"
                raise named(self.offer, "peer_timeout", self._behind(), why) from None

    def until(self, true: Callable[[Peer], bool], deadline: float, why: str) -> None:
        """Raises Aborted `peer_timeout` with all those of whom it is not true in time."""
        while late := [number for number, peer in self.peers.items() if not true(peer)]:
            try:
                self.hear(self.wait(self.peers.values(), deadline))
            except TimeoutError:
                raise named(self.offer, "peer_timeout", late, why) from None

    def tell(self, message: bytes, but: Peer | None = None) -> None:
        for peer in self.peers.values():
            if peer is not but:
                peer.channel.post(message)

    def wait(self, what: Iterable[Peer | socket], deadline: float, at_most: float | None = None) -> list[Peer | socket]:
        """Those with something to say; none after `at_most` seconds, when something happened in another thread, or
        now and then, all of them having been told that it is this sender that waits.

        Raises TimeoutError when time is over, Aborted when told to end: `client_abort`, or why a receiver has left,
        which is what made somebody tell it.
        """
        asked = list(what)
        left = deadline - time.monotonic()
        ready = wait([*asked, self._alarm], min(left, self._sign_s if at_most is None else at_most))
        if self._alarm in ready:
            self._alarm.hush()
        if reason := self._aborted():
            blame = self._last_words(asked)
            raise blame.error() if blame.known else Aborted(Failure("client_abort", reason))
        if not ready and time.monotonic() >= deadline:
            raise TimeoutError
        if not ready:
            self._sign(asked)
        return [each for each in ready if not isinstance(each, Alarm)]

    def hear_now(self) -> None:
        """Without waiting: who is gone is noticed while a trainer fills a buffer."""
        with suppress(TimeoutError):
            self.hear(self.wait(self.peers.values(), time.monotonic()))

    def hear(self, ready: Iterable[Peer | socket]) -> None:
        """Raises Aborted when one of them gave up, is gone, or talks nonsense."""
        blame = Blame(self.offer)
        for peer in ready:
            if isinstance(peer, Peer):
                self._hear(peer, blame)
                self._pass_on(peer)
        if blame:
            raise blame.error()

    def drop(self) -> bool:
        """Whether something was under way, whose memory must not be used again."""
        if self._forming is not None:
            self._forming.give_up()
        return self._flying is not None

    def _sign(self, what: Iterable[Peer | socket]) -> None:
        now = time.monotonic()
        if now - self._signed < self._sign_s:
            return
        self._signed = now
        for peer in {*what, *self.peers.values()}:
            if isinstance(peer, Peer) and peer.hello is not None and not peer.done:
                peer.channel.post(_WAITING)

    def _last_words(self, what: Iterable[Peer | socket]) -> Blame:
        blame = Blame(self.offer)
        for peer in what:
            if isinstance(peer, Peer) and peer.hello is not None:
                blame.hear(peer.number, peer.channel.messages)
        return blame

    def _hear(self, peer: Peer, blame: Blame) -> None:
        try:
            for message in peer.channel.messages():
                if isinstance(message, Goodbye):
                    peer.left = True
                    blame.left(peer.number, message.failures)
                elif not peer.note(message):
                    blame.seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
        except Gone:
            blame.seen(peer.number, "peer_lost", "closed its connection")
        except wire.WireError as error:
            blame.seen(peer.number, "stream_mismatch", f"said what is no message: {error}")

    def _pass_on(self, peer: Peer) -> None:
        while peer.keys:
            key = peer.keys.popleft()
            if self._forming is not None:
                self._forming.relay.learn(key.name, bytes.fromhex(key.value))
            self.tell(encode(key), but=peer)

    def _blame(self, error: Broken) -> Aborted:
        """A group tells that it broke, and not through whom: those who are gone or give up have a moment to be seen. If
        all that is heard is that it broke, it was one of those who did not get on.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        blame = Blame(self.offer)
        with suppress(TimeoutError):
            while not blame.known:
                try:
                    ready = self.wait([peer for peer in self.peers.values() if not peer.left], deadline)
                except Aborted as told:
                    return told
                for peer in ready:
                    if isinstance(peer, Peer):
                        self._hear(peer, blame)
        if not blame.known:
            for number in self._behind():
                blame.seen(number, "peer_lost", f"did not get on, and the group broke: {error}")
        return blame.error()

    def _behind(self) -> list[int]:
        """Receivers that have not shown to be through with what was posted; all, if every one has."""
        late = [number for number, peer in self.peers.items() if peer.ready <= self.sent]
        return late or list(self.peers)
