"""The sending end of a stream: tensors in the plan's order, packed into a sender's buffers as they come.

Holds no tensor and no buffer of its own: what is in memory is the tensor that is put and the sender's two buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from trainer_side.sources.whole import without_bytes
from transports.buckets import Bucket, Chunk, StreamPlan
from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES, byte_shape, is_packed
from transports.stream import StreamSender, pack
from updater.core.errors import Aborted, Failure
from updater.protocol.manifest import TensorSpec


class Packer:
    """`check` and `send` every tensor of the plan in its order. `known`: names whose digests need not be computed here.

    `stall_s`: how long one wait for a receiver may last.
    """

    def __init__(self, plan: StreamPlan, sender: StreamSender, known: Mapping[str, str], stall_s: float) -> None:
        self._plan, self._sender, self._known, self._stall_s = plan, sender, known, stall_s
        self._specs = {spec.name: spec for spec in plan.tensors}
        self._pieces = _by_tensor(plan.buckets)
        self._next = 0
        self._buffer: tuple[int, torch.Tensor] | None = None  # bucket, and what is filled for it
        self.digests: dict[str, str] = {}

    def check(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """What was promised of the tensor that comes next. Raises Aborted if this is not it: `stream_mismatch` out of
        order, `tensor_unexpected`, `tensor_duplicate`, `tensor_shape`, `tensor_dtype`.
        """
        spec = self._expected(name)
        check_tensor(spec, tensor)
        return spec

    def send(self, spec: TensorSpec, tensor: torch.Tensor) -> int:
        """Send the checked tensor; its bytes. It may be overwritten when this returns. Raises what the sender does."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        for bucket, chunks in self._pieces.get(spec.name, ()):
            buffer = self._filled(bucket)
            pack(replace(bucket, chunks=chunks), buffer, {spec.name: tensor}, self._specs)
            if chunks[-1] is bucket.chunks[-1]:
                self._buffer = None
                self._sender.send(bucket, self._stall_s)
        if not self._known.get(spec.name):
            self.digests[spec.name] = to_hex(tensor_digest(tensor, spec.dtype))
        self._next += 1
        return spec.nbytes

    def check_complete(self) -> None:
        """Raises Aborted `tensor_missing` with what was never put."""
        left = self._plan.tensors[self._next :]
        if left:
            raise Aborted(*(Failure("tensor_missing", "it was never put", tensor=spec.name) for spec in left[:100]))

    def _filled(self, bucket: Bucket) -> torch.Tensor:
        if self._buffer is None or self._buffer[0] != bucket.index:
            self._buffer = bucket.index, self._sender.buffer(bucket, self._stall_s)
        return self._buffer[1]

    def _expected(self, name: str) -> TensorSpec:
        wanted = self._plan.tensors[self._next] if self._next < len(self._plan.tensors) else None
        if wanted is not None and wanted.name == name:
            return wanted
        if name not in self._specs:
            raise _fault("tensor_unexpected", "the manifest does not promise it", name)
        if wanted is None or any(spec.name == name for spec in self._plan.tensors[: self._next]):
            raise _fault("tensor_duplicate", "it was put before", name)
        raise _fault("stream_mismatch", f"it is not its turn: {wanted.name} comes next", name)


def check_tensor(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Raises Aborted `tensor_shape`, `tensor_dtype` where a tensor is not what was promised, `bad_request` for one
    without memory of its own.
    """
    kind = without_bytes(tensor)
    if kind is not None:
        raise _fault("bad_request", f"{kind}: it holds no plain bytes", spec.name)
    shape, dtype = tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if is_packed(spec.dtype) and dtype == "U8" and shape == byte_shape(spec.shape, spec.dtype):
        return
    if dtype != spec.dtype:
        raise _fault("tensor_dtype", f"{dtype}, promised as {spec.dtype}", spec.name)
    if shape not in (spec.shape, byte_shape(spec.shape, spec.dtype)):
        why = f"shape {list(shape)}, promised as {list(spec.shape)}"
        if not tensor.numel():
            why += ": an un-gathered parameter?"
        raise _fault("tensor_shape", why, spec.name)


def _fault(code: str, why: str, name: str) -> Aborted:
    return Aborted(Failure(code, why, tensor=name))


def _by_tensor(buckets: Sequence[Bucket]) -> dict[str, list[tuple[Bucket, tuple[Chunk, ...]]]]:
    """Of every tensor: its chunks, bucket by bucket."""
    found: dict[str, list[tuple[Bucket, tuple[Chunk, ...]]]] = {}
    for bucket in buckets:
        mine: dict[str, list[Chunk]] = {}
        for chunk in bucket.chunks:
            mine.setdefault(chunk.name, []).append(chunk)
        for name, chunks in mine.items():
            found.setdefault(name, []).append((bucket, tuple(chunks)))
    return found
