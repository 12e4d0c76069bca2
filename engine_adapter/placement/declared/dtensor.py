"""Placement learned from DTensor parameters: their own placements say how they are cut, the rules only say names.

`Replicate` and plain tensors are whole on this rank; one `Shard(dim)` is cut by torch's chunk rule, uneven lengths
included. Partial sums, strided shards, two shardings at once and sharded fused parameters are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine_adapter.placement.declared.cutting import Cut
from engine_adapter.placement.declared.layouts import QKV, Experts, Merged, Sharded
from engine_adapter.placement.declared.rules import Rules, Target, analyse
from engine_adapter.placement.rows import Placement
from updater.core.errors import Failure, Rejected, refuse
from updater.protocol.manifest import TensorSpec


def from_dtensors(
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    rules: Rules,
    rank: int,
    size: int,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> Placement:
    """Rows into the local tensors of `tensors` (name -> DTensor or plain tensor). `aliases`: ties per parameter.

    Raises `Rejected` with every parameter that is refused, or with every failure of names and shapes.
    """
    ties = aliases or {}
    targets: dict[str, Target] = {}
    learned: dict[str, Cut] = {}
    failures: list[Failure] = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        targets[name] = Target(tuple(local.shape), ties.get(name, ()))
        try:
            learned[name] = cut_of(name, tensor, rules)
        except Rejected as error:
            failures += error.failures
    if failures:  # of the model, not of the checkpoint: names and shapes come after
        raise Rejected(*(failure.at(rank=rank) for failure in failures))
    found = analyse(specs, targets, rules, rank, size, learned)
    if found.failures:
        raise Rejected(*found.failures)
    return found.placement


def cut_of(name: str, tensor: torch.Tensor, rules: Rules) -> Cut:
    """How `tensor` lies on this rank. Raises `Rejected` (`placement_refused`) where rows cannot say it."""
    declared = rules.layout_of(name)
    cuts = _shards(name, tensor) if isinstance(tensor, DTensor) else []
    if not cuts:
        return Cut(declared, 0, 1)
    if len(cuts) > 1:
        raise refuse("placement_refused", "sharded along two mesh dimensions", tensor=name)
    if isinstance(declared, Experts | Merged | QKV):
        kind = type(declared).__name__
        raise refuse("placement_refused", f"a {kind} parameter cannot be cut by one Shard", tensor=name)
    dim, rank, size = cuts[0]
    return Cut(Sharded(dim, uneven=True), rank, size)


def _shards(name: str, tensor: DTensor) -> list[tuple[int, int, int]]:
    """(dim, mesh rank, mesh size) of every real sharding."""
    found = []
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        # by exact type: a strided shard is a Shard for isinstance, and is laid out differently
        if type(placement) is Shard:
            if mesh.size(axis) > 1:
                found.append((placement.dim % tensor.dim(), mesh.get_local_rank(axis), mesh.size(axis)))
        elif type(placement) is not Replicate:
            raise refuse("placement_refused", f"placement {placement} is not understood", tensor=name)
    return found
