"""The seams of a pushed stream: what a sender and a receiver of any such transport do, and a receiver as a source.

A stream comes once, from one sender to every rank of every participant. Sender and receiver are one-to-many sockets,
groups or shared buffers; cutting, packing and scattering are done here, for all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch

from transports.base import Cancelled, Read, ReadReport
from transports.buckets import Bucket, Chunk, Plans, StreamPlan
from transports.digest import add, region_digest
from transports.disk.targets import Landing, landing
from transports.dtypes import TORCH_DTYPES, byte_shape, carrier, is_packed
from updater.core.errors import Aborted, Failure, Rejected, refuse
from updater.core.participant import StreamOffer
from updater.protocol.manifest import Manifest, TensorSpec


class StreamSender(Protocol):
    """One per trainer, for many updates. Used from one thread; `abort` from any.

    Every wait ends at its deadline. Raises Aborted with codes `peer_lost` (a receiver is gone or says that it gave
    up, named), `peer_timeout`, `stream_mismatch` (the plan is not what the receivers expect). After any of them, and
    after `finish(normal=False)`, `session` is another one.
    """

    kind: str

    @property
    def address(self) -> str:
        """For the request: where receivers find this sender."""

    @property
    def session(self) -> str:
        """For the request."""

    def open(self, offer: StreamOffer, plans: Plans, deadline_s: float) -> None:
        """Meet every receiver of the offer and agree with each on its plan. Keeps what may be kept of the update
        before. A transport that sends every receiver the same refuses plans that differ (`stream_mismatch`).
        """

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        """uint8 memory of `bucket.nbytes` bytes to be filled, free of what was sent before. The next bucket of at least
        one plan: it goes to those receivers.
        """

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        """The buffer of this bucket is full. May return before it has arrived."""

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        """`normal`: until everything has arrived everywhere. Otherwise tells every receiver, and never waits long."""

    def abort(self, reason: str) -> None:
        """From any thread: whatever is under way ends soon, with `client_abort`."""

    def close(self) -> None:
        """No update follows. Leaves nothing behind."""


class StreamReceiver(Protocol):
    """One per update and rank, made by a transport's hub (`registry.Transports`), which keeps what outlives it."""

    def receive(
        self,
        expected: Callable[[StreamPlan], None],
        take: Callable[[Chunk, torch.Tensor], None],
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        """Meet the sender, have its plan judged by `expected`, take every chunk in order; bytes received.

        `take` is given uint8 tensors that are overwritten after it returned; a receiver of device memory synchronises
        before it lets the sender go on. Ends soon after `should_stop` with Cancelled. Raises Aborted `peer_lost`,
        `peer_timeout`, `stream_mismatch`.
        """

    def close(self, *, normal: bool) -> None:
        """After an end that was not normal nothing of this stream is used again."""


class StreamSource:
    """A `transports.base.Source` over a stream: `read` takes all reads at once, once."""

    def __init__(self, kind: str, manifest: Manifest, receiver: StreamReceiver) -> None:
        self.kind = kind
        self._manifest = manifest
        self._specs = MappingProxyType(manifest.specs())
        self._receiver = receiver
        self._watch: tuple[str, ...] = ()
        self._scatter: Scatter | None = None
        self._complete = False
        self._closed = False

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def watch(self, names: Iterable[str]) -> None:
        """Before `read`: digest these as they pass, since they will not come again."""
        self._watch = tuple(names)

    def arrived(self, name: str) -> int:
        """Digest of a watched tensor. Raises Aborted `tensor_missing`."""
        digest = self._scatter.digest_of(name) if self._scatter is not None else None
        if digest is None:
            raise Aborted(Failure("tensor_missing", "did not arrive whole", tensor=name))
        return digest

    def read(
        self,
        reads: Sequence[Read],
        *,
        progress: Callable[[int], None] = lambda _bytes: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadReport:
        """Receive the stream and put every chunk where it is wanted. Raises Aborted, Cancelled."""
        if self._closed or self._scatter is not None:
            raise Aborted(Failure("read_failed", "a stream comes once"))
        began = time.perf_counter()
        self._scatter = scatter = Scatter(self._specs, reads, self._watch)
        if should_stop():
            raise Cancelled
        received = self._receiver.receive(self._expected, scatter.take, progress, should_stop)
        scatter.check_complete()
        self._complete = True
        return ReadReport(received, scatter.delivered, time.perf_counter() - began)

    def recheck(self) -> None:
        """Nothing lies anywhere that could change."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._receiver.close(normal=self._complete)

    def _expected(self, plan: StreamPlan) -> None:
        """Raises Rejected `stream_mismatch` with every difference between the sender's plan and the manifest."""
        sent = {spec.name: spec for spec in plan.tensors}
        faults = [
            Failure("stream_mismatch", _difference(sent.get(name), self._specs.get(name)), tensor=name)
            for name in sorted(sent.keys() | self._specs.keys())
            if sent.get(name) != self._specs.get(name)
        ]
        if faults:
            raise Rejected(*faults[:100])


def _difference(sent: TensorSpec | None, promised: TensorSpec | None) -> str:
    if sent is None:
        return "promised by the manifest, and not in the sender's plan"
    if promised is None:
        return "in the sender's plan, and not in the manifest"
    return f"sent as {sent.dtype} {list(sent.shape)}, promised as {promised.dtype} {list(promised.shape)}"


def pack(
    bucket: Bucket, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
) -> None:
    """Fill a sender's buffer: each chunk's region of its tensor, row-major. `tensors`: at least those of the bucket.

    A tensor may be non-contiguous and on any device; it is copied region by region, never whole. Raises Rejected
    `tensor_missing`, `tensor_shape`, `tensor_dtype` where a tensor is not what its spec says: the plan is out already.
    """
    for chunk in bucket.chunks:
        spec, tensor = specs[chunk.name], tensors.get(chunk.name)
        if tensor is None:
            raise refuse("tensor_missing", "announced, and not there to be sent", tensor=chunk.name)
        view = _as_announced(spec, tensor.detach().resolve_conj().resolve_neg())
        bits = carrier(view.element_size())  # bytes travel unchanged, also of types that torch cannot copy
        piece = buffer[chunk.offset : chunk.offset + chunk.nbytes]
        piece.view(bits).view(chunk.box.size).copy_(view[chunk.box.slices()].view(bits))


def _as_announced(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the shape that its bytes are cut by. Types that torch cannot hold, and packed ones, come as bytes
    of any shape.
    """
    shape = byte_shape(spec.shape, spec.dtype)
    own = TORCH_DTYPES.get(spec.dtype, torch.uint8)
    as_bytes = own is torch.uint8 or is_packed(spec.dtype)
    if tensor.dtype != own and not (as_bytes and tensor.dtype == torch.uint8):
        raise refuse("tensor_dtype", f"{tensor.dtype}, announced as {spec.dtype}", tensor=spec.name)
    if tuple(tensor.shape) == shape:
        return tensor
    if not is_packed(spec.dtype) or tensor.numel() != prod(shape):
        hint = " (a part that was not gathered?)" if tensor.numel() < prod(shape) else ""
        why = f"shape {list(tensor.shape)}, announced as {list(spec.shape)}{hint}"
        raise refuse("tensor_shape", why, tensor=spec.name)
    return tensor.contiguous().view(torch.uint8).view(shape)


@dataclass(slots=True)
class _Watched:
    digest: int = 0


class Scatter:
    """`reads`: all that a receiver wants, checked here. `watch`: names whose digest is computed as they pass.

    Raises Aborted `tensor_missing`, `tensor_shape`, `tensor_dtype`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], reads: Sequence[Read], watch: Iterable[str] = ()) -> None:
        missing = sorted({read.name for read in reads} - set(specs))
        if missing:
            raise Aborted(*(Failure("tensor_missing", "not in this stream", tensor=name) for name in missing[:100]))
        self._specs = specs
        self._wanted: dict[str, list[Landing]] = defaultdict(list)
        for read in reads:
            self._wanted[read.name].append(landing(specs[read.name], read))
        self._watched = {name: _Watched() for name in watch}
        self._shapes = {name: byte_shape(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._arrived = dict.fromkeys(specs, 0)  # elements; a tensor's regions come in row-major order
        self.delivered = 0  # bytes put into targets

    def take(self, chunk: Chunk, data: torch.Tensor) -> None:
        """`data`: uint8, on any device, the chunk's bytes; free to be overwritten when this returns.

        On a device the copies are only queued: the code that overwrites `data` synchronises first. Raises Aborted
        `stream_mismatch` for a region that is not the next one of its tensor.
        """
        spec = self._specs[chunk.name]
        if _first_element(chunk, self._shapes[chunk.name]) != self._arrived[chunk.name]:
            raise Aborted(Failure("stream_mismatch", f"region {chunk.box} came out of turn", tensor=chunk.name))
        for found in self._wanted.get(chunk.name, ()):
            common = chunk.box.meet(found.box)
            if common is None:
                continue
            piece = data.view(found.dtype).view(chunk.box.size)[common.within(chunk.box).slices()]
            found.view[common.within(found.box).slices()].copy_(piece)
            self.delivered += piece.numel() * piece.element_size()
        watched = self._watched.get(chunk.name)
        if watched is not None:
            watched.digest = add(watched.digest, _digest(spec, chunk, data))
        self._arrived[chunk.name] += chunk.box.numel

    def digest_of(self, name: str) -> int | None:
        """Of a watched tensor that has arrived whole; else None."""
        return self._watched[name].digest if name in self._watched and self._whole(name) else None

    def check_complete(self) -> None:
        """Raises Aborted `tensor_missing` with every tensor of which something did not come."""
        wrong = [name for name in self._arrived if not self._whole(name)]
        if wrong:
            raise Aborted(*(Failure("tensor_missing", "did not arrive whole", tensor=name) for name in wrong[:100]))

    def _whole(self, name: str) -> bool:
        return name in self._arrived and self._arrived[name] == prod(self._shapes[name])


def _first_element(chunk: Chunk, shape: tuple[int, ...]) -> int:
    """Row-major number of the element with which a region begins."""
    first = 0
    for start, size in zip(chunk.box.start, shape, strict=True):
        first = first * size + start
    return first


def _digest(spec: TensorSpec, chunk: Chunk, data: torch.Tensor) -> int:
    if is_packed(spec.dtype):
        shape = byte_shape(spec.shape, spec.dtype)
        return region_digest(data.view(chunk.box.size), shape, "U8", chunk.box)
    typed = data.view(TORCH_DTYPES[spec.dtype]).view(chunk.box.size)
    return region_digest(typed, spec.shape, spec.dtype, chunk.box)
