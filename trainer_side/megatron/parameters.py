"""What this rank's model chunks hold, and the fragments of checkpoint tensors that it comes to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_side.megatron.coordinates import Coordinates, Geometry, Seat
from trainer_side.megatron.layouts import LAYOUTS, LayoutPlace, Unfit, check_partition
from trainer_side.megatron.rules import Match, Rule, find, is_ignored
from transports.base import Box
from transports.dtypes import DTYPE_NAMES, is_packed
from updater.core.errors import Failure, Rejected
from updater.protocol.names import clean_name

_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Fragment:
    """`pieces`, stacked along dimension 0, are region `box` of checkpoint tensor `name`. `dtype`: as it is held.

    `speaks`: whether this rank is the one of its data-parallel copies that takes part. `layer`: -1 outside layers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    pieces: tuple[torch.Tensor, ...]
    speaks: bool = True
    layer: int = -1
    expert: int = -1

    def tensor(self) -> torch.Tensor:
        """The region: a view, or a copy where it lies in several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)


def local_state(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, live, with layers numbered over all pipeline stages. Copies nothing.

    The same name in two chunks is a fault of the model; raises Rejected `tensor_duplicate`.
    """
    state: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        numbers = dict(_layer_numbers(chunk))
        for raw, tensor in chunk.state_dict(keep_vars=True).items():
            name = _numbered(clean_name(raw), numbers)
            if name in state:
                raise Rejected(Failure("tensor_duplicate", "held by two chunks of the model", tensor=name))
            state[name] = tensor
    return state


def fragments(
    state: Mapping[str, object],
    rules: Sequence[Rule],
    coordinates: Coordinates,
    geometry: Geometry,
    *,
    ignored: Sequence[str],
    renamed: Mapping[str, str],
) -> list[Fragment]:
    """In the order of `state`. `renamed`: checkpoint names that are another tensor's (ties).

    Raises Rejected with every fault: `tensor_unexpected` for a parameter that no rule names, `tensor_dtype`,
    `placement_refused` where a parameter is not cut as its rule says.
    """
    found: list[Fragment] = []
    faults: list[Failure] = []
    for name, tensor in state.items():
        if is_ignored(name, ignored):
            continue
        match = find(name, rules)
        if match is None:
            faults.append(Failure("tensor_unexpected", "no rule says what it becomes", tensor=name))
        elif (fault := _unfit(name, tensor)) is not None:
            faults.append(fault)
        elif isinstance(tensor, torch.Tensor):
            try:
                found += _cut(match, tensor, coordinates, geometry, renamed)
            except Unfit as error:
                faults.append(Failure("placement_refused", str(error), tensor=name))
    if faults:
        raise Rejected(*faults)
    return found


def _cut(
    match: Match, tensor: torch.Tensor, coordinates: Coordinates, geometry: Geometry, renamed: Mapping[str, str]
) -> Iterator[Fragment]:
    of_experts = match.rule.of_experts
    seat = coordinates.expert_tensor if of_experts else coordinates.tensor
    speaks = (coordinates.expert_copy if of_experts else coordinates.copy) == 0
    held = _local_experts(geometry, coordinates.expert) if of_experts else 0
    layout, dimension = LAYOUTS[match.rule.layout]
    check_partition(tensor, dimension, seat)
    for cut in layout(tensor.detach(), LayoutPlace(seat, geometry, held)):
        local = match.local_expert + cut.expert
        if of_experts and local >= held:
            raise Unfit(f"expert {local} of a rank that holds {held}")
        expert = coordinates.expert.rank * held + local if of_experts else -1
        name = match.target(cut.target, expert)
        dtype = DTYPE_NAMES[tensor.dtype]
        layer = -1 if match.layer is None else match.layer
        yield Fragment(renamed.get(name, name), dtype, cut.shape, cut.box, cut.pieces, speaks, layer, expert)


def _local_experts(geometry: Geometry, seat: Seat) -> int:
    if not geometry.experts or geometry.experts % seat.size:
        raise Unfit(f"{geometry.experts} experts over {seat.size} ranks")
    return geometry.experts // seat.size


def _unfit(name: str, tensor: object) -> Failure | None:
    if not isinstance(tensor, torch.Tensor):
        return Failure("bad_request", f"a {type(tensor).__name__}, not a tensor", tensor=name)
    if tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "device_mesh"):
        return Failure("bad_request", "holds no plain bytes of this rank", tensor=name)
    if tensor.numel() == 0:
        return Failure("tensor_shape", f"shape {list(tensor.shape)} holds nothing: released?", tensor=name)
    if tensor.dtype not in DTYPE_NAMES or is_packed(DTYPE_NAMES[tensor.dtype]):
        return Failure("tensor_dtype", f"{tensor.dtype} has no safetensors type", tensor=name)
    return None


def _layer_numbers(chunk: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """(name of a layer within the chunk, its number over all stages): Megatron's layers know theirs, from 1."""
    for name, module in chunk.named_modules():
        clean = clean_name(name)
        number = getattr(module, "layer_number", None)
        if isinstance(number, int) and _LAYER.fullmatch(clean):
            yield clean, number - 1


def _numbered(name: str, numbers: Mapping[str, int]) -> str:
    found = _LAYER.match(name)
    if found is None or found[0] not in numbers:
        return name
    return f"{found['before']}{numbers[found[0]]}{name[found.end() :]}"


def watched(held: Iterable[Fragment]) -> dict[str, list[torch.Tensor]]:
    """Checkpoint name -> the views that it is made of here; they share their parameters' version counters."""
    views: dict[str, list[torch.Tensor]] = {}
    for fragment in held:
        views.setdefault(fragment.name, []).extend(fragment.pieces)
    return views
