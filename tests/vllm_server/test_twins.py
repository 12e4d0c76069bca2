"""Post-processed layers in one process, without an engine: install, undo and roll back, bit for bit as a fresh load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from shutil import copytree
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from engine_adapter.base import EngineSpec, Parameter
from engine_adapter.hosted.meta_twin import default_dtype
from engine_adapter.parameters import collect
from engine_adapter.rank.spare import RankSpare
from engine_adapter.rank.state import DerivedStates
from engine_adapter.testing.bare import BareReplica
from engine_adapter.testing.small_models import manifest_of
from engine_adapter.vllm.building import recorded_placements
from engine_adapter.vllm.engine import VllmRankEngine
from engine_adapter.vllm.twins.layers import ProcessedLayers, check_compiled, load_start, processed_layers, twin_model
from engine_adapter.vllm.twins.state import LayerTwin
from engine_adapter.vllm.twins.table import METHODS, Method, qualified
from tests.vllm_server.models import Checkpoints, Dtype
from transports.dtypes import DTYPE_NAMES
from transports.testing import MemorySource, refused
from updater.core.policy import InstallMode
from updater.protocol.manifest import TensorSpec

pytestmark = pytest.mark.vllm

TOKENS = torch.tensor([5, 40, 41, 99, 7, 250, 3, 64, 65, 66, 12, 13])
MODES = [InstallMode.FLIP, InstallMode.EXCHANGE]
#: Model and dtype. In bfloat16 it depends on the processor whether linears are packed; experts always are.
CASES = [
    *((name, "float32") for name in ("llama", "tied", "qwen2", "mixtral")),
    *((name, "bfloat16") for name in ("llama", "qwen2", "mixtral")),
]


@dataclass(frozen=True)
class Int8:
    """A form of compressed-tensors W8A8. `channel`: a weight scale per row, else one per tensor; `symmetric` and
    `static`: how activations are quantised, per token unless their scale is part of the checkpoint. `scale`: dtype of
    the weight scales in the checkpoint. `layers`: how the names of such layers end.
    """

    channel: bool = True
    symmetric: bool = True
    static: bool = False
    scale: torch.dtype = torch.float32
    layers: tuple[str, ...] = ("_proj",)


INT8 = Int8()
STATIC = Int8(static=True)
_PAIRS = list(product([True, False], repeat=2))
INT8_CASES = [
    *(("qwen2", "bfloat16", Int8(*pair), mode) for pair in _PAIRS for mode in MODES),
    *(("qwen2", "bfloat16", Int8(*pair, static=True), InstallMode.FLIP) for pair in _PAIRS),
    ("llama", "bfloat16", Int8(scale=torch.bfloat16), InstallMode.FLIP),
    ("llama", "float32", INT8, InstallMode.FLIP),
]


@dataclass
class Loaded:
    """A model as a vLLM worker holds it, and what it answers."""

    model: nn.Module
    config: Any

    def logits(self) -> torch.Tensor:
        """Of every position of `TOKENS`, [tokens, vocabulary]."""
        contexts: Any = import_module("vllm.forward_context")
        with torch.no_grad(), contexts.set_forward_context(None, self.config, num_tokens=len(TOKENS)):
            hidden = self.model(TOKENS, torch.arange(len(TOKENS)), None, None)
            return self.model.compute_logits(hidden).clone()


class Updated:
    """The seam as a rank agent uses it: the spare and the derived states side by side."""

    def __init__(self, live: Loaded, layers: ProcessedLayers) -> None:
        self.live, self.layers = live, layers
        self.parameters: dict[str, Parameter] = collect(live.model, empty=False) | dict(layers.parameters)
        self.spare = RankSpare(self.parameters)
        self.derived = DerivedStates(layers.derived, self.parameters)

    def stage(self, checkpoint: Path) -> None:
        """Fill the spare in load format, as replayed rows would, and build what is derived."""
        self.derived.drop()
        config = configured(checkpoint, self.live.config.model_config.dtype)
        twin = twin_model(config)
        load_start(twin, config)
        loaded = dict(twin.named_parameters(remove_duplicate=False))
        for name, tensor in self.spare.spare.items():
            tensor.copy_(loaded[name] if name in loaded else self.spare.live[name])
        self.derived.build(self.spare.spare, lambda: None)

    def install(self, mode: InstallMode = InstallMode.FLIP) -> None:
        self.spare.install(mode)
        self.derived.install()

    def undo(self) -> None:
        self.spare.undo()
        self.derived.undo()

    def settle(self) -> None:
        self.spare.settle()
        self.derived.settle()


def configured(path: Path, dtype: torch.dtype, **options: Any) -> Any:
    arguments: Any = import_module("vllm.engine.arg_utils")
    name = str(dtype).removeprefix("torch.")
    settings = {"enforce_eager": True, "max_model_len": 256, **options}
    return arguments.EngineArgs(model=str(path), dtype=name, **settings).create_engine_config()


def fresh(path: Path, dtype: Dtype, **options: Any) -> Loaded:
    """What vLLM loads and processes by itself."""
    config = configured(path, getattr(torch, dtype), **options)
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    configs: Any = import_module("vllm.config")
    model = twin_model(config)
    load_start(model, config)
    # vLLM holds that default while it loads, and serves without it.
    with default_dtype(config.model_config.dtype), configs.set_current_vllm_config(config):
        loading.process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        # A twin is registered nowhere; what serves is.
        for module in model.modules():
            if type(module).__name__ == "MoERunner":
                config.compilation_config.static_forward_context[module.layer_name] = module
    attention: Any = import_module("vllm.model_executor.layers.attention")
    for module in model.modules():
        if isinstance(module, attention.Attention):
            module.forward = partial(_causal, module)
    return Loaded(model, config)


def layers_of(live: Loaded) -> ProcessedLayers:
    return processed_layers(live.model, live.config, twin_model(live.config))


def _causal(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
    """Attention over one sequence without a paged cache, which is not what is tested here."""
    heads = [t.unflatten(-1, (-1, layer.head_size)).transpose(0, 1) for t in (q, k, v)]
    out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


Made = Callable[..., Checkpoints]


def packed_by_vllm(model: nn.Module) -> set[str]:
    """The layers that hold what vLLM made of their weights: a kernel in `cpu_linear` (the product of torch's that it
    falls back on closes over nothing), grouped experts, and what compressed-tensors makes of linears and of attention.
    """
    found = set()
    for name, module in model.named_modules():
        kind = type(getattr(module, "quant_method", None)).__name__
        linear: Any = getattr(module, "cpu_linear", None)
        kernel = getattr(linear, "__closure__", None) is not None
        if kernel or kind == "UnquantizedFusedMoEMethod" or kind.startswith("CompressedTensors"):
            found.add(name)
    return found


@pytest.mark.case("F00")
@pytest.mark.any_processor
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_install_equals_a_fresh_load_and_the_way_back_the_old_one(
    alone: None, checkpoints: Made, name: str, dtype: Dtype, mode: InstallMode
) -> None:
    there_and_back(checkpoints(name, dtype), mode)


def there_and_back(both: Checkpoints, mode: InstallMode) -> None:
    live = fresh(both.first, both.dtype)
    old, new = live.logits(), fresh(both.second, both.dtype).logits()
    assert not torch.equal(old, new)
    updated = Updated(live, layers_of(live))
    assert {derived.name for derived in updated.layers.derived} == packed_by_vllm(live.model)
    updated.stage(both.second)
    assert torch.equal(live.logits(), old)  # nothing live was touched
    updated.install(mode)
    assert torch.equal(live.logits(), new)
    updated.undo()
    assert torch.equal(live.logits(), old)
    updated.install(mode)
    updated.settle()
    assert torch.equal(live.logits(), new)
    updated.install(mode)  # a rollback
    updated.settle()
    assert torch.equal(live.logits(), old)
    for path, logits in ((both.second, new), (both.first, old), (both.second, new)):  # both twins are used again
        updated.stage(path)
        updated.install(mode)
        updated.settle()
        assert torch.equal(live.logits(), logits)


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        ("llama", "float32", None),
        ("mixtral", "float32", None),
        ("mixtral", "bfloat16", None),
        ("qwen2", "bfloat16", INT8),
        ("qwen2", "bfloat16", STATIC),
    ],
)
def test_a_build_keeps_nothing_of_what_it_was_built_from(
    alone: None, checkpoints: Made, tmp_path: Path, name: str, dtype: Dtype, form: Int8 | None
) -> None:
    """An exchange moves other bytes into that memory afterwards."""
    both = checkpoints(name, dtype) if form is None else in_int8(checkpoints(name, dtype), tmp_path, form)
    live, new = fresh(both.first, dtype), fresh(both.second, dtype).logits()
    updated = Updated(live, layers_of(live))
    updated.stage(both.second)
    updated.install()
    for name, parameter in updated.layers.parameters.items():
        for tensor in (parameter.local, updated.spare.live[name]):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 3)
    assert torch.equal(live.logits(), new)


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [("tied", "float32", None), ("mixtral", "bfloat16", None), ("llama", "bfloat16", INT8)],
)
def test_builds_beside_forward_passes_change_no_answer(
    alone: None, checkpoints: Made, tmp_path: Path, name: str, dtype: Dtype, form: Int8 | None
) -> None:
    both = checkpoints(name, dtype) if form is None else in_int8(checkpoints(name, dtype), tmp_path, form)
    live, new = fresh(both.first, dtype), fresh(both.second, dtype).logits()
    updated = Updated(live, layers_of(live))
    for path, wanted in ((both.second, new), (both.first, live.logits())):
        old = live.logits()
        updated.stage(path)
        staging = Thread(target=updated.derived.build, args=(updated.spare.spare, lambda: None))
        staging.start()
        while staging.is_alive():
            assert torch.equal(live.logits(), old)
        staging.join()
        updated.install()
        updated.settle()
        assert torch.equal(live.logits(), wanted)


def test_without_packed_layers_no_checkpoint_is_read_again(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "bfloat16")
    live = fresh(both.first, "bfloat16")
    if all(parameter.numel() for parameter in live.model.parameters()):
        live.config.model_config.model = "/nowhere"
        assert layers_of(live) == ProcessedLayers({}, ())


def test_only_what_vllm_changes_has_a_state(alone: None, checkpoints: Made) -> None:
    """In bfloat16 this processor's linears keep their weights, and an update of those is the spare's alone."""
    both = checkpoints("llama", "bfloat16")
    live = fresh(both.first, "bfloat16")
    layers = layers_of(live)
    packed = [name for name, parameter in live.model.named_parameters() if not parameter.numel()]
    assert set(packed) == set(layers.parameters)
    if not packed:
        assert layers.derived == ()


def test_parameters_hold_the_start_checkpoint_in_load_format(alone: None, checkpoints: Made) -> None:
    both = checkpoints("tied", "float32")
    live = fresh(both.first, "float32")
    layers = layers_of(live)
    wanted = load_file(both.first / "model.safetensors")
    at = "model.layers.1.self_attn"
    fused = torch.cat([wanted[f"{at}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(layers.parameters[f"{at}.qkv_proj.weight"].local, fused)
    assert "model.embed_tokens.weight" not in layers.parameters  # it serves as it is
    assert {derived.name: derived.feeds for derived in layers.derived}["lm_head"] == ("model.embed_tokens.weight",)


def test_a_head_that_vllm_tied_by_value_follows_its_embedding(alone: None, checkpoints: Made, tmp_path: Path) -> None:
    """A checkpoint of a tied model that holds the head as well."""
    both = checkpoints("tied", "float32")
    paths = [_with_head(path, tmp_path / path.name) for path in (both.first, both.second)]
    live, new = fresh(paths[0], "float32"), fresh(paths[1], "float32").logits()
    assert live.model.lm_head.weight is live.model.model.embed_tokens.weight
    updated = Updated(live, layers_of(live))
    updated.stage(paths[1])
    updated.install()
    assert torch.equal(live.logits(), new)


def test_a_live_kernel_of_other_weights_is_refused(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "float32")
    live, other = fresh(both.first, "float32"), fresh(both.second, "float32")
    live.model.lm_head.cpu_linear = other.model.lm_head.cpu_linear
    with refused("placement_refused", tensors=["lm_head"]):
        layers_of(live)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_live_experts_of_other_weights_are_refused(alone: None, checkpoints: Made, dtype: Dtype) -> None:
    both = checkpoints("mixtral", dtype)
    live = fresh(both.first, dtype)
    name = "model.layers.1.block_sparse_moe.experts.routed_experts"
    live.model.get_submodule(name).w2_weight.data[0, 0, 0] += 1
    with refused("placement_refused", tensors=[name]):
        layers_of(live)


@pytest.mark.case("B078")
def test_an_untested_quant_method_is_refused(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "bfloat16")
    live = fresh(both.first, "bfloat16")
    layer = live.model.model.layers[0].mlp.down_proj
    layer.quant_method = type("Novel", (type(layer.quant_method),), {})()
    with refused("placement_refused", tensors=["model.layers.0.mlp.down_proj"]):
        layers_of(live)


def test_layers_that_are_quantised_while_they_load_are_refused(alone: None, checkpoints: Made) -> None:
    live = fresh(checkpoints("llama", "bfloat16").first, "bfloat16", quantization="fp8_per_channel")
    assert live.logits().isfinite().all()
    with refused("placement_refused", tensors=["model.layers.0.self_attn.qkv_proj"]):
        layers_of(live)


def test_an_untested_hook_after_the_load_is_refused(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "bfloat16")
    live = fresh(both.first, "bfloat16")
    live.model.model.norm.process_weights_after_loading = lambda: None
    with refused("placement_refused", tensors=["model.norm"]):
        layers_of(live)


def test_an_attention_backend_that_processes_weights_is_refused(alone: None, checkpoints: Made) -> None:
    live = fresh(checkpoints("llama", "bfloat16").first, "bfloat16")
    impl = live.model.model.layers[0].self_attn.attn.impl
    hook = {"process_weights_after_loading": lambda _self, _dtype: None}
    impl.__class__ = type("Processing", (type(impl),), hook)
    with refused("placement_refused", tensors=["model.layers.0.self_attn.attn"]):
        layers_of(live)


@pytest.mark.case("F00")
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("mixtral", "bfloat16")])
def test_packed_layers_of_a_compiled_model_are_refused(alone: None, checkpoints: Made, name: str, dtype: Dtype) -> None:
    """Before the server listens, and by the proof at join."""
    live = fresh(checkpoints(name, dtype).first, dtype)
    check_compiled(live.model, live.config)
    configs: Any = import_module("vllm.config")
    live.config.compilation_config.mode = configs.CompilationMode.VLLM_COMPILE
    with refused("placement_refused"):
        check_compiled(live.model, live.config)
    with refused("placement_refused"):
        layers_of(live)


def test_weights_of_another_shape_are_refused_by_the_build(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "float32")
    live = fresh(both.first, "float32")
    updated = Updated(live, layers_of(live))
    tensors = dict(updated.spare.spare)
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][1:]
    with refused("rank_failed", tensors=[name]):
        updated.derived.build(tensors, lambda: None)
    assert not updated.derived.held


# --- int8 of compressed-tensors


@pytest.mark.parametrize(("name", "dtype", "form", "mode"), INT8_CASES)
def test_an_install_of_int8_layers_equals_a_fresh_load_and_the_way_back_the_old_one(
    alone: None,
    checkpoints: Made,
    tmp_path: Path,
    name: str,
    dtype: Dtype,
    form: Int8,
    mode: InstallMode,
) -> None:
    there_and_back(in_int8(checkpoints(name, dtype), tmp_path, form), mode)


@pytest.mark.parametrize(
    "form",
    [
        Int8(scale=torch.bfloat16),
        Int8(channel=False, symmetric=False),
        Int8(static=True, layers=("o_proj", "down_proj")),
    ],
)
def test_int8_is_staged_and_digested_as_the_checkpoint_holds_it(
    alone: None, checkpoints: Made, tmp_path: Path, form: Int8
) -> None:
    """By the rank's own agent, over the placement that vLLM's loaders were recorded for."""
    both = in_int8(checkpoints("qwen2", "bfloat16"), tmp_path, form)
    weights = [load_file(path / "model.safetensors") for path in (both.first, both.second)]
    live, new = fresh(both.first, "bfloat16"), fresh(both.second, "bfloat16").logits()
    old = live.logits()
    assert not torch.equal(old, new)
    worker = SimpleNamespace(get_model=lambda: live.model, vllm_config=live.config, model_runner=None)
    engine: Any = VllmRankEngine(worker, EngineSpec(0, 1, str(both.first), "", {}))
    held = [MemorySource(tensors, manifest_of(tensors)) for tensors in weights]
    sources = iter(held)
    replica = BareReplica([engine], lambda _rank: next(sources))
    start = replica.stage(1, start=True)
    spare = replica.agents[0].spare
    assert all(torch.equal(spare.spare[name], tensor) for name, tensor in spare.live.items())
    replica.discard(1)
    found = replica.stage(2)
    assert (start.proof, found.proof) == ("digests", "digests")
    assert torch.equal(live.logits(), old)
    for serial, version, digest, logits in ((2, "0-1", found.observed, new), (3, "start", "", old)):
        if serial == 3:
            replica.check_previous(3, version, digest)
        engine.stand(serial)
        replica.switch(serial, version, digest)
        assert torch.equal(live.logits(), logits)


@pytest.mark.parametrize(("form", "dtype"), [(INT8, "bfloat16"), (STATIC, "bfloat16"), (INT8, "float32")])
def test_a_build_packs_for_the_model_s_dtype_and_sets_no_default(
    alone: None, checkpoints: Made, tmp_path: Path, form: Int8, dtype: Dtype
) -> None:
    both = in_int8(checkpoints("llama", dtype), tmp_path, form)
    live = fresh(both.first, dtype)
    updated = Updated(live, layers_of(live))
    updated.stage(both.second)
    with pytest.MonkeyPatch.context() as patch, _Kernels() as kernels:
        patch.setattr(torch, "set_default_dtype", _never)
        updated.derived.build(updated.spare.spare, lambda: None)
    assert kernels.dtypes == [getattr(torch, dtype)] * 8


class _Kernels(TorchFunctionMode):
    """The output dtypes of all int8 kernels that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._C.create_onednn_scaled_mm_handler:
            self.dtypes.append(args[2])
        return func(*args, **(kwargs or {}))


