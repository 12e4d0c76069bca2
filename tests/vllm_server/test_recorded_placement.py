"""Placements read off vLLM's own loaders equal the declared ones, and replaying them gives what vLLM loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine_adapter.hosted.meta_twin import fingerprint, meta_twin
from engine_adapter.parameters import collect
from engine_adapter.placement.coverage import check_destination, check_rows, check_sources, source_boxes
from engine_adapter.placement.declared.layouts import QKV, Experts, Layout, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.recorded.record import StartCheckpoint, place
from engine_adapter.placement.recorded.twin import Pairs
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow, Placement, Row
from engine_adapter.placement.values import WireTensor
from engine_adapter.vllm.building import build, recorded_placements
from tests.vllm_server.models import SHAPES, Checkpoints
from transports.dtypes import DTYPE_NAMES
from transports.testing import refused
from updater.protocol.manifest import TensorSpec

pytestmark = pytest.mark.vllm

Made = Callable[..., Checkpoints]
RANKS = [(0, 1), (0, 2), (1, 2)]


@dataclass(frozen=True)
class Tensors:
    """A checkpoint in memory."""

    weights: Mapping[str, torch.Tensor]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {n: TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in sorted(self.weights.items())}


@dataclass(frozen=True)
class OneOf:
    """The tensor parallel group of a rank whose peers do not exist: layers ask for their share, none communicates."""

    rank_in_group: int
    world_size: int


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    state: Any = import_module("vllm.distributed.parallel_state")
    with pytest.MonkeyPatch.context() as patch:
        if size > 1:
            patch.setattr(state, "_TP", OneOf(rank, size))
        yield


def configured(path: Path, **options: Any) -> Any:
    arguments: Any = import_module("vllm.engine.arg_utils")
    settings = {"enforce_eager": True, "max_model_len": 256, "dtype": "bfloat16", **options}
    return arguments.EngineArgs(model=str(path), **settings).create_engine_config()


def built(config: Any, weights: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """A model as vLLM builds it, loaded by its own `load_weights`."""
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        model: Any = loading.initialize_model(config)
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        parameter.data.fill_(-7)
    if weights is not None:
        with torch.no_grad():
            model.load_weights(iter(weights.items()))
    return model  # type: ignore[no-any-return]


def tensors_of(path: Path) -> Tensors:
    return Tensors(load_file(path / "model.safetensors"))


def targets_of(model: nn.Module) -> dict[str, Target]:
    """What the engine says that it holds."""
    return {name: Target(tuple(each.local.shape), each.aliases) for name, each in collect(model, empty=False).items()}


def declared_rules(name: str) -> Rules:
    """What vLLM's loaders do to Llama shapes, written down by hand."""
    shape = SHAPES[name]
    stacked = [
        Stacked(".q_proj", ".qkv_proj", "q"),
        Stacked(".k_proj", ".qkv_proj", "k"),
        Stacked(".v_proj", ".qkv_proj", "v"),
        Stacked(".gate_proj", ".gate_up_proj", "gate"),
        Stacked(".up_proj", ".gate_up_proj", "up"),
    ]
    substring: tuple[tuple[str, str | None], ...] = ()
    layouts: list[tuple[str, Layout]] = [
        ("*embed_tokens.weight", PaddedVocab(shape.vocab)),
        ("*lm_head.weight", PaddedVocab(shape.vocab)),
        ("*.qkv_proj.*", QKV(shape.heads, shape.kv_heads, shape.head_dim)),
        ("*.o_proj.weight", Sharded(1)),
        ("*.gate_up_proj.weight", Merged(sizes=(shape.intermediate,) * 2)),
        ("*.down_proj.weight", Sharded(1)),
    ]
    if shape.family == "mixtral":
        routed = ".experts.routed_experts"
        stacked += [
            Stacked(".experts.{e}.w1.weight", f"{routed}.w13_weight", "gate"),
            Stacked(".experts.{e}.w3.weight", f"{routed}.w13_weight", "up"),
            Stacked(".experts.{e}.w2.weight", f"{routed}.w2_weight"),
        ]
        layouts += [
            ("*.w13_weight", Experts(shape.experts, Merged(sizes=(shape.intermediate,) * 2))),
            ("*.w2_weight", Experts(shape.experts, Sharded(1))),
        ]
    return Rules(
        NameRules(substring=substring, stacked=tuple(stacked)), layouts=tuple(layouts), carried=("*.attn._*_scale",)
    )


