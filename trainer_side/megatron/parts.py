"""One checkpoint tensor of a model that is spread over ranks: digested where it lies, gathered on the sender alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer_side.megatron.parameters import Fragment
from trainer_side.megatron.plan import Region, TensorPlan
from trainer_side.sources.casts import cast
from transports.base import Box
from transports.digest import MASK, region_digest
from transports.dtypes import TORCH_DTYPES
from updater.core.errors import Aborted, Failure
from updater.protocol.manifest import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Here:
    """This rank within `group` (None: it is alone), the sender's rank, and where collectives run."""

    group: ProcessGroup | None
    rank: int
    sender: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class MegatronPart:
    """A `trainer_side.sources.Part`. `spec`: with the dtype that it travels in. `held`: by this rank, by region."""

    spec: TensorSpec
    planned: TensorPlan
    held: dict[Box, Fragment]
    here: Here

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return [piece for fragment in self.held.values() for piece in fragment.pieces]

    @property
    def device(self) -> torch.device:
        return self.here.device

    def share(self, sender: bool) -> int | None:
        """Of the regions that this rank owns."""
        total = 0
        for region in self.planned.regions:
            if region.owner == self.here.rank:
                total += self.region_share(region)
        return total & MASK

    def region_share(self, region: Region) -> int:
        """Digest of a region that this rank holds, in the coordinates of the whole tensor."""
        total, start = 0, region.box.start
        for piece in self.held[region.box].pieces:
            box = Box(start, tuple(piece.shape))
            total += region_digest(cast(piece, self.spec.dtype), self.spec.shape, self.spec.dtype, box)
            start = (start[0] + piece.shape[0], *start[1:]) if start else start
        return total & MASK

    def fill(self, whole: Any) -> None:
        """The other way: set what this rank holds from a tensor (or a slice reader of a file) of the whole shape."""
        for box, fragment in self.held.items():
            for piece, part in _side_by_side(fragment, whole[_slices(box)]):
                piece.copy_(part)

    def whole(self, sender: bool) -> torch.Tensor | None:
        """Point to point from the owners of its regions to the sender; other ranks have nothing to do."""
        if not sender:
            self._send()
            return None
        regions = self.planned.regions
        if len(regions) == 1 and regions[0].owner == self.here.rank:
            return cast(self.held[regions[0].box].tensor(), self.spec.dtype)
        return self._receive()

    def _receive(self) -> torch.Tensor:
        tensor = torch.empty(self.spec.shape, dtype=TORCH_DTYPES[self.spec.dtype], device=self.device)
        waiting: list[tuple[Region, torch.Tensor, dist.Work | None]] = []
        for region in self.planned.regions:
            place = tensor[_slices(region.box)]
            if region.owner == self.here.rank:
                for piece, part in _side_by_side(self.held[region.box], place):
                    part.copy_(cast(piece, self.spec.dtype))
                continue
            # Rows land where they belong; columns by way of a copy.
            landing = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            with self._with_peer(region):
                work = dist.irecv(_as_bytes(landing), group=self.here.group, group_src=region.owner)
            waiting.append((region, landing, work))
        for region, landing, work in waiting:
            self._finish(work, region)
            place = tensor[_slices(region.box)]
            if landing.data_ptr() != place.data_ptr():
                place.copy_(landing)
        return tensor

    def _send(self) -> None:
        waiting = []
        for region in self.planned.regions:
            if region.owner == self.here.rank:
                data = cast(self.held[region.box].tensor(), self.spec.dtype).to(self.device).contiguous()
                with self._with_peer(region):
                    work = dist.isend(_as_bytes(data), group=self.here.group, group_dst=self.here.sender)
                waiting.append((region, data, work))
        for region, _data, work in waiting:
            self._finish(work, region)

    def _finish(self, work: dist.Work | None, region: Region) -> None:
        """Waits as long as the trainer's group does (I9). None: torch has done it already."""
        with self._with_peer(region):
            if work is not None:
                work.wait()

    @contextlib.contextmanager
    def _with_peer(self, region: Region) -> Iterator[None]:
        """torch says that a peer is gone, or was too slow, by a RuntimeError that names no rank."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(region) from error

    def _lost(self, region: Region) -> Aborted:
        here = self.here
        peer = region.owner if here.rank == here.sender else here.sender
        text = f"trainer rank {peer} did not take part in gathering"
        return Aborted(Failure("peer_lost", text, rank=peer, tensor=self.spec.name))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _side_by_side(fragment: Fragment, region: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(piece, its part of the region)."""
    if len(fragment.pieces) == 1:
        yield fragment.pieces[0], region
        return
    yield from zip(fragment.pieces, torch.split(region, [each.shape[0] for each in fragment.pieces]), strict=True)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
