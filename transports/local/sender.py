"""The sender of a stream inside a machine: two buffers, each free again when every receiver has copied out of it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from transports.buckets import Bucket, StreamPlan
from transports.control.blame import Blame, named
from transports.control.channel import Alarm, Gone, wait
from transports.control.messages import LONGEST_PATIENCE_S, SIGN_S, Goodbye, Waiting
from transports.digest import tensor_digest, to_hex
from transports.local.addresses import Listener, fresh_address
from transports.local.meeting import Meeting
from transports.local.memory import SenderBuffer, SenderMemory
from transports.local.messages import PATIENCE_S, TOLD, Ack, Announce, Buffers, StreamOpening, encode
from transports.local.peers import Peer
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: One to be filled while the other is copied out of.
BUFFERS = 2

_WAITING = encode(Waiting())


class _Round:
    """One update. `sent`: buckets announced."""

    def __init__(self, offer: StreamOffer, plan: StreamPlan) -> None:
        self.offer = offer
        self.plan = plan
        self.peers: dict[int, Peer] = {}
        self.sent = 0

    def behind(self, buckets: int) -> set[int]:
        """Receivers that have not acknowledged so many."""
        return {number for number, peer in self.peers.items() if peer.acknowledged < buckets}


class LocalSender:
    """A `transports.stream.StreamSender` over any `SenderMemory`. See `transports.shared_memory` for the options."""

    def __init__(
        self, memory: SenderMemory, *, patience_s: float = PATIENCE_S, digests: bool = False, folder: str | None = None
    ) -> None:
        memory.check()
        self.kind = memory.kind
        self._memory = memory
        self._patience_s = min(patience_s, LONGEST_PATIENCE_S)
        self._digests = digests
        self._folder = folder
        self._alarm = Alarm()
        self._lock = threading.RLock()  # of the next five, which `abort` shares
        self._listener = Listener(fresh_address(folder))
        self._session = _fresh_session()
        self._round: _Round | None = None
        self._aborted = ""
        self._closed = False
        self._peers: list[Peer] = []  # of the last update that ended well
        self._buffers: list[SenderBuffer] = []
        self._set = 0  # number of that set of buffers

    @property
    def address(self) -> str:
        """One per session: a receiver that comes late for one that has ended finds no listener, and knows at once."""
        with self._lock:
            if self._listener.closed and not self._closed:
                self._listener = Listener(fresh_address(self._folder))
            return self._listener.address

    @property
    def session(self) -> str:
        return self._session

    def open(self, offer: StreamOffer, plan: StreamPlan, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._ending_badly():
            run = self._enter(offer, plan)
            _check(plan)
            self._make_room(plan)
            opening = encode(StreamOpening(plan, plan.digest, self._patience_s))
            meeting = Meeting(offer, self._listener, self._memory, opening, self._peers)
            self._peers = meeting.peers
            run.peers = meeting.run(self._wait, deadline)
            for peer in run.peers.values():
                self._give_buffers(peer)

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        with self._ending_badly():
            run = self._running()
            self._in_turn(run, bucket)
            self._until_acknowledged(run, run.sent - len(self._buffers) + 1, deadline_s)
            return self._buffers[bucket.index % len(self._buffers)].tensor[: bucket.nbytes]

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        with self._ending_badly():
            run = self._running()
            self._in_turn(run, bucket)
            which = bucket.index % len(self._buffers)
            if run.behind(run.sent - len(self._buffers) + 1):
                raise _broken_plan(f"bucket {bucket.index} lies in a buffer that is still in use")
            self._memory.filled()
            data = self._buffers[which].tensor[: bucket.nbytes]
            digest = to_hex(tensor_digest(data)) if self._digests else ""
            announce = encode(Announce(bucket.index, which, 0, bucket.nbytes, digest))
            run.sent += 1
            for peer in run.peers.values():
                peer.channel.post(announce)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        if not normal:
            self._end(Failure("peer_lost", "the sender gave up"))
            return
        with self._ending_badly():
            run = self._running()
            if run.sent < len(run.plan.buckets):
                raise _broken_plan(f"{run.sent} of {len(run.plan.buckets)} buckets were sent")
            self._until_acknowledged(run, run.sent, deadline_s)
            with self._lock:
                if self._aborted:
                    raise _client_abort(self._aborted)
                self._round = None
            for peer in self._peers:
                peer.next_update()

    def abort(self, reason: str) -> None:
        """With nothing under way only the session is another one then: an offer that was made is void."""
        with self._lock:
            if self._round is None:
                self._listener.close()
                self._session = _fresh_session()
            else:
                self._aborted = reason or "aborted"
                self._alarm.ring()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end(Failure("peer_lost", "the sender has ended"))
            self._alarm.close()

    def _enter(self, offer: StreamOffer, plan: StreamPlan) -> _Round:
        with self._lock:
            if self._closed or self._round is not None:
                raise _misused("closed" if self._closed else "an update is under way")
            if offer.session != self._session or self._listener.closed:
                raise Aborted(Failure("client_abort", "the session of this offer has been ended"))
            self._round = _Round(offer, plan)
            return self._round

    def _running(self) -> _Round:
        if self._round is None:
            raise _misused("no update is under way")
        return self._round

    def _in_turn(self, run: _Round, bucket: Bucket) -> None:
        planned = run.plan.buckets[run.sent] if run.sent < len(run.plan.buckets) else None
        if bucket != planned:
            raise _broken_plan(f"bucket {bucket.index} of {bucket.nbytes} bytes is not the next one of the plan")

    def _make_room(self, plan: StreamPlan) -> None:
        """Buffers are kept while they suffice."""
        count = min(BUFFERS, len(plan.buckets))
        if len(self._buffers) >= count and all(each.tensor.numel() >= plan.room for each in self._buffers):
            return
        self._drop_buffers()
        self._set += 1
        for _ in range(count):
            self._buffers.append(self._memory.allocate(plan.room))

    def _drop_buffers(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []
        self._memory.collect()

    def _give_buffers(self, peer: Peer) -> None:
        if not self._buffers or peer.buffers == self._set:
            return
        described = [(buffer, *buffer.describe()) for buffer in self._buffers]
        peer.buffers = self._set
        peer.given = [(buffer, descriptor) for buffer, descriptor, _ in described]
        files = [number for *_, numbers in described for number in numbers]
        peer.channel.post(Buffers(tuple(descriptor for _, descriptor, _ in described)), files)

    def _until_acknowledged(self, run: _Round, buckets: int, deadline_s: float) -> None:
        """A receiver's death is seen on the way, also when nothing has to be waited for."""
        deadline = time.monotonic() + deadline_s
        self._hear(run, self._wait(run.peers.values(), 0.0, late=False))
        while late := run.behind(buckets):
            try:
                self._hear(run, self._wait(run.peers.values(), deadline))
            except TimeoutError:
                raise named(run.offer, "peer_timeout", late, f"did not take bucket {buckets - 1} in time") from None

    def _wait(self, what: Iterable[Peer | Listener], deadline: float, *, late: bool = True) -> list[Peer | Listener]:
        """Raises TimeoutError when time is over (with `late`), Aborted when `abort` was called: `client_abort`, or why
        a receiver has left, which is what made somebody call it.

        Comes back now and then with nothing, having told all of them that it is this sender that waits.
        """
        asked = list(what)
        left = deadline - time.monotonic()
        ready = wait([*asked, self._alarm], min(left, SIGN_S, self._patience_s / 3))
        with self._lock:
            aborted = self._aborted
        if aborted:
            blame = self._last_words(asked)
            raise blame.error() if blame.known else _client_abort(aborted)
        if not ready and late:
            if time.monotonic() >= deadline:
                raise TimeoutError
            buckets = len(self._running().plan.buckets)
            for each in asked:  # but those who have everything, and are done with this update
                if isinstance(each, Peer) and each.number is not None and each.acknowledged < buckets:
                    each.channel.post(_WAITING)
        return [each for each in ready if not isinstance(each, Alarm)]

    def _last_words(self, asked: Iterable[Peer | Listener]) -> Blame:
        blame = Blame(self._running().offer)
        for peer in asked:
            if isinstance(peer, Peer) and peer.number is not None and not peer.channel.closed:
                blame.hear(peer.number, peer.channel.messages)
        return blame

    def _hear(self, run: _Round, ready: Iterable[Peer | Listener]) -> None:
        """Raises Aborted when one of them gave up, is gone, or talks nonsense."""
        blame = Blame(run.offer)
        for peer in ready:
            if isinstance(peer, Peer) and peer.number is not None:
                self._hear_one(run, peer, peer.number, blame)
        if blame:
            raise blame.error()

    def _hear_one(self, run: _Round, peer: Peer, number: int, blame: Blame) -> None:
        try:
            for message in peer.channel.messages():
                if isinstance(message, Goodbye):
                    peer.given.clear()
                    blame.left(number, message.failures)
                elif isinstance(message, Ack) and message.bucket == peer.acknowledged < run.sent:
                    peer.acknowledged += 1
                else:
                    blame.seen(number, "stream_mismatch", f"said {message.kind} out of turn")
        except Gone:
            peer.lost()
            blame.seen(number, "peer_lost", "closed its connection")
        except wire.WireError as error:
            blame.seen(number, "stream_mismatch", f"said what is no message: {error}")

    @contextmanager
    def _ending_badly(self) -> Iterator[None]:
        """Whatever goes wrong ends the update for all."""
        try:
            yield
        except BaseException as error:
            why = error.failures[0] if isinstance(error, Aborted) else Failure("internal", type(error).__name__)
            code = why.code if why.code in TOLD else "peer_lost"
            self._end(Failure(code, f"the sender ended the update: {why.code}: {why.message}"))
            raise

    def _end(self, why: Failure) -> None:
        """Not normally: nothing of this session is used again."""
        for peer in self._peers:
            peer.hang_up(why)
        self._peers = []
        self._drop_buffers()
        with self._lock:
            self._listener.close()
            self._session = _fresh_session()
            self._round, self._aborted = None, ""
            self._alarm.hush()


def _check(plan: StreamPlan) -> None:
    try:
        plan.check()
    except wire.WireError as error:
        raise Aborted(Failure("stream_mismatch", f"{error.where}: {error.why}")) from None


def _misused(why: str) -> Aborted:
    return Aborted(Failure("wrong_phase", why))


def _broken_plan(why: str) -> Aborted:
    return Aborted(Failure("stream_mismatch", why))


def _client_abort(reason: str) -> Aborted:
    return Aborted(Failure("client_abort", reason))


def _fresh_session() -> str:
    return secrets.token_hex(16)
