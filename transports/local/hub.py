"""What a receiving process keeps between updates: links to senders, until these are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transports.control.channel import SENDER_LIMIT, Alarm, wait
from transports.local.addresses import connect
from transports.local.line import Line
from transports.local.memory import ReceiverMemory
from transports.local.messages import PATIENCE_S
from transports.local.receiver import Link, LocalReceiver
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: A look at kept links also without anything to see.
IDLE_S = 60.0


class LocalHub:
    """A `transports.registry.Hub` over any `ReceiverMemory`.

    A kept link is watched by a thread: when its sender ends or dies, its memory is given back at once and not when
    somebody happens to need the hub again.
    """

    def __init__(self, memory: ReceiverMemory, *, patience_s: float | None) -> None:
        self.memory = memory
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._kept: list[Link] = []
        self._alarm: Alarm | None = None
        self._watcher: threading.Thread | None = None
        self._closed = False

    def receiver(self, offer: StreamOffer, number: int) -> LocalReceiver:
        return LocalReceiver(self, offer, number)

    def take(self, offer: StreamOffer, should_stop: Callable[[], bool]) -> Link:
        found, stale = self._pick(offer)
        for link in stale:
            link.close()
        if found is not None:
            return found
        patience_s = PATIENCE_S if self.patience_s is None else self.patience_s
        sock = connect(offer.address, patience_s, should_stop)
        return Link(Line(sock, SENDER_LIMIT, descriptors=True), self.memory, offer.address, offer.session)

    def keep(self, link: Link) -> None:
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
            if self._alarm is not None:
                self._alarm.ring()
        if self._watcher is not None:
            self._watcher.join()
        if self._alarm is not None:
            self._alarm.close()
        for link in kept:
            link.close()

    def _pick(self, offer: StreamOffer) -> tuple[Link | None, list[Link]]:
        """A link of this session, which is no longer watched then, and those of ended sessions of the same sender. One
        that the sender has hung up since, for it took no part in an update, is stale too: the thread that watches may
        not have looked yet.
        """
        with self._lock:
            if self._closed:
                raise Aborted(Failure("wrong_phase", "this rank is being shut down"))
            here = [link for link in self._kept if link.address == offer.address]
            usable = [link for link in here if link.session == offer.session and link.stands()]
            found = usable[0] if usable else None
            stale = [link for link in here if link not in usable]
            self._kept = [link for link in self._kept if link is not found and link not in stale]
            if self._alarm is not None:
                self._alarm.ring()
            return found, stale

    def _watch(self) -> None:
        if self._alarm is None:
            self._alarm = Alarm()
            self._watcher = threading.Thread(target=self._look, args=(self._alarm,), name="kept-links", daemon=True)
            self._watcher.start()
        else:
            self._alarm.ring()

    def _look(self, alarm: Alarm) -> None:
        while True:
            with self._lock:
                alarm.hush()
                if self._closed:
                    return
                kept = list(self._kept)
            watched: list[Alarm | Link] = [alarm, *kept]
            ready = wait(watched, IDLE_S)
            for link in kept:
                if link in ready and self._is_over(link):
                    link.close()

    def _is_over(self, link: Link) -> bool:
        """Of a kept link that was heard of; then it is kept no longer."""
        with self._lock:
            if link not in self._kept or link.stands():
                return False
            self._kept.remove(link)
            return True
