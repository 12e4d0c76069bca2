"""What receivers of the conformance suite do with their chunks instead of taking them, and a stream as a `Source`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from transports.base import Read, ReadReport
from transports.buckets import Chunk, StreamPlan
from transports.registry import Hub
from transports.stream import StreamSender, StreamSource
from transports.testing.source_contract import digests
from transports.testing.transfer import (
    FaultySender,
    Receiving,
    manifest_of,
    offer_of,
    seats_for,
    send_all,
    specs_of,
)
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol.manifest import Manifest, TensorSpec


class RankFault(RuntimeError):
    pass


def raise_at(name: str) -> Callable[[Chunk, torch.Tensor], None]:
    def take(chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk.name == name:
            raise RankFault(name)

    return take


class Failing:
    """Finds a fault at one chunk, but not before `when`."""

    def __init__(self, chunk: Chunk, when: threading.Event) -> None:
        self.chunk, self.when = chunk, when

    def __call__(self, chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk == self.chunk:
            assert self.when.wait(60)
            raise Aborted(Failure("tensor_digest", "not what was promised", tensor=chunk.name))


class Stuck:
    """Stands still at tensor `name` until released."""

    def __init__(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        self.name, self.then, self.release = name, then, threading.Event()

    def __call__(self, chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk.name == self.name:
            self.then()
            self.release.wait(60)


class Lagging:
    """Takes one chunk so many seconds after it came."""

    def __init__(self, chunk: Chunk, seconds: float) -> None:
        self.chunk, self.seconds = chunk, seconds

    def __call__(self, chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk == self.chunk:
            threading.Event().wait(self.seconds)


class Stopping:
    """Asks for an end at tensor `name`."""

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, threading.Event()

    def __call__(self, chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk.name == self.name:
            self.stopped.set()


class Slow:
    """Takes its time over every few chunks, by work and not by sleeping."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    def __call__(self, _chunk: Chunk, _data: torch.Tensor) -> None:
        self.count += 1
        if self.count % self.every == 0:
            torch.ones(300, 300) @ torch.ones(300, 300)


class Streamed:
    """A `Source` whose `read` is one transfer: a sender in a thread, a second receiver that takes everything."""

    def __init__(
        self,
        sender: StreamSender,
        hubs: tuple[Hub, Hub],
        tensors: Mapping[str, torch.Tensor],
        fault: Callable[[], tuple[str, str]],
    ) -> None:
        self._sender, self._hubs, self._tensors, self._fault = sender, hubs, tensors, fault
        self._plan = StreamPlan(specs_of(tensors), 1024)
        self._manifest = manifest_of(self._plan.tensors)
        self._offer = offer_of(sender, seats_for(1, 1))
        self._source = StreamSource(sender.kind, self._manifest, hubs[0].receiver(self._offer, 0))
        self.kind = sender.kind

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._source.specs

    @property
    def manifest(self) -> Manifest | None:
        return self._source.manifest

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._source.warnings

    def read(
        self,
        reads: Sequence[Read],
        *,
        progress: Callable[[int], None] = lambda _bytes: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadReport:
        fault, name = self._fault()
        sender = FaultySender(self._sender, fault, name) if fault else self._sender
        thread = threading.Thread(target=self._send, args=(sender,))
        other = Receiving(self._hubs[1], self._manifest)
        threads = [thread, other.start(self._offer, 1)]
        thread.start()
        try:
            report = self._source.read(reads, progress=progress, should_stop=should_stop)
        except BaseException:
            self._source.close()
            self._sender.abort("the reader is gone")
            raise
        finally:
            for each in threads:
                each.join(60)
                assert not each.is_alive()
        assert other.error is None
        assert fault or digests(other.arrived) == digests(dict(self._tensors))
        return report

    def recheck(self) -> None:
        self._source.recheck()

    def close(self) -> None:
        self._source.close()
        close_all(self._hubs)
        self._sender.close()

    def _send(self, sender: StreamSender) -> None:
        with suppress(LiveweightsError):  # a reader that was refused something has said so itself
            send_all(sender, self._offer, self._plan, self._tensors, 30.0)


def close_all(hubs: Sequence[Hub]) -> None:
    for hub in hubs:
        hub.close()
