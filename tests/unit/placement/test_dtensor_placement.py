"""Placements learned from DTensors agree with declared ones, and refuse what rows cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine_adapter.placement.declared.dtensor import from_dtensors
from engine_adapter.placement.declared.layouts import Merged, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, declare
from transports.testing import refused
from updater.protocol.manifest import TensorSpec


@contextmanager
def mesh(rank: int, size: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks that exist in name only: placements need no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh("cpu", list(range(size)))
    finally:
        dist.destroy_process_group()


def spread(whole: tuple[int, ...], local: tuple[int, ...], how: Placement, on: DeviceMesh) -> DTensor:
    strides = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(torch.zeros(local), on, [how], run_check=False, shape=torch.Size(whole), stride=strides)


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, "F32", shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_agrees_with_declared_on_plain_kinds(rank: int) -> None:
    rules = Rules(
        NameRules(prefix=(("model.", ""),)),
        layouts=(("col", Sharded(0)), ("row", Sharded(1)), ("odd", Sharded(0, uneven=True))),
    )
    whole = {"col": (4, 6), "row": (4, 6), "odd": (5, 2), "norm": (3,), "plain": (2, 2)}
    local = {"col": (2, 6), "row": (4, 3), "odd": (3 - rank, 2), "norm": (3,), "plain": (2, 2)}
    how = {"col": Shard(0), "row": Shard(-1), "odd": Shard(0), "norm": Replicate()}
    found = specs(**{f"model.{name}": shape for name, shape in whole.items()})
    with mesh(rank, 2) as on:
        tensors: dict[str, torch.Tensor] = {n: spread(whole[n], local[n], how[n], on) for n in how}
        tensors["plain"] = torch.zeros(2, 2)
        learned = from_dtensors(found, tensors, rules, rank, 2)
    assert learned == declare(found, {name: Target(shape) for name, shape in local.items()}, rules, rank, 2)
    assert len(learned.rows) == 5


def test_the_axis_comes_from_the_placement_and_not_from_the_rules() -> None:
    with mesh(1, 2) as on:
        tensor = spread((4, 4), (4, 2), Shard(1), on)
        row = from_dtensors(specs(w=(4, 4)), {"w": tensor}, Rules(layouts=(("w", Sharded(0)),)), 1, 2).rows[0]
    assert (row.source_box.start, row.source_box.size) == ((0, 2), (4, 2))


def test_an_uneven_tail_may_leave_a_rank_empty() -> None:
    with mesh(3, 4) as on:
        found = from_dtensors(specs(w=(5,)), {"w": spread((5,), (0,), Shard(0), on)}, Rules(), 3, 4)
    assert (found.rows, found.loaded) == ((), {"w"})


def test_what_rows_cannot_say_is_refused() -> None:
    fused = Rules(NameRules(stacked=(Stacked("gate", "gu", "gate"), Stacked("up", "gu", "up"))), (("gu", Merged()),))
    with mesh(0, 2) as on:
        with refused("placement_refused", tensors=["w"]):
            from_dtensors(specs(w=(4,)), {"w": spread((4,), (4,), Partial(), on)}, Rules(), 0, 2)
        with refused("placement_refused", tensors=["w"]):
            strided = _StridedShard(0, split_factor=2)
            from_dtensors(specs(w=(8,)), {"w": spread((8,), (4,), strided, on)}, Rules(), 0, 2)
        with refused("placement_refused", tensors=["gu"]):
            tensor = spread((8, 2), (4, 2), Shard(0), on)
            from_dtensors(specs(gate=(4, 2), up=(4, 2)), {"gu": tensor}, fused, 0, 2)
        whole = spread((8, 2), (8, 2), Replicate(), on)
        assert len(from_dtensors(specs(gate=(4, 2), up=(4, 2)), {"gu": whole}, fused, 0, 2).rows) == 2
