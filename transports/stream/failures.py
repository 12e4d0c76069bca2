"""Why receivers ended an update: whom to name, and the cause before what followed from it.

One receiver refuses or dies, the coordinator hears of it and tells the others to stop: by the time a busy sender looks,
all of them have hung up. Which connection it reads first must not decide what it takes for the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transports.stream.connection import ConnectionClosed
from transports.stream.messages import Close, Message
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.protocol import wire

#: Of what a receiver that gave up says, these are the update's reason as they are; any other becomes `peer_lost`.
TELLING = ("stream_mismatch", "tensor_digest", "transport_unsupported")
#: Codes that a sender passes on as they are; whatever else ended an update is `peer_lost` to the other receivers.
TOLD = ("stream_mismatch", "transport_unsupported")
#: What a receiver says that was told to stop, and one that lost the sender, or another receiver within their group:
#: another one's doing.
_FOLLOWED = ("client_abort", "peer_lost")
#: Failures that one error holds at most.
_MOST = 100
_CAUSE, _LOSS, _CONSEQUENCE = range(3)


def place(offer: StreamOffer, number: int, failure: Failure) -> Failure:
    """The failure with replica and rank of the receiver."""
    replica, rank = offer.name_of(number)
    return failure.at(replica=replica, rank=rank)


def named(offer: StreamOffer, code: str, numbers: Iterable[int], why: str) -> Aborted:
    """One failure per receiver."""
    return Aborted(*(place(offer, number, Failure(code, why)) for number in sorted(numbers)))


class FailureAttribution:
    """Reasons as they are heard. True when there is any."""

    def __init__(self, offer: StreamOffer) -> None:
        self._offer = offer
        self._heard: list[tuple[int, Failure]] = []  # how much it explains, and what is said of it

    def __bool__(self) -> bool:
        return bool(self._heard)

    @property
    def known(self) -> bool:
        """Whether there is more than the word of those who left because of another."""
        return any(order < _CONSEQUENCE for order, _ in self._heard)

    def seen(self, number: int, code: str, why: str) -> None:
        """What the sender itself sees of a receiver."""
        self._add(_CAUSE if code in TELLING else _LOSS, number, Failure(code, why))

    def refused(self, number: int, failures: Iterable[Failure]) -> None:
        """What a receiver has against the plan."""
        for failure in failures:
            self._add(_CAUSE, number, failure)

    def left(self, number: int, failures: Iterable[Failure]) -> None:
        """What a receiver says when it gives up."""
        given = list(failures)
        if not given:
            self._add(_LOSS, number, Failure("peer_lost", "gave up without a reason"))
        for failure in given:
            if failure.code in TELLING:
                self._add(_CAUSE, number, failure)
            else:
                order = _CONSEQUENCE if failure.code in _FOLLOWED else _LOSS
                self._add(order, number, Failure("peer_lost", f"gave up: {failure.code}: {failure.message}"[:1000]))

    def hear(self, number: int, messages: Callable[[], Iterable[Message]]) -> None:
        """What a receiver has said last, of an update that is at its end. `messages`: as a connection gives them."""
        try:
            for message in messages():
                if isinstance(message, Close):
                    self.left(number, message.failures)
        except ConnectionClosed:
            self.seen(number, "peer_lost", "closed its connection")
        except wire.WireError as error:
            self.seen(number, "stream_mismatch", f"said what is no message: {error}")

    def error(self) -> Aborted:
        """The causes first, else in the order in which they were heard."""
        return Aborted(*(failure for _, failure in sorted(self._heard, key=lambda heard: heard[0])[:_MOST]))

    def _add(self, order: int, number: int, failure: Failure) -> None:
        self._heard.append((order, place(self._offer, number, failure)))
