"""The receivers of a sender: who has come, and what each of them has said."""

from __future__ import annotations

from dataclasses import dataclass, field

from transports.control.messages import Goodbye
from transports.local.line import Line
from transports.local.memory import SenderBuffer
from transports.local.messages import BufferDescriptor
from updater.core.errors import Failure


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `number`: its seat in the update that runs; `refused`: the plan; `acknowledged`: buckets;
    `given`: what was described to it, of the set of buffers numbered `buffers`.
    """

    channel: Line
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
