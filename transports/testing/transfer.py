"""One update over a stream, both ends through the real seams, and what can be wrong with either end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from transports.base import Box, Cancelled, Read, ReadReport
from transports.buckets import Bucket, Chunk, Plans, StreamPlan
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES
from transports.registry import Hub
from transports.stream import StreamReceiver, StreamSender, StreamSource, pack
from updater.core.errors import LiveweightsError
from updater.core.participant import Seats, StreamOffer
from updater.protocol.manifest import Manifest, TensorEntry, TensorSpec

#: What a faulty sender can do to the bucket in which a tensor begins.
SENDER_FAULTS = ("drop", "duplicate", "reorder", "truncate", "flip", "stale", "oversize", "dead", "slow")
#: How often a receiver was asked whether it should stop, when it is certain that it waits.
_OFTEN = 3


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """In the order of the mapping. Packed types count elements as torch does."""
    return tuple(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())


def manifest_of(specs: Sequence[TensorSpec]) -> Manifest:
    """Without digests."""
    return Manifest(tuple(sorted((TensorEntry(s.name, s.dtype, s.shape) for s in specs), key=lambda e: e.name)))


def seats_for(*ranks: int, life: str = "life") -> tuple[Seats, ...]:
    """Replicas r0, r1, ... with so many ranks each."""
    firsts = [sum(ranks[:at]) for at in range(len(ranks))]
    return tuple(Seats(f"r{at}", f"{life}-{at}", firsts[at], count) for at, count in enumerate(ranks))


def offer_of(sender: StreamSender, seats: tuple[Seats, ...]) -> StreamOffer:
    """What a coordinator hands to the ranks."""
    return StreamOffer(sender.kind, sender.address, sender.session, seats)  # type: ignore[arg-type]


def send_all(
    sender: StreamSender, offer: StreamOffer, plan: StreamPlan, tensors: Mapping[str, torch.Tensor], deadline_s: float
) -> None:
    """A whole update, as a trainer sends it."""
    specs = {spec.name: spec for spec in plan.tensors}
    normal = False
    try:
        sender.open(offer, plan, deadline_s)
        for bucket in plan.buckets:
            pack(bucket, sender.buffer(bucket, deadline_s), tensors, specs)
            sender.send(bucket, deadline_s)
        sender.finish(deadline_s, normal=True)
        normal = True
    finally:
        if not normal:
            sender.finish(deadline_s, normal=False)


class _Passing:
    """A sender in front of another one."""

    def __init__(self, inner: StreamSender) -> None:
        self.inner = inner
        self.kind = inner.kind

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def session(self) -> str:
        return self.inner.session

    def open(self, offer: StreamOffer, plans: Plans, deadline_s: float) -> None:
        self.inner.open(offer, plans, deadline_s)

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        return self.inner.buffer(bucket, deadline_s)

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        self.inner.send(bucket, deadline_s)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        self.inner.finish(deadline_s, normal=normal)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


class HeldSender(_Passing):
    """Stands still before it asks for room for bucket `at`, having set `waiting`, until `release` is set.

    `then_s`: its deadlines from there on, in seconds, whatever it is told.
    """

    def __init__(self, inner: StreamSender, at: int, then_s: float | None = None) -> None:
        super().__init__(inner)
        self.at, self.then_s = at, then_s
        self.waiting, self.release = threading.Event(), threading.Event()

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        if bucket.index == self.at:
            self.waiting.set()
            self.release.wait(60)
        return super().buffer(bucket, self._patience(deadline_s))

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        super().send(bucket, self._patience(deadline_s))

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        super().finish(self._patience(deadline_s), normal=normal)

    def _patience(self, told_s: float) -> float:
        return told_s if self.then_s is None or not self.waiting.is_set() else self.then_s


class FaultySender(_Passing):
    """A sender that does `fault` (one of SENDER_FAULTS) to the bucket in which tensor `name` begins.

    "slow" sends it only once `release` is set; "dead" goes away without a word.
    """

    def __init__(self, inner: StreamSender, fault: str, name: str) -> None:
        if fault not in SENDER_FAULTS:
            raise ValueError(fault)
        super().__init__(inner)
        self.fault, self.name = fault, name
        self.release = threading.Event()
        self._hit: Bucket | None = None
        self._held: torch.Tensor | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def open(self, offer: StreamOffer, plans: Plans, deadline_s: float) -> None:
        plan = plans if isinstance(plans, StreamPlan) else plans[0]
        self._hit = next(bucket for bucket in plan.buckets if any(c.name == self.name for c in bucket.chunks))
        self.inner.open(offer, plans, deadline_s)

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        self._buffer = self.inner.buffer(bucket, deadline_s)
        return self._buffer

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        if bucket is self._hit:
            self._spoilt(bucket, deadline_s)
            return
        self.inner.send(bucket, deadline_s)
        if self._held is not None and self._hit is not None:  # reorder: the held bucket follows its successor
            self.inner.buffer(self._hit, deadline_s).copy_(self._held)
            self.inner.send(self._hit, deadline_s)
            self._held = None

    def abort(self, reason: str) -> None:
        self.release.set()
        self.inner.abort(reason)

    def _spoilt(self, bucket: Bucket, deadline_s: float) -> None:
        chunk = next(c for c in bucket.chunks if c.name == self.name)
        sent = [bucket]
        if self.fault == "drop":
            sent = []
        elif self.fault == "duplicate":
            sent = [bucket, bucket]
        elif self.fault == "reorder":
            sent, self._held = [], self._buffer.clone()
        elif self.fault == "truncate":
            sent = [replace(bucket, nbytes=bucket.nbytes - 8)]
        elif self.fault == "oversize":
            sent = [replace(bucket, nbytes=bucket.nbytes + 8)]
        elif self.fault == "flip":
            self._buffer[chunk.offset + chunk.nbytes // 2] ^= 0x10
        elif self.fault == "stale":  # what lay here before was never overwritten
            self._buffer[chunk.offset : chunk.offset + chunk.nbytes] = 0
        elif self.fault == "dead":
            self.inner.close()
        elif self.fault == "slow":
            self.release.wait(60)
        for each in sent:
            self.inner.send(each, deadline_s)


@dataclass
class Receiving:
    """One receiver in a thread of its own. `reads`: None for everything, whole; then `arrived` holds it.

    `take`: put in front of the real one, to fail or to be slow.
    """

    hub: Hub
    manifest: Manifest
    reads: Sequence[Read] | None = None
    take: Callable[[Chunk, torch.Tensor], None] | None = None
    should_stop: Callable[[], bool] = lambda: False
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)
    report: ReadReport | None = None
    error: BaseException | None = None
    progress: list[int] = field(default_factory=list)

    def waiting(self, event: threading.Event, buckets: int = 0) -> threading.Event:
        """Have `event` set when it waits for its sender with so many buckets behind it: what it has to say to them was
        said then. For use before `start`.
        """
        inner, asked = self.should_stop, 0

        def should_stop() -> bool:
            nonlocal asked
            if len(self.progress) >= buckets:
                asked += 1
            if asked >= _OFTEN:
                event.set()
            return inner()

        self.should_stop = should_stop
        return event

    def start(self, offer: StreamOffer, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(offer, number), name=f"receiver-{number}")
        thread.start()
        return thread

    def _run(self, offer: StreamOffer, number: int) -> None:
        receiver = self.hub.receiver(offer, number)
        source = StreamSource(
            offer.kind, self.manifest, receiver if self.take is None else _Before(receiver, self.take)
        )
        try:
            reads = self.reads
            if reads is None:
                self.arrived = targets_of(source.specs)
                reads = [Read(name, Box.whole(t.shape), t) for name, t in self.arrived.items()]
            self.report = source.read(reads, progress=self.progress.append, should_stop=self.should_stop)
        except (LiveweightsError, Cancelled, RuntimeError) as error:
            self.error = error
        finally:
            source.close()


def targets_of(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Room for whole tensors, filled with bytes that no test sends. What torch has no type for is taken as bytes."""
    return {
        name: torch.full((max(spec.nbytes, 1),), 0xCD, dtype=torch.uint8)[: spec.nbytes]
        .view(TORCH_DTYPES[spec.dtype])
        .reshape(spec.shape)
        for name, spec in specs.items()
    }


