"""How a sender meets all receivers of an update: who has come, the plan of each, and what it thinks of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from transports.stream.addresses import Arrivals
from transports.stream.connection import ConnectionClosed
from transports.stream.failures import FailureAttribution, named
from transports.stream.messages import Close, Hello, Opening, other_release, seats_digest
from transports.stream.sender_session import Peer, SenderSession
from updater.core.errors import Aborted, Failure
from updater.protocol import wire

#: Connections that have not said who they are; more are closed.
STRANGERS = 1024
#: After a first refusal: how long to wait for the opinions of the others.
MORE_REFUSALS_S = 1.0


class Rendezvous:
    """`peers`: connections that are there already; after `gather` exactly those of the offer."""

    def __init__(self, session: SenderSession, arrivals: Arrivals, peers: Iterable[Peer]) -> None:
        self._session, self._offer, self._medium = session, session.offer, session.medium
        self._seats = seats_digest(session.offer)
        self._arrivals = arrivals
        self.peers = list(peers)

    def gather(self, deadline: float) -> dict[int, Peer]:
        """Until every receiver has said Hello. Raises Aborted `peer_timeout`, `peer_lost`, `stream_mismatch`,
        `release_mismatch`, `transport_unsupported`.
        """
        self._admit()
        while missing := set(range(self._offer.receivers)) - {peer.number for peer in self.peers}:
            try:
                ready = self._session.wait([self._arrivals, *self.peers], deadline)
            except TimeoutError:
                raise named(self._offer, "peer_timeout", missing, "did not come") from None
            if self._arrivals in ready:
                self._admit()
            failures = FailureAttribution(self._offer)
            for peer in ready:
                if isinstance(peer, Peer):
                    self._greet(peer, failures)
            if failures:
                raise failures.error()
        for peer in [peer for peer in self.peers if peer.hello is None]:
            self._dismiss(peer, "not a receiver of this update")
        return {peer.number: peer for peer in self.peers}

    def agree(self, opening: Callable[[Peer], Opening | bytes], deadline: float) -> None:
        """Its plan to every receiver, until all have said yes. Raises Aborted as `gather`, with every refusal."""
        for peer in self.peers:
            peer.connection.post(opening(peer))
        failures = FailureAttribution(self._offer)
        gone: set[int] = set()
        until = deadline
        while waiting := [peer for peer in self.peers if not peer.answered and peer.number not in gone]:
            try:
                ready = self._session.wait(waiting, until)
            except Aborted:
                if failures.known:
                    break
                raise
            except TimeoutError:
                if failures:
                    break
                late = [peer.number for peer in waiting]
                raise named(self._offer, "peer_timeout", late, "did not answer the plan") from None
            for said in ready:
                if isinstance(said, Peer) and not self._session.hear_one(said, failures):
                    gone.add(said.number)
                    until = min(until, time.monotonic() + MORE_REFUSALS_S)
        if failures:
            raise failures.error()

    def _admit(self) -> None:
        for connection in self._arrivals.accept():
            peer = Peer(connection)
            self.peers.append(peer)
            if sum(each.hello is None for each in self.peers) > STRANGERS:
                self._dismiss(peer, "too many connections")

    def _greet(self, peer: Peer, failures: FailureAttribution) -> None:
        """Before its hello a connection may end without harm: it may be a stranger's, or of an update before."""
        try:
            messages = peer.connection.messages()
        except ConnectionClosed:
            self._medium.left(peer, alive=False)
            if peer.hello is not None:
                failures.seen(peer.number, "peer_lost", "closed its connection")
            else:
                self.peers.remove(peer)
                peer.connection.close()
            return
        except wire.WireError as error:
            why = f"said what is no message: {error}"
            if peer.hello is not None:
                failures.seen(peer.number, "stream_mismatch", why)
            else:
                self._dismiss(peer, why)
            return
        for message in messages:
            if isinstance(message, Close):
                self._medium.left(peer, alive=True)
            if isinstance(message, Close) and peer.hello is not None:
                failures.left(peer.number, message.failures)
                return
            if peer.hello is not None:
                failures.seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
                return
            if not isinstance(message, Hello):
                self._dismiss(peer, f"said {message.kind} before hello")
                return
            why = self._misplaced(message)
            unable = None if why else other_release(message)
            if unable is None and not why and message.seats != self._seats:
                why = "was given other seats"
            if why:
                self._dismiss(peer, why)
                return
            peer.hello = message
            unable = unable or self._medium.accepts(message)
            if unable is not None:
                failures.refused(peer.number, [unable])
                return

    def _misplaced(self, hello: Hello) -> str:
        if hello.session != self._offer.session:
            return "the session of this offer is over"
        if hello.number >= self._offer.receivers:
            return f"no receiver {hello.number} among {self._offer.receivers}"
        if any(peer.number == hello.number for peer in self.peers):
            return f"receiver {hello.number} is there already"
        return ""

    def _dismiss(self, peer: Peer, why: str) -> None:
        self.peers.remove(peer)
        self._medium.left(peer, alive=True)
        peer.hang_up(Failure("peer_lost", why))
