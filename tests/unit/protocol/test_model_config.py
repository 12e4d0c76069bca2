"""One reading of configs: each spelling, each nesting and each form of a value, one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from updater.protocol.model_config import (
    CONFIG_BYTES,
    ConfigRefused,
    bounded,
    canonical,
    config_part,
    differences,
    quantisation_part,
    text_of,
    view,
)

pytestmark = pytest.mark.case("F01")

DEFAULT = {"rope_type": "default"}
LAYERS = {"full_attention": DEFAULT | {"rope_theta": 10**6}, "sliding_attention": DEFAULT | {"rope_theta": 10**4}}
BY_LAYER = {
    "rope_parameters.full_attention.rope_theta": 10**6,
    "rope_parameters.full_attention.rope_type": "default",
    "rope_parameters.sliding_attention.rope_theta": 10**4,
    "rope_parameters.sliding_attention.rope_type": "default",
}


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: {"x": value}, lambda value: [value]], ids=["objects", "lists"])
def test_depth_is_bounded_before_python_gives_up(wrap: Any) -> None:
    for depth in (40, 5000):
        with pytest.raises(ConfigRefused):
            canonical(nested(depth, wrap))
        with pytest.raises(ConfigRefused):
            config_part({"x": nested(depth, wrap)})
    assert config_part({"x": nested(20, wrap)}) == {"x": nested(20, wrap)}


def test_a_config_of_the_largest_size_is_taken_and_no_larger_one() -> None:
    frame = len(text_of({"x": ""}))
    assert bounded({"x": "y" * (CONFIG_BYTES - frame)})
    for text in ("y" * (CONFIG_BYTES - frame + 1), "\u00e9" * (CONFIG_BYTES // 2)):
        with pytest.raises(ConfigRefused):
            bounded({"x": text})


def test_every_form_of_a_value_is_kept_apart() -> None:
    values = [1, True, "1", None, [1], [1, 2], [2, 1], {"a": 1}, 1.5, math.nan, math.inf, -math.inf, 1e300, 2**53 + 1]
    assert len({text_of(canonical(value)) for value in values}) == len(values)
    assert canonical((1, 2.0)) == [1, 2]
    assert text_of(canonical(1e300)) == "1e+300"
    with pytest.raises(ValueError, match="JSON"):
        text_of(math.nan)


def test_lists_are_compared_in_their_order() -> None:
    kinds = ["sliding_attention", "full_attention"]
    (found,) = differences({"layer_types": kinds}, {"layer_types": kinds[::-1]})
    assert (found.key, found.theirs, found.ours) == ("layer_types", text_of(kinds), text_of(kinds[::-1]))


def test_what_is_written_anew_does_not_count_inside_either() -> None:
    one = {
        "text_config": {"hidden_size": 8, "torch_dtype": "float16"},
        "vision_config": {"n": 1, "_name_or_path": "/x"},
    }
    assert config_part(one) == {"text_config": {"hidden_size": 8}, "vision_config": {"n": 1}}


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_a_quantisation_has_two_names_and_is_no_part_of_the_config(name: str) -> None:
    assert quantisation_part({name: {"bits": 4, "version": "1"}}) == {"bits": 4}
    assert config_part({"n": 1, name: {"bits": 4}}) == {"n": 1}
    assert quantisation_part({name: None}) == {}


@pytest.mark.parametrize(("old", "new"), [("mrope", "default"), ("su", "longrope")])
def test_old_names_of_scalings(old: str, new: str) -> None:
    assert view({"rope_scaling": {"type": old, "factor": 2}}) == view(
        {"rope_parameters": {"rope_type": new, "factor": 2}}
    )


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": LAYERS},
        {"rope_parameters": {kind: {"rope_theta": each["rope_theta"]} for kind, each in LAYERS.items()}},
        {"rope_theta": 10**6, "rope_local_base_freq": 10**4},
        # What the file still says beside the settings by kind of layer is not read.
        {"rope_parameters": LAYERS, "rope_theta": 5, "rope_local_base_freq": 7},
    ],
)
def test_rotary_settings_by_kind_of_layer_have_one_form(config: dict[str, Any]) -> None:
    assert view(config) == BY_LAYER
    assert view({"text_config": config}) == BY_LAYER


def test_a_setting_of_all_layers_beside_those_by_kind_is_kept() -> None:
    assert view({"rope_parameters": LAYERS | {"rope_theta": 5}}) == BY_LAYER | {"rope_parameters.rope_theta": 5}


def test_a_kind_of_layer_that_differs_is_named() -> None:
    other = {"rope_parameters": LAYERS | {"sliding_attention": DEFAULT | {"rope_theta": 37}}}
    (found,) = differences({"text_config": other}, {"rope_theta": 10**6, "rope_local_base_freq": 10**4})
    assert (found.key, found.theirs, found.ours) == ("rope_parameters.sliding_attention.rope_theta", "37", "10000")


def test_the_newer_spelling_counts_where_both_are_there() -> None:
    both = {
        "rope_scaling": {"type": "linear", "factor": 2},
        "rope_theta": 100,
        "rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 37},
    }
    assert view(both) == view({"rope_parameters": both["rope_parameters"]})


def test_the_rotated_part_of_a_head_has_one_place() -> None:
    inside = {"rope_parameters": {"rope_theta": 100, "partial_rotary_factor": 0.5}}
    assert view(inside) == view({"rope_theta": 100, "partial_rotary_factor": 0.5})
    assert view(inside)["partial_rotary_factor"] == 0.5


def test_a_number_that_json_has_not_is_no_kind_of_layer() -> None:
    config = config_part({"rope_theta": math.inf})
    assert view(config)["rope_parameters.rope_theta"] == {"__float__": "Infinity"}
    assert view(config_part({"rope_parameters": {"rope_theta": math.inf}})) == view(config)
    assert view({"rope_theta": 100})["rope_parameters.rope_type"] == "default"


def test_a_value_of_the_wrapper_counts_where_it_differs_from_the_text_models() -> None:
    text = {"hidden_size": 8, "tie_word_embeddings": True}
    same = {"text_config": text, "tie_word_embeddings": True}
    assert view(same) == view(text)
    other = {"text_config": text, "tie_word_embeddings": False}
    assert view(other) == view(text) | {"outer.tie_word_embeddings": False}


def test_a_null_is_what_the_class_makes_of_it() -> None:
    assert differences({"n": None}, {}) == []
    assert differences({"n": None}, {"n": 4}, None, {"n": 4})[0].theirs == "null"
    assert differences({"n": None}, {"n": 4}, {"n": 4}) == []
    (found,) = differences({"n": 4}, {}, None, {})
    assert (found.one_sided, found.ours) == (True, None)
