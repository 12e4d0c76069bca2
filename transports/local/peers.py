"""The receivers of a sender: who has come, what each of them has said, and whom a failure names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from transports.local.channel import Channel
from transports.local.memory import SenderBuffer
from transports.local.messages import BufferDescriptor, Goodbye, Message
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `number`: its seat in the update that runs; `refused`: the plan; `acknowledged`: buckets;
    `given`: what was described to it, of the set of buffers numbered `buffers`.
    """

    channel: Channel
    pid: int
    number: int | None = None
    refused: bool = False
    acknowledged: int = 0
    buffers: int = 0
    given: list[tuple[SenderBuffer, BufferDescriptor]] = field(default_factory=list)

    def fileno(self) -> int:
        return self.channel.fileno()

    def next_update(self) -> None:
        self.number, self.refused, self.acknowledged = None, False, 0

    def hang_up(self, *failures: Failure) -> None:
        """Tell why and close. Never waits."""
        if not self.channel.closed:
            self.channel.post(Goodbye(failures))
            self.channel.close()

    def lost(self) -> None:
        """It died: what it had opened is open no more."""
        self.channel.close()
        for buffer, descriptor in self.given:
            buffer.abandon(descriptor)
        self.given.clear()


def place(offer: StreamOffer, number: int, failure: Failure) -> Failure:
    replica, rank = offer.name_of(number)
    return failure.at(replica=replica, rank=rank)


def named(offer: StreamOffer, code: str, numbers: Iterable[int], why: str) -> Aborted:
    """One failure per receiver."""
    return Aborted(*(place(offer, number, Failure(code, why)) for number in sorted(numbers)))


def gave_up(offer: StreamOffer, number: int, goodbye: Goodbye) -> Aborted:
    why = "; ".join(f"{each.code}: {each.message}" for each in goodbye.failures)[:1000]
    return named(offer, "peer_lost", [number], f"gave up: {why or 'without a reason'}")


def garbled(offer: StreamOffer, number: int, error: wire.WireError) -> Aborted:
    return named(offer, "stream_mismatch", [number], f"said what is no message: {error}")


def out_of_turn(offer: StreamOffer, number: int, message: Message) -> Aborted:
    return named(offer, "stream_mismatch", [number], f"said {message.kind} out of turn")
