"""One checkpoint tensor of a model that is spread over ranks: digested where it lies, gathered on the sender alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer_side.megatron.parameters import Fragment
from trainer_side.megatron.plan import Planned, Region
from trainer_side.sources.casts import cast
from transports.base import Box
from transports.digest import MASK, region_digest
from transports.dtypes import TORCH_DTYPES
from updater.core.errors import Aborted, Failure
from updater.manifest import TensorSpec

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
    planned: Planned
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
            region, at = whole[_slices(box)], 0
            for piece in fragment.pieces:
                piece.copy_(region[at : at + piece.shape[0]] if len(fragment.pieces) > 1 else region)
                at += piece.shape[0]

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
        waiting: list[tuple[Region, torch.Tensor, dist.Work]] = []
        for region in self.planned.regions:
            place = tensor[_slices(region.box)]
            if region.owner == self.here.rank:
                _copy(self.held[region.box], place, self.spec.dtype)
                continue
            # Rows land where they belong; columns by way of a copy.
            landing = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            waiting.append((region, landing, self._started(dist.irecv, landing, region.owner, region)))
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
                waiting.append((region, data, self._started(dist.isend, data, self.here.sender, region)))
        for region, _data, work in waiting:
            self._finish(work, region)

    def _started(self, call: object, data: torch.Tensor, peer: int, region: Region) -> dist.Work:
        """As bytes: not every backend knows every dtype."""
        side = {"group_src": peer} if call is dist.irecv else {"group_dst": peer}
        try:
            work: dist.Work = call(data.view(-1).view(torch.uint8), group=self.here.group, **side)  # type: ignore[operator]
        except RuntimeError as error:
            raise self._lost(region) from error
        return work

    def _finish(self, work: dist.Work, region: Region) -> None:
        """Waits as long as the trainer's group does (I9)."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(region) from error

    def _lost(self, region: Region) -> Aborted:
        here = self.here
        peer = region.owner if here.rank == here.sender else here.sender
        text = f"trainer rank {peer} did not take part in gathering"
        return Aborted(Failure("peer_lost", text, rank=peer, tensor=self.spec.name))


def _copy(fragment: Fragment, place: torch.Tensor, dtype: str) -> None:
    at = 0
    for piece in fragment.pieces:
        target = place[at : at + piece.shape[0]] if len(fragment.pieces) > 1 else place
        target.copy_(cast(piece, dtype))
        at += piece.shape[0]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
