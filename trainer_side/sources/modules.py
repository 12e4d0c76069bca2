"""A module as a source: its state dict and its config, whatever it is wrapped in, and the group that trains it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_side.sources.casts import Casts
from trainer_side.sources.parts import PartsSource
from trainer_side.sources.state_dict import state_dict_source
from updater.core.errors import refuse
from updater.protocol.model_config import ConfigRefused, config_part, quantisation_part
from updater.protocol.model_document import ModelDocument

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("liveweights.trainer")
#: What a layer adds to a state dict beside its tensors.
_EXTRA = "_extra_state"
#: Where wrappers keep what they wrap: data parallel, compiled, FSDP1, checkpointing of activations, peft.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PEFT = ("base_model", "model")


def module_source(
    module: torch.nn.Module, casts: Casts, *, group: ProcessGroup | None = None, sender_rank: int = 0
) -> PartsSource:
    """By what is inside: adapters of peft, units of FSDP1, or parameters that a state dict has. Raises Rejected."""
    source = _tensors_of(module, casts, group or group_of(module), sender_rank)
    source.model = document_of(module)
    return source


def _tensors_of(module: torch.nn.Module, casts: Casts, group: ProcessGroup | None, sender_rank: int) -> PartsSource:
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


def document_of(module: torch.nn.Module) -> ModelDocument | None:
    """The config of a model of transformers, as it would be saved; None for any other module.

    What a trainer changes for itself (dtype, cache, attention kernel, dropout) is not part of it: see
    `updater.protocol.model_config`. A config that cannot be written as JSON is not compared, and the log says so.
    """
    model = _pretrained_in(module)
    if model is None:
        return None
    try:
        config = json.loads(model.config.to_json_string(use_diff=False))
        # A save names the class, as it was before FSDP2 gave it one of its own.
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        return ModelDocument(config=config_part(config), quantization=quantisation_part(config))
    except (TypeError, ValueError, ConfigRefused) as error:
        _log.warning("the config of %s is not compared with the engines': %s", type(model).__name__, error)
        return None


def _pretrained_in(module: torch.nn.Module) -> Any:
    """The model of transformers that this is, or wraps."""
    if "transformers" not in sys.modules:  # a module cannot be of what was never imported
        return None
    from transformers import PreTrainedModel

    inner: torch.nn.Module | None = module
    while inner is not None and not isinstance(inner, PreTrainedModel):
        children = inner._modules
        held = next((children[name] for name in _WRAPPED if name in children), None)
        if held is None and _PEFT[0] in children:
            adapted = children[_PEFT[0]]
            held = (
                adapted if isinstance(adapted, PreTrainedModel) or adapted is None else adapted._modules.get(_PEFT[1])
            )
        inner = held
    return inner


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
