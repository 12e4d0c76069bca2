"""How a sender meets all receivers of an update: who has come, the plan, and what each thinks of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable

from transports.broadcast.line import accepted, seats_digest
from transports.broadcast.messages import PROTOCOL, Hello, Message
from transports.broadcast.peers import Peer
from transports.control.blame import Blame, named
from transports.control.channel import RECEIVER_LIMIT, Gone
from transports.control.messages import Goodbye, other_release
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: Connections that have not said who they are; more are closed.
STRANGERS = 1024
#: After a first refusal: how long to wait for the opinions of the others.
MORE_REFUSALS_S = 1.0

#: (what to wait for, deadline) -> those with something to say; raises TimeoutError, or Aborted when told to end.
Wait = Callable[[Iterable["Peer | socket.socket"], float], "list[Peer | socket.socket]"]


class Meeting:
    """`peers`: connections that are there already; after `gather` exactly those of the offer."""

    def __init__(self, offer: StreamOffer, listener: socket.socket, peers: Iterable[Peer], wait: Wait) -> None:
        self._offer = offer
        self._seats = seats_digest(offer)
        self._listener = listener
        self._wait = wait
        self.peers = list(peers)

    def gather(self, deadline: float) -> dict[int, Peer]:
        """Until every receiver has said Hello. Raises Aborted `peer_timeout`, `peer_lost`, `stream_mismatch`."""
        self._admit()
        while missing := set(range(self._offer.receivers)) - {peer.number for peer in self.peers}:
            try:
                ready = self._wait([self._listener, *self.peers], deadline)
            except TimeoutError:
                raise named(self._offer, "peer_timeout", missing, "did not come") from None
            if self._listener in ready:
                self._admit()
            blame = Blame(self._offer)
            for peer in ready:
                if isinstance(peer, Peer):
                    self._greet(peer, blame)
            if blame:
                raise blame.error()
        for peer in [peer for peer in self.peers if peer.hello is None]:
            self._dismiss(peer, "not a receiver of this update")
        return {peer.number: peer for peer in self.peers}

    def agree(self, opening: bytes, deadline: float) -> None:
        """The plan to all, until all have said yes. Raises Aborted as `gather`, with every refusal."""
        for peer in self.peers:
            peer.channel.post(opening)
        blame = Blame(self._offer)
        gone: set[int] = set()
        until = deadline
        while waiting := [peer for peer in self.peers if not peer.answered and peer.number not in gone]:
            try:
                ready = self._wait(waiting, until)
            except Aborted:
                if blame.known:
                    break
                raise
            except TimeoutError:
                if blame:
                    break
                late = [peer.number for peer in waiting]
                raise named(self._offer, "peer_timeout", late, "did not answer the plan") from None
            for said in ready:
                if isinstance(said, Peer) and not self._answers(said, blame):
                    gone.add(said.number)
                    until = min(until, time.monotonic() + MORE_REFUSALS_S)
        if blame:
            raise blame.error()

    def _admit(self) -> None:
        for line in accepted(self._listener, RECEIVER_LIMIT):
            peer = Peer(line)
            self.peers.append(peer)
            if sum(each.hello is None for each in self.peers) > STRANGERS:
                self._dismiss(peer, "too many connections")

    def _greet(self, peer: Peer, blame: Blame) -> None:
        """Before its hello a connection may end without harm: it may be a stranger's, or of an update before."""
        try:
            messages = peer.channel.messages()
        except Gone:
            if peer.hello is not None:
                blame.seen(peer.number, "peer_lost", "closed its connection")
            else:
                self._forget(peer)
            return
        except wire.WireError as error:
            why = f"said what is no message: {error}"
            if peer.hello is not None:
                blame.seen(peer.number, "stream_mismatch", why)
            else:
                self._dismiss(peer, why)
            return
        for message in messages:
            if isinstance(message, Goodbye) and peer.hello is not None:
                blame.left(peer.number, message.failures)
                return
            if peer.hello is not None:
                blame.seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
                return
            why = self._misplaced(message)
            if why or not isinstance(message, Hello):
                self._dismiss(peer, why)
                return
            peer.hello = message
            other = other_release(message.protocol, PROTOCOL, message.release)
            if other is not None:
                blame.refused(peer.number, [other])
                return

    def _misplaced(self, message: Message) -> str:
        if not isinstance(message, Hello):
            return f"said {message.kind} before hello"
        if message.session != self._offer.session:
            return "the session of this offer is over"
        if message.seats != self._seats or message.number >= self._offer.receivers:
            return "was given other seats"
        if any(peer.number == message.number for peer in self.peers):
            return f"receiver {message.number} is there already"
        return ""

    def _answers(self, peer: Peer, blame: Blame) -> bool:
        """False: nothing more is waited for from it. Who said yes goes on at once, so it may have said more."""
        try:
            for message in peer.channel.messages():
                if isinstance(message, Goodbye):
                    blame.left(peer.number, message.failures)
                    return False
                if not peer.note(message):
                    blame.seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
                    return False
        except Gone:
            blame.seen(peer.number, "peer_lost", "closed its connection")
            return False
        except wire.WireError as error:
            blame.seen(peer.number, "stream_mismatch", f"said what is no message: {error}")
            return False
        return True

    def _dismiss(self, peer: Peer, why: str) -> None:
        self.peers.remove(peer)
        peer.hang_up(Failure("peer_lost", why))

    def _forget(self, peer: Peer) -> None:
        self.peers.remove(peer)
        peer.channel.close()
