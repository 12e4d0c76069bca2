"""The sender of a stream, over any medium: two buffers, of which one is filled while the other travels or is read."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from transports.buckets import Bucket, Plans, StreamPlan
from transports.digest import tensor_digest, to_hex
from transports.stream.addresses import Arrivals
from transports.stream.connection import Waker
from transports.stream.failures import TOLD
from transports.stream.medium import SenderMedium
from transports.stream.messages import AHEAD, LONGEST_PATIENCE_S, PATIENCE_S, SIGN_S, End, Opening, encode
from transports.stream.rendezvous import Rendezvous
from transports.stream.sender_session import Peer, SenderSession, mismatch
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.protocol import wire


class MediumSender:
    """A `transports.stream.StreamSender` over any `SenderMedium`.

    `listen`: where connections come from, asked for once per session. `patience_s`: how long receivers wait for a
    sender that gives no sign. `digests`: send one with every bucket, so that bytes which changed on the way are found
    there and the side is named; costs a look at every byte on both sides.

    Listens at once. Raises Rejected `transport_unsupported`.
    """

    kind = ""

    def __init__(
        self,
        medium: SenderMedium,
        listen: Callable[[], Arrivals],
        *,
        patience_s: float = PATIENCE_S,
        digests: bool = False,
    ) -> None:
        medium.check()
        self.medium = medium
        self._listen = listen
        self._patience_s = min(patience_s, LONGEST_PATIENCE_S)
        self._digests = digests
        self._waker = Waker()
        self._lock = threading.RLock()  # of the next five, which `abort` shares
        self._arrivals = listen()
        self._name = _fresh_name()
        self._session: SenderSession | None = None
        self._aborted = ""
        self._closed = False
        self._peers: list[Peer] = []  # kept between updates that end well

    @property
    def address(self) -> str:
        """Another one with every session, if it may be: a receiver that is late for an ended one knows it at once."""
        with self._lock:
            if self._arrivals.closed and not self._closed:
                self._arrivals = self._listen()
            return self._arrivals.address

    @property
    def session(self) -> str:
        return self._name

    @property
    def sending(self) -> bool:
        """Whether an update is under way."""
        return self._session is not None

    def open(self, offer: StreamOffer, plans: Plans, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._ending_badly():
            plans = dict.fromkeys(range(offer.receivers), plans) if isinstance(plans, StreamPlan) else dict(plans)
            session = self._enter(offer, plans)
            self._check(plans, offer.receivers)
            rendezvous = Rendezvous(session, self._arrivals, self._peers)
            self._peers = rendezvous.peers
            session.meet(rendezvous.gather(deadline))
            name = self.medium.prepare(session, min(AHEAD, session.buckets), session.nbytes)
            rendezvous.agree(self._openings(plans, name, deadline_s), deadline)
            self.medium.open(session, deadline)
            session.until(lambda peer: peer.joined, deadline, "did not get ready for the first bucket")

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        with self._ending_badly():
            return self._running().room(bucket, time.monotonic() + deadline_s)

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        with self._ending_badly():
            self._running().post(bucket, self._digest, time.monotonic() + deadline_s)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        if not normal:
            self._end(Failure("peer_lost", "the sender gave up"))
            return
        deadline = time.monotonic() + deadline_s
        with self._ending_badly():
            session = self._running()
            for peer in session.peers.values():
                if peer.sent < len(peer.plan.buckets):
                    raise mismatch(f"{peer.sent} of {len(peer.plan.buckets)} buckets were sent")
            session.settle(deadline)
            for peer in session.peers.values():
                peer.connection.post(End(peer.sent))
            session.until(lambda peer: peer.done, deadline, "did not put everything in its place")
            with self._lock:
                if self._aborted:
                    raise Aborted(Failure("client_abort", self._aborted))
                self._session = None
            for peer in self._peers:
                peer.next_update()

    def abort(self, reason: str) -> None:
        """With nothing under way only the session is another one then: an offer that was made is void."""
        with self._lock:
            if self._session is None:
                self._renew()
            else:
                self._aborted = reason or "aborted"
                self._waker.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end(Failure("peer_lost", "the sender has ended"))
            self._waker.close()

    def _enter(self, offer: StreamOffer, plans: Mapping[int, StreamPlan]) -> SenderSession:
        with self._lock:
            if self._closed or self._session is not None:
                why = "closed" if self._closed else "an update is under way"
                raise Aborted(Failure("wrong_phase", why))
            if offer.session != self._name or self._arrivals.closed:
                raise Aborted(Failure("client_abort", "the session of this offer has been ended"))
            sign_s = min(SIGN_S, self._patience_s / 3)
            self._session = SenderSession(offer, plans, self.medium, self._waker, lambda: self._aborted, sign_s)
            return self._session

    def _check(self, plans: Mapping[int, StreamPlan], receivers: int) -> None:
        if set(plans) != set(range(receivers)):
            raise mismatch(f"plans for receivers {sorted(plans)}, and there are {receivers}")
        if self.medium.alike and any(plan != plans[0] for plan in plans.values()):
            raise mismatch(f"{self.kind} sends every receiver the same, and their plans differ")
        for plan in {id(plan): plan for plan in plans.values()}.values():
            try:
                plan.check()
            except wire.WireError as error:
                raise mismatch(f"{error.where}: {error.why}") from None

    def _openings(
        self, plans: Mapping[int, StreamPlan], name: str, deadline_s: float
    ) -> Callable[[Peer], Opening | bytes]:
        """A plan that several receivers have is encoded once."""
        within_s = min(max(deadline_s, 0.001), LONGEST_PATIENCE_S)
        frames: dict[int, bytes] = {}

        def opening(peer: Peer) -> bytes:
            plan = plans[peer.number]
            if id(plan) not in frames:
                frames[id(plan)] = encode(
                    Opening(plan, plan.digest, self.medium.kind, name, within_s, self._patience_s)
                )
            return frames[id(plan)]

        return opening

    def _running(self) -> SenderSession:
        if self._session is None:
            raise Aborted(Failure("wrong_phase", "no update is under way"))
        return self._session

    def _digest(self, data: torch.Tensor) -> str:
        return to_hex(tensor_digest(data)) if self._digests else ""

    @contextmanager
    def _ending_badly(self) -> Iterator[None]:
        """Whatever goes wrong ends the update for all."""
        try:
            yield
        except BaseException as error:
            why = error.failures[0] if isinstance(error, Aborted) else Failure("internal", type(error).__name__)
            code = why.code if why.code in TOLD else "peer_lost"
            text = f"the sender ended the update: {why.code}: {why.message}"
            self._end(Failure(code, text, why.replica, why.rank))
            raise

    def _end(self, why: Failure) -> None:
        """Not normally: nothing of this session is used again."""
        if not self._arrivals.closed:
            for connection in self._arrivals.accept():
                Peer(connection).hang_up(why)
        with self._lock:
            self._session, self._aborted = None, ""
            self._renew()
            self._waker.clear()
        for peer in self._peers:
            peer.hang_up(why)
        self._peers = []
        self.medium.drop()

    def _renew(self) -> None:
        """Another session. With the lock."""
        self._name = _fresh_name()
        if self._closed or not self._arrivals.lasting:
            self._arrivals.close()


def _fresh_name() -> str:
    return secrets.token_hex(16)
