"""The receiving end of a stream over any medium: one receiver per update, and the hub that keeps connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from transports.base import Cancelled
from transports.buckets import StreamPlan
from transports.stream.addresses import Dial
from transports.stream.connection import Connection, ConnectionClosed, Waker, wait
from transports.stream.medium import ReceiverMedium
from transports.stream.messages import Close, Waiting
from transports.stream.receiver_session import MEET_S, ReceiverSession, Take
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import StreamOffer
from updater.protocol import wire

#: A look at kept links also without anything to see, in seconds.
IDLE_S = 60.0


class ReceiverLink:
    """A connection to a sender and this side's end of the medium. Used by one thread at a time."""

    def __init__(self, connection: Connection, medium: ReceiverMedium, session: str) -> None:
        self.connection, self.medium = connection, medium
        self.session = session

    def fileno(self) -> int:
        return self.connection.fileno()

    def stands(self) -> bool:
        """Of one that is kept: whether the sender has said nothing since, but that it waited for another receiver."""
        try:
            said = self.connection.messages()
            return not self.connection.ended and all(isinstance(message, Waiting) for message in said)
        except (ConnectionClosed, wire.WireError):
            return False

    def close(self, *failures: Failure) -> None:
        """Let go of the medium, then say so and why, then hang up."""
        self.medium.drop()
        if not self.connection.closed:
            self.connection.post(Close(failures))
            self.connection.close()


class MediumHub:
    """A `transports.registry.Hub` over any `ReceiverMedium`; `medium` makes one per connection, which `dial` makes.

    `patience_s`: as of `ReceiverSession`, which gets it when it begins.

    A kept link is watched by a thread: when its sender ends or dies, what it holds is given back at once and not when
    the hub happens to be needed again.
    """

    def __init__(self, medium: Callable[[], ReceiverMedium], dial: Dial, patience_s: float | None) -> None:
        self.patience_s = patience_s
        self._medium, self._dial = medium, dial
        self._lock = threading.Lock()
        self._kept: list[ReceiverLink] = []
        self._waker: Waker | None = None
        self._watcher: threading.Thread | None = None
        self._closed = False

    def receiver(self, offer: StreamOffer, number: int) -> MediumReceiver:
        return MediumReceiver(self, offer, number)

    def take(self, offer: StreamOffer, check: Callable[[], None]) -> ReceiverLink:
        """A kept link of this session, or a new one. Raises Aborted, and what `check` raises."""
        found, stale = self._pick(offer)
        for link in stale:
            link.close()
        if found is not None:
            return found
        medium = self._medium()
        try:
            medium.greeting()  # what this process lacks is known before a sender is called
            patience_s = MEET_S if self.patience_s is None else self.patience_s
            connection = self._dial(offer.address, time.monotonic() + patience_s, check)
        except BaseException:
            medium.drop()
            raise
        return ReceiverLink(connection, medium, offer.session)

    def keep(self, link: ReceiverLink) -> None:
        """Until the next update of its session, or until its sender is gone."""
        with self._lock:
            if not self._closed:
                self._kept.append(link)
                self._watch()
                return
        link.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
            if self._waker is not None:
                self._waker.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._waker is not None:
            self._waker.close()
        for link in kept:
            link.close()

    def _pick(self, offer: StreamOffer) -> tuple[ReceiverLink | None, list[ReceiverLink]]:
        """A link of this session, which is no longer watched then, and those that are not used again: of other
        sessions, and those that their sender has hung up since: the thread that watches may not have looked yet.
        """
        with self._lock:
            if self._closed:
                raise Aborted(Failure("wrong_phase", "this rank is being shut down"))
            stale = [link for link in self._kept if link.session != offer.session or not link.stands()]
            found = next((link for link in self._kept if link not in stale), None)
            self._kept = [link for link in self._kept if link is not found and link not in stale]
            if self._waker is not None:
                self._waker.set()
            return found, stale

    def _watch(self) -> None:
        if self._waker is None:
            self._waker = Waker()
            self._watcher = threading.Thread(target=self._look, args=(self._waker,), name="kept-links", daemon=True)
            self._watcher.start()
        else:
            self._waker.set()

    def _look(self, waker: Waker) -> None:
        while True:
            with self._lock:
                waker.clear()
                if self._closed:
                    return
                kept = list(self._kept)
            watched: list[Waker | ReceiverLink] = [waker, *kept]
            ready = wait(watched, IDLE_S)
            for link in kept:
                if link in ready and self._is_over(link):
                    link.close()

    def _is_over(self, link: ReceiverLink) -> bool:
        """Of a kept link that was heard of; then it is kept no longer."""
        with self._lock:
            if link not in self._kept or link.stands():
                return False
            self._kept.remove(link)
            return True


class MediumReceiver:
    """A `transports.stream.StreamReceiver` of one update."""

    def __init__(self, hub: MediumHub, offer: StreamOffer, number: int) -> None:
        self._hub, self._offer, self._number = hub, offer, number
        self._link: ReceiverLink | None = None
        self._done = False

    def receive(
        self,
        expected: Callable[[StreamPlan], None],
        take: Take,
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        def check() -> None:
            if should_stop():
                raise Cancelled

        self._link = link = self._hub.take(self._offer, check)
        session = ReceiverSession(
            link.connection, link.medium, self._offer, self._number, self._hub.patience_s, should_stop
        )
        try:
            received = session.run(expected, take, progress)
        except BaseException as error:
            self._hang_up(*_told(error))
            raise
        self._done = True
        return received

    def close(self, *, normal: bool) -> None:
        link = self._link
        if link is not None and normal and self._done:
            self._link = None
            self._hub.keep(link)
        else:
            self._hang_up(Failure("client_abort", "the receiver gave the stream up"))

    def _hang_up(self, *failures: Failure) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(*failures)


def _told(error: BaseException) -> tuple[Failure, ...]:
    if isinstance(error, LiveweightsError):
        return error.failures[:100]
    if isinstance(error, Cancelled):
        return (Failure("client_abort", "its update was given up"),)
    return (Failure("rank_failed", f"{type(error).__name__}: {error}"[:1000]),)