def normal(rows: tuple[Row, ...]) -> list[str]:
    return sorted(repr(row) for row in rows)


def replay(placement: Placement, weights: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for row in placement.rows:
        if isinstance(row, FillRow):
            parameters[row.target].data[row.target_box.slices()].fill_(row.value)
        elif isinstance(row, CopyRow):
            source = weights[row.source][row.source_box.slices()]
            source = source if row.permute is None else source.permute(row.permute)
            parameters[row.target].data[row.target_box.slices()].copy_(source.reshape(row.target_box.size))


def replayed(placement: Placement, weights: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """What the rows make of a checkpoint, by parameter, in a model that was never loaded."""
    empty = built(apart(config))
    replay(placement, weights, empty)
    return dict(empty.named_parameters())


def apart(config: Any) -> Any:
    """The same configuration for a second model: its layers register elsewhere."""
    made = copy(config)
    made.compilation_config = copy(config.compilation_config)
    made.compilation_config.static_forward_context = {}
    made.compilation_config.static_all_moe_layers = []
    return made


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: target.shape for name, target in targets_of(model).items()}


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_recorded_rows_are_the_declared_ones_and_load_the_same_bytes(
    alone: None, checkpoints: Made, name: str, rank: int, size: int
) -> None:
    path = checkpoints(name).first
    tensors, config = tensors_of(path), configured(path)
    with as_rank(rank, size):
        live = built(config, tensors.weights)
        found = recorded_placements(config, live).placement(tensors.specs)
        made = replayed(found, tensors.weights, config)
    wanted = declare(tensors.specs, targets_of(live), declared_rules(name), rank, size)
    assert normal(found.rows) == normal(wanted.rows)
    assert (found.rank, found.size, found.loaded) == (rank, size, wanted.loaded)
    assert (found.ignored, found.redundant) == (wanted.ignored, wanted.redundant)
    for key, parameter in live.named_parameters():
        assert torch.equal(parameter, made[key]), key


@pytest.mark.parametrize("name", ["llama", "odd", "mixtral"])
def test_the_ranks_together_hold_every_element(alone: None, checkpoints: Made, name: str) -> None:
    path = checkpoints(name).first
    tensors, config = tensors_of(path), configured(path)
    boxes = []
    for rank in range(2):
        with as_rank(rank, 2):
            live = built(apart(config))
            found = recorded_placements(config, live).placement(tensors.specs)
        assert check_rows(found, tensors.specs, shapes_of(live)) == []
        assert check_destination(found, shapes_of(live)) == []
        boxes.append(source_boxes(found))
    wire = [WireTensor(spec.name, spec.dtype, spec.shape, "") for spec in tensors.specs.values()]
    assert check_sources(wire, boxes) == []


# other families: their own checkpoints, written by transformers

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 257,
}
_MOE = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
#: Class prefix -> sizes. Experts one by one; transposed and stacked experts; transposed linears; fused projections.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": _MOE,
    "GptOss": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 257},
    "Phi3": {**_SIZES, "pad_token_id": 0},
    "Bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 257},
}
_HEADS = {"GPT2": "GPT2LMHeadModel"}


