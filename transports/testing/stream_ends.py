"""The ends of one conversation, message by message, right or wrong, as a test wants it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from transports.buckets import StreamPlan
from transports.stream.addresses import Dial, TcpListener, UnixListener, dial_tcp, dial_unix, fresh_address
from transports.stream.connection import Connection, ConnectionClosed, wait
from transports.stream.messages import Agreed, Hello, Message, Opening, seats_digest
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE

M = TypeVar("M", bound=Message)
HANG_S = 60.0


class Scripted:
    """One side of a connection that says what it likes."""

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection
        self._heard: deque[Message] = deque()

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("not met")
        return self._connection

    def say(self, message: Message | bytes, descriptors: Sequence[int] = ()) -> None:
        self.connection.post(message, descriptors)

    def hear(self, kind: type[M]) -> M:
        """The next message. Raises RuntimeError for one of another kind, `ConnectionClosed`."""
        while not self._heard:
            wait([self.connection], HANG_S)
            self._heard.extend(self.connection.messages())
        message = self._heard.popleft()
        if not isinstance(message, kind):
            raise RuntimeError(f"{message.kind} instead of {kind.__name__}")
        return message

    def hear_all(self) -> list[Message]:
        """Until it was hung up on, which is done here too then."""
        while True:
            wait([self.connection], HANG_S)
            try:
                self._heard.extend(self.connection.messages())
            except ConnectionClosed:
                self.close()
                return list(self._heard)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class ScriptedSender(Scripted):
    """The sending end, with a place to come to, or over a `connection` that somebody made. `session`: its own name."""

    def __init__(
        self, kind: str = "shared_memory", session: str = "scripted", *, connection: Connection | None = None
    ) -> None:
        super().__init__(connection)
        self.kind, self.session = kind, session
        self._listener: TcpListener | UnixListener = (
            TcpListener("127.0.0.1", 0) if kind == "broadcast" else UnixListener(fresh_address())
        )

    @property
    def address(self) -> str:
        return self._listener.address

    def admit(self) -> None:
        """The first receiver that comes."""
        while self._connection is None:
            wait([self._listener], HANG_S)
            self._connection = next(iter(self._listener.accept()), None)

    def opens(
        self, plan: StreamPlan, digest: str | None = None, name: str = "scripted", patience_s: float = 60.0
    ) -> None:
        """Take the first receiver in and say the plan."""
        self.admit()
        self.hear(Hello)
        medium: Any = {"broadcast": "gloo", "cuda_ipc": "device"}.get(self.kind, "file")
        self.say(Opening(plan, plan.digest if digest is None else digest, medium, name, patience_s, patience_s))

    def meet(self, plan: StreamPlan) -> None:
        """As `opens`, and hear that it will do."""
        self.opens(plan)
        self.hear(Agreed)

    def close(self) -> None:
        super().close()
        self._listener.close()


class ScriptedReceiver(Scripted):
    """A connection to a sender."""

    def __init__(self, offer: StreamOffer) -> None:
        dial: Dial = dial_tcp if offer.kind == "broadcast" else dial_unix
        super().__init__(dial(offer.address, float("inf"), lambda: None))
        self.offer = offer

    def says(self, *messages: Message | bytes) -> ScriptedReceiver:
        for message in messages:
            self.say(message)
        return self

    def hello(self, number: int = 0, **other: Any) -> ScriptedReceiver:
        """As a right receiver would, but for `other`."""
        right = {"session": self.offer.session, "seats": seats_digest(self.offer), "release": RELEASE}
        return self.says(Hello(**(right | {"number": number} | other)))

    def joins(self, *then: Message | bytes, **other: Any) -> threading.Thread:
        """In a thread: says hello, hears the plan, has nothing against it, and says `then`."""

        def talk() -> None:
            self.hello(**other)
            self.hear(Opening)
            self.says(Agreed(), *then)

        thread = threading.Thread(target=talk, name="scripted-receiver")
        thread.start()
        return thread
