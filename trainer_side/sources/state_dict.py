"""A state dict as a source: every entry checked, wrappers off the names, ties found, dtypes decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from trainer_side.sources import whole
from trainer_side.sources.casts import Casts
from trainer_side.sources.parts import Part, PartsSource
from trainer_side.sources.whole import WholePart
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import Rejected, refuse
from updater.protocol.manifest import TensorSpec
from updater.protocol.names import clean_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from trainer_side.sources.sharded import ShardedPart


def state_dict_source(
    state: Mapping[str, torch.Tensor],
    casts: Casts,
    *,
    group: ProcessGroup | None = None,
    sender_rank: int = 0,
) -> PartsSource:
    """Raises Rejected with every fault of every tensor."""
    if not state:
        raise refuse("bad_request", "no tensors to publish")
    names = clean_names(state)
    check(state, names)
    casts.check(names.values())
    group = group or group_of_tensors(state.values())
    sender = global_rank(group, sender_rank)
    parts = [part_of(names[name], tensor, casts, sender) for name, tensor in state.items()]
    return PartsSource(parts, ties_of(parts), group=group, sender_rank=sender_rank)


def check(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
    """Raises Rejected: what holds no bytes, has no safetensors type, or shares part of another's memory."""
    faults = [fault for name, tensor in state.items() for fault in whole.faults(names[name], tensor)]
    for name, tensor in state.items():
        if is_sharded(tensor):
            from trainer_side.sources import sharded

            faults += sharded.faults(names[name], tensor)
    if faults:
        raise Rejected(*faults)
    faults = whole.overlaps({names[name]: tensor for name, tensor in state.items() if not is_sharded(tensor)})
    if faults:
        raise Rejected(*faults)


def part_of(name: str, tensor: torch.Tensor, casts: Casts, sender: int) -> Part:
    """detach() shares the version counter with its source, so that later steps on the parameter are still seen.

    `sender`: its rank in the world.
    """
    spec = TensorSpec(name, casts.wire(name, DTYPE_NAMES[tensor.dtype]), tuple(tensor.shape))
    if not is_sharded(tensor):
        return WholePart(spec, tensor.detach())
    from trainer_side.sources.sharded import ShardedPart

    return ShardedPart.of(spec, tensor, sender)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing what only sharded trainers need."""
    return hasattr(tensor, "device_mesh")


def ties_of(parts: Sequence[Part]) -> tuple[tuple[str, str], ...]:
    """(alias, canonical name) of parts that lie in one storage. What is computed on the way is tied to nothing."""
    keys: dict[str, object] = {}
    for part in parts:
        if isinstance(part, WholePart):
            keys[part.spec.name] = whole.tie_key(part.tensor)
        elif _lies_sharded(part):
            from trainer_side.sources import sharded

            keys[part.spec.name] = sharded.tie_key(part)
    return whole.find_ties(keys)


def _lies_sharded(part: Part) -> TypeGuard[ShardedPart]:
    return is_sharded(getattr(part, "tensor", None))


def group_of_tensors(tensors: Iterable[torch.Tensor]) -> ProcessGroup | None:
    """All ranks, if they share a mesh; or the one group of a smaller mesh; None where nothing is sharded.

    Raises Rejected where that is not clear.
    """
    meshes = {tensor.device_mesh for tensor in tensors if is_sharded(tensor)}
    if not meshes:
        return None
    if any(mesh.size() == torch.distributed.get_world_size() for mesh in meshes):
        world: ProcessGroup = torch.distributed.group.WORLD  # type: ignore[assignment]
        return world
    if len(meshes) == 1 and (mesh := meshes.pop()).ndim == 1:
        return mesh.get_group()
    raise refuse("bad_request", "sharded over several meshes: say which ranks push together, group=...")


def global_rank(group: ProcessGroup | None, rank: int) -> int:
    """Of a rank of the group, in the world."""
    return rank if group is None else torch.distributed.get_global_rank(group, rank)
