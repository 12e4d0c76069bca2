"""The test models keep their promises: wide margins, tokens of their own, and tokens that every weight decides."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.big_models import make_big
from engine_adapter.models import (
    SAFE_MARGIN,
    ModelShape,
    encode,
    least_margin,
    longest_offset,
    make_model,
    make_versions,
    reference_tokens,
)
from engine_adapter.rank.messages import RankPlan
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.transformers.families import rules_of
from transports.testing import MemorySource
from updater.core.participant import DiskOffer

torch.set_num_threads(1)
PROMPT = encode("a prompt that is longer than the offsets")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mixtral": {"family": "mixtral"},
    "four_ranks": {"layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 8},
}


def tokens_of(model: Path, count: int = 8) -> tuple[int, ...]:
    return reference_tokens(model, PROMPT, count).tokens


@pytest.mark.parametrize("name", SHAPES)
def test_versions_have_wide_margins_and_tokens_of_their_own(tmp_path: Path, name: str) -> None:
    models = make_versions(tmp_path, 3, ModelShape(**SHAPES[name]), seed=3)
    assert len({tokens_of(model) for model in models}) == 3
    assert min(least_margin(model) for model in models) >= SAFE_MARGIN
    assert len({(model / "config.json").read_text() for model in models}) == 1


def test_a_margin_that_is_not_reached_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        make_model(tmp_path, margin=1000.0)


def test_the_same_seed_gives_the_same_bytes_and_shards_do_not_matter(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one", seed=5), make_model(tmp_path / "two", seed=5, shards=3)
    weights = load_file(one / "model.safetensors")
    index = json.loads((two / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(weights)
    assert len(set(index.values())) == 3
    for file in set(index.values()):
        for name, tensor in load_file(two / file).items():
            assert index[name] == file
            assert torch.equal(tensor, weights[name])


def test_the_next_token_depends_on_one_token_at_the_models_offset(tmp_path: Path) -> None:
    """The closed form: changing a prompt token changes exactly the outputs that hang on it."""
    model = make_model(tmp_path)
    base = reference_tokens(model, PROMPT, 1).tokens
    offsets = [
        back
        for back in range(longest_offset(ModelShape()) + 1)
        if reference_tokens(model, replaced(PROMPT, -1 - back), 1).tokens != base
    ]
    assert len(offsets) == 1


def replaced(prompt: tuple[int, ...], position: int) -> tuple[int, ...]:
    changed = list(prompt)
    changed[position] = ord("#")
    return tuple(changed)


FAULTS = {
    "swapped K and V": lambda w, _: swap(w, "self_attn.k_proj", "self_attn.v_proj"),
    "stale q_proj": lambda w, old: stale(w, old, "self_attn.q_proj"),
    "stale k_proj": lambda w, old: stale(w, old, "self_attn.k_proj"),
    "stale v_proj": lambda w, old: stale(w, old, "self_attn.v_proj"),
    "stale o_proj": lambda w, old: stale(w, old, "self_attn.o_proj"),
    "stale down_proj": lambda w, old: stale(w, old, "mlp.down_proj"),
    "swapped gate and up": lambda w, _: swap(w, "mlp.gate_proj", "mlp.up_proj"),
    "stale embedding": lambda w, old: w.update({k: old[k] for k in w if "embed" in k}),
    "stale head": lambda w, old: w.update({k: old[k] for k in w if "lm_head" in k}),
}


def swap(weights: dict[str, torch.Tensor], a: str, b: str) -> None:
    """In layer 1 only."""
    a, b = f"model.layers.1.{a}.weight", f"model.layers.1.{b}.weight"
    weights[a], weights[b] = weights[b], weights[a]


def stale(weights: dict[str, torch.Tensor], old: dict[str, torch.Tensor], name: str) -> None:
    weights[f"model.layers.0.{name}.weight"] = old[f"model.layers.0.{name}.weight"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_place_changes_the_tokens(tmp_path: Path, fault: str) -> None:
    old, new = make_versions(tmp_path, 2, seed=7)
    broken = tmp_path / "broken"
    shutil.copytree(new, broken)
    weights = load_file(new / "model.safetensors")
    FAULTS[fault](weights, load_file(old / "model.safetensors"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(broken) != tokens_of(new)


def test_the_tokenizer_is_bytes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(make_model(tmp_path)))
    text = "two  spaces\nand ümläute, 日本"
    assert tuple(tokenizer(text).input_ids) == encode(text)
    assert tokenizer.decode(list(encode(text))) == text
    assert tokenizer.eos_token_id == 256


@pytest.mark.parametrize(
    "wrong",
    [{"head_dim": 24}, {"hidden": 64}, {"intermediate": 32}, {"vocab": 256}, {"heads": 3}, {"layers": 0}],
)
def test_a_shape_without_room_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        make_model(tmp_path, ModelShape(**wrong))  # type: ignore[arg-type]


@pytest.mark.slow
def test_big_models_have_the_size_asked_for_and_distinct_tensors(tmp_path: Path) -> None:
    a, b = make_big(tmp_path / "a", 0.2), make_big(tmp_path / "b", 0.2, seed=1)
    index = json.loads((a / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] >= 0.2e9
    assert (a / "config.json").read_text() == (b / "config.json").read_text()
    first, second = ({n: t for f in sorted(p.glob("*.safetensors")) for n, t in load_file(f).items()} for p in (a, b))
    assert set(first) == set(index["weight_map"])
    assert all(not torch.equal(first[name], second[name]) for name in first if first[name].dim() == 2)
    heads = [bytes(t.reshape(-1)[:64].view(torch.uint8).numpy()) for t in first.values() if t.dim() == 2]
    assert len(set(heads)) == len(heads)


@pytest.mark.case("B054", "F04")
def test_experts_one_by_one_and_as_the_library_stacks_them_are_the_same(tmp_path: Path) -> None:
    """The one library whose stacking needs no word of a trainer. Its own loader is the oracle."""
    started = make_model(tmp_path / "7", ModelShape(family="mixtral"), seed=7)
    new = make_model(tmp_path / "8", ModelShape(family="mixtral"), seed=8)
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16)
    wanted = {name: tensor.detach() for name, tensor in model.named_parameters()}
    engine = BareEngine({n: tuple(t.shape) for n, t in wanted.items()}, rules_of(model.config))
    replica = BareReplica([engine], lambda _rank: MemorySource(load_file(started / "model.safetensors")))
    replica.agents[0].plan(RankPlan(0, DiskOffer(""), (), "", start=True, known=True))
    stacked = {name: tensor for name, tensor in wanted.items() if ".experts." in name}
    by_one = load_file(new / "model.safetensors")
    rest = {name: tensor for name, tensor in by_one.items() if ".experts." not in name}
    assert len(rest) + len(stacked) < len(by_one)
    for serial, tensors in enumerate((rest | stacked, by_one), 1):
        replica.open_source = lambda _rank, held=tensors: MemorySource(held)
        replica.update(serial, f"0-{serial}", known=True)
        assert all(torch.equal(engine.bound[name], tensor) for name, tensor in wanted.items())
