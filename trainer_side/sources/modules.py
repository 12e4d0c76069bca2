"""A module's state dict, whatever it is wrapped in, and the group that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What a layer adds to a state dict beside its tensors.
_EXTRA = "_extra_state"


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, live and not copied. FSDP2 brings its parameters back to shards for it."""
    state: Mapping[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != _EXTRA}


def group_of_module(module: torch.nn.Module) -> ProcessGroup | None:
    """Of DistributedDataParallel, at any depth of wrapping that is outermost; else None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel):
            found: ProcessGroup = module.process_group
            return found
        inner = module._modules.get("_orig_mod")
        if inner is None:
            return None
        module = inner
