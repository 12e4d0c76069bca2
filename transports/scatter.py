"""The receiving end of a stream: chunks put where reads want them, and what is still missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from transports.base import Read
from transports.buckets import Chunk
from transports.digest import add, region_digest
from transports.disk.targets import Landing, landing
from transports.dtypes import TORCH_DTYPES, byte_shape, is_packed
from updater.core.errors import Aborted, Failure
from updater.protocol.manifest import TensorSpec


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
