"""Wrappers come off in every order; what collides or belongs to an adapter is refused by name."""

from __future__ import annotations

from itertools import permutations

import pytest

from updater.core.errors import Rejected
from updater.protocol.names import clean_name, clean_names

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.case("B048")
@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_in_any_nesting(prefix: str) -> None:
    assert clean_name(prefix + Q) == Q


@pytest.mark.case("B050")
@pytest.mark.parametrize(
    "raw",
    [
        "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight",
        "_checkpoint_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
    ],
)
def test_sharding_and_checkpointing_marks(raw: str) -> None:
    assert clean_name(raw) == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.case("B043")
@pytest.mark.parametrize("inner", ["", ".base_layer", ".base_layer.base_layer"])
def test_names_under_an_adapter(inner: str) -> None:
    assert clean_name(f"base_model.model.model.layers.0.self_attn.q_proj{inner}.weight") == Q


@pytest.mark.parametrize(
    "order", list(permutations(["module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model."]))
)
def test_every_order_of_wrappers(order: tuple[str, ...]) -> None:
    assert clean_name("".join(order) + Q) == Q


@pytest.mark.parametrize(
    "name",
    [Q, "module", "module_list.0.weight", "encoder.module.weight", "lm_head.base_model.weight", "base_layer.weight",
     "base_model.weight", "_orig_mod", "a.base_layer", "x_orig_mod.weight"],
)  # fmt: skip
def test_honest_names_stay(name: str) -> None:
    assert clean_name(name) == name


@pytest.mark.parametrize(
    "raw", ["module.module.x", "base_model.model.base_model.model.module.y", "_orig_mod._orig_mod.z"]
)
def test_cleaning_twice_changes_nothing(raw: str) -> None:
    assert clean_name(clean_name(raw)) == clean_name(raw)


@pytest.mark.case("B043", "B048")
def test_a_collision_names_both() -> None:
    with pytest.raises(Rejected) as caught:
        clean_names([Q, "other", f"module.{Q}", f"_orig_mod.{Q}"])
    assert caught.value.code == "tensor_duplicate"
    assert {failure.tensor for failure in caught.value.failures} == {Q, f"module.{Q}", f"_orig_mod.{Q}"}


@pytest.mark.case("B051")
def test_a_repeated_name() -> None:
    with pytest.raises(Rejected) as caught:
        clean_names([Q, Q])
    assert [(failure.code, failure.tensor) for failure in caught.value.failures] == [("tensor_duplicate", Q)]


@pytest.mark.case("B045")
@pytest.mark.parametrize("part", ["lora_A", "lora_B.default", "lora_magnitude_vector", "modules_to_save.default"])
def test_tensors_of_an_adapter(part: str) -> None:
    raw = f"base_model.model.model.layers.0.self_attn.q_proj.{part}.weight"
    with pytest.raises(Rejected) as caught:
        clean_names([Q, raw])
    assert [(failure.code, failure.tensor) for failure in caught.value.failures] == [("adapter_unsupported", raw)]


def test_order_is_kept() -> None:
    assert list(clean_names(["module.b", "a", "module.c"]).items()) == [
        ("module.b", "b"),
        ("a", "a"),
        ("module.c", "c"),
    ]