class _Before:
    """A receiver with something put in front of `take`."""

    def __init__(self, inner: StreamReceiver, first: Callable[[Chunk, torch.Tensor], None]) -> None:
        self._inner, self._first = inner, first

    def receive(
        self,
        expected: Callable[[StreamPlan], None],
        take: Callable[[Chunk, torch.Tensor], None],
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        def both(chunk: Chunk, data: torch.Tensor) -> None:
            self._first(chunk, data)
            take(chunk, data)

        return self._inner.receive(expected, both, progress, should_stop)

    def close(self, *, normal: bool) -> None:
        self._inner.close(normal=normal)


@dataclass
class Transfer:
    """One update: `sender` in a thread, one receiver per hub. `seats` must have as many ranks as there are hubs."""

    sender: StreamSender
    hubs: Sequence[Hub]
    tensors: Mapping[str, torch.Tensor]
    bucket_bytes: int = 4096
    deadline_s: float = 60.0
    seats: tuple[Seats, ...] = ()
    plan: StreamPlan | None = None  # what the sender says it sends; None: what it has
    raises: type[BaseException] = LiveweightsError  # what a sender may end with, besides well
    sender_error: BaseException | None = None
    receivers: list[Receiving] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = manifest_of(specs_of(self.tensors))
        self.seats = self.seats or seats_for(len(self.hubs))
        self.plan = self.plan or StreamPlan(specs_of(self.tensors), self.bucket_bytes)
        self.receivers = [Receiving(hub, manifest) for hub in self.hubs]
        self._threads: list[threading.Thread] = []

    def start(self, absent: Sequence[int] = (), *, gathered: bool = False) -> None:
        """`absent`: receivers that never come. `gathered`: the sender opens when the others are there and wait."""
        offer = offer_of(self.sender, self.seats)
        coming = [(at, receiver) for at, receiver in enumerate(self.receivers) if at not in absent]
        there = [receiver.waiting(threading.Event()) for _, receiver in coming] if gathered else []
        sending = threading.Thread(target=self._send_when, args=(offer, there), name="sender")
        sending.start()
        self._threads = [sending, *(receiver.start(offer, at) for at, receiver in coming)]

    def join(self, hang_s: float = 120.0) -> None:
        """Raises RuntimeError if somebody is still at it after `hang_s`."""
        for thread in self._threads:
            thread.join(hang_s)
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} hangs")

    def join_sender(self, hang_s: float = 120.0) -> None:
        self._threads[0].join(hang_s)

    def join_receiver(self, number: int, hang_s: float = 120.0) -> None:
        self._threads[1 + number].join(hang_s)

    def join_receivers(self, hang_s: float = 120.0) -> None:
        for thread in self._threads[1:]:
            thread.join(hang_s)

    def run(self, absent: Sequence[int] = (), *, gathered: bool = False) -> Transfer:
        self.start(absent, gathered=gathered)
        self.join()
        return self

    def send(self, offer: StreamOffer) -> None:
        """The sender's half, in this thread."""
        plan = self.plan or StreamPlan(specs_of(self.tensors), self.bucket_bytes)
        try:
            send_all(self.sender, offer, plan, self.tensors, self.deadline_s)
        except (LiveweightsError, self.raises) as error:
            self.sender_error = error

    def _send_when(self, offer: StreamOffer, there: Sequence[threading.Event]) -> None:
        for event in there:
            event.wait(60)
        self.send(offer)
