"""Slices of tensor-parallel ranks: all ranks of vLLM's models in one process, updated by rank agents.

vLLM builds and loads every rank, placements are recorded from its loaders, and what must lie where is cut from the
checkpoint by plain indexing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine_adapter.base import Parameter
from engine_adapter.parameters import collect
from engine_adapter.placement.declared.rules import Rules
from engine_adapter.placement.rows import Placement
from engine_adapter.rank.messages import RankDigests, RankDiscard, RankPlan
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import manifest_of
from engine_adapter.vllm.building import recorded_placements
from tests.vllm_server.models import SHAPES, Checkpoints
from tests.vllm_server.test_recorded_placement import apart, as_rank, built, configured, tensors_of, written
from transports.digest import tensor_digest, to_hex
from transports.testing import MemorySource, refused
from updater.core.participant import DiskOffer, SpareState
from updater.core.policy import InstallMode, SourceLayout
from updater.protocol.manifest import TensorSpec

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("alone")]

Made = Callable[..., Checkpoints]
Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"
QKV = f"{ATTENTION}.qkv_proj.weight"
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
HEAD_DIM = 32

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
#: Class prefix -> what else its configuration needs.
_MORE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Olmo2": {},
    "Phi3": {"pad_token_id": 0},
    "MiniMaxM2": {
        "head_dim": HEAD_DIM,
        "rotary_dim": HEAD_DIM,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}


class Rank(BareEngine):
    """One rank of vLLM's, loaded from `start`. `acts_as`: another rank that its layers take themselves for."""

    def __init__(self, config: Any, start: Tensors, rank: int, size: int, acts_as: int | None = None) -> None:
        super().__init__({}, Rules(), rank, size, placement=self._record)
        self.acts_as = rank if acts_as is None else acts_as
        with as_rank(self.acts_as, size):
            self.model = built(apart(config), start)
            self.recorded = recorded_placements(config, self.model)
        self._collected = collect(self.model, empty=False)

    def parameters(self) -> Mapping[str, Parameter]:
        return self._collected

    def _record(self, specs: Mapping[str, TensorSpec]) -> Placement:
        with as_rank(self.acts_as, self.size):
            return self.recorded.placement(specs)

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """What a forward pass reads."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


class Replica(BareReplica):
    """All ranks of a checkpoint, whose spares are poisoned before every staging."""

    def __init__(self, path: Path, size: int = 2, acts_as: int | None = None) -> None:
        self.config = configured(path, skip_tokenizer_init=True)
        self.source: Tensors = dict(tensors_of(path).weights)
        self.ranks = [Rank(self.config, self.source, rank, size, acts_as) for rank in range(size)]
        self._serial = 0
        super().__init__(self.ranks, lambda _rank: MemorySource(self.source, manifest_of(self.source)), poison=True)

    def prove(self) -> None:
        """Plan the start checkpoint, as a replay does."""
        for agent in self.agents:
            agent.plan(RankPlan(0, DiskOffer(""), (), "", start=True, known=True))
            agent.discard(RankDiscard(0))

    def publish(self, tensors: Tensors, mode: InstallMode = InstallMode.FLIP, **plan: Any) -> None:
        self.source, self._serial = tensors, self._serial + 1
        self.update(self._serial, f"0-{self._serial}", mode, **plan)

    def live(self, name: str) -> list[torch.Tensor]:
        """By rank."""
        return [rank.live[name] for rank in self.ranks]

    def digests(self) -> list[dict[str, str]]:
        """Of what a checkpoint feeds, by rank, as the agents say."""
        said = [agent.digests(RankDigests()).digests for agent in self.agents]
        return [
            {each.name: each.digest for each in reply if each.name in rank.live}
            for rank, reply in zip(self.ranks, said, strict=True)
        ]


def read(path: Path) -> Tensors:
    return dict(tensors_of(path).weights)


def make(family: str, folder: Path, **sizes: int) -> Path:
    return written(family, _SIZES | _MORE[family] | sizes, folder)


def digest(tensor: torch.Tensor) -> str:
    return to_hex(tensor_digest(tensor.contiguous()))


def numbered(count: int, first: int, *width: int) -> torch.Tensor:
    """[count, *width] in bfloat16: every row filled with its number, counted from `first`; exact up to 256."""
    rows = torch.arange(first, first + count).view(-1, *(1 for _ in width))
    return rows.expand(-1, *width).to(torch.bfloat16).contiguous()


def cut(tensors: Tensors, kv_heads: int, rank: int, size: int) -> Tensors:
    """What rank `rank` of a Llama must hold: written without the placement code, and without vLLM's."""

    def rows(name: str) -> torch.Tensor:
        return tensors[name].chunk(size)[rank]

    def heads(name: str) -> torch.Tensor:
        each = tensors[name].unflatten(0, (kv_heads, -1))
        first = rank * kv_heads // size
        return each[first : first + max(1, kv_heads // size)].flatten(0, 1)

    def padded(name: str) -> torch.Tensor:
        return nn.functional.pad(tensors[name], (0, 0, 0, -len(tensors[name]) % 64)).chunk(size)[rank]

    held: Tensors = {}
    for name, tensor in tensors.items():
        if name in VOCABULARY:
            held[name] = padded(name)
        elif "q_proj" in name:
            parts = [rows(name), *(heads(name.replace("q_proj", part)) for part in ("k_proj", "v_proj"))]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            parts = [rows(name), rows(name.replace("gate_proj", "up_proj"))]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif "o_proj" in name or "down_proj" in name:
            held[name] = tensor.chunk(size, 1)[rank]
        elif "norm" in name:
            held[name] = tensor
    return held


# more ranks than heads


@pytest.mark.case("B058")
@pytest.mark.parametrize(("name", "size"), [("odd", 2), ("llama", 4)])
def test_more_ranks_than_kv_heads_hold_each_head_twice(checkpoints: Made, name: str, size: int) -> None:
    both, count = checkpoints(name), SHAPES[name].kv_heads
    replica, tensors = Replica(both.first, size), read(both.second)
    for part, first in (("k_proj", 1), ("v_proj", 101)):
        tensors[f"{ATTENTION}.{part}.weight"] = numbered(count * HEAD_DIM, first, 256)
    replica.publish(tensors)
    keys_and_values = [fused[-2 * HEAD_DIM :] for fused in replica.live(QKV)]
    for rank, held in enumerate(keys_and_values):
        start = HEAD_DIM * (rank // 2)
        assert torch.equal(held, torch.cat([numbered(HEAD_DIM, first + start, 256) for first in (1, 101)]))
    found = [digest(held) for held in keys_and_values]
    assert found[::2] == found[1::2]
    assert len(set(found)) == count


@pytest.mark.case("B060")
@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 4)])
def test_a_norm_that_vllm_cuts_follows_its_replicated_head(tmp_path: Path, count: int, size: int) -> None:
    path = make("MiniMaxM2", tmp_path, num_key_value_heads=count)
    replica, tensors = Replica(path, size), read(path)
    tensors[f"{ATTENTION}.k_norm.weight"] = numbered(count * HEAD_DIM, 1)
    tensors[f"{ATTENTION}.k_proj.weight"] = numbered(count * HEAD_DIM, 1, 128)
    tensors[f"{ATTENTION}.q_norm.weight"] = numbered(4 * HEAD_DIM, 1)
    replica.publish(tensors)
    keys, queries, fused = (replica.live(f"{ATTENTION}.{part}.weight") for part in ("k_norm", "q_norm", "qkv_proj"))
    for rank, key in enumerate(keys):
        assert torch.equal(key, numbered(HEAD_DIM, 1 + HEAD_DIM * (rank // 2)))
        assert torch.equal(key, fused[rank][-2 * HEAD_DIM : -HEAD_DIM, 0])  # of the head that lies there
    assert torch.equal(torch.cat(queries), tensors[f"{ATTENTION}.q_norm.weight"])


@pytest.mark.case("B060")
def test_a_norm_that_vllm_keeps_whole_is_whole_on_every_rank(tmp_path: Path) -> None:
    """Its Olmo2 is transformers' own class, changed in place: transformers cannot build another in this process."""
    path = make("Olmo2", tmp_path, num_key_value_heads=1)
    replica, tensors = Replica(path), read(path)
    norms = {
        f"{ATTENTION}.k_norm.weight": numbered(HEAD_DIM, 1),
        f"{ATTENTION}.q_norm.weight": numbered(4 * HEAD_DIM, 101),
    }
    replica.publish(tensors | norms)
    for name, norm in norms.items():
        assert all(torch.equal(held, norm) for held in replica.live(name))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param(
            "MiniMaxM2",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            id="half-a-head",
            marks=pytest.mark.case("B060"),
        ),
        pytest.param("Llama", {"intermediate_size": 25}, id="intermediate", marks=pytest.mark.case("B064")),
    ],
)
def test_sizes_that_do_not_divide_are_never_built(tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    path = make(family, tmp_path, **sizes)
    config = configured(path, skip_tokenizer_init=True)
    for rank in range(2):
        with as_rank(rank, 2), pytest.raises(AssertionError):
            built(apart(config))
    replica = Replica(path, 1)  # on one rank nothing is wrong with them
    replica.publish(read(path))


# slices


@pytest.mark.case("B061")
@pytest.mark.parametrize("name", ["llama", "odd"])
def test_after_every_update_ranks_have_the_digests_of_an_independent_slicer(checkpoints: Made, name: str) -> None:
    both = checkpoints(name)
    replica = Replica(both.first)
    for path in (both.second, both.first, both.second):
        tensors = read(path)
        replica.publish(tensors)
        wanted = [cut(tensors, SHAPES[name].kv_heads, rank, 2) for rank in range(2)]
        assert replica.digests() == [{name: digest(held) for name, held in rank.items()} for rank in wanted]
        for rank in replica.ranks:
            with as_rank(rank.rank, 2):
                loaded = dict(built(apart(replica.config), tensors).named_parameters())
            assert all(torch.equal(held, loaded[name]) for name, held in rank.live.items())


@pytest.mark.case("B061")
def test_ranks_that_all_hold_the_first_slice_are_refused(checkpoints: Made) -> None:
    """Shapes agree, and each rank by itself is complete: only all of them together show it."""
    both = checkpoints("llama")
    replica = Replica(both.first, acts_as=0)
    first, second = replica.digests()
    assert first == second
    replica.source = read(both.second)
    with refused("tensor_unwritten") as caught:
        replica.vote(1)
    assert {failure.tensor for failure in caught[0].failures} == {name for name in replica.source if "norm" not in name}
    assert {agent.spare.state for agent in replica.agents} == {SpareState.EMPTY}  # no byte has moved


@pytest.mark.case("B062")
def test_padding_rows_are_zero_after_every_update(checkpoints: Made) -> None:
    both = checkpoints("odd")
    replica = Replica(both.first)
    updates = (
        (both.second, InstallMode.FLIP),
        (both.first, InstallMode.EXCHANGE),
        (both.second, InstallMode.EXCHANGE),
        (both.first, InstallMode.FLIP),
    )
    for path, mode in updates:
        tensors = read(path)
        replica.publish(tensors, mode)
        for name in VOCABULARY:
            first, second = replica.live(name)
            assert first.shape == second.shape == (160, 256)
            assert torch.equal(first, tensors[name][:160])
            assert torch.equal(second[:97], tensors[name][160:])
            assert second[97:].eq(0).all()


@pytest.mark.case("B064")
def test_gathering_the_ranks_gives_back_the_source(checkpoints: Made) -> None:
    both = checkpoints("odd")
    replica, tensors = Replica(both.first), read(both.second)
    replica.publish(tensors)
    for name in VOCABULARY:
        assert len(tensors[name]) == 257
        assert torch.equal(torch.cat(replica.live(name))[:257], tensors[name])


@pytest.mark.case("B064")
def test_a_loader_that_drops_the_tail_is_refused(checkpoints: Made) -> None:
    def rounds_down(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data[:96].copy_(loaded[160:256])
        parameter.data[96:].fill_(0)

    both = checkpoints("odd")
    replica = Replica(both.first)
    twin: Any = replica.ranks[1].recorded.fresh
    twin.lm_head.weight.weight_loader = rounds_down
    replica.source = read(both.second)
    with refused("tensor_unwritten") as caught:
        replica.vote(1)
    assert {failure.tensor for failure in caught[0].failures} == {"lm_head.weight"}


@pytest.mark.case("B066")
def test_square_weights_are_cut_along_the_axis_of_vllm_s_own_loader(checkpoints: Made) -> None:
    """One is the other's transpose, so that neither values nor shapes give the axis away."""
    both = checkpoints("llama")
    replica, tensors = Replica(both.first), read(both.second)
    number = torch.arange(256)
    square = (number[:, None] - number).to(torch.bfloat16)
    query, output = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.o_proj.weight"
    replica.publish(tensors | {query: square, output: square.T.contiguous()})
    assert torch.equal(torch.cat([fused[:128] for fused in replica.live(QKV)]), square)
    assert torch.equal(torch.cat(replica.live(output), 1), square.T)


@pytest.mark.case("B066")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{ATTENTION}.o_proj.weight", (256, 128)),  # a shard already
        (f"{ATTENTION}.q_proj.weight", (128, 256)),
        (f"{LAYER}.input_layernorm.weight", (512,)),  # no axis at all
    ],
)
def test_a_shape_that_no_axis_explains_is_refused(checkpoints: Made, name: str, shape: tuple[int, ...]) -> None:
    both = checkpoints("llama")
    replica, tensors = Replica(both.first), read(both.second)
    replica.publish(tensors)
    with refused("tensor_shape") as caught:
        replica.publish(tensors | {name: torch.ones(shape, dtype=torch.bfloat16)})
    assert {failure.tensor for failure in caught[0].failures} == {name}


@pytest.mark.case("B068")
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_each_rank_holds_half_of_each_part_in_order(tmp_path: Path, family: str) -> None:
    """The checkpoint of a Llama has the parts one by one, that of a Phi3 has them fused."""
    path = make(family, tmp_path)
    replica, tensors = Replica(path), read(path)
    attention = {"q": numbered(128, 1, 128), "k": numbered(64, 129, 128), "v": numbered(64, 193, 128)}
    mlp = {"gate": numbered(64, 1, 128), "up": numbered(64, 65, 128)}
    fusions = ((f"{ATTENTION}.qkv", ATTENTION, attention), (f"{LAYER}.mlp.gate_up", f"{LAYER}.mlp", mlp))
    for fused, at, parts in fusions:
        if family == "Phi3":
            tensors[f"{fused}_proj.weight"] = torch.cat(list(parts.values()))
        else:
            tensors |= {f"{at}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    replica.publish(tensors)
    for fused, _, parts in fusions:
        for rank, held in enumerate(replica.live(f"{fused}_proj.weight")):
            assert torch.equal(held, torch.cat([tensor.chunk(2)[rank] for tensor in parts.values()]))


@pytest.mark.case("F04")
@pytest.mark.parametrize("kind", [SourceLayout.CONCATENATED, SourceLayout.BY_KV_HEAD])
def test_a_llama_started_on_parts_takes_fused_ones_only_as_somebody_says_they_lie(
    tmp_path: Path, kind: SourceLayout
) -> None:
    """vLLM's own loader takes every fused projection for a concatenated one."""
    path = make("Llama", tmp_path)
    replica, tensors = Replica(path), read(path)
    replica.prove()
    q, k, v = numbered(128, 1, 128), numbered(64, 129, 128), numbered(64, 193, 128)
    heads = [part.unflatten(0, (2, -1)) for part in (q, k, v)]  # two heads of keys, each with two of queries
    grouped = torch.cat([part[group] for group in range(2) for part in heads])
    whole = grouped if kind is SourceLayout.BY_KV_HEAD else torch.cat((q, k, v))
    sent = {name: tensor for name, tensor in tensors.items() if not re.search("[qkv]_proj", name)} | {QKV: whole}
    with refused("layout_unproved", tensors=[QKV]):
        replica.publish(sent)
    replica.publish(sent, layouts=(("*.qkv_proj.weight", kind),))
    for rank, held in enumerate(replica.live(QKV)):
        assert torch.equal(held, torch.cat([part.chunk(2)[rank] for part in (q, k, v)]))
