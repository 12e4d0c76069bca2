"""How Megatron's parameters lie in checkpoint tensors, with parameters laid out by hand: no megatron, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from trainer_side.megatron import Coordinates, Geometry, MegatronSource, Rule, Seat, is_megatron
from trainer_side.megatron.parameters import Fragment, fragments
from trainer_side.megatron.plan import TensorPlan, merge
from trainer_side.megatron.rules import IGNORED, NAMINGS, TIE, find
from trainer_side.sources import as_source
from transports.base import Box
from transports.digest import MASK, region_digest, tensor_digest
from updater.core.errors import Rejected

HIDDEN, HEAD, FFN = 12, 4, 6
SHAPE = Geometry(layers=1, heads=4, groups=2, head_size=HEAD, experts=4)
LAYER = "decoder.layers.0."
State = Mapping[str, torch.Tensor]


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    """Every element another value."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def held(
    state: State, naming: str = "llama", where: Coordinates | None = None, geometry: Geometry = SHAPE, **renamed: str
) -> list[Fragment]:
    rules = NAMINGS[naming]
    return fragments(state, rules, where or Coordinates(), geometry, ignored=IGNORED, renamed=renamed)


def told(ranks: Sequence[Sequence[Fragment]]) -> list[list[list[Any]]]:
    return [
        [
            [f.name, f.dtype, list(f.shape), list(f.box.start), list(f.box.size), f.layer, f.expert]
            for f in rank
            if f.speaks
        ]
        for rank in ranks
    ]


def gathered(ranks: Sequence[Sequence[Fragment]], geometry: Geometry = SHAPE) -> dict[str, torch.Tensor]:
    """What the sender would have, and on the way: the digests of owned fragments add up to that of the whole."""
    whole = {}
    for planned in merge(told(ranks), geometry, sender=0):
        spec = planned.spec
        tensor, total = torch.full(spec.shape, float("nan")), 0
        for region in planned.regions:
            (fragment,) = [f for f in ranks[region.owner] if f.name == spec.name and f.box == region.box and f.speaks]
            slices = tuple(slice(a, a + n) for a, n in zip(region.box.start, region.box.size, strict=True))
            tensor[slices] = fragment.tensor()
            total += region_digest(fragment.tensor(), spec.shape, spec.dtype, region.box)
        assert total & MASK == tensor_digest(tensor)
        whole[spec.name] = tensor
    return whole


def refused(ranks: Sequence[Sequence[Fragment]], geometry: Geometry = SHAPE) -> list[tuple[str, str, int | None]]:
    with pytest.raises(Rejected) as caught:
        merge(told(ranks), geometry, sender=0)
    return [(failure.code, failure.tensor, failure.rank) for failure in caught.value.failures]


