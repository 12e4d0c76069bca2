"""How a sender meets all receivers of an update: hellos, the plan, and what each thinks of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from transports.control.blame import Blame, place
from transports.control.channel import RECEIVER_LIMIT, Gone
from transports.control.messages import Goodbye, other_release
from transports.local.addresses import Listener, peer_of
from transports.local.line import Line
from transports.local.memory import SenderMemory
from transports.local.messages import PROTOCOL, Answer, Hello, Message
from transports.local.peers import Peer
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: Connections that have not said who they are; more are closed.
STRANGERS = 1024
#: After a first refusal: how long to wait for the opinions of the others.
MORE_REFUSALS_S = 1.0

#: (what to wait for, deadline) -> what is ready; raises when the deadline is over or somebody aborted.
Wait = Callable[[Iterable["Peer | Listener"], float], "list[Peer | Listener]"]


class Meeting:
    """`peers`: connections that are there already, and at the end exactly those of the offer, by their numbers."""

    def __init__(
        self, offer: StreamOffer, listener: Listener, memory: SenderMemory, opening: bytes, peers: Iterable[Peer]
    ) -> None:
        self._offer = offer
        self._listener = listener
        self._memory = memory
        self._opening = opening
        self.peers = list(peers)
        self._answered: set[int] = set()
        self._blame = Blame(offer)

    def run(self, wait: Wait, deadline: float) -> dict[int, Peer]:
        """Raises Aborted `peer_lost`, `peer_timeout`, `stream_mismatch`, `transport_unsupported`."""
        self._admit()
        for peer in list(self.peers):
            self._clear_leftover(peer)
        until = deadline
        while missing := self._missing():
            try:
                ready = wait([self._listener, *self.peers], until)
            except Aborted:
                if self._blame.known:
                    break
                raise
            except TimeoutError:
                if self._blame:
                    break
                raise self._late(missing) from None
            if self._listener in ready:
                self._admit()
            for each in ready:
                if isinstance(each, Peer):
                    self._hear(each)
            if self._blame:
                until = min(deadline, until, time.monotonic() + MORE_REFUSALS_S)
        if self._blame:
            raise self._blame.error()
        for peer in [peer for peer in self.peers if peer.number is None]:
            self._dismiss(peer)
        return {peer.number: peer for peer in self.peers if peer.number is not None}

    def _missing(self) -> set[int]:
        return set(range(self._offer.receivers)) - self._answered

    def _late(self, missing: set[int]) -> Aborted:
        met = {peer.number for peer in self.peers}
        return Aborted(
            *(
                place(
                    self._offer,
                    number,
                    Failure("peer_timeout", "did not answer the plan" if number in met else "did not come"),
                )
                for number in sorted(missing)
            )
        )

    def _admit(self) -> None:
        for sock in self._listener.accept():
            peer = Peer(Line(sock, RECEIVER_LIMIT), peer_of(sock)[0])
            if sum(each.number is None for each in self.peers) < STRANGERS:
                self.peers.append(peer)
            else:
                peer.hang_up()

    def _clear_leftover(self, peer: Peer) -> None:
        """Hear what was said before this meeting; who said something and is gone already belonged to an earlier one."""
        try:
            said = peer.channel.messages()
        except Gone:
            said = []
        except wire.WireError as error:
            self._dismiss(peer, Failure("stream_mismatch", str(error)))
            return
        if peer.channel.ended:
            self._forget(peer, *said)
            return
        for message in said:
            self._take(peer, message)
            if peer.channel.closed:
                return

    def _hear(self, peer: Peer) -> None:
        try:
            for message in peer.channel.messages():
                self._take(peer, message)
                if peer.channel.closed:
                    return
        except Gone:
            self._forget(peer)
            if peer.number is not None and not peer.refused:
                self._against(peer.number).seen(peer.number, "peer_lost", "closed its connection")
        except wire.WireError as error:
            if peer.number is not None:
                self._against(peer.number).seen(peer.number, "stream_mismatch", f"said what is no message: {error}")
            self._dismiss(peer, Failure("stream_mismatch", str(error)))

    def _take(self, peer: Peer, message: Message) -> None:
        if peer.number is None:
            if isinstance(message, Hello):
                self._greet(peer, message)
            else:
                self._forget(peer, message)
        elif isinstance(message, Answer) and peer.number not in self._answered:
            self._answered.add(peer.number)
            peer.refused = bool(message.failures)
            self._blame.refused(peer.number, message.failures)
        elif isinstance(message, Goodbye):
            self._forget(peer, message)
            if not peer.refused:
                self._against(peer.number).left(peer.number, message.failures)
        else:
            self._against(peer.number).seen(peer.number, "stream_mismatch", f"said {message.kind} out of turn")
            self._dismiss(peer)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        why = self._misplaced(hello)
        if why:
            self._dismiss(peer, Failure("peer_lost", why))
            return
        peer.number = hello.number
        unable = other_release(hello.protocol, PROTOCOL, hello.release) or self._memory.accepts(hello)
        if unable is not None:
            self._against(hello.number).refused(hello.number, [unable])
        else:
            peer.channel.post(self._opening)

    def _misplaced(self, hello: Hello) -> str:
        if hello.session != self._offer.session:
            return "another session"
        if hello.number >= self._offer.receivers:
            return f"no receiver {hello.number} among {self._offer.receivers}"
        if any(peer.number == hello.number for peer in self.peers):
            return f"receiver {hello.number} is there already"
        return ""

    def _against(self, number: int) -> Blame:
        """Nothing more is waited for from this one."""
        self._answered.add(number)
        return self._blame

    def _dismiss(self, peer: Peer, *failures: Failure) -> None:
        """Not one of ours: told so, and its mappings are its own business."""
        self.peers.remove(peer)
        peer.hang_up(*failures)

    def _forget(self, peer: Peer, *said: Message) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
        if any(isinstance(message, Goodbye) for message in said):
            peer.given.clear()
        peer.lost()