def _never(_dtype: torch.dtype) -> None:
    raise RuntimeError("the default dtype belongs to the threads that serve as well")


@pytest.mark.parametrize("form", [INT8, STATIC])
def test_a_live_int8_kernel_of_other_weights_is_refused(
    alone: None, checkpoints: Made, tmp_path: Path, form: Int8
) -> None:
    both = in_int8(checkpoints("llama", "bfloat16"), tmp_path, form)
    live, other = fresh(both.first, "bfloat16"), fresh(both.second, "bfloat16")
    layers = [loaded.model.model.layers[1].mlp.down_proj.scheme.kernel for loaded in (live, other)]
    layers[0].dnnl_handler = layers[1].dnnl_handler
    with refused("placement_refused", tensors=["model.layers.1.mlp.down_proj"]):
        layers_of(live)


@pytest.mark.parametrize(
    ("form", "key"),
    [(INT8, "weight_scale"), (INT8, "azp_adj"), (STATIC, "input_scale")],
)
def test_live_int8_scales_of_other_weights_are_refused(
    alone: None, checkpoints: Made, tmp_path: Path, form: Int8, key: str
) -> None:
    live = fresh(in_int8(checkpoints("llama", "bfloat16"), tmp_path, form).first, "bfloat16")
    layer = live.model.model.layers[1].mlp.gate_up_proj
    getattr(layer, key).data.view(-1)[0] += 1
    with refused("placement_refused", tensors=["model.layers.1.mlp.gate_up_proj"]):
        layers_of(live)