def tensor_seats(size: int) -> list[Coordinates]:
    return [Coordinates(tensor=Seat(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_fused_attention_comes_apart_by_groups(size: int, part: str) -> None:
    """Sizes 4 and 8 have several ranks to a group: cuts fall between its parts, and inside its queries."""
    rest = (HIDDEN,) if part == "weight" else ()
    q, k, v = (numbers(rows, *rest, start=1000 * at) for at, rows in enumerate((16, 8, 8)))
    fused = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
    name = f"{LAYER}self_attention.linear_qkv.{part}"
    ranks = [held({name: fused.chunk(size)[at]}, where=where) for at, where in enumerate(tensor_seats(size))]
    whole = gathered(ranks)
    for kind, expected in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(whole[f"model.layers.0.self_attn.{kind}_proj.{part}"], expected)


def test_gate_and_up_are_halves_of_each_rank() -> None:
    gate, up = numbers(FFN, HIDDEN), numbers(FFN, HIDDEN, start=500)
    name = f"{LAYER}mlp.linear_fc1.weight"
    ranks = [
        held({name: torch.cat([gate.chunk(2)[at], up.chunk(2)[at]])}, where=where)
        for at, where in enumerate(tensor_seats(2))
    ]
    whole = gathered(ranks)
    assert torch.equal(whole["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(whole["model.layers.0.mlp.up_proj.weight"], up)


@pytest.mark.parametrize("vocabulary", [1, 3, 4, 5, 8])
def test_padding_of_the_vocabulary_belongs_to_nobody(vocabulary: int) -> None:
    """Also where a rank holds padding alone (vocabularies of 1, 3 and 4 rows over two ranks of 4)."""
    table = numbers(8, HIDDEN)
    geometry = Geometry(layers=0, heads=4, groups=2, head_size=HEAD, vocabulary=vocabulary)
    ranks = [
        held({"embedding.word_embeddings.weight": table.chunk(2)[at]}, where=where, geometry=geometry)
        for at, where in enumerate(tensor_seats(2))
    ]
    whole = gathered(ranks, geometry)
    assert torch.equal(whole["model.embed_tokens.weight"], table[:vocabulary])


def experts_of(naming: str) -> tuple[str, tuple[str, str, str]]:
    if naming == "mixtral":
        return "model.layers.0.block_sparse_moe.experts.", ("w1", "w3", "w2")
    return "model.layers.0.mlp.experts.", ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("naming", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["sequential", "numbered", "grouped"])
@pytest.mark.parametrize("etp", [1, 2])
def test_every_kind_of_experts_comes_to_the_same(naming: str, kind: str, etp: int) -> None:
    """Four experts over two expert ranks: two each, one tensor each or all in one, cut within an expert or not."""
    gate, up = numbers(4, FFN, HIDDEN), numbers(4, FFN, HIDDEN, start=2000)
    down = numbers(4, HIDDEN, FFN, start=4000)
    ranks = []
    for ep, at in ((ep, at) for ep in range(2) for at in range(etp)):
        mine = slice(2 * ep, 2 * ep + 2)
        fc1 = torch.cat([gate[mine].chunk(etp, 1)[at], up[mine].chunk(etp, 1)[at]], 1)
        fc2 = down[mine].chunk(etp, 2)[at]
        where = Coordinates(expert=Seat(ep, 2), expert_tensor=Seat(at, etp))
        ranks.append(held(expert_state(kind, fc1, fc2), naming, where))
    whole = gathered(ranks)
    prefix, names = experts_of(naming)
    assert len(whole) == 12
    for name, expected in zip(names, (gate, up, down), strict=True):
        for expert in range(4):
            assert torch.equal(whole[f"{prefix}{expert}.{name}.weight"], expected[expert])


def expert_state(kind: str, fc1: torch.Tensor, fc2: torch.Tensor) -> dict[str, torch.Tensor]:
    experts = f"{LAYER}mlp.experts."
    if kind == "grouped":  # both transposed, one expert after the other in memory
        first = fc1.transpose(1, 2).contiguous().view(HIDDEN, -1)
        return {f"{experts}weight1": first, f"{experts}weight2": fc2.transpose(1, 2).contiguous().view(-1, HIDDEN)}
    form = "local_experts.{}.linear_fc{}.weight" if kind == "sequential" else "linear_fc{1}.weight{0}"
    return {
        f"{experts}{form.format(expert, number)}": tensor[expert]
        for number, tensor in ((1, fc1), (2, fc2))
        for expert in range(2)
    }


def test_norms_fused_into_transformer_engines_layers_have_the_same_names() -> None:
    weight = numbers(HIDDEN)
    local = {"input_layernorm.weight": weight, "pre_mlp_layernorm.weight": weight}
    fused = {"self_attention.linear_qkv.layer_norm_weight": weight, "mlp.linear_fc1.layer_norm_weight": weight}
    found = [[f.name for f in held({LAYER + name: tensor for name, tensor in each.items()})] for each in (local, fused)]
    assert (
        found[0]
        == found[1]
        == [
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        ]
    )


def test_shared_experts_and_dense_layers_of_a_mixture() -> None:
    state = {
        f"{LAYER}mlp.router.weight": numbers(4, HIDDEN),
        f"{LAYER}mlp.shared_experts.linear_fc1.weight": numbers(2 * FFN, HIDDEN),
        f"{LAYER}mlp.shared_experts.linear_fc2.weight": numbers(HIDDEN, FFN),
        f"{LAYER}mlp.shared_experts.gate_weight": numbers(1, HIDDEN),
        "decoder.layers.1.mlp.linear_fc2.weight": numbers(HIDDEN, FFN),
    }
    assert [f.name for f in held(state, "qwen2_moe")] == [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.shared_expert.down_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]


def test_the_copy_of_a_tied_embedding_on_the_last_stage_is_a_second_holder() -> None:
    table = numbers(8, HIDDEN)
    geometry = Geometry(layers=0, heads=4, groups=2, head_size=HEAD, tied=True)
    ranks = [
        fragments({name: table}, NAMINGS["llama"], Coordinates(), geometry, ignored=(), renamed=dict([TIE]))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    (planned,) = merge(told(ranks), geometry, sender=1)
    assert (planned.spec.name, [region.holders for region in planned.regions]) == (
        "model.embed_tokens.weight",
        [(0, 1)],
    )
    assert planned.regions[0].owner == 1  # the sender has it already


def test_one_data_parallel_copy_speaks_for_all() -> None:
    state = {f"{LAYER}input_layernorm.weight": numbers(HIDDEN)}
    ranks = [held(state, where=Coordinates(copy=copy)) for copy in range(3)]
    (planned,) = merge(told(ranks), SHAPE, sender=2)
    assert [(region.owner, region.holders) for region in planned.regions] == [(0, (0,))]


@pytest.mark.case("B066")
def test_the_axis_is_declared_and_never_guessed_from_shapes() -> None:
    """Square matrices fit both axes. A parameter whose own attributes contradict its rule is refused."""
    square = numbers(16, 16)
    o_proj, q_like = f"{LAYER}self_attention.linear_proj.weight", "output_layer.weight"
    ranks = [
        held({o_proj: square.chunk(2, 1)[at], q_like: square.chunk(2, 0)[at]}, where=where)
        for at, where in enumerate(tensor_seats(2))
    ]
    whole = gathered(ranks)
    assert torch.equal(whole["model.layers.0.self_attn.o_proj.weight"], square)
    assert torch.equal(whole["lm_head.weight"], square)
    for dimension, parallel, code in (
        (1, True, None),
        (0, True, "placement_refused"),
        (-1, False, "placement_refused"),
    ):
        parameter = nn.Parameter(square)
        parameter.tensor_model_parallel, parameter.partition_dim = parallel, dimension  # type: ignore[attr-defined]
        codes = []
        try:
            held({o_proj: parameter}, where=tensor_seats(2)[0])
        except Rejected as error:
            codes = [failure.code for failure in error.failures]
        assert codes == ([code] if code else [])


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    state: dict[str, Any] = {
        f"{LAYER}self_attention.linear_qkv._extra_state": None,
        f"{LAYER}self_attention.linear_kv_down_proj.weight": numbers(4, HIDDEN),
        "embedding.position_embeddings.weight": numbers(4, HIDDEN),
        f"{LAYER}self_attention.linear_qkv.weight": numbers(31, HIDDEN),
        f"{LAYER}mlp.linear_fc1.weight": numbers(5, HIDDEN),
        f"{LAYER}mlp.linear_fc2.weight": numbers(HIDDEN),
        f"{LAYER}input_layernorm.weight": torch.zeros(0),
        f"{LAYER}pre_mlp_layernorm.weight": torch.zeros(3, device="meta"),
    }
    with pytest.raises(Rejected) as caught:
        held(state)
    assert {(failure.tensor.removeprefix(LAYER), failure.code) for failure in caught.value.failures} == {
        ("self_attention.linear_kv_down_proj.weight", "tensor_unexpected"),
        ("embedding.position_embeddings.weight", "tensor_unexpected"),
        ("self_attention.linear_qkv.weight", "placement_refused"),
        ("mlp.linear_fc1.weight", "placement_refused"),
        ("mlp.linear_fc2.weight", "placement_refused"),
        ("input_layernorm.weight", "tensor_shape"),
        ("pre_mlp_layernorm.weight", "bad_request"),
    }


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        (f"{LAYER}mlp.linear_fc1.weight", Geometry(1, 4, 2, HEAD, gated=False)),
        ("output_layer.weight", Geometry(1, 4, 2, HEAD, vocabulary=13)),
        (f"{LAYER}mlp.experts.local_experts.0.linear_fc2.weight", Geometry(1, 4, 2, HEAD, experts=0)),
        (f"{LAYER}mlp.experts.local_experts.4.linear_fc2.weight", SHAPE),
        (f"{LAYER}mlp.experts.weight1", Geometry(1, 4, 2, HEAD, experts=5)),
    ],
)
def test_what_the_config_denies_is_refused(name: str, geometry: Geometry) -> None:
    with pytest.raises(Rejected) as caught:
        held({name: numbers(12, HIDDEN)}, "qwen3_moe", geometry=geometry)
    assert [(failure.code, failure.tensor) for failure in caught.value.failures] == [("placement_refused", name)]


class Config:
    """The fields of a TransformerConfig that decide anything."""

    num_layers, num_attention_heads, num_query_groups, kv_channels, num_moe_experts = 1, 4, None, HEAD, None
    gated_linear_unit = True

    def __init__(self, **more: Any) -> None:
        vars(self).update(more)


@pytest.mark.parametrize(
    "setting", ["attention_output_gate", "rotary_interleaved", "multi_latent_attention", "fp8_param"]
)
def test_settings_that_change_what_parameters_mean_are_refused(setting: str) -> None:
    assert Geometry.of(Config(**{setting: False}), vocabulary=0, tied=False).groups == 4
    with pytest.raises(Rejected) as caught:
        Geometry.of(Config(**{setting: True}), vocabulary=0, tied=False)
    assert caught.value.code == "mode_unsupported"


def one(name: str, shape: tuple[int, ...], box: Box, dtype: str = "F32", layer: int = -1, expert: int = -1) -> Fragment:
    return Fragment(name, dtype, shape, box, (torch.zeros(box.size),), True, layer, expert)


def rows(name: str, start: int, stop: int, of: int, **more: Any) -> Fragment:
    return one(name, (of, 2), Box((start, 0), (stop - start, 2)), **more)


NOTHING = Geometry(layers=0, heads=4, groups=2, head_size=HEAD)


def test_ranks_that_contradict_each_other_are_refused() -> None:
    assert refused([[rows("a", 0, 4, 8)], [rows("a", 4, 8, 8, dtype="BF16")]], NOTHING) == [("tensor_dtype", "a", 1)]
    assert refused([[rows("a", 0, 4, 8)], [rows("a", 4, 8, 9)]], NOTHING) == [("tensor_shape", "a", 1)]
    assert refused([[rows("a", 0, 4, 8)], [rows("a", 3, 8, 8)]], NOTHING) == [("placement_refused", "a", None)]
    columns = one("a", (8, 2), Box((0, 0), (8, 1)))
    assert refused([[rows("a", 0, 4, 8)], [columns]], NOTHING)[0][:2] == ("placement_refused", "a")


def test_regions_that_nobody_holds_are_missing() -> None:
    assert refused([[rows("a", 0, 4, 8)], []], NOTHING) == [("tensor_missing", "a", None)]
    assert refused([[rows("a", 4, 8, 8)], []], NOTHING) == [("tensor_missing", "a", None)]
    stage = Geometry(layers=3, heads=4, groups=2, head_size=HEAD, experts=2)
    first, second = rows("b", 0, 8, 8, layer=0, expert=0), rows("c", 0, 8, 8, layer=2, expert=1)
    assert refused([[first], [second]], stage) == [("tensor_missing", "", None)] * 3  # a layer, an expert each


def test_order_counts_numbers_and_not_digits() -> None:
    names = [f"model.layers.{layer}.x" for layer in (10, 2, 1)]
    planned: tuple[TensorPlan, ...] = merge(told([[rows(name, 0, 8, 8) for name in names]]), NOTHING, sender=0)
    assert [each.spec.name for each in planned] == [f"model.layers.{layer}.x" for layer in (1, 2, 10)]


class Layer(nn.Module):
    """Stands where a TransformerLayer stands: it knows its number, from 1 over all stages."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)


def chunk(*numbers: int) -> nn.Module:
    module, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleList(Layer(number) for number in numbers)
    module.decoder = decoder
    return module


def test_layers_are_numbered_over_all_chunks_whatever_is_around_them() -> None:
    geometry = Geometry(layers=4, heads=4, groups=2, head_size=HEAD)
    wrapper = nn.Module()
    wrapper.module = chunk(3, 4)
    source = MegatronSource([chunk(1, 2), wrapper], coordinates=Coordinates(), geometry=geometry)
    assert list(source.specs) == [f"model.layers.{layer}.input_layernorm.weight" for layer in range(4)]
    assert source.is_sender
    assert source.digests() == {name: f"{tensor_digest(tensor):016x}" for name, tensor in source.tensors()}
    with pytest.raises(Rejected) as caught:
        MegatronSource([chunk(1), chunk(1)], coordinates=Coordinates(), geometry=geometry)
    assert caught.value.code == "tensor_duplicate"


class Fused(nn.Module):
    """A layer with an attention of two groups, as one rank of one holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 1
        self.self_attention = nn.Module()
        self.self_attention.linear_qkv = nn.Linear(HIDDEN, 32)


def fused() -> nn.Module:
    module, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleList([Fused()])
    module.decoder = decoder
    return module


def test_pieces_of_a_fragment_are_digested_where_they_lie() -> None:
    model = fused()
    source = MegatronSource(model, coordinates=Coordinates(), geometry=SHAPE)
    whole = {name: tensor for name, tensor in source.tensors() if tensor is not None}
    assert len(whole) == 6
    assert source.digests() == {name: f"{tensor_digest(tensor):016x}" for name, tensor in whole.items()}


def test_a_model_is_filled_by_the_same_regions() -> None:
    model, other = fused(), fused()
    source, target = (MegatronSource(each, coordinates=Coordinates(), geometry=SHAPE) for each in (model, other))
    whole = dict(source.tensors())
    with torch.no_grad():
        for part in target.parts:
            part.fill(whole[part.spec.name])
    assert target.digests() == source.digests()
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(Rejected) as caught:
        target.check_untouched()
    assert {failure.code for failure in caught.value.failures} == {"source_changed"}
    assert len(caught.value.failures) == 6


def test_a_write_that_leaves_no_trace_still_breaks_the_promise() -> None:
    """Megatron's optimisers write through `.data`: versions stay, and the digests taken before do not fit."""
    model = fused()
    source = MegatronSource(model, coordinates=Coordinates(), geometry=SHAPE)
    promised = source.digests()
    model.get_parameter("decoder.layers.0.self_attention.linear_qkv.weight").data.mul_(2)
    source.check_untouched()
    sent = {name: f"{tensor_digest(tensor):016x}" for name, tensor in source.tensors() if tensor is not None}
    changed = {name for name, digest in promised.items() if sent[name] != digest}
    assert changed == {f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"}


def test_rules_of_ones_own_come_first() -> None:
    special = Rule("decoder.layers.{layer}.input_layernorm.weight", "whole", "transformer.h.{layer}.ln_1.weight")
    geometry = Geometry(layers=1, heads=4, groups=2, head_size=HEAD)
    source = MegatronSource(chunk(1), naming=(special, *NAMINGS["llama"]), coordinates=Coordinates(), geometry=geometry)
    assert list(source.specs) == ["transformer.h.0.ln_1.weight"]
    for bad in (lambda: Rule("a", "diagonal", "b"), lambda: MegatronSource(chunk(1), naming="gpt2", geometry=geometry)):
        with pytest.raises(Rejected) as caught:
            bad()
        assert caught.value.code == "bad_request"


def test_no_rule_matches_more_than_its_own_names() -> None:
    for rules in NAMINGS.values():
        for name in ("xoutput_layer.weight", "output_layer.weight.more", "decoder.layers.x.input_layernorm.weight"):
            assert find(name, rules) is None


def test_a_megatron_model_is_not_taken_for_a_plain_module() -> None:
    """By the module that its class comes from; nothing of megatron is imported."""
    gpt = type("GPTModel", (nn.Linear,), {"__module__": "megatron.core.models.gpt.gpt_model"})
    mine = type("Mine", (gpt,), {})(2, 2)
    assert is_megatron(mine)
    assert is_megatron([mine, mine])
    assert not is_megatron(nn.Linear(2, 2))
    assert not is_megatron([])
    with pytest.raises(Rejected) as caught:
        as_source(mine)
    assert caught.value.code == "bad_request"