def written(family: str, sizes: Mapping[str, Any], folder: Path) -> Path:
    """A random checkpoint of a family. No biases of zero and norms of one: every element is its own."""
    library: Any = import_module("transformers")
    config = getattr(library, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2, dtype="bfloat16")
    torch.manual_seed(5)
    model = getattr(library, _HEADS.get(family, f"{family}ForCausalLM"))(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_replaying_loads_what_the_family_s_own_loader_loads(
    alone: None, tmp_path: Path, family: str, rank: int, size: int
) -> None:
    path = written(family, FAMILIES[family], tmp_path)
    tensors, config = tensors_of(path), configured(path, skip_tokenizer_init=True)
    with as_rank(rank, size):
        live = built(config, tensors.weights)
        found = recorded_placements(config, live).placement(tensors.specs)
        made = replayed(found, tensors.weights, config)
    carried = {row.target for row in found.rows if isinstance(row, CarryRow)}
    for key, parameter in live.named_parameters():
        assert torch.equal(parameter, made[key]), key
    assert not carried & set(made)
    assert check_destination(found, shapes_of(live)) == []


def test_parameters_that_a_loader_computes_are_refused(alone: None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 16}
    path = written("Mamba", sizes, tmp_path)
    config = configured(path, skip_tokenizer_init=True)
    placements = recorded_placements(config, built(config))
    with refused("placement_refused", tensors=[f"backbone.layers.{i}.mixer.A" for i in range(2)]):
        placements.placement(tensors_of(path).specs)


# the life of a worker


@pytest.fixture
def llama(alone: None, checkpoints: Made) -> Tensors:
    return tensors_of(checkpoints("llama").first)


@pytest.fixture
def config(alone: None, checkpoints: Made) -> Any:
    return configured(checkpoints("llama").first)


def test_the_twin_has_no_memory_and_no_part_of_the_live_model(config: Any, llama: Tensors) -> None:
    live = built(config, llama.weights)
    modules, tensors = dict(live.named_modules()), dict(live.named_parameters())
    contents = {name: dict(module.__dict__) for name, module in modules.items()}
    bytes_before = {name: tensor.clone() for name, tensor in tensors.items()}
    registered = dict(config.compilation_config.static_forward_context)
    twin = meta_twin(lambda: build(config), live)
    place(twin, llama.specs, 0, 1)
    assert not set(twin.module.modules()) & set(modules.values())
    assert all(entry.tensor.is_meta for entry in twin.tensors.values())
    assert dict(live.named_modules()) == modules
    assert {name: dict(module.__dict__) for name, module in modules.items()} == contents
    assert all(live.get_parameter(name) is tensor for name, tensor in tensors.items())
    assert all(torch.equal(tensor, bytes_before[name]) for name, tensor in tensors.items())
    assert config.compilation_config.static_forward_context == registered


def test_another_recording_runs_on_a_thread_and_sets_no_current_configuration(config: Any, llama: Tensors) -> None:
    configs: Any = import_module("vllm.config")
    twin = meta_twin(lambda: build(config), built(config))
    start = StartCheckpoint(llama.specs, place(twin, llama.specs, 0, 1))
    inner, seen = twin.load, []

    def load(pairs: Pairs) -> object:
        seen.append(configs.get_current_vllm_config_or_none())
        return inner(pairs)

    twin.load = load
    wide = {name: replace(spec, dtype="F32") for name, spec in llama.specs.items()}
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(place, twin, wide, 0, 1, start).result()
    assert found == start.placement
    assert seen == [None]


def test_placements_are_remembered_by_names_dtypes_and_shapes(config: Any, llama: Tensors) -> None:
    placements = recorded_placements(config, built(config))
    first = placements.placement(llama.specs)
    assert placements.placement(dict(reversed(llama.specs.items()))) is first
    assert fingerprint(llama.specs) != fingerprint({n: replace(s, dtype="F32") for n, s in llama.specs.items()})
    for i in range(20):
        extra = f"model.layers.0.self_attn.rotary_emb.inv_freq{'_' * i}"
        with_extra = placements.placement(llama.specs | {extra: TensorSpec(extra, "F32", (2,))})
        assert [name for name, _ in with_extra.ignored] == [extra]
    assert placements.placement(llama.specs) is first
    assert placements.targets.keys() == {row.target for row in first.rows}


def test_wrong_names_are_reported_at_once(config: Any, llama: Tensors) -> None:
    placements = recorded_placements(config, built(config))
    placements.placement(llama.specs)
    gone, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    specs = {name: spec for name, spec in llama.specs.items() if name != gone}
    specs |= {"model.layers.1.mlp.upp_proj.weight": llama.specs[gone], norm: replace(llama.specs[norm], shape=(3,))}
    wrong = [gone, "model.layers.1.mlp.upp_proj.weight", norm]
    with refused("tensor_missing", "tensor_unexpected", "tensor_shape", tensors=wrong):
        placements.placement(specs)


def test_a_redundant_tied_head_is_recognised(alone: None, checkpoints: Made) -> None:
    path = checkpoints("tied").first
    tensors, config = tensors_of(path), configured(path)
    placements = recorded_placements(config, built(config))
    first = placements.placement(tensors.specs)
    embedding = tensors.specs["model.embed_tokens.weight"]
    found = placements.placement(tensors.specs | {"lm_head.weight": replace(embedding, name="lm_head.weight")})
    assert found.redundant == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert found.rows == first.rows
    assert placements.targets["model.embed_tokens.weight"] == ("lm_head.weight",)


def test_a_model_that_was_tied_after_its_load_has_a_tied_twin(config: Any, llama: Tensors) -> None:
    live: Any = built(config)
    live.lm_head.weight = live.model.embed_tokens.weight
    assert meta_twin(lambda: build(config), live).tensors["model.embed_tokens.weight"].aliases == ("lm_head.weight",)


def test_processing_of_the_live_model_changes_no_row(alone: None, checkpoints: Made) -> None:
    path = checkpoints("llama", "float32").first
    tensors, config = tensors_of(path), configured(path, dtype="float32")
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    configs: Any = import_module("vllm.config")
    live = built(config, tensors.weights)
    before = recorded_placements(config, live).placement(tensors.specs)
    with configs.set_current_vllm_config(config):
        loading.process_weights_after_loading(live, config.model_config, torch.device("cpu"))
    assert not live.get_parameter("model.layers.0.mlp.down_proj.weight").numel()
    assert recorded_placements(config, live).placement(tensors.specs) == before


@pytest.mark.case("F00")
@pytest.mark.any_processor
def test_the_placement_has_the_targets_that_the_engine_lists(config: Any, llama: Tensors) -> None:
    """Those that vLLM packed away (which depends on the processor) are listed beside the model (`twins`)."""
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    configs: Any = import_module("vllm.config")
    live = built(config, llama.weights)
    shapes = shapes_of(live)
    with configs.set_current_vllm_config(config):
        loading.process_weights_after_loading(live, config.model_config, torch.device("cpu"))
    found = recorded_placements(config, live).placement(llama.specs)
    packed = {name for name, parameter in live.named_parameters() if not parameter.numel()}
    assert {row.target for row in found.rows} == set(collect(live, empty=False)) | packed
    assert check_destination(found, shapes) == []


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("", "lora_config", object()),
        ("", "speculative_config", object()),
        ("parallel_config", "enable_eplb", True),
        ("parallel_config", "enable_expert_parallel", True),
        ("parallel_config", "pipeline_parallel_size", 2),
    ],
)
def test_what_one_recording_cannot_describe_is_refused(config: Any, where: str, field: str, value: Any) -> None:
    live = built(config)
    changed = apart(config)
    changed.parallel_config = copy(config.parallel_config)
    object.__setattr__(getattr(changed, where) if where else changed, field, value)
    with refused("adapter_unsupported"):
        recorded_placements(changed, live)