def test_static_scales_of_fused_layers_are_refused_by_the_placement(
    alone: None, checkpoints: Made, tmp_path: Path
) -> None:
    """vLLM's loader keeps the last one of q, k and v."""
    path = in_int8(checkpoints("llama", "bfloat16"), tmp_path, STATIC).first
    live, tensors = fresh(path, "bfloat16"), load_file(path / "model.safetensors")
    specs = {name: TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    fused = [f"model.layers.1.{name}.input_scale" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")]
    with refused("placement_refused", tensors=fused):
        recorded_placements(live.config, live.model).placement(specs)


def _other_scheme(layer: Any) -> None:
    layer.scheme.__class__ = type("Novel", (type(layer.scheme),), {})


def _other_kernel(layer: Any) -> None:
    layer.scheme.kernel.__class__ = type("Novel", (type(layer.scheme.kernel),), {})


def _no_onednn(layer: Any) -> None:
    del layer.scheme.kernel.dnnl_handler


def _quantised_cache(layer: Any) -> None:
    layer.kv_cache_dtype = "fp8"


def _scales_of_the_cache(layer: Any) -> None:
    layer.quant_method.quant_config.kv_cache_scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mlp.down_proj", _other_scheme),
        ("mlp.down_proj", _other_kernel),
        ("mlp.down_proj", _no_onednn),
        ("self_attn.attn", _quantised_cache),
        ("self_attn.attn", _scales_of_the_cache),
    ],
)
def test_what_was_never_tested_of_compressed_tensors_is_refused(
    alone: None, checkpoints: Made, tmp_path: Path, name: str, change: Callable[[Any], None]
) -> None:
    live = fresh(in_int8(checkpoints("llama", "bfloat16"), tmp_path, INT8).first, "bfloat16")
    layer: Any = live.model.get_submodule(f"model.layers.1.{name}")
    method = METHODS[qualified(type(layer.quant_method))]
    assert not method.untested(layer)
    change(layer)
    assert method.untested(layer)
    with refused("placement_refused", tensors=[f"model.layers.1.{name}"]):
        layers_of(live)


