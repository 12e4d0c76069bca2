"""Views of rows: what is written through one is read back through the other, permuted and squeezed rows included."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest
import torch

from engine_adapter.placement.declared.rules import Rules
from engine_adapter.placement.regions import blocks, source_region, target_region
from engine_adapter.placement.rows import CopyRow, Placement
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import manifest_of
from transports.base import Box
from transports.testing import MemorySource
from updater.protocol.manifest import TensorSpec

SOURCE = torch.arange(120.0).view(2, 3, 4, 5)
BOX = Box((0, 1, 0, 2), (2, 2, 4, 3))


@pytest.mark.parametrize("permute", list(permutations(range(4))))
def test_permuted_rows_come_back(permute: tuple[int, ...]) -> None:
    moved = tuple(BOX.size[dim] for dim in permute)
    padded = (1, *moved)
    row = CopyRow("s", BOX, "t", Box((1,) + (0,) * 4, padded), permute)
    target = torch.zeros(3, *moved)
    target_region(target, row).copy_(SOURCE[BOX.slices()].permute(permute))
    assert torch.equal(target[1], SOURCE[BOX.slices()].permute(permute))
    assert target[0].eq(0).all()
    assert target[2].eq(0).all()
    assert torch.equal(source_region(target, row), SOURCE[BOX.slices()])


def test_a_transposed_parameter_goes_through_a_whole_update_with_proof() -> None:
    """A kernel layout that is only a permutation needs no twin: it is rows."""
    weight = torch.arange(12.0).view(3, 4).to(torch.bfloat16)

    def transposed(specs: Mapping[str, TensorSpec]) -> Placement:
        row = CopyRow("w", Box((0, 0), (3, 4)), "w", Box((0, 0), (4, 3)), (1, 0))
        return Placement(0, 1, (row,), frozenset(specs))

    engine = BareEngine({"w": (4, 3)}, Rules(), placement=transposed)
    found = BareReplica([engine], lambda _rank: MemorySource({"w": weight}, manifest_of({"w": weight}))).update(
        1, "0-1"
    )
    assert (found.proof, found.failures) == ("digests", ())
    assert torch.equal(engine.bound["w"], weight.T)


@pytest.mark.parametrize("size", [(), (7,), (0, 3), (5, 6), (2, 3, 50), (100, 1)])
@pytest.mark.parametrize("limit", [1, 10, 60, 1000])
def test_blocks_cut_a_region_completely(size: tuple[int, ...], limit: int) -> None:
    seen = torch.zeros(size)
    for block in blocks(size, limit):
        seen[block] += 1
        assert seen[block].numel() <= max(limit, 1)
    assert seen.eq(1).all()
