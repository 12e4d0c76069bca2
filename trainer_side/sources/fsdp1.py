"""FullyShardedDataParallel (FSDP1): parameters that lie in a flat one, of which every rank holds a run of elements.

Nothing is unsharded: a tensor is put together from the runs of its owners, so at most one is whole, on the sender.
The layout is that of torch's flat parameter; it is checked against what torch says of this rank's own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from trainer_side.sources.casts import Casts, cast
from trainer_side.sources.parts import Part, PartsSource
from trainer_side.sources.state_dict import check, global_rank, part_of
from trainer_side.sources.whole import WholePart
from transports.base import Box
from transports.digest import MASK, region_digest
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import refuse
from updater.protocol.manifest import TensorSpec
from updater.protocol.names import clean_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def fsdp1_source(
    module: torch.nn.Module, casts: Casts, *, group: ProcessGroup | None = None, sender_rank: int = 0
) -> PartsSource:
    """`module`: holds FullyShardedDataParallel units, at any depth. Raises Rejected with every fault."""
    units: dict[str, Any] = {
        name: each for name, each in module.named_modules() if isinstance(each, FullyShardedDataParallel)
    }
    group = group or _group_of(list(units.values()))
    sender = global_rank(group, sender_rank)
    flat = [each for name, unit in units.items() for each in _flat_tensors(name, unit, sender)]
    managed = {id(unit._handle.flat_param) for unit in units.values() if unit._handle is not None}
    aliases = [pair for name, unit in units.items() for pair in _shared(name, unit)]
    plain = dict(_unmanaged(module, {each.raw for each in flat} | {alias for alias, _name in aliases}, managed))
    tensors = {each.raw: each for each in flat}
    names = clean_names([*tensors, *plain, *(alias for alias, _name in aliases)])
    check(plain, names)
    casts.check(names.values())
    parts: dict[str, Part] = {each.raw: each.part(names[each.raw], casts) for each in flat}
    parts.update((name, part_of(names[name], tensor, casts, sender)) for name, tensor in plain.items())
    parts.update((alias, tensors[name].part(names[alias], casts)) for alias, name in aliases)
    ties = [(names[alias], names[name]) for alias, name in aliases]
    return PartsSource(list(parts.values()), ties, group=group, sender_rank=sender_rank)


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One original parameter inside a flat one. `offset`: of its first element; `raw`: its name with wrappers."""

    raw: str
    shape: tuple[int, ...]
    offset: int
    row_major: bool
    strides: tuple[int, ...]
    unit: Any  # FullyShardedDataParallel
    original: torch.Tensor  # what an optimiser holds: the parameter itself, or the flat one
    sender: int  # its rank in the world

    def part(self, name: str, casts: Casts) -> Part:
        flat = _shard(self.unit)
        spec = TensorSpec(name, casts.wire(name, DTYPE_NAMES[flat.dtype]), self.shape)
        if not self.unit._handle.uses_sharded_strategy:
            held = flat.detach()[self.offset : self.offset + prod(self.shape)]
            return WholePart(spec, held.as_strided(self.shape, self.strides, held.storage_offset()))
        return FlatPart(spec, self)


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A parameter whose elements are spread over ranks in runs. A run is read when it is needed: FSDP may move it."""

    spec: TensorSpec
    tensor: FlatTensor

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return (self.tensor.original, _shard(self.tensor.unit))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.tensor.unit.compute_device
        return device

    def share(self, sender: bool) -> int | None:
        """Runs are in storage order, so a tensor that is not row-major has no regions to add up."""
        if not self.tensor.row_major:
            return None
        group = self._group
        if self.tensor.sender not in dist.get_process_group_ranks(group):
            return 0  # another replica of the same shards, that of the sender, counts them
        low, _high = self._run(group.rank())
        held, total = self._held(), 0
        for box, at in flat_boxes(self.spec.shape, low, low + held.numel()):
            piece = held[at - low : at - low + box.numel].view(box.size)
            total += region_digest(piece, self.spec.shape, self.spec.dtype, box)
        return total & MASK

    def whole(self, sender: bool) -> torch.Tensor | None:
        """Owners send their runs, in the order of ranks; no other rank takes part."""
        group = self._group
        ranks = dist.get_process_group_ranks(group)
        if self.tensor.sender not in ranks:
            return None
        held = self._held().to(self.device)
        if not sender:
            if held.numel():
                dist.send(_bytes(held), self.tensor.sender, group=group)
            return None
        flat = torch.empty(self.spec.numel, dtype=held.dtype, device=self.device)
        for at, rank in enumerate(ranks):
            low, high = self._run(at)
            if rank == self.tensor.sender:
                flat[low:high] = held
            elif low < high:
                dist.recv(_bytes(flat[low:high]), rank, group=group)
        return flat.as_strided(self.spec.shape, self.tensor.strides)

    @property
    def _group(self) -> ProcessGroup:
        group: ProcessGroup = self.tensor.unit.process_group
        return group

    def _run(self, rank: int) -> tuple[int, int]:
        """Elements of this tensor, in storage order, that `rank` of the unit's group holds."""
        shard = _shard(self.tensor.unit).numel()
        first = rank * shard - self.tensor.offset
        return min(max(first, 0), self.spec.numel), min(max(first + shard, 0), self.spec.numel)

    def _held(self) -> torch.Tensor:
        """This rank's run, in the wire dtype."""
        shard = _shard(self.tensor.unit).detach()
        rank = self._group.rank()
        low, high = self._run(rank)
        start = self.tensor.offset + low - rank * shard.numel()
        return cast(shard[start : start + high - low] if low < high else shard[:0], self.spec.dtype)


