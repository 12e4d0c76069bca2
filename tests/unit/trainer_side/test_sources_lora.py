"""LoRA adapters of peft: what is sent is what `merge_and_unload` makes of a copy, and the live model is not touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_side.sources import as_source
from transports.digest import tensor_digest, to_hex
from updater.core.errors import Rejected

peft = pytest.importorskip("peft")


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8)
        self.v_proj = torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) * self.v_proj(x).sum()


class Small(torch.nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(Attention() for _ in range(2))
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 11, bias=False)
        self.register_buffer("seen", torch.tensor(3))
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


TARGETS = ["q_proj", "v_proj"]


def adapted(
    dtype: torch.dtype = torch.float32, tied: bool = False, upcast: bool = True, second: Any = None, **config: Any
) -> Any:
    """With an adapter that is not at rest; `second`: the configuration of another one, active as well."""
    config = {"target_modules": TARGETS, "r": 3, **config}
    model = peft.get_peft_model(Small(tied).to(dtype), peft.LoraConfig(**config), autocast_adapter_dtype=upcast)
    if second is not None:
        model.add_adapter("second", second)
        model.base_model.set_adapter(["default", "second"])
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def transposed() -> Any:
    """As GPT-2 stores its weights."""
    from transformers.pytorch_utils import Conv1D

    model = torch.nn.Sequential()
    torch.manual_seed(0)
    model.add_module("c_attn", Conv1D(9, 6))
    made = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    with torch.no_grad():
        made.base_model.model.c_attn.lora_B["default"].weight.normal_()
    return made


CASES: dict[str, Callable[[], Any]] = {
    "float32": lambda: adapted(),
    "bfloat16 under float32 factors": lambda: adapted(torch.bfloat16),
    "bfloat16": lambda: adapted(torch.bfloat16, upcast=False),
    "float16": lambda: adapted(torch.float16, upcast=False),
    "rank-stabilised": lambda: adapted(use_rslora=True, lora_alpha=7),
    "transposed": transposed,
    "embedding": lambda: adapted(target_modules=["embed_tokens", "q_proj"]),
    "bias of the factors": lambda: adapted(target_modules=["q_proj"], lora_bias=True),
    "trained biases": lambda: adapted(bias="all"),
    "a whole module": lambda: adapted(modules_to_save=["lm_head"]),
    "a whole module of a tied model": lambda: adapted(tied=True, modules_to_save=["lm_head"]),
    "tied": lambda: adapted(tied=True),
    "two adapters": lambda: adapted(torch.bfloat16, second=peft.LoraConfig(target_modules=["q_proj"], r=2)),
}


def prints(model: torch.nn.Module) -> dict[str, tuple[int, int, int]]:
    """Digest, address and version of everything in the live model."""
    state = model.state_dict(keep_vars=True)
    return {name: (tensor_digest(t.detach()), t.data_ptr(), t._version) for name, t in state.items()}


@pytest.mark.case("B192", "B198")
@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_pefts_own_merge_and_the_base_is_untouched(case: str) -> None:
    model = CASES[case]()
    before = prints(model)
    source = as_source(model)
    ahead = source.digests()
    sent = {name: tensor.clone() for name, tensor in source.tensors() if tensor is not None}
    source.check_untouched()
    assert prints(model) == before
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert list(sent) == list(merged)
    for name, tensor in merged.items():
        assert sent[name].dtype == tensor.dtype, name
        assert torch.equal(sent[name], tensor), name
        assert source.specs[name].shape == tuple(tensor.shape)
    assert all(ahead[name] == to_hex(tensor_digest(merged[name])) for name in ahead)
    assert set(merged) - set(ahead)  # what is merged has no digest ahead


def test_the_adapter_changes_what_is_sent() -> None:
    """Otherwise an equal base would pass for a merge."""
    merged, base = dict(as_source(adapted()).tensors()), Small().state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}  # type: ignore[arg-type]
    assert changed == {f"layers.{at}.{target}.weight" for at in range(2) for target in TARGETS}


@pytest.mark.case("B043")
def test_names_are_those_of_the_base_model() -> None:
    assert set(as_source(adapted()).specs) == set(Small().state_dict())


def test_a_merged_tensor_is_rounded_after_it_was_added_up() -> None:
    model = adapted()
    name = "layers.0.q_proj.weight"
    sent = dict(as_source(model, dtypes={"*": "BF16"}).tensors())[name]
    exact = copy.deepcopy(model).merge_and_unload().state_dict()[name]
    assert sent is not None
    assert torch.equal(sent, exact.to(torch.bfloat16))


def test_only_active_adapters_are_merged() -> None:
    model = adapted(second=peft.LoraConfig(target_modules=["q_proj"], r=2))
    model.base_model.set_adapter("second")
    sent = dict(as_source(model).tensors())
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert all(torch.equal(sent[name], tensor) for name, tensor in merged.items())  # type: ignore[arg-type]


def test_an_adapter_that_is_merged_already_is_not_added_twice() -> None:
    model = adapted()
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    model.merge_adapter()
    sent = dict(as_source(model).tensors())
    assert all(torch.equal(sent[name], tensor) for name, tensor in merged.items())  # type: ignore[arg-type]


@pytest.mark.case("B035")
def test_a_step_of_the_factors_is_seen() -> None:
    model = adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    source = as_source(model)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(trained, fused=True).step()
    with pytest.raises(Rejected) as caught:
        source.check_untouched()
    merged = {f"layers.{at}.{target}.weight" for at in range(2) for target in TARGETS}
    assert {failure.tensor for failure in caught.value.failures} == merged


def off() -> Any:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def nobody() -> Any:
    """Its layers know no active adapter: what is left is the base."""
    model = adapted(second=peft.LoraConfig(target_modules=["q_proj"], r=2))
    model.base_model.set_adapter([])
    return model


LAYER = "layers.0.q_proj"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (lambda: adapted(use_dora=True), LAYER),
    "switched off": (off, LAYER),
    "tied to what is merged": (lambda: adapted(tied=True, target_modules=["embed_tokens"]), "lm_head.weight"),
    "another kind of adapter": (
        lambda: peft.get_peft_model(Small(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        LAYER,
    ),
    "single tokens": (lambda: adapted(trainable_token_indices={"embed_tokens": [1, 2]}), "embed_tokens"),
    "no active adapter": (nobody, ""),
}


@pytest.mark.case("B045")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_by_its_layer(case: str) -> None:
    """Among it an adapter that changes nothing: the base would be published for a trained model."""
    make, layer = REFUSED[case]
    with pytest.raises(Rejected) as caught:
        as_source(make())
    assert [(failure.code, failure.tensor) for failure in caught.value.failures] == [("adapter_unsupported", layer)]
