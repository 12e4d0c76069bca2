"""The receivers of a sender: what each has said so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from transports.buckets import Bucket, StreamPlan
from transports.stream.connection import Connection
from transports.stream.messages import AHEAD, Answer, Close, Hello, Key, Message, Ready
from updater.core.errors import Failure


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `plan`: what this receiver gets; `sent`: buckets of it that were posted; `taken`: that it has put
    away, or -1 before it is in place; `left`: it has said Close; `keys`: that its side of
    the medium has said and the sender's has not heard.
    """

    connection: Connection
    hello: Hello | None = None
    answered: bool = False
    plan: StreamPlan = field(default_factory=lambda: StreamPlan(()))
    sent: int = 0
    taken: int = -1
    left: bool = False
    keys: deque[Key] = field(default_factory=deque)

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def number(self) -> int:
        return self.hello.number if self.hello is not None else -1

    @property
    def joined(self) -> bool:
        return self.taken >= 0

    @property
    def has_room(self) -> bool:
        return self.joined and self.sent < self.taken + AHEAD

    @property
    def done(self) -> bool:
        """It has everything."""
        return self.taken == len(self.plan.buckets)

    def awaits(self, bucket: Bucket) -> bool:
        """Whether this bucket is the next one of its plan."""
        return self.sent < len(self.plan.buckets) and self.plan.buckets[self.sent] == bucket

    def next_update(self) -> None:
        self.hello, self.answered, self.sent, self.taken = None, False, 0, -1
        self.keys.clear()

    def note(self, message: Message) -> bool:
        """Whether it may say that now. Hello and Close are not heard here."""
        if isinstance(message, Answer) and not self.answered:
            self.answered = True
        elif isinstance(message, Key) and self.answered and not self.joined:
            self.keys.append(message)
        elif isinstance(message, Ready) and self.answered and message.taken == self.taken + 1 <= self.sent:
            self.taken += 1
        else:
            return False
        return True

    def hang_up(self, *failures: Failure) -> None:
        """Tell why and close. Never waits."""
        if not self.connection.closed:
            self.connection.post(Close(failures))
            self.connection.close()
