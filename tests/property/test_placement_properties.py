"""For random shapes and sizes: all ranks together give back the checkpoint, and what is swapped is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.placement.atoms import combine, make_cuts
from engine_adapter.placement.boxes import first_overlap
from engine_adapter.placement.declared.layouts import QKV, Experts, Heads, Layout, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.regions import source_region, target_region
from engine_adapter.placement.rows import CopyRow, FillRow, Placement
from engine_adapter.rank.messages import RankPlan, RankStage, RankVerify
from engine_adapter.rank.readback import copy_numbers
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import checkpoint, holds, manifest_of, replica, sliced
from transports.base import Box
from transports.testing import MemorySource
from updater.core.participant import DiskOffer
from updater.protocol.manifest import TensorSpec

torch.set_num_threads(1)

STACKED = tuple(Stacked(f".{part}", ".fused", part) for part in ("q", "k", "v", "gate", "up"))
Case = tuple[Layout, dict[str, tuple[int, ...]], tuple[int, ...], int]  # layout, sources, local shape, size


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout with sizes that it accepts, fused or in parts."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    wide = draw(st.integers(1, 5))
    share = draw(st.integers(1, 4))
    kind = draw(
        st.sampled_from(["column", "row", "uneven", "heads", "merged", "unequal", "qkv", "vocab", "experts", "ep"])
    )
    if kind == "column":
        return Sharded(0), {"w.fused": (share * size, wide)}, (share, wide), size
    if kind == "row":
        return Sharded(1), {"w.fused": (wide, share * size)}, (wide, share), size
    if kind == "uneven":
        return Sharded(0, uneven=True), {"w.fused": (draw(st.integers(1, 13)), wide)}, (-1, wide), size
    if kind == "heads":
        count = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n % size == 0 or size % n == 0]))
        return Heads(count, share), {"w.fused": (count * share,)}, (max(1, count // size) * share,), size
    if kind == "merged":
        layout = Merged(interleaved=draw(st.booleans()))
        full = (share * size, wide)
        sources = draw(st.sampled_from([{"w.gate": full, "w.up": full}, {"w.fused": (2 * share * size, wide)}]))
        return layout, sources, (2 * share, wide), size
    if kind == "unequal":
        sizes = (share * size, 2 * share * size)
        return Merged(sizes=sizes), {"w.gate": (sizes[0], wide), "w.up": (sizes[1], wide)}, (3 * share, wide), size
    if kind == "qkv":
        kv = draw(st.sampled_from([n for n in (1, 2, 4) if n % size == 0 or size % n == 0]))
        heads = size * kv
        q, k = (heads * share, wide), (kv * share, wide)
        fused = {"w.fused": (q[0] + 2 * k[0], wide)}
        sources = draw(st.sampled_from([{"w.q": q, "w.k": k, "w.v": k}, fused]))
        return QKV(heads, kv, share), sources, ((kv + 2 * max(1, kv // size)) * share, wide), size
    if kind == "vocab":
        rows = draw(st.integers(1, 4 * size))
        return PaddedVocab(rows, padded=4 * size), {"w.fused": (rows, wide)}, (4, wide), size
    inner = draw(st.sampled_from([Sharded(0), Sharded(1)]))
    if kind == "ep":
        return Experts(share * size, inner, "ep"), {"w.fused": (share * size, wide, wide)}, (share, wide, wide), size
    return Experts(3, Sharded(1), "tp"), {"w.fused": (3, wide, share * size)}, (3, wide, share), size


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """Every element of every source has a number of its own."""
    tensors, number = {}, 1
    for name, shape in case[1].items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(number, number + count, dtype=torch.float32).view(shape)
        number += count
    return tensors


def local_shape(case: Case, rank: int) -> tuple[int, ...]:
    _, sources, local, size = case
    if local[0] != -1:
        return local
    chunks = torch.zeros(sources["w.fused"]).chunk(size)
    return tuple(chunks[rank].shape) if rank < len(chunks) else (0, local[1])


def placement(case: Case, rank: int) -> Placement:
    layout, sources, _, size = case
    specs = {name: TensorSpec(name, "F32", shape) for name, shape in sources.items()}
    rules = Rules(NameRules(stacked=STACKED), (("w.fused", layout),))
    return declare(specs, {"w.fused": Target(local_shape(case, rank))}, rules, rank, size)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_gathering_all_ranks_gives_back_the_checkpoint(case: Case) -> None:
    tensors = tensors_of(case)
    gathered = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(case[3]):
        local = torch.full(local_shape(case, rank), -1.0)
        rows = placement(case, rank).rows
        for row in rows:
            if isinstance(row, FillRow):
                local[row.target_box.slices()] = row.value
            elif isinstance(row, CopyRow):
                target_region(local, row).copy_(tensors[row.source][row.source_box.slices()])
        assert not (local == -1).any()
        for row in rows:
            if isinstance(row, CopyRow):
                gathered[row.source][row.source_box.slices()] = source_region(local, row)
    assert all(torch.equal(gathered[name], tensor) for name, tensor in tensors.items())


@given(cases())
@settings(max_examples=25, deadline=None)
def test_the_vote_is_yes_and_says_the_same_at_every_size(case: Case) -> None:
    tensors = tensors_of(case)
    layout, _, _, size = case
    rules = Rules(NameRules(stacked=STACKED), (("w.fused", layout),))
    engines = [
        BareEngine({"w.fused": local_shape(case, rank)}, rules, rank, size, dtypes={"w.fused": torch.float32})
        for rank in range(size)
    ]
    found = BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors))).vote(1)
    assert (found.failures, found.proof) == ((), "digests")
    assert found.digests == {entry.name: entry.digest for entry in manifest_of(tensors).tensors}


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_forward_through_the_shards_equals_the_unsharded_one(
    batch: int, hidden: int, share: int, size: int, seed: int
) -> None:
    """x @ up.T @ down.T with `up` cut by columns and `down` by rows; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 9, shape, generator=generator).double()

    x, up, down = rand(batch, hidden), rand(share * size, hidden), rand(hidden, share * size)
    rules = Rules(layouts=(("up", Sharded(0)), ("down", Sharded(1))))
    shapes = {"up": (share, hidden), "down": (hidden, share)}
    engines = [BareEngine(shapes, rules, r, size, dtypes=dict.fromkeys(shapes, torch.float64)) for r in range(size)]
    BareReplica(engines, lambda _rank: MemorySource({"up": up, "down": down})).update(1, "0-1")
    sharded = sum(x @ engine.bound["up"].T @ engine.bound["down"].T for engine in engines)
    assert torch.equal(torch.as_tensor(sharded), x @ up.T @ down.T)