def test_an_update_brings_no_scales_of_the_cache(alone: None, checkpoints: Made, tmp_path: Path) -> None:
    live = fresh(in_int8(checkpoints("llama", "bfloat16"), tmp_path, INT8).first, "bfloat16")
    updated = Updated(live, layers_of(live))
    tensors = {name: tensor.clone() for name, tensor in updated.spare.live.items()}
    updated.derived.build(tensors, lambda: None)
    name = "model.layers.1.self_attn.attn"
    tensors[f"{name}.k_scale"] *= 2
    with refused("rank_failed", tensors=[name]):
        updated.derived.build(tensors, lambda: None)


class _Idle:
    """A quant method that makes nothing of a layer."""

    def process_weights_after_loading(self, _layer: nn.Module) -> None:
        pass


def _idle() -> nn.Module:
    layer: Any = nn.Linear(3, 2, bias=False).requires_grad_(False)
    layer.quant_method = _Idle()
    return layer  # type: ignore[no-any-return]


def test_a_layer_that_is_packed_in_another_way_has_no_state() -> None:
    """It is not known then what dtype its kernel is for."""
    with pytest.raises(ValueError):
        LayerTwin(0, _idle(), Method(packs_by_default_dtype=True)).build({"weight": torch.ones(2, 3)})


