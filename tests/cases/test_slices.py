"""Slices of tensor-parallel ranks, at placement level. All ranks live in this process."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.placement.declared.layouts import QKV, Heads, Layout, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.rows import Placement
from engine_adapter.rank.messages import RankDigests
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import Tensors, checkpoint, manifest_of, replica, sliced
from transports.digest import tensor_digest, to_hex
from transports.testing import MemorySource, PoisonSource, refused
from updater.core.errors import LiveweightsError
from updater.core.policy import InstallMode
from updater.protocol.manifest import TensorSpec

STACKED = tuple(Stacked(f"{part}_proj", "fused", part) for part in ("q", "k", "v", "gate", "up"))


def ranks(
    tensors: Tensors, layout: Layout, local: tuple[int, ...], size: int, name: str = "fused"
) -> list[torch.Tensor]:
    """What every rank's one parameter holds after an update with proof."""
    rules = Rules(NameRules(stacked=STACKED), ((name, layout),))
    engines = [BareEngine({name: local}, rules, rank, size) for rank in range(size)]
    BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors))).update(1, "0-1")
    return [engine.bound[name] for engine in engines]


def numbered_heads(count: int, width: int = 16) -> torch.Tensor:
    """[count * 4, width], every element the index of its head."""
    return torch.arange(count).repeat_interleave(4)[:, None].expand(-1, width).to(torch.bfloat16).contiguous()


@pytest.mark.case("B058")
def test_kv_heads_are_replicated_in_pairs() -> None:
    tensors = {"q_proj": numbered_heads(4), "k_proj": numbered_heads(2), "v_proj": numbered_heads(2) + 10}
    held = ranks(tensors, QKV(4, 2, 4), (12, 16), 4)
    assert [t[4:8].unique().tolist() for t in held] == [[0], [0], [1], [1]]
    assert [t[8:].unique().tolist() for t in held] == [[10], [10], [11], [11]]
    assert [t[:4].unique().tolist() for t in held] == [[0], [1], [2], [3]]
    pairs = [tensor_digest(t[4:].contiguous()) for t in held]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]


@pytest.mark.case("B060")
def test_a_per_head_norm_follows_its_replicated_head() -> None:
    norm = torch.arange(8.0).to(torch.bfloat16)
    held = ranks({"k_norm": norm}, Heads(2, 4), (4,), 4, name="k_norm")
    assert [t.tolist() for t in held] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


@pytest.mark.case("B060")
def test_a_split_head_is_refused() -> None:
    for local, layout in (((2,), Heads(2, 4)), ((2,), Heads(3, 4))):
        with pytest.raises(LiveweightsError) as caught:
            ranks({"k_norm": torch.zeros(layout.count * 4).to(torch.bfloat16)}, layout, local, 4, name="k_norm")
        assert {f.tensor for f in caught.value.failures} == {"k_norm"}
        assert caught.value.code in ("tensor_shape", "placement_refused")


@pytest.mark.case("B061")
def test_a_rank_that_takes_another_ranks_slice_fails_the_update() -> None:
    """Every rank believes to be rank 0: shapes agree, the tensor's second half lands nowhere."""
    tensors = checkpoint(1)
    made = replica(tensors, 2)
    as_rank_zero = made.engines[0].placement
    made.engines[1]._placement = as_rank_zero
    with refused("tensor_unwritten", tensors=["l.attn.o_proj.weight", "l.mlp.gate_proj.weight"]):
        made.vote(1)


@pytest.mark.case("B061")
def test_after_a_commit_every_rank_has_the_digests_of_an_independent_slicer() -> None:
    tensors = checkpoint(2)
    made = replica(tensors, 2)
    made.update(1, "0-1")
    for rank, agent in enumerate(made.agents):
        want = {name: to_hex(tensor_digest(t.contiguous())) for name, t in sliced(tensors, rank, 2).items()}
        assert {each.name: each.digest for each in agent.digests(RankDigests()).digests} == want


@pytest.mark.case("B062")
def test_the_padded_vocabulary_on_two_ranks() -> None:
    rows = torch.arange(1.0, 258.0)[:, None].expand(-1, 16).to(torch.bfloat16).contiguous()
    rules = Rules(layouts=(("embed", PaddedVocab(257)),))
    engines = [BareEngine({"embed": (160, 16)}, rules, rank, 2) for rank in range(2)]
    made = BareReplica(engines, lambda _rank: MemorySource({"embed": rows}, manifest_of({"embed": rows})))
    for serial in range(1, 4):  # padding is zero after every update, also where both sides held rubbish before
        for agent in made.agents:
            agent.spare.poison()
        made.update(serial, f"0-{serial}", [InstallMode.FLIP, InstallMode.EXCHANGE][serial % 2])
        assert torch.equal(engines[0].bound["embed"], rows[:160])
        assert torch.equal(engines[1].bound["embed"][:97], rows[160:])
        assert engines[1].bound["embed"][97:].eq(0).all()


