"""What is compared between a source and an engine, key by key, and what only warns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from updater.core.participant import Compared, same_definition
from updater.protocol import wire
from updater.protocol.manifest import Manifest
from updater.protocol.model_config import ConfigRefused, config_part, quantisation_part, quantiser_part, view
from updater.protocol.model_document import ModelDocument, compare, config_hash, whole
from updater.protocol.model_tokenizer import TokenizerData, of_files, of_tokenizer_json

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 100.0, "eos_token_id": 2,
    "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


def document(completed: dict[str, Any] | None = None, **changes: Any) -> ModelDocument:
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    made = ModelDocument(config=config_part(config), quantization=quantisation_part(config))
    return made if completed is None else replace(made, completed=config_part(completed))


def refused(theirs: ModelDocument, ours: ModelDocument, *allowed: str) -> list[str]:
    return [failure.message.split(" ")[0] for failure in compare(theirs, ours, allowed).refused]


@pytest.mark.case("F01", "F02")
@pytest.mark.parametrize(
    "anew",
    [
        {"transformers_version": "5.0"}, {"torch_dtype": "float32"}, {"dtype": "auto"}, {"_name_or_path": "/x"},
        {"use_cache": False}, {"initializer_range": 0.5}, {"attention_dropout": 0.1}, {"id2label": {"0": "a"}},
        {"rms_norm_eps": 0.000001}, {"hidden_size": 16.0}, {"rope_theta": 100},
        {"rope_theta": "absent", "rope_parameters": {"rope_theta": 100, "rope_type": "default"}},
        {"rope_scaling": None}, {"sliding_window": "absent"},
    ],
)  # fmt: skip
def test_what_a_save_writes_anew_is_no_difference(anew: dict[str, Any]) -> None:
    found = compare(document(**anew), document())
    assert (found.refused, found.warnings) == ((), ())
    assert found.compared == Compared(config="engine", quantisation="engine")
    assert config_hash(document(**anew)) == config_hash(document())


@pytest.mark.case("F01")
@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"rope_theta": 37.0}, "rope_parameters.rope_theta"), ({"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"), ({"tie_word_embeddings": 0}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_parameters.rope_type"), ({"model_type": "qwen2"}, "model_type"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"), ({"text_config": {"hidden_size": 8}}, "hidden_size"),
        ({"sliding_window": 4096}, "sliding_window"),
    ],
)  # fmt: skip
def test_what_changes_a_forward_pass_is_refused_with_both_values(changed: dict[str, Any], key: str) -> None:
    ours = document(completed=CONFIG)
    assert key in refused(document(**changed), ours)
    found = next(each for each in compare(document(**changed), ours).refused if each.message.split(" ")[0] == key)
    assert key in found.hint
    assert found.file == "config.json"
    assert refused(document(**changed), ours, key) == [
        each for each in refused(document(**changed), ours) if each != key
    ]
    assert any(key in text for text in compare(document(**changed), ours, [key]).warnings)
    assert config_hash(document(**changed)) != config_hash(document())


@pytest.mark.case("F01")
def test_every_key_is_named_and_their_number_is_bounded() -> None:
    many = {f"key_{number}": 1 for number in range(250)}
    found = compare(document(**many), document(**dict.fromkeys(many, 2)))
    assert len(found.refused) == 101
    assert "150" in found.refused[-1].message
    assert len(compare(document(**many), document(**dict.fromkeys(many, 2)), most=None).refused) == 250
    assert "--against" in found.refused[-1].hint
    few = {f"key_{number}": 1 for number in range(100)}
    assert len(compare(document(**few), document(**dict.fromkeys(few, 2))).refused) == 100
    assert len(compare(document(**many), document()).warnings) == 101
    assert len(compare(document(**many), document(), most=None).warnings) == 250
    assert len(compare(document(**few), document()).warnings) == 100
    both = compare(document(hidden_act="silu"), document(hidden_act="gelu")).refused[0].message
    assert '"silu"' in both
    assert '"gelu"' in both
    long = compare(document(hidden_act="x" * 10_000), document(hidden_act="y")).refused[0].message
    assert len(long) < 500


@pytest.mark.case("F01")
def test_ids_and_generation_only_warn() -> None:
    theirs = replace(document(eos_token_id=[2, 3]), generation={"top_k": 1}, chat_template="a")
    ours = replace(document(), generation={"top_k": 2}, chat_template="b")
    found = compare(theirs, ours)
    assert found.refused == ()
    assert len(found.warnings) == 3
    assert config_hash(theirs) == config_hash(ours)


@pytest.mark.case("F01")
def test_a_key_of_one_side_is_what_the_engines_class_makes_of_it() -> None:
    theirs = document(head_dim=8)
    assert compare(theirs, document()).refused == ()
    assert any("head_dim" in text for text in compare(theirs, document()).warnings)
    assert refused(theirs, document(completed=CONFIG | {"head_dim": 4})) == ["head_dim"]
    agreed = compare(theirs, document(completed=CONFIG | {"head_dim": 8}))
    assert (agreed.refused, agreed.warnings) == ((), ())
    # A null is what the class makes of it, which for some keys is not what it makes of nothing.
    assert refused(document(head_dim=None), document(completed=CONFIG | {"head_dim": 4})) == ["head_dim"]
    assert refused(document(CONFIG | {"head_dim": 4}, head_dim=None), document(CONFIG | {"head_dim": 4})) == []
    assert config_hash(document(CONFIG | {"head_dim": 8}, head_dim=None)) == config_hash(document(head_dim=8))
    assert config_hash(document(CONFIG | {"head_dim": 8})) == config_hash(document(head_dim=8))


@pytest.mark.case("F01")
@pytest.mark.parametrize(
    ("name", "others"),
    [("rope_theta", {"rope_theta": 37}), ("text_config.hidden_size", {"hidden_size": 8}),
     ("rope_scaling", {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 100}),
     ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn"}}),
     ("rope_parameters", {"rope_theta": 37}), ("text_config.rope_theta", {"rope_theta": 37})],
)  # fmt: skip
def test_a_key_is_allowed_by_the_name_that_its_file_has(name: str, others: dict[str, Any]) -> None:
    assert refused(document(**others), document())
    assert refused(document(**others), document(), name) == []


@pytest.mark.case("F01")
def test_what_one_side_lacks_is_not_compared() -> None:
    assert compare(ModelDocument(), document()).compared == Compared()
    assert compare(document(), ModelDocument()) == compare(ModelDocument(), document())
    one_sided = compare(document(quantization_config={"bits": 4}), document())
    assert one_sided.compared == Compared(config="engine")
    assert len(one_sided.warnings) == 1
    other_side = compare(document(), document(quantization_config={"bits": 4}))
    assert (other_side.refused, other_side.compared) == ((), Compared(config="engine"))
    bare = ModelDocument(quantization={"bits": 4})  # of a quantiser's own file alone
    assert compare(bare, document(quantization_config={"bits": 4})).compared == Compared(quantisation="engine")
    tokenizer = ModelDocument(tokenizer=TokenizerData({"vocabulary": "a"}, {"x": 1}))
    for pair in ((tokenizer, ModelDocument()), (ModelDocument(), tokenizer)):
        assert compare(*pair) == compare(ModelDocument(), ModelDocument())


@pytest.mark.case("F01")
def test_quantisation_is_compared_without_what_wrote_it() -> None:
    quantised = document(quantization_config={"quant_method": "gptq", "bits": 4, "_written": 1})
    same = document(quantization_config={"quant_method": "gptq", "bits": 4.0, "quantization_status": "frozen"})
    assert compare(quantised, same).refused == ()
    assert compare(quantised, same).compared == Compared("engine", "none", "engine")
    assert refused(quantised, document(quantization_config={"quant_method": "gptq", "bits": 8})) == [
        "quantization_config.bits"
    ]
    assert quantiser_part({"quantization": {"quant_algo": "FP8"}}) == {"quant_algo": "FP8"}


@pytest.mark.case("F01")
def test_a_tokenizer_is_compared_as_data() -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    added = [{"id": 3, "content": "<s>", "special": True}]
    one = of_tokenizer_json({"version": "1.0", "model": model, "added_tokens": added, "normalizer": None})
    other = of_tokenizer_json(
        {"model": model | {"merges": [["a", "b"]]}, "added_tokens": [*added, {"id": 4, "content": "x"}]}
    )

    def both(theirs: TokenizerData, ours: TokenizerData) -> tuple[list[str], int, str]:
        pair = (ModelDocument(tokenizer=theirs), ModelDocument(tokenizer=ours))
        found = compare(*pair)
        return refused(*pair), len(found.warnings), found.compared.tokenizer

    assert both(one, one) == ([], 0, "engine")
    assert both(other, one) == ([], 1, "engine")
    assert both(one, other) == ([], 1, "engine")
    swapped = of_tokenizer_json({"model": model | {"vocab": {"b": 0, "a": 1, "ab": 2}}, "added_tokens": added})
    assert both(swapped, one) == (["tokenizer.vocabulary"], 0, "engine")
    lower = of_tokenizer_json({"model": model, "added_tokens": added, "normalizer": {"type": "Lowercase"}})
    assert both(lower, one) == (["tokenizer.normalizer"], 0, "engine")
    moved = of_tokenizer_json({"model": model, "added_tokens": [{"id": 9, "content": "<s>"}]})
    assert both(moved, one) == (["tokenizer.added_tokens"], 0, "engine")
    old = of_files({"a": 0, "b": 1, "ab": 2}, "#version: 0.2\na b\n", {"<s>": 3}, b"")
    assert both(old, one) == ([], 0, "engine")
    assert both(of_files(None, None, {}, b"model"), one) == ([], 1, "none")
    assert compare(ModelDocument(tokenizer=swapped), ModelDocument(tokenizer=one), ["tokenizer"]).refused == ()
    crowd = {f"<{number}>": number for number in range(3000)}
    assert both(of_files({}, None, crowd, b""), of_files({}, None, crowd | {"<1>": 7}, b""))[0] == [
        "tokenizer.added_tokens"
    ]


@pytest.mark.case("F01")
def test_rotary_settings_by_kind_of_layer() -> None:
    old = {"rope_theta": 10**6, "rope_local_base_freq": 10**4, "rope_scaling": {"rope_type": "linear", "factor": 8}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 10**6},
            "sliding_attention": {"rope_theta": 10**4},
        }
    }
    assert view(old) == view(new)


@pytest.mark.case("F02")
def test_a_hash_names_its_definition() -> None:
    assert config_hash(document()).startswith("v2:")
    assert config_hash(ModelDocument()) == ""
    assert same_definition("v2:a", "v2:b")
    assert not same_definition("v2:a", "a" * 64)
    assert not same_definition("a" * 64, "a" * 64)


@pytest.mark.case("F65")
@pytest.mark.parametrize("config", [{"x": "y" * (65 << 10)}, {"rms_norm_eps": 2.0}, {"x": {"y": float("inf")}}])
def test_a_document_in_another_form_is_no_manifests(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigRefused):
        ModelDocument(config=config).check()
    with pytest.raises(wire.WireError):
        Manifest((), model=ModelDocument(config=config)).check()


@pytest.mark.case("F65")
@pytest.mark.parametrize(
    "document",
    [
        ModelDocument(generation={"x": "y" * (257 << 10)}),
        ModelDocument(tokenizer=TokenizerData({"x": "y" * (257 << 10)})),
        ModelDocument(tokenizer=TokenizerData({}, {f"{number:012x}": number for number in range(20_000)})),
        ModelDocument(completed={"x": "y" * (65 << 10)}),
        ModelDocument(quantization={"x": "y" * (65 << 10)}),
    ],
    ids=["generation", "parts", "added tokens", "completed", "quantisation"],
)
def test_a_document_that_is_too_large_is_refused(document: ModelDocument) -> None:
    with pytest.raises(ConfigRefused):
        document.check()


@pytest.mark.case("F65")
def test_a_document_of_usual_size_is_taken() -> None:
    ModelDocument().check()
    added = {f"{number:012x}": number for number in range(2000)}
    replace(document(), generation={"top_k": 1}, tokenizer=TokenizerData({"vocabulary": "a" * 64}, added)).check()
    assert whole({"x": "y" * (65 << 10)}) == {}
    assert whole(CONFIG) == config_part(CONFIG)


def test_a_manifest_of_before_keeps_its_digest() -> None:
    assert "model" not in Manifest(()).to_json()
    with_model = Manifest((), model=document())
    assert Manifest.from_json(with_model.to_json()) == with_model
