"""A tensor sharded over a device mesh (DTensor): FSDP2, tensor parallelism, and both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer_side.sources.casts import cast
from transports.base import Box
from transports.digest import MASK, region_digest
from updater.core.errors import Failure
from updater.protocol.manifest import TensorSpec

Run = tuple[int, int, int]  # of one dimension: start in the whole tensor, start in the shard, size


@dataclass(frozen=True, slots=True)
class ShardedPart:
    """`tensor`: a detached DTensor; `local`: its shard on this rank; `given`: the shard that the trainer writes to.

    The detached DTensor shares the version counter of the trainer's; its shard has one of its own. `sender`: rank in
    the world of the one that sends.
    """

    spec: TensorSpec
    tensor: DTensor
    local: torch.Tensor
    given: torch.Tensor
    sender: int

    @classmethod
    def of(cls, spec: TensorSpec, tensor: DTensor, sender: int) -> ShardedPart:
        with torch.no_grad():
            detached: DTensor = tensor.detach()  # type: ignore[assignment]
            return cls(spec, detached, detached.to_local(), tensor._local_tensor, sender)

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return (self.tensor, self.given)

    @property
    def device(self) -> torch.device:
        return torch.device(self.tensor.device_mesh.device_type)

    def share(self, sender: bool) -> int | None:
        """Of this rank's shard, in the coordinates of the whole; 0 where another rank counts the same shard.

        Where several meshes hold the tensor, one per tensor-parallel rank, that of the sender counts it.
        """
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None or not counts(coordinate, placements) or self.sender not in mesh.mesh.flatten().tolist():
            return 0
        held = cast(self.local, self.spec.dtype)
        total = 0
        for box, inside in regions(self.spec.shape, tuple(mesh.shape), coordinate, placements):
            total += region_digest(held[inside], self.spec.shape, self.spec.dtype, box)
        return total & MASK

    def whole(self, sender: bool) -> torch.Tensor | None:
        """Gathered on every rank of the mesh: each holds the whole tensor for the length of this call."""
        return self._travelling().full_tensor()

    def _travelling(self) -> DTensor:
        """In the wire dtype, on the mesh's device: shards are cast before they are gathered, which moves less."""
        held = cast(self.local, self.spec.dtype).to(self.device.type)
        if held is self.local:
            return self.tensor
        like = self.tensor
        return DTensor.from_local(
            held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def counts(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Of the ranks that hold the same shard, the one with index 0 in every replicated dimension counts it."""
    return all(at == 0 for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())


def regions(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """(region of the whole tensor, the same in the shard) of the rank at `coordinate`: one, unless shards interleave.

    Uneven shards and empty ones included. `mesh`: sizes of its dimensions.
    """
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        size, start = _compute_local_shape_and_global_offset(
            torch.Size(shape), tuple(mesh), list(coordinate), tuple(placements)
        )
        yield Box(tuple(start), tuple(size)), tuple(slice(0, count) for count in size)
        return
    runs = [_runs(shape[dim], dim, mesh, coordinate, placements) for dim in range(len(shape))]
    for each in product(*runs):
        box = Box(tuple(run[0] for run in each), tuple(run[2] for run in each))
        yield box, tuple(slice(run[1], run[1] + run[2]) for run in each)


def faults(name: str, tensor: DTensor) -> Iterator[Failure]:
    """What makes a sharded tensor unfit, beside what `whole.faults` finds."""
    odd = [placement for placement in tensor.placements if not placement.is_shard() and not placement.is_replicate()]
    odd = [placement for placement in odd if not isinstance(placement, _StridedShard)]
    if odd:
        yield Failure("bad_request", f"placement {odd[0]} is a sum that was not made yet", tensor=name)
    if tensor.device_mesh.get_coordinate() is None:
        yield Failure("bad_request", "lies on a device mesh without this rank", tensor=name)


def tie_key(part: ShardedPart) -> object:
    """Equal for two names of one shard; by storage and not by address, which empty shards do not have."""
    local = part.local
    return (local.untyped_storage()._cdata, local.storage_offset(), part.tensor.shape, local.stride(), local.dtype)


def _runs(
    size: int, dim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Run]:
    """Consecutive indexes of one dimension that this rank holds: torch's own splits, applied to index numbers."""
    held = torch.arange(size)
    for count, at, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            split = _StridedShard(0, split_factor=placement.split_factor)
            held = split._split_tensor(held, count, with_padding=False)[0][at]
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = Shard(0)._split_tensor(held, count, with_padding=False)[0][at]
    if held.numel() == 0:
        return [(size, 0, 0)]
    cuts = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist(), held.numel()]
    return [(int(held[low]), low, high - low) for low, high in pairwise(cuts)]
