"""LoRA adapters of peft, merged tensor by tensor into a fresh one: W + scale * (B @ A). The live base is only read.

Which layers are merged, and in which dtype the sum is made, is what peft's own `merge_and_unload` would do. What it
would do otherwise (DoRA and other variants, convolutions, quantised bases, adapters of other kinds) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer_side.sources.casts import Casts, cast
from trainer_side.sources.parts import Part, PartsSource
from trainer_side.sources.state_dict import check, global_rank, group_of_tensors, part_of, ties_of
from trainer_side.sources.steps import storage_key
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import Failure, Rejected, refuse
from updater.protocol.manifest import TensorSpec
from updater.protocol.names import clean_name, clean_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter adds to one tensor. `b` None: `a` itself, scaled (a bias)."""

    a: torch.Tensor
    b: torch.Tensor | None
    scale: float
    transposed: bool


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """One tensor of the merged checkpoint, under its name with wrappers. `deltas`: in the order they are added."""

    name: str
    tensor: torch.Tensor
    deltas: tuple[Delta, ...] = ()


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether peft has changed this module."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(each, PeftModel | BaseTunerLayer) for each in module.modules())


def lora_source(
    module: torch.nn.Module, casts: Casts, *, group: ProcessGroup | None = None, sender_rank: int = 0
) -> PartsSource:
    """Raises Rejected: `adapter_unsupported` with the layer for what is not merged here, and where nothing is."""
    walk = _Walk()
    entries = list(walk.entries(module, ""))
    names = clean_names(entry.name for entry in entries)
    tensors = {entry.name: entry.tensor for entry in entries}
    check(tensors, names)
    casts.check(names.values())
    if not walk.changed:
        raise refuse(
            "adapter_unsupported",
            "no layer is changed by an active adapter: this would push the bare base",
            hint="activate the adapter (set_adapter), or push the base model itself (get_base_model)",
        )
    _check_ties(entries, names)
    group = group or group_of_tensors(tensors.values())
    sender = global_rank(group, sender_rank)
    parts = [_part(entry, names[entry.name], casts, sender) for entry in entries]
    return PartsSource(parts, ties_of(parts), group=group, sender_rank=sender_rank)


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Computed on the way: base and factors are gathered one after the other, and only then does the sender add them
    up: where its memory ends, no other rank is left in a collective.
    """

    spec: TensorSpec
    base: Part
    deltas: tuple[tuple[Delta, Part, Part | None], ...]

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        parts = [self.base, *(part for _delta, a, b in self.deltas for part in (a, b) if part is not None)]
        return [tensor for part in parts for tensor in part.watched]

    def share(self, sender: bool) -> int | None:
        return None

    def whole(self, sender: bool) -> torch.Tensor | None:
        base = self.base.whole(sender)
        factors = [(delta, a.whole(sender), None if b is None else b.whole(sender)) for delta, a, b in self.deltas]
        if not sender or base is None:
            return None
        merged = base.clone()
        del base
        for delta, first, second in factors:
            if first is not None:
                merged += _sum(delta, first, second)  # in the wider of the two dtypes, rounded once
        return cast(merged, self.spec.dtype)


def _sum(delta: Delta, a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """scale * (B @ A), or its transpose; half precision is multiplied in float32 where a CPU does it."""
    if b is None:
        return a * delta.scale
    wide = a.device.type == "cpu" and b.dtype in (torch.float16, torch.bfloat16)
    product = b.float() @ a.float() if wide else b @ a
    summed = (product.t() if delta.transposed else product) * delta.scale
    return summed.to(b.dtype) if wide else summed


def _part(entry: LoraEntry, name: str, casts: Casts, sender: int) -> Part:
    if not entry.deltas:
        return part_of(name, entry.tensor, casts, sender)
    spec = TensorSpec(name, casts.wire(name, DTYPE_NAMES[entry.tensor.dtype]), tuple(entry.tensor.shape))

    def as_it_is(tensor: torch.Tensor) -> Part:
        return part_of(name, tensor, Casts(), sender)

    factors = tuple((each, as_it_is(each.a), None if each.b is None else as_it_is(each.b)) for each in entry.deltas)
    return LoraPart(spec, as_it_is(entry.tensor), factors)


def _check_ties(entries: Sequence[LoraEntry], names: Mapping[str, str]) -> None:
    """A merged tensor and an unmerged one of the same storage can no longer be tied, and an engine would tie them."""
    merged = {storage_key(entry.tensor): entry.name for entry in entries if entry.deltas}
    faults = [
        Failure(
            "adapter_unsupported",
            f"is tied to {names[merged[key]]}, which an adapter changes",
            tensor=names[entry.name],
        )
        for entry in entries
        if not entry.deltas and (key := storage_key(entry.tensor)) in merged
    ]
    if faults:
        raise Rejected(*faults)


class _Walk:
    """A module tree as entries, in the order of a state dict: adapter layers become the layer that they wrap."""

    def __init__(self) -> None:
        from peft import PeftModel
        from peft.tuners.lora import layer
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self._model, self._tuner, self._layer = PeftModel, BaseTuner, BaseTunerLayer
        self._linear, self._embedding = layer.Linear, layer.Embedding
        self._saved, self._auxiliary = ModulesToSaveWrapper, AuxiliaryTrainingWrapper
        self.changed = False  # whether an active adapter was met anywhere

    def entries(self, module: torch.nn.Module, prefix: str) -> Iterator[LoraEntry]:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward pass the parameters are still whole
        if isinstance(module, self._model) and not isinstance(module.base_model, self._tuner):
            raise _refuse(prefix, f"{type(module).__name__} adds to the prompt, not to the weights")
        if isinstance(module, self._layer):
            yield from self._merged(module, prefix)
        elif isinstance(module, self._saved):
            saved = _saved_module(module, prefix)
            self.changed |= saved is not module.original_module
            yield from self.entries(saved, prefix)
        elif isinstance(module, self._auxiliary):
            raise _refuse(prefix, f"a {type(module).__name__}")
        else:
            yield from _own(module, prefix)
            for name, child in module.named_children():
                yield from self.entries(child, _join(prefix, name))

    def _merged(self, layer: Any, prefix: str) -> Iterator[LoraEntry]:
        base = layer.get_base_layer()
        adapters = self._adapters(layer, prefix)
        self.changed |= bool(adapters or layer.merged_adapters)
        deltas = {
            "weight": tuple(self._delta(layer, name) for name in adapters),
            "bias": tuple(_bias(layer, name, prefix) for name in adapters if layer.lora_bias.get(name)),
        }
        for entry in self.entries(base, prefix):
            own = entry.name.removeprefix(prefix).lstrip(".")
            yield LoraEntry(entry.name, entry.tensor, deltas.get(own, ()))

    def _delta(self, layer: Any, name: str) -> Delta:
        if self._kind(layer) is self._embedding:
            return Delta(layer.lora_embedding_A[name], layer.lora_embedding_B[name], layer.scaling[name], True)
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return Delta(a, b, layer.scaling[name], bool(layer.fan_in_fan_out))

    def _adapters(self, layer: Any, prefix: str) -> list[str]:
        """Active ones that this layer has and that its base does not hold yet."""
        kind = self._kind(layer)
        if kind not in (self._linear, self._embedding):
            raise _refuse(prefix, f"a {type(layer).__name__} of {kind.__module__}")
        if layer.disable_adapters:
            raise _refuse(prefix, "its adapters are switched off")
        strange = sorted(set(layer.merged_adapters) - set(layer.active_adapters))
        if strange:
            raise _refuse(prefix, f"{strange[0]} is merged into the base and not active")
        held = layer.lora_embedding_A if kind is self._embedding else layer.lora_A
        found = [name for name in layer.active_adapters if name in held and name not in layer.merged_adapters]
        for name in found:
            if name in layer.lora_variant:
                raise _refuse(prefix, f"{name} is a {type(layer.lora_variant[name]).__name__}")
        return found

    def _kind(self, layer: Any) -> type:
        """peft's own class of the layer: sharding gives a layer a class of its own on top."""
        kinds: list[type] = [each for each in type(layer).__mro__ if each.__module__.startswith("peft.")]
        return kinds[0]


def _bias(layer: Any, name: str, prefix: str) -> Delta:
    if getattr(layer.get_base_layer(), "bias", None) is None:
        raise _refuse(prefix, f"{name} has a bias, and its base has none to add it to")
    return Delta(layer.lora_B[name].bias, None, layer.scaling[name], False)


def _saved_module(wrapper: Any, prefix: str) -> torch.nn.Module:
    """The trained copy of the active adapter; the original where no active one has a copy."""
    if wrapper.disable_adapters:
        raise _refuse(prefix, "its adapters are switched off")
    found = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if len(found) > 1:
        raise _refuse(prefix, f"{' and '.join(found)} both replace it")
    module: torch.nn.Module = wrapper.modules_to_save[found[0]] if found else wrapper.original_module
    return module


def _own(module: torch.nn.Module, prefix: str) -> Iterator[LoraEntry]:
    """Parameters and persistent buffers of this module alone."""
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield LoraEntry(_join(prefix, name), tensor)


def _refuse(prefix: str, why: str) -> Rejected:
    """Of the layer at `prefix`."""
    return refuse("adapter_unsupported", why, tensor=clean_name(prefix))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