def test_a_parameter_that_a_kernel_reads_belongs_to_every_state() -> None:
    assert not LayerTwin(0, _idle(), Method()).build({"weight": torch.ones(2, 3)}).parameters
    assert LayerTwin(0, _idle(), Method(aliased=("weight",))).build({"weight": torch.ones(2, 3)}).parameters


def _with_head(path: Path, copy: Path) -> Path:
    copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    return copy


def in_int8(both: Checkpoints, folder: Path, form: Int8) -> Checkpoints:
    if form.symmetric and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM packs for AMX on this processor, which was never tested")
    first, second = (_in_int8(path, folder / path.name, form) for path in (both.first, both.second))
    return Checkpoints(first, second, both.dtype)


def _in_int8(path: Path, copy: Path, form: Int8) -> Path:
    copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(tuple(f"{layer}.weight" for layer in form.layers))]:
        weight = tensors[name].float()
        most = weight.abs().amax(1, keepdim=True) if form.channel else weight.abs().amax().view(1)
        scale = most.clamp(min=1e-6) / 127
        tensors[name], tensors[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale.to(form.scale)
        if form.static:
            at = name.removesuffix("weight")
            tensors[f"{at}input_scale"] = tensors["model.norm.weight"][:1].float() / 20 + scale.max()
            if not form.symmetric:
                tensors[f"{at}input_zero_point"] = torch.tensor([7], dtype=torch.int8)
    save_file(tensors, copy / "model.safetensors")
    eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    activations = {"strategy": "tensor", "dynamic": False} if form.static else {"strategy": "token", "dynamic": True}
    group = {
        "targets": [f"re:.*{layer}$" for layer in form.layers],
        "weights": {**eight, "strategy": "channel" if form.channel else "tensor", "dynamic": False},
        "input_activations": {**eight, **activations, "symmetric": form.symmetric},
    }
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (copy / "config.json").write_text(json.dumps(config))
    return copy
