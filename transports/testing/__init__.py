"""Doubles of the seam and checkpoints made byte by byte, for tests here and of other authors of transports.

`TransportContract` (from `transports.testing.source_contract`) is the conformance suite.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transports.base import Cancelled, Read, ReadReport
from transports.dtypes import DTYPE_NAMES
from transports.testing.source_contract import StoredContract, TransportContract
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol.manifest import Manifest, TensorSpec

__all__ = [
    "HandMadeFile",
    "LyingSource",
    "MemorySource",
    "PoisonSource",
    "StoredContract",
    "TransportContract",
    "refused",
    "shard_name",
    "tensor_bytes",
    "write_checkpoint",
    "write_index",
    "write_sharded",
]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of a CPU tensor of any dtype."""
    whole = tensor.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size()) if whole.numel() else b""


@dataclass
class HandMadeFile:
    """A safetensors file written entry by entry, right or wrong.

    Methods return the builder. `claim`: the header length to write instead of the true one; `header`: JSON bytes to
    write instead of the entries.
    """

    entries: list[tuple[str, Any]] = field(default_factory=list)
    payload: bytes = b""
    claim: int | None = None
    header: bytes | None = None

    def tensor(self, name: str, tensor: torch.Tensor) -> HandMadeFile:
        """A well-formed entry behind what is there."""
        return self.data(name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor_bytes(tensor))

    def data(self, name: str, dtype: str, shape: Sequence[int], data: bytes) -> HandMadeFile:
        """An entry whose range is exactly `data`, whatever dtype and shape say."""
        low = len(self.payload)
        self.payload += data
        return self.entry(name, {"dtype": dtype, "shape": list(shape), "data_offsets": [low, low + len(data)]})

    def entry(self, name: str, value: Any) -> HandMadeFile:
        """Any JSON value under any name, also a name that is there already; no payload."""
        self.entries.append((name, value))
        return self

    def hole(self, size: int) -> HandMadeFile:
        """Payload that no entry claims."""
        self.payload += b"\xcd" * size
        return self

    def to_bytes(self) -> bytes:
        text = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in self.entries)
        raw = ("{" + text + "}").encode() if self.header is None else self.header
        claim = len(raw) if self.claim is None else self.claim
        return claim.to_bytes(8, "little") + raw + self.payload

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """One well-formed file, tensors in the order given."""
    made = HandMadeFile()
    for name, tensor in tensors.items():
        made.tensor(name, tensor)
    return made.write(path)


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_sharded(folder: Path, shards: Sequence[Mapping[str, torch.Tensor]]) -> list[Path]:
    """Well-formed shards with their index; returns the shards' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    paths = [write_checkpoint(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    write_index(folder, {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard})
    return paths


def write_index(folder: Path, weight_map: Mapping[str, Any], **metadata: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}))
    return path


class MemorySource:
    """A correct `Source` over tensors in memory. `manifest` and `warnings` are handed out as given."""

    kind = "memory"

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], manifest: Manifest | None = None, warnings: tuple[str, ...] = ()
    ) -> None:
        self.tensors = dict(tensors)
        self.closed = False
        self._manifest = manifest
        self._warnings = warnings

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in sorted(self.tensors.items())
        }

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._warnings

    def read(
        self,
        reads: Sequence[Read],
        *,
        progress: Callable[[int], None] = lambda _bytes: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadReport:
        for read in reads:
            self._check(read)
        total = 0
        for read in reads:
            if should_stop():
                raise Cancelled
            region = self.tensors[read.name][read.box.slices()]
            size = region.numel() * region.element_size()
            self.deliver(region if read.permute is None else region.permute(read.permute), read.target)
            progress(size)
            total += size
        return ReadReport(total, total, 0.0)

    def deliver(self, region: torch.Tensor, target: torch.Tensor) -> None:
        """Bring one region, already permuted, into its target."""
        target.copy_(region.reshape(target.shape))

    def recheck(self) -> None:
        """What lies in memory here does not change."""

    def close(self) -> None:
        self.closed = True

    def _check(self, read: Read) -> None:
        tensor = self.tensors.get(read.name)
        if tensor is None:
            raise Aborted(Failure("tensor_missing", "not in this source", tensor=read.name))
        if not read.box.fits(tensor.shape) or read.box.numel != read.target.numel():
            raise Aborted(Failure("tensor_shape", "region does not fit", tensor=read.name))


class LyingSource(MemorySource):
    """Reports success and writes nothing, for the tensors in `silent` (None: for all)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], silent: frozenset[str] | None = None, **rest: Any) -> None:
        super().__init__(tensors, **rest)
        self.silent = silent

    def read(self, reads: Sequence[Read], **callbacks: Any) -> ReadReport:
        honest = [read for read in reads if self.silent is not None and read.name not in self.silent]
        super().read(honest, **callbacks)
        total = sum(read.box.numel * self.tensors[read.name].element_size() for read in reads)
        return ReadReport(total, total, 0.0)


class PoisonSource(MemorySource):
    """Delivers through one reused buffer and overwrites it with 0xAB after each region."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], **rest: Any) -> None:
        super().__init__(tensors, **rest)
        largest = max((t.numel() * t.element_size() for t in self.tensors.values()), default=0)
        self.buffer = torch.empty(largest, dtype=torch.uint8)

    def deliver(self, region: torch.Tensor, target: torch.Tensor) -> None:
        room = self.buffer[: region.numel() * region.element_size()].view(region.dtype).view(region.shape)
        room.copy_(region)
        super().deliver(room, target)
        self.buffer.fill_(0xAB)


@contextmanager
def refused(*codes: str, tensors: Sequence[str] = (), files: Sequence[str] = ()) -> Iterator[list[LiveweightsError]]:
    """The block must raise a typed error with exactly these codes, naming at least these tensors and files."""
    caught: list[LiveweightsError] = []
    try:
        yield caught
    except LiveweightsError as error:
        caught.append(error)
    if not caught:
        raise AssertionError(f"nothing was refused; wanted {codes}")
    failures = caught[0].failures
    _same("codes", {failure.code for failure in failures}, set(codes), exact=True)
    _same("tensors", {failure.tensor for failure in failures}, set(tensors))
    _same("files", {failure.file for failure in failures}, set(files))


def _same(what: str, found: set[str], wanted: set[str], *, exact: bool = False) -> None:
    if found != wanted if exact else not wanted <= found:
        raise AssertionError(f"{what}: found {sorted(found)}, wanted {sorted(wanted)}")