@given(st.integers(0, 999), st.sampled_from([1, 2, 4]), st.sampled_from(["tp", "ep"]), st.booleans())
@settings(max_examples=8, deadline=None)
def test_every_rank_holds_what_plain_indexing_says(seed: int, size: int, parallel: Any, interleaved: bool) -> None:
    tensors = checkpoint(seed)
    updated = replica(tensors, size, parallel=parallel, interleaved=interleaved)
    updated.update(1, "0-1")
    assert holds(updated, [sliced(tensors, rank, size, parallel, interleaved) for rank in range(size)])


# what a wrong placement, or a wrong write, must not survive


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("a", "b"),
    [("l.attn.k_proj.weight", "l.attn.v_proj.weight"), ("l.mlp.gate_proj.weight", "l.mlp.up_proj.weight")],
)
def test_swapped_parts_are_caught(a: str, b: str, size: int) -> None:
    """Bytes that were swapped on the way: the spare holds K where V belongs, or up where gate does."""
    tensors = checkpoint(5)
    made = replica(tensors, size)
    mixed = tensors | {a: tensors[b], b: tensors[a]}
    made.open_source = lambda _rank: MemorySource(mixed, manifest_of(tensors))
    found = made.vote(1)
    assert {(failure.code, failure.tensor) for failure in found.failures} == {
        ("tensor_digest", a),
        ("tensor_digest", b),
    }


@pytest.mark.parametrize(
    "name", ["l.attn.q_proj.weight", "l.attn.o_proj.weight", "embed.weight", "l.experts.2.w1.weight"]
)
def test_two_ranks_that_hold_each_others_slice_are_caught(name: str) -> None:
    tensors = checkpoint(6)
    made = replica(tensors, 2)
    turned = dict(tensors)
    dim = 1 if name.endswith("o_proj.weight") else 0
    half = 160 if name == "embed.weight" else tensors[name].shape[dim] // 2
    if name == "embed.weight":  # rank 0 gets the first rows of rank 1
        turned[name] = torch.cat([tensors[name][160:], tensors[name][: 257 - 97]])
    else:
        turned[name] = tensors[name].roll(half, dim)
    made.open_source = lambda _rank: MemorySource(turned, manifest_of(tensors))
    assert {(f.code, f.tensor) for f in made.vote(1).failures} == {("tensor_digest", name)}


def test_one_wrong_replicated_copy_is_caught_without_any_promise() -> None:
    """Structure only: no digests are promised, but the copies of a head must agree."""
    tensors = checkpoint(7)
    made = replica(tensors, 4, digests=False)
    other = tensors | {"l.attn.k_proj.weight": tensors["l.attn.k_proj.weight"] + 1}
    made.open_source = lambda rank: MemorySource(other if rank == 1 else tensors)
    found = made.vote(1)
    assert {(f.code, f.tensor) for f in found.failures} == {("copies_differ", "l.attn.k_proj.weight")}
    assert "[0] / [1]" in found.failures[0].message


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_one_flipped_bit_in_any_spare_is_caught(data: st.DataObject) -> None:
    """Between staging and the vote: read back from the spare, so the wire cannot hide it."""
    tensors = checkpoint(8)
    made = replica(tensors, 2)
    plans = [agent.plan(RankPlan(1, DiskOffer(""), (), "")) for agent in made.agents]
    cuts = make_cuts(plans[0].tensors, [plan.boxes for plan in plans])
    for agent in made.agents:
        agent.stage(RankStage(1, 60.0))
    spare = made.agents[data.draw(st.integers(0, 1))].spare.spare
    name = data.draw(st.sampled_from(sorted(set(spare) - {"embed.weight", "lm_head.weight"})))
    words = spare[name].view(torch.int16).flatten()
    at = data.draw(st.integers(0, words.numel() - 1))
    words[at] ^= 1 << data.draw(st.integers(0, 14))
    replies = [agent.verify(RankVerify(1, cuts, 60.0)) for agent in made.agents]
    found = combine(plans[0].tensors, (), cuts, replies)
    assert {failure.code for failure in found.failures} <= {"tensor_digest", "copies_differ"}
    assert found.failures


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=8))
def test_rows_of_one_copy_never_overlap(found: list[tuple[int, int]]) -> None:
    rows = [CopyRow("s", Box((start,), (length,)), "t", Box((0,), (length,))) for start, length in found]
    numbers = copy_numbers(rows)
    for number in set(numbers):
        assert first_overlap([row.source_box for row, n in zip(rows, numbers, strict=True) if n == number]) is None
