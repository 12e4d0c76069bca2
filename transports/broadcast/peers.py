"""The receivers of a sender: what each has said so far, and whom a failure names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from transports.broadcast.line import Line
from transports.broadcast.messages import Answer, Done, Formed, Goodbye, Hello, Key, Message, Ready
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

#: Of what a receiver that gave up says, these are the update's reason as they are; any other becomes `peer_lost`.
_TELLING = ("stream_mismatch", "tensor_digest", "transport_unsupported")


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `ready`: buckets it has had room for; `keys`: not yet passed on."""

    channel: Line
    hello: Hello | None = None
    answered: bool = False
    formed: bool = False
    ready: int = 0
    done: bool = False
    keys: deque[Key] = field(default_factory=deque)

    def fileno(self) -> int:
        return self.channel.fileno()

    @property
    def number(self) -> int:
        return self.hello.number if self.hello is not None else -1

    def next_update(self) -> None:
        self.hello, self.answered, self.formed, self.ready, self.done = None, False, False, 0, False
        self.keys.clear()

    def note(self, message: Message) -> bool:
        """Whether it may say that now. Hello and Goodbye are not heard here."""
        if isinstance(message, Answer) and not self.answered:
            self.answered = True
        elif isinstance(message, Key) and self.answered and not self.formed:
            self.keys.append(message)
        elif isinstance(message, Formed) and self.answered and not self.formed:
            self.formed = True
        elif isinstance(message, Ready) and self.formed and message.bucket == self.ready:
            self.ready += 1
        elif isinstance(message, Done) and self.formed and not self.done:
            self.done = True
        else:
            return False
        return True

    def hang_up(self, *failures: Failure) -> None:
        """Tell why and close. Never waits."""
        if not self.channel.closed:
            self.channel.say(Goodbye(failures))
            self.channel.close()


def place(offer: StreamOffer, number: int, failure: Failure) -> Failure:
    replica, rank = offer.name_of(number)
    return failure.at(replica=replica, rank=rank)


def named(offer: StreamOffer, code: str, numbers: Iterable[int], why: str) -> Aborted:
    """One failure per receiver."""
    return Aborted(*(place(offer, number, Failure(code, why)) for number in sorted(numbers)))


def reasons(offer: StreamOffer, number: int, goodbye: Goodbye) -> list[Failure]:
    """Why a receiver gave up."""
    return [
        place(
            offer,
            number,
            each if each.code in _TELLING else Failure("peer_lost", f"gave up: {each.code}: {each.message}"[:1000]),
        )
        for each in goodbye.failures or (Failure("peer_lost", "gave no reason"),)
    ]
