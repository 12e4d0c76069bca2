"""`as_source`: what kind of trainer this is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_side.sources.casts import Casts, Dtypes
from trainer_side.sources.folder import FolderSource
from trainer_side.sources.modules import module_source
from trainer_side.sources.source import WeightSource
from trainer_side.sources.state_dict import state_dict_source
from updater.core.errors import refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Weights = WeightSource | Mapping[str, torch.Tensor] | torch.nn.Module | str | os.PathLike[str]


def as_source(
    weights: Weights,
    *,
    sender_rank: int = 0,
    group: ProcessGroup | None = None,
    dtypes: Dtypes | None = None,
) -> WeightSource:
    """`weights` as something that can be described, digested and walked. Copies and gathers nothing.

    `weights`: a state dict (DTensors in it stay sharded), a module (plain, DistributedDataParallel, compiled, FSDP1,
    FSDP2, a model with LoRA adapters of peft), a safetensors file or folder, or a WeightSource, which is answered as
    it is.
    `group`: the ranks that push together; every one of them makes a source and walks it. Found by itself where the
    weights name one (a device mesh, DistributedDataParallel, FSDP). Whole tensors name none: this process pushes alone.
    `sender_rank`: rank within `group` of the one that gets the tensors.
    `dtypes`: {glob pattern: dtype} of floating-point tensors that travel rounded, the last match decides:
    `{"*": "BF16", "*.router.weight": "F32"}`. One dtype alone is that of all: `torch.bfloat16`, `"bfloat16"`.

    Raises Rejected with every fault: empty (ungathered) or meta tensors, two names for one, a pattern without a match.
    """
    casts = Casts.of(dtypes)
    if isinstance(weights, torch.nn.Module):
        from trainer_side.megatron import is_megatron

        if is_megatron(weights):  # its state is one shard, under names that no engine loads
            raise refuse("bad_request", "a Megatron model: give trainer_side.megatron.MegatronSource(model, ...)")
        return module_source(weights, casts, group=group, sender_rank=sender_rank)
    if isinstance(weights, Mapping):
        return state_dict_source(weights, casts, group=group, sender_rank=sender_rank)
    if isinstance(weights, str | os.PathLike):
        return FolderSource(weights, casts, group=group, sender_rank=sender_rank)
    if dtypes:
        raise refuse("bad_request", "dtypes: a source that is made already decides its own")
    return weights
