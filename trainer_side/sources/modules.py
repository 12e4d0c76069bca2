"""A module as a source: its state dict, whatever it is wrapped in, and the group that trains it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_side.sources.casts import Casts
from trainer_side.sources.parts import PartsSource
from trainer_side.sources.state_dict import state_dict_source
from updater.core.errors import refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What a layer adds to a state dict beside its tensors.
_EXTRA = "_extra_state"


def module_source(
    module: torch.nn.Module, casts: Casts, *, group: ProcessGroup | None = None, sender_rank: int = 0
) -> PartsSource:
    """By what is inside: adapters of peft, units of FSDP1, or parameters that a state dict has. Raises Rejected."""
    group = group or group_of(module)
    flat = _is_flat(module)
    if "peft" in sys.modules:  # a module cannot hold what was never imported
        from trainer_side.sources import lora

        if lora.has_adapters(module):
            if flat:
                raise refuse(
                    "adapter_unsupported", "adapters inside FullyShardedDataParallel", hint="shard it with fully_shard"
                )
            return lora.lora_source(module, casts, group=group, sender_rank=sender_rank)
    if flat:
        from trainer_side.sources.fsdp1 import fsdp1_source

        return fsdp1_source(module, casts, group=group, sender_rank=sender_rank)
    return state_dict_source(state_of(module), casts, group=group, sender_rank=sender_rank)


def _is_flat(module: torch.nn.Module) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, live and not copied. FSDP2 brings its parameters back to shards for it."""
    state: Mapping[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != _EXTRA}


def group_of(module: torch.nn.Module) -> ProcessGroup | None:
    """Of the outermost DistributedDataParallel, also inside a compiled module; else None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.nn.parallel import DistributedDataParallel

    inner: torch.nn.Module | None = module
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = inner._modules.get("_orig_mod")
    if inner is None:
        return None
    group: ProcessGroup = inner.process_group
    return group
