"""Post-processed layers in one process, without an engine: install, undo and roll back, bit for bit as a fresh load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine_adapter.base import Parameter
from engine_adapter.rank.derived import DerivedStates
from engine_adapter.rank.spare import Spare
from engine_adapter.vllm.parameters import collect
from engine_adapter.vllm.twins import ProcessedLayers, load_start, processed_layers, twin_model
from tests.vllm_server.models import Checkpoints, Dtype
from transports.testing import refused
from updater.core.policy import InstallMode

pytestmark = pytest.mark.vllm

TOKENS = torch.tensor([5, 40, 41, 99, 7, 250, 3, 64, 65, 66, 12, 13])
MODES = [InstallMode.FLIP, InstallMode.EXCHANGE]
#: Model, dtype, layers with a state of their own, and whether every weight of a linear is packed away.
CASES = [
    ("llama", "float32", 2 * 4 + 2),
    ("tied", "float32", 2 * 4 + 2),
    ("qwen2", "float32", 2 * 4 + 2),
    ("mixtral", "float32", 2 * 4 + 2),
    ("mixtral", "bfloat16", 2 * 1),
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
        self.parameters: dict[str, Parameter] = collect(live.model) | dict(layers.parameters)
        self.spare = Spare(self.parameters)
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank by itself, as far as vLLM's layers ask."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    distributed: Any = import_module("vllm.distributed")
    configs: Any = import_module("vllm.config")
    meeting = tmp_path_factory.mktemp("meeting") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        with configs.set_current_vllm_config(configs.VllmConfig()):
            distributed.init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
            distributed.ensure_model_parallel_initialized(1, 1)
        yield
        distributed.cleanup_dist_env_and_memory()
    torch.set_num_threads(threads)


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
    with configs.set_current_vllm_config(config):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype", "layers"), CASES)
def test_an_install_equals_a_fresh_load_and_the_way_back_the_old_one(
    alone: None, checkpoints: Made, name: str, dtype: Dtype, layers: int, mode: InstallMode
) -> None:
    both = checkpoints(name, dtype)
    live = fresh(both.first, dtype)
    old, new = live.logits(), fresh(both.second, dtype).logits()
    assert not torch.equal(old, new)
    updated = Updated(live, layers_of(live))
    assert len(updated.layers.derived) == layers
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


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("mixtral", "float32"), ("mixtral", "bfloat16")])
def test_a_build_keeps_nothing_of_what_it_was_built_from(
    alone: None, checkpoints: Made, name: str, dtype: Dtype
) -> None:
    """An exchange moves other bytes into that memory afterwards."""
    both = checkpoints(name, dtype)
    live, new = fresh(both.first, dtype), fresh(both.second, dtype).logits()
    updated = Updated(live, layers_of(live))
    updated.stage(both.second)
    updated.install()
    for parameter in updated.layers.parameters.values():
        parameter.local.fill_(float("nan"))
    for name in updated.layers.parameters:
        updated.spare.live[name].fill_(float("nan"))
    assert torch.equal(live.logits(), new)


@pytest.mark.parametrize(("name", "dtype"), [("tied", "float32"), ("mixtral", "bfloat16")])
def test_builds_beside_forward_passes_change_no_answer(alone: None, checkpoints: Made, name: str, dtype: Dtype) -> None:
    both = checkpoints(name, dtype)
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


def test_an_untested_quant_method_is_refused(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "bfloat16")
    live = fresh(both.first, "bfloat16")
    layer = live.model.model.layers[0].mlp.down_proj
    layer.quant_method = type("Novel", (type(layer.quant_method),), {})()
    with refused("placement_refused", tensors=["model.layers.0.mlp.down_proj"]):
        layers_of(live)


def test_int8_layers_are_refused(alone: None, checkpoints: Made, tmp_path: Path) -> None:
    """They run on this platform, but their kernels are packed by the process-wide default dtype."""
    path = _in_int8(checkpoints("llama", "bfloat16").first, tmp_path / "int8")
    live = fresh(path, "bfloat16")
    assert live.logits().isfinite().all()
    with refused("placement_refused", tensors=["model.layers.1.mlp.down_proj"]):
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


def test_packed_layers_of_a_compiled_model_are_refused(alone: None, checkpoints: Made) -> None:
    both = checkpoints("llama", "float32")
    live = fresh(both.first, "float32")
    configs: Any = import_module("vllm.config")
    live.config.compilation_config.mode = configs.CompilationMode.VLLM_COMPILE
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


def _with_head(path: Path, copy: Path) -> Path:
    copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    return copy


def _in_int8(path: Path, copy: Path) -> Path:
    """Weights of eight bits with a scale per row, activations quantised per token (compressed-tensors)."""
    copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        tensors[name], tensors[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
    save_file(tensors, copy / "model.safetensors")
    eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
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
