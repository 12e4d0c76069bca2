"""The receivers of a sender: what each has said so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from transports.broadcast.line import Line
from transports.broadcast.messages import Answer, Done, Formed, Hello, Key, Message, Ready
from transports.control.messages import Goodbye
from updater.core.errors import Failure


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `ready`: buckets it has had room for; `left`: it said goodbye; `keys`: not yet passed on."""

    channel: Line
    hello: Hello | None = None
    answered: bool = False
    formed: bool = False
    ready: int = 0
    done: bool = False
    left: bool = False
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
            self.channel.post(Goodbye(failures))
            self.channel.close()
