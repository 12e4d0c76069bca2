"""A state dict of whole tensors as a source of this process alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_side.sources.casts import Casts
from trainer_side.sources.parts import PartsSource
from trainer_side.sources.state_dict import is_sharded, state_dict_source
from updater.core.errors import Failure, Rejected


def take(weights: Mapping[str, torch.Tensor]) -> PartsSource:
    """Check a state dict and clean its names. Copies nothing. Raises Rejected with every fault, not only the first.

    No other rank takes part here: what is sharded over a device mesh is refused. `sources.as_source` takes all kinds.
    """
    text = "sharded over a device mesh: gather it before publishing"
    faults = [Failure("tensor_shape", text, tensor=name) for name, tensor in weights.items() if is_sharded(tensor)]
    if faults:
        raise Rejected(*faults)
    return state_dict_source(weights, Casts())
