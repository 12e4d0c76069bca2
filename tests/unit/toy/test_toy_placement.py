"""The toy engine's declared placement against the independent slicer: two derivations of the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.placement.coverage import check_destination, check_rows, check_sources, source_boxes
from engine_adapter.placement.declared.rules import Target
from engine_adapter.placement.rows import CopyRow, FillRow, Placement
from engine_adapter.placement.values import WireTensor
from engine_adapter.testing import ToyOptions, expected_parameters, make_toy_checkpoint
from engine_adapter.testing.toy.config import ToyConfig
from engine_adapter.testing.toy.placement import toy_placement
from engine_adapter.testing.toy.slicer import load_tensors
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import Rejected
from updater.protocol.manifest import TensorSpec

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "M0": ("M0", {}, {}),
    "M0-interleaved-swapped": ("M0", {}, {"interleaved": True, "kernel": "swap"}),
    "M0-no-qk-norm": ("M0", {"qk_norm": "none"}, {"pad_vocab": 4}),
    "M1": ("M1", {}, {}),
    "M2": ("M2", {}, {}),
    "M2-expert-parallel": ("M2", {}, {"expert_parallel": True, "kernel": "swap"}),
    "M2-fused": ("M2", {"fused_experts": True}, {"kernel": "swap"}),
    "M2-fused-expert-parallel": ("M2", {"fused_experts": True}, {"expert_parallel": True}),
    "M3": ("M3", {}, {}),
    "M3-old-spelling": ("M3", {"wrapper": "old"}, {}),
    "M4": ("M4", {}, {}),
}


def replay(placement: Placement, sources: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rows on poisoned parameters: what no row writes stays all ones bits."""
    made = {name: torch.full_like(_bytes(tensor), 0xFF) for name, tensor in like.items()}
    views = {name: made[name].view(tensor.dtype).view(tensor.shape) for name, tensor in like.items()}
    for row in placement.rows:
        place = views[row.target][row.target_box.slices()]
        if isinstance(row, FillRow):
            place.fill_(row.value)
        elif isinstance(row, CopyRow):
            place.copy_(sources[row.source][row.source_box.slices()].reshape(place.shape))
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def specs_of(sources: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in sources.items()}


def targets_of(like: dict[str, torch.Tensor], config: ToyConfig) -> dict[str, Target]:
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return {
        name: Target(tuple(t.shape), tied if name == "model.embed_tokens.weight" else ()) for name, t in like.items()
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_rows_give_what_the_slicer_gives(tmp_path: Path, model: str, size: int) -> None:
    fixture, changes, given = MODELS[model]
    folder = make_toy_checkpoint(tmp_path, fixture, shards=2, **changes)
    config, options, sources = ToyConfig.load(folder), ToyOptions.parse(given), load_tensors(folder)
    specs, boxes = specs_of(sources), []
    for rank in range(size):
        like = expected_parameters(folder, rank, size, options)
        found = toy_placement(specs, targets_of(like, config), config, options, rank, size)
        shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}
        assert check_rows(found, specs, shapes) + check_destination(found, shapes) == []
        made = replay(found, sources, like)
        assert [name for name in like if not torch.equal(made[name], _bytes(like[name]))] == []
        boxes.append(source_boxes(found))
    wire = [WireTensor(spec.name, spec.dtype, spec.shape, "") for spec in specs.values()]
    assert check_sources(wire, boxes) == []


@pytest.mark.parametrize(
    ("model", "other"), [("M3", {"wrapper": "old"}), ("M3-old-spelling", {"wrapper": "new"})], ids=["new", "old"]
)
def test_both_spellings_of_the_wrapper_feed_the_same_parameters(tmp_path: Path, model: str, other: Any) -> None:
    fixture, changes, _ = MODELS[model]
    started = make_toy_checkpoint(tmp_path / "started", fixture, seed=7, **changes)
    pushed = make_toy_checkpoint(tmp_path / "pushed", fixture, seed=8, **other)
    config, like = ToyConfig.load(started), expected_parameters(pushed, 1, 2)
    sources = load_tensors(pushed)
    found = toy_placement(specs_of(sources), targets_of(like, config), config, ToyOptions(), 1, 2)
    made = replay(found, sources, like)
    assert [name for name in like if not torch.equal(made[name], _bytes(like[name]))] == []


@pytest.mark.case("B079")
@pytest.mark.parametrize(
    "gone",
    ["weight", "weight_scale"],  # the latter has a slot of its own, of another name
)
def test_a_float8_weight_without_its_scale_is_refused_and_the_other_way_round(tmp_path: Path, gone: str) -> None:
    """By the name that the checkpoint gives it (F29)."""
    folder = make_toy_checkpoint(tmp_path, "M4")
    config, sources = ToyConfig.load(folder), load_tensors(folder)
    del sources[f"model.layers.1.mlp.up_proj.{gone}"]
    like = expected_parameters(folder, 0, 1)
    with pytest.raises(Rejected) as refused:
        toy_placement(specs_of(sources), targets_of(like, config), config, ToyOptions(), 0, 1)
    assert [(failure.code, failure.tensor) for failure in refused.value.failures] == [
        ("tensor_missing", f"model.layers.1.mlp.up_proj.{gone}")
    ]


def test_seeds_of_different_parity_differ_in_every_element(tmp_path: Path) -> None:
    seven = load_tensors(make_toy_checkpoint(tmp_path / "7", "M4", seed=7))
    eight = load_tensors(make_toy_checkpoint(tmp_path / "8", "M4", seed=8))
    for name, tensor in seven.items():
        wide = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert bool((tensor.view(wide) != eight[name].view(wide)).all()), name


def test_the_skip_defect_leaves_a_hole_that_destination_coverage_sees(tmp_path: Path) -> None:
    folder = make_toy_checkpoint(tmp_path, "M0")
    config, options = ToyConfig.load(folder), ToyOptions(skip_target="model.norm.weight")
    like, sources = expected_parameters(folder, 0, 1), load_tensors(folder)
    found = toy_placement(specs_of(sources), targets_of(like, config), config, options, 0, 1, defect=True)
    failures = check_destination(found, {name: tuple(tensor.shape) for name, tensor in like.items()})
    assert [(failure.code, failure.tensor) for failure in failures] == [("tensor_unwritten", "model.norm.weight")]