@pytest.mark.case("B064")
@pytest.mark.parametrize(("full", "name"), [(257, "vocab"), (25, "intermediate")])
def test_a_length_that_does_not_divide_is_refused_or_complete(full: int, name: str) -> None:
    spec = {"w": TensorSpec("w", "F32", (full, 3))}
    for rank, local in ((0, full // 2 + 1), (1, full // 2), (0, full // 2)):
        with refused("tensor_shape", tensors=["w"]):
            declare(spec, {"w": Target((local, 3))}, Rules(layouts=(("w", Sharded(0)),)), rank, 2)
    tensor = torch.arange(full * 3).view(full, 3).to(torch.float32)
    rules = Rules(layouts=(("w", Sharded(0, uneven=True)),))
    engines = [
        BareEngine({"w": (full // 2 + 1 - rank, 3)}, rules, rank, 2, dtypes={"w": torch.float32}) for rank in range(2)
    ]
    BareReplica(engines, lambda _rank: MemorySource({"w": tensor}, manifest_of({"w": tensor}))).update(1, "0-1")
    assert torch.equal(torch.cat([engine.bound["w"] for engine in engines]), tensor)


@pytest.mark.case("B064")
def test_a_placement_that_drops_the_tail_is_refused() -> None:
    """Not only what `declare` makes: any placement goes through the coverage of the source."""
    rules = Rules(layouts=(("w", Sharded(0)),))

    def rounds_down(rank: int) -> Placement:
        return declare({"w": TensorSpec("w", "F32", (24, 1))}, {"w": Target((12, 1))}, rules, rank, 2)

    engines = [
        BareEngine(
            {"w": (12, 1)}, rules, rank, 2, dtypes={"w": torch.float32}, placement=lambda _s, r=rank: rounds_down(r)
        )
        for rank in range(2)
    ]
    made = BareReplica(engines, lambda _rank: MemorySource({"w": torch.zeros(25, 1)}))
    with refused("tensor_unwritten", tensors=["w"]):
        made.vote(1)


@pytest.mark.case("B066")
def test_the_axis_is_declared_for_square_weights() -> None:
    square = torch.arange(256.0).view(16, 16).to(torch.bfloat16)
    rows = ranks({"w": square}, Sharded(1), (16, 8), 2, name="w")
    columns = ranks({"w": square}, Sharded(0), (8, 16), 2, name="w")
    assert torch.equal(torch.cat(rows, 1), square)
    assert torch.equal(torch.cat(columns, 0), square)


@pytest.mark.case("B066")
def test_no_declared_axis_and_another_shape_is_refused() -> None:
    for local in ((8, 16), (16, 8)):
        with refused("tensor_shape", tensors=["w"]):
            declare({"w": TensorSpec("w", "BF16", (16, 16))}, {"w": Target(local)}, Rules(), 0, 2)
    with refused("tensor_shape", tensors=["w"]):  # a declared axis is not turned round to make it fit
        rules = Rules(layouts=(("w", Sharded(0)),))
        declare({"w": TensorSpec("w", "BF16", (16, 16))}, {"w": Target((16, 8))}, rules, 0, 2)


@pytest.mark.case("B068")
@pytest.mark.parametrize("parts", [("k", "v"), ("gate", "up")])
def test_each_rank_gets_its_part_of_every_part(parts: tuple[str, str]) -> None:
    fused = torch.cat([torch.ones(8, 4), torch.full((8, 4), 2.0)]).to(torch.bfloat16)
    held = ranks({"fused": fused}, Merged(parts), (8, 4), 2)
    assert [t[:, 0].tolist() for t in held] == [[1, 1, 1, 1, 2, 2, 2, 2]] * 2


@pytest.mark.case("B069")
@pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
def test_expert_parallel_ranks_hold_the_same_by_every_source(mode: InstallMode) -> None:
    tensors = checkpoint(3)
    digests = []
    for source in (MemorySource, PoisonSource):
        made = replica(tensors, 2, parallel="ep")
        made.open_source = lambda _rank, kind=source: kind(tensors, manifest=manifest_of(tensors))
        made.update(1, "0-1", mode)
        digests.append([agent.digests(RankDigests()) for agent in made.agents])
    assert digests[0] == digests[1]
    want = [{n: to_hex(tensor_digest(t.contiguous())) for n, t in sliced(tensors, r, 2, "ep").items()} for r in (0, 1)]
    assert [{each.name: each.digest for each in reply.digests} for reply in digests[0]] == want


@pytest.mark.case("B069")
def test_a_rank_never_reads_experts_that_are_not_its_own() -> None:
    asked: list[set[str]] = [set(), set()]

    class Watched(MemorySource):
        def __init__(self, rank: int) -> None:
            super().__init__(tensors, manifest_of(tensors))
            self.rank = rank

        def read(self, reads, **callbacks):  # type: ignore[no-untyped-def]
            asked[self.rank] |= {read.name for read in reads}
            return super().read(reads, **callbacks)

    tensors = checkpoint(4)
    made = replica(tensors, 2, parallel="ep")
    made.open_source = Watched
    made.update(1, "0-1")
    experts = [{int(name.split(".")[2]) for name in names if ".experts." in name} for names in asked]
    assert experts == [{0, 1}, {2, 3}]
