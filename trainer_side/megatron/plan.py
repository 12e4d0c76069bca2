"""Who holds which region of which checkpoint tensor: exchanged once, then equal on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_side.megatron.coordinates import Geometry
from trainer_side.megatron.parameters import Fragment
from trainer_side.ranks.agreement import RankAgreement
from transports.base import Box
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.protocol.manifest import TensorSpec

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Region:
    """`holders`: ranks of the group that hold the same region, ascending. The `owner` sends it and counts it."""

    box: Box
    owner: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the checkpoint, whole. `regions` are disjoint, cover it, and are in order."""

    spec: TensorSpec
    regions: tuple[Region, ...]


def agree(
    agreement: RankAgreement, held: Sequence[Fragment] | LiveweightsError, geometry: Geometry, sender: int
) -> tuple[TensorPlan, ...]:
    """Collective. Every rank says what it holds, or what is wrong with it; every rank gets or raises the same.

    In the order of names, numbers in them by value. Raises Rejected `tensor_missing` where something is held by
    no rank, `tensor_shape`, `tensor_dtype` or `placement_refused` where ranks contradict each other.
    """
    error = held if isinstance(held, LiveweightsError) else None
    if (fault := agreement.agree(error)) is not None:
        raise fault
    mine = [_described(fragment) for fragment in held if fragment.speaks] if not isinstance(held, Exception) else []
    told = [each["held"] for each in agreement.exchange({"held": mine})]
    return merge(told, geometry, sender)


def merge(told: Sequence[Sequence[Sequence[Any]]], geometry: Geometry, sender: int) -> tuple[TensorPlan, ...]:
    """The same of what every rank told, in the order of ranks."""
    claims: dict[str, list[tuple[int, str, tuple[int, ...], Box]]] = {}
    layers: set[int] = set()
    experts: dict[int, set[int]] = {}
    for rank, entries in enumerate(told):
        for name, dtype, shape, start, size, layer, expert in entries:
            claims.setdefault(name, []).append((rank, dtype, tuple(shape), Box(tuple(start), tuple(size))))
            layers.add(layer)
            if expert >= 0:
                experts.setdefault(layer, set()).add(expert)
    faults = [*_absent(layers, experts, geometry)]
    plans = []
    for name in sorted(claims, key=_order):
        try:
            plans.append(_planned(name, claims[name], sender))
        except Rejected as error:
            faults += error.failures
    if faults:
        raise Rejected(*faults)
    return tuple(plans)


def _described(fragment: Fragment) -> list[Any]:
    box = fragment.box
    return [fragment.name, fragment.dtype, fragment.shape, box.start, box.size, fragment.layer, fragment.expert]


def _planned(name: str, claims: Sequence[tuple[int, str, tuple[int, ...], Box]], sender: int) -> TensorPlan:
    _rank, dtype, shape, _box = claims[0]
    for rank, other, whole, _region in claims:
        if other != dtype:
            raise Rejected(Failure("tensor_dtype", f"{dtype} and {other}", tensor=name, rank=rank))
        if whole != shape:
            raise Rejected(Failure("tensor_shape", f"of {list(shape)} and {list(whole)}", tensor=name, rank=rank))
    holders: dict[Box, list[int]] = {}
    for rank, _dtype, _shape, box in claims:
        holders.setdefault(box, []).append(rank)
    regions = tuple(
        Region(box, sender if sender in ranks else ranks[0], tuple(ranks))
        for box, ranks in sorted(holders.items(), key=lambda item: item[0].start)
    )
    _tiles(name, shape, [region.box for region in regions])
    return TensorPlan(TensorSpec(name, dtype, shape), regions)


def _tiles(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Layouts cut along one dimension, so regions must follow each other along it without gap or overlap."""
    cut = [at for at in range(len(shape)) if any(box.size[at] != shape[at] for box in boxes)]
    if not cut:
        if len(boxes) != 1:
            raise Rejected(Failure("tensor_duplicate", "held in two ways", tensor=name))
        return
    reached = 0
    for box in boxes:
        if len(cut) > 1 or box.start[cut[0]] != reached:
            code = "tensor_missing" if box.start[cut[0]] > reached else "placement_refused"
            raise Rejected(Failure(code, f"regions {boxes} do not follow each other", tensor=name))
        reached += box.size[cut[0]]
    if reached != shape[cut[0]]:
        raise Rejected(Failure("tensor_missing", f"no rank holds {reached} and on of {list(shape)}", tensor=name))


def _absent(layers: set[int], experts: dict[int, set[int]], geometry: Geometry) -> Iterable[Failure]:
    """Whole layers or experts that no rank holds: a stage, or an expert rank, that is not in the group."""
    for layer in sorted(set(range(geometry.layers)) - layers):
        yield Failure("tensor_missing", f"no rank of the group holds layer {layer}")
    for layer, held in sorted(experts.items()):
        for expert in sorted(set(range(geometry.experts)) - held):
            yield Failure("tensor_missing", f"no rank of the group holds expert {expert} of layer {layer}")


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]