def flat_boxes(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[Box, int]]:
    """(region, its first element) of elements low to high - 1, counted row-major: few boxes, each a run itself."""
    if low >= high:
        return
    if not shape:
        yield Box((), ()), low
        return
    row = prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, low, high)
        return
    yield from _in_row(shape, first - 1, low, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * row
    yield from _in_row(shape, last, last * row, high)


def _in_row(shape: Sequence[int], index: int, low: int, high: int) -> Iterator[tuple[Box, int]]:
    row = prod(shape[1:])
    for box, at in flat_boxes(shape[1:], low - index * row, high - index * row):
        yield Box((index, *box.start), (1, *box.size)), at + index * row


def _bytes(run: torch.Tensor) -> torch.Tensor:
    """Bytes travel unchanged, also of types that a backend does not know."""
    return run.view(torch.uint8)


def _shard(unit: Any) -> torch.Tensor:
    """In full precision, wherever FSDP keeps it between steps; it has its own name once the unit has been used."""
    flat: Any = unit._handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    return shard


def _group_of(units: Sequence[Any]) -> ProcessGroup:
    """The ranks of a unit; where its shards are replicated as well, every rank."""
    if any(unit.sharding_strategy in _HYBRID for unit in units):
        world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        return world
    group: ProcessGroup = units[0].process_group
    return group


def _flat_tensors(prefix: str, unit: Any, sender: int) -> Iterator[FlatTensor]:
    handle = unit._handle
    if handle is None:
        return
    flat = handle.flat_param
    if any(extension is not None for extension in flat._param_extensions):
        raise refuse("bad_request", f"{prefix or 'the root'}: sharded by a device mesh inside FSDP1; use fully_shard")
    ranges = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
    offsets = [first for (first, _last), padding in ranges if not padding]
    for at, info in enumerate(flat._param_infos):
        tensor = FlatTensor(
            _join(prefix, "_fsdp_wrapped_module", info.module_name, info.param_name),
            tuple(flat._shapes[at]),
            offsets[at],
            bool(flat._contiguities[at]),
            tuple(flat._strides[at]),
            unit,
            flat._params[at] if flat._params is not None else flat,
            sender,
        )
        if handle.uses_sharded_strategy:
            _check(tensor, flat._shard_param_infos[at])
        yield tensor


def _check(tensor: FlatTensor, info: Any) -> None:
    """Against torch's own word on this rank's run. Raises Rejected where another torch lays shards out otherwise."""
    shard, rank = _shard(tensor.unit).numel(), tensor.unit.process_group.rank()
    first = rank * shard - tensor.offset
    low, high = max(first, 0), min(first + shard, prod(tensor.shape))
    mine = (low, high - low) if low < high else (None, None)
    if (info.intra_param_start_idx, info.numel_in_shard) != mine:
        raise refuse("bad_request", "this torch shards a flat parameter in another way", tensor=tensor.raw)


def _shared(prefix: str, unit: Any) -> Iterator[tuple[str, str]]:
    """(raw alias, raw name) of parameters that modules of one unit share."""
    if unit._handle is None:
        return
    for info in unit._handle.flat_param._shared_param_infos:
        alias = _join(prefix, "_fsdp_wrapped_module", info.module_name, info.param_name)
        yield alias, _join(prefix, "_fsdp_wrapped_module", info.prim_module_name, info.prim_param_name)


def _unmanaged(module: torch.nn.Module, managed: set[str], flats: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that FSDP was told to ignore, and persistent buffers: whole on every rank."""
    for prefix, each in module.named_modules():
        for name, parameter in each._parameters.items():
            raw = _join(prefix, name)
            if parameter is not None and id(parameter) not in flats and raw not in managed:
                yield raw, parameter
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield _join(prefix, name), buffer


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
