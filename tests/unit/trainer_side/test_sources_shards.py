"""Digests of shards: the summands of all ranks of any mesh add up to the digest of the whole tensor."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer_side.sources.casts import cast
from trainer_side.sources.fsdp1 import flat_boxes
from trainer_side.sources.sharded import counts, regions
from transports.digest import add, region_digest, tensor_digest
from transports.dtypes import DTYPE_NAMES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(prod(shape)) * 37 % 251 + 1).reshape(shape).to(dtype)


def split(
    whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], places: tuple[Placement, ...]
) -> torch.Tensor:
    """The shard as torch cuts it: one mesh dimension after the other."""
    held = whole
    for count, index, place in zip(mesh, at, places, strict=True):
        if not isinstance(place, Replicate):
            held = place._split_tensor(held, count, with_padding=False)[0][index]  # type: ignore[attr-defined]
    return held


def summed(whole: torch.Tensor, mesh: tuple[int, ...], places: tuple[Placement, ...], wire: str) -> int:
    """As every rank of the mesh would do it. Each element of a region must be that of the whole."""
    total = 0
    for at in product(*(range(count) for count in mesh)):
        shard = split(whole, mesh, at, places)
        covered = 0
        for box, inside in regions(tuple(whole.shape), mesh, at, places):
            assert torch.equal(shard[inside], whole[box.slices()])
            covered += box.numel
            if counts(at, places):
                total = add(total, region_digest(cast(shard, wire)[inside], tuple(whole.shape), wire, box))
        assert covered == shard.numel()
    return total


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = st.one_of(st.builds(Shard, st.integers(0, len(shape) - 1)), st.just(Replicate()))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


@given(sharded(), st.sampled_from(DTYPES), st.booleans())
def test_summands_of_a_mesh_add_up(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]], dtype: torch.dtype, rounded: bool
) -> None:
    shape, mesh, places = case
    whole = filled(shape, dtype)
    wire = "BF16" if rounded and dtype == torch.float32 else DTYPE_NAMES[dtype]
    assert summed(whole, mesh, places, wire) == tensor_digest(cast(whole, wire))


@given(st.integers(1, 24), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_summands_of_fsdp_over_tensor_parallelism_add_up(rows: int, data: int, tensor: int, columns: bool) -> None:
    """FSDP2 shards what tensor parallelism has cut already: the same dimension twice, from the right."""
    places = (_StridedShard(0, split_factor=tensor), Shard(1 if columns else 0))
    whole = filled((rows, 5), torch.bfloat16)
    assert summed(whole, (data, tensor), places, "BF16") == tensor_digest(whole)


def test_interleaved_shards_are_several_regions() -> None:
    places = (_StridedShard(0, split_factor=2),)
    boxes = [box.start for box, _inside in regions((8, 3), (2,), (0,), places)]
    assert boxes == [(0, 0), (4, 0)]


@pytest.mark.parametrize("wrong", ["swapped", "shifted", "twice", "left out"])
def test_a_wrong_shard_is_another_digest(wrong: str) -> None:
    whole, places = filled((6, 4), torch.float32), (Shard(0),)
    shards = {at: (split(whole, (3,), (at,), places), next(regions((6, 4), (3,), (at,), places))[0]) for at in range(3)}
    if wrong == "swapped":
        shards[0], shards[1] = (shards[1][0], shards[0][1]), (shards[0][0], shards[1][1])
    elif wrong == "shifted":
        shards[1] = (shards[1][0], shards[0][1])
    elif wrong == "twice":
        shards[3] = shards[2]
    else:
        del shards[2]
    total = add(*(region_digest(held, (6, 4), "F32", box) for held, box in shards.values()))
    assert total != tensor_digest(whole)


@given(
    st.lists(st.integers(1, 7), min_size=0, max_size=4),
    st.lists(st.integers(0, 400), min_size=0, max_size=4),
    st.sampled_from(DTYPES),
)
def test_runs_of_a_flat_parameter_add_up(sizes: list[int], cuts: list[int], dtype: torch.dtype) -> None:
    """FSDP1 cuts tensors anywhere: each run becomes boxes that lie end to end in it."""
    shape = tuple(sizes)
    whole = filled(shape, dtype)
    flat, name = whole.reshape(-1), DTYPE_NAMES[dtype]
    edges = [0, *sorted(min(cut, flat.numel()) for cut in cuts), flat.numel()]
    total = 0
    for low, high in pairwise(edges):
        expected = low
        for box, at in flat_boxes(shape, low, high):
            assert at == expected
            expected += box.numel
            piece = flat[at : at + box.numel].view(box.size)
            assert torch.equal(piece, whole[box.slices()])
            total = add(total, region_digest(piece, shape, name, box))
        assert expected == high
    assert total == tensor_digest(whole)
