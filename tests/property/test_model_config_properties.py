"""Comparing configs: nothing differs from itself, in any spelling, and what differs is found."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from updater.protocol.model_config import (
    CONFIG_BYTES,
    ConfigRefused,
    bounded,
    canonical,
    config_part,
    differences,
    text_of,
    view,
)
from updater.protocol.model_document import ModelDocument, compare, config_hash

keys = st.sampled_from(["hidden_size", "rms_norm_eps", "layer_types", "vision_config", "head_dim", "hidden_act", "n"])
leaves = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | st.text(max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
configs = st.dictionaries(keys, values, min_size=1, max_size=6)
scalings = st.fixed_dictionaries(
    {"factor": st.integers(2, 64)}, optional={"low_freq_factor": st.sampled_from([1.0, 2.0])}
)


def document(config: dict[str, Any]) -> ModelDocument:
    return ModelDocument(config=config_part(config), quantization={})


@pytest.mark.case("F01")
@given(configs)
def test_a_config_does_not_differ_from_itself(config: dict[str, Any]) -> None:
    one = document(config)
    assert differences(one.config or {}, one.config or {}) == []
    assert config_hash(one) == config_hash(document(json.loads(text_of(canonical(config)))))
    assert compare(one, one).refused == ()


@pytest.mark.case("F01")
@given(configs, keys, st.integers(0, 5), st.integers(6, 9))
def test_a_value_that_differs_is_found(config: dict[str, Any], key: str, mine: int, other: int) -> None:
    one, two = document(config | {key: mine}), document(config | {key: other})
    assert [failure.code for failure in compare(one, two).refused].count("config_mismatch") >= 1
    assert config_hash(one) != config_hash(two)
    assert compare(one, two, [key, f"{key}.x"]).refused == ()


@pytest.mark.case("F01")
@given(configs, st.integers(1, 10**6), scalings, st.sampled_from(["yarn", "linear", "llama3"]))
def test_spellings_of_rotary_settings_are_one(
    config: dict[str, Any], theta: int, scaling: dict[str, Any], kind: str
) -> None:
    spelled = [
        {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}},
        {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **scaling}},
        {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **scaling}},
        {"rope_theta": theta, "rope_scaling": None, "rope_parameters": {"rope_type": kind, **scaling}},
    ]
    views = [view(config_part(config | each)) for each in spelled]
    assert all(each == views[0] for each in views)
    assert {config_hash(document(config | each)) for each in spelled} == {config_hash(document(config | spelled[0]))}


@pytest.mark.case("F01")
@given(configs)
def test_a_text_model_is_one_inside_its_wrapper_and_outside(config: dict[str, Any]) -> None:
    outside, inside = document(config), document({"text_config": config})
    assert compare(outside, inside).refused == ()
    assert config_hash(outside) == config_hash(inside)


@pytest.mark.case("F01")
@given(st.floats())
def test_a_number_has_one_form(number: float) -> None:
    text = text_of(canonical(number))
    assert canonical(json.loads(text)) == canonical(number)
    if number.is_integer() and abs(number) < 2**53:
        assert text == text_of(int(number))
    assert math.isfinite(number) or "__float__" in text


@pytest.mark.case("F65")
@given(st.integers(33, 80))
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"vision_config": config}
    with pytest.raises(ConfigRefused):
        config_part(config)
    with pytest.raises(ConfigRefused):
        bounded({"x": "y" * CONFIG_BYTES})
