"""What of a model's config changes a forward pass: one reading of `config.json` for trainer, engine and coordinator.

Two configs are compared key by key after their spellings were made one: `rope_theta` and `rope_parameters`, `type` and
`rope_type` of a scaling, the nesting under `text_config`. Pure: values in, values out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

#: Bytes of a config as canonical JSON, and how deep it may be nested.
CONFIG_BYTES = 64 << 10
CONFIG_DEPTH = 32
_EXACT = 2**53  # floats below it that are whole numbers are written as integers

#: Written anew by every save, or how an engine runs a model, not what the model computes. Dtypes are the tensors' own.
BOOKKEEPING = (
    "_*", "transformers_version", "torch_dtype", "dtype", "use_cache", "attn_implementation", "auto_map", "torchscript",
    "return_dict", "output_attentions", "output_hidden_states", "output_scores", "use_return_dict", "use_bfloat16",
    "return_dict_in_generate", "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "pretraining_tp",
    "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "unsloth_*", "transformers.js_config",
)  # fmt: skip
#: Of training alone, and the names of a classifier's answers.
TRAINING = (
    "initializer_range", "initializer_factor", "init_std", "*dropout*", "*_pdrop", "*layerdrop", "drop_path_rate",
    "gradient_*", "*loss*", "seq_aux", "label_smoothing", "output_router_logits", "problem_type", "id2label",
    "label2id", "num_labels",
)  # fmt: skip
#: A difference is a warning: which class reads the model, what the tensors' shapes say already, token ids and habits
#: of generation.
WARNED = (
    "architectures", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences",
    "exponential_decay_length_penalty", "remove_invalid_values", "generation_config",
)  # fmt: skip
#: Of a quantisation: what wrote it, and how far it had come.
QUANTISATION_BOOKKEEPING = (
    "_*", "producer", "quantization_status", "global_compression_ratio", "version", "transformers_version"
)  # fmt: skip
_QUANTISATION = ("quantization_config", "compression_config")
_SCALING_NAMES = {"mrope": "default", "su": "longrope"}
ROPE = "rope_parameters"
#: What older configs say instead, key by key.
ROPE_SPELLINGS = ("rope_theta", "rope_scaling", "rope_local_base_freq")


class ConfigRefused(ValueError):
    """No config that can be compared: not an object, nested too deeply, too large."""


def canonical(value: object, depth: int = CONFIG_DEPTH) -> Any:
    """The same value in the one form it is compared and stored in: whole floats as integers, NaN and infinity as
    `{"__float__": "NaN"}`, which is how transformers writes them. Raises ConfigRefused.
    """
    if depth < 0:
        raise ConfigRefused(f"nested deeper than {CONFIG_DEPTH}")
    if isinstance(value, Mapping):
        return {_text(str(key)): canonical(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(inner, depth - 1) for inner in value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if value is None or isinstance(value, bool | int):
        return value
    raise ConfigRefused(f"holds a {type(value).__name__}, which JSON has not")


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be sent anywhere


def text_of(value: object) -> str:
    """Canonical JSON: keys sorted, no spaces. Equal texts are equal values: `true` is not 1."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def bounded(value: Mapping[str, Any], limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """Canonical and at most `limit` bytes. Raises ConfigRefused."""
    found: dict[str, Any] = canonical(value)
    size = len(text_of(found).encode())
    if size > limit:
        raise ConfigRefused(f"{size} bytes of keys that count, and at most {limit} are compared")
    return found


def config_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole `config.json`: what is compared, and what a difference warns of. Raises ConfigRefused."""
    return bounded(_stripped(config, (*BOOKKEEPING, *TRAINING, *_QUANTISATION)))


def quantisation_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation that a `config.json` describes; empty for none. Raises ConfigRefused."""
    found: Mapping[str, Any] = next((c for name in _QUANTISATION if isinstance(c := config.get(name), Mapping)), {})
    return quantiser_part(found)


def quantiser_part(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a quantiser's own file. Raises ConfigRefused."""
    inner = settings.get("quantization")
    return bounded(_stripped(inner if isinstance(inner, Mapping) else settings, QUANTISATION_BOOKKEEPING))


def _stripped(config: Mapping[str, Any], patterns: tuple[str, ...], depth: int = CONFIG_DEPTH) -> dict[str, Any]:
    if depth < 0:
        raise ConfigRefused(f"nested deeper than {CONFIG_DEPTH}")
    return {
        key: _stripped(value, patterns, depth - 1) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key == "__float__" or not any(fnmatchcase(str(key), pattern) for pattern in patterns)
    }


# --- one spelling


def view(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, in one spelling. What lies in `text_config` has no prefix; a value of the wrapper round it
    that differs from the text model's is `outer.KEY`.
    """
    return dict(_flat(_roped(_lifted(config))))


def _lifted(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    merged: dict[str, Any] = {key: value for key, value in config.items() if key != "text_config"}
    outer = {
        f"outer.{key}": merged[key] for key in text if key in merged and text_of(merged[key]) != text_of(text[key])
    }
    return merged | dict(text) | outer


def _roped(config: dict[str, Any]) -> dict[str, Any]:
    """All that a config says of rotary positions, as one `rope_parameters`."""
    old = {key: config.pop(key) for key in ROPE_SPELLINGS if key in config}
    given = config.pop(ROPE, None)
    rope = _scaling(given) if isinstance(given, Mapping) else {}
    if isinstance(old.get("rope_scaling"), Mapping):
        rope = _scaling(old["rope_scaling"]) | rope
    if old.get("rope_theta") is not None and not _by_layer(rope):
        rope.setdefault("rope_theta", old["rope_theta"])
    local = old.get("rope_local_base_freq")
    if local is not None and not _by_layer(rope):
        rope = {"full_attention": {"rope_type": "default"} | rope}
        rope["sliding_attention"] = {"rope_type": "default", "rope_theta": local}
    if rope and not _by_layer(rope):
        rope.setdefault("rope_type", "default")
        if rope.get("partial_rotary_factor") is not None:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope:
        config[ROPE] = rope
    return config


def _by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) and "__float__" not in value for value in rope.values())


def _scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    if _by_layer(given):
        layers = {key: _scaling(value) if isinstance(value, Mapping) else value for key, value in given.items()}
        return {k: {"rope_type": "default"} | v if isinstance(v, dict) else v for k, v in layers.items()}
    found = {key: value for key, value in given.items() if key != "type" and value is not None}
    kind = found.get("rope_type", given.get("type"))
    if kind is not None:
        found["rope_type"] = _SCALING_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and "__float__" not in value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# --- the comparison


@dataclass(frozen=True, slots=True)
class Difference:
    """`theirs`: the source's value as JSON text; `ours`: the engine's. None: it has none, and no default is known."""

    key: str
    theirs: str | None
    ours: str | None

    @property
    def one_sided(self) -> bool:
        return self.theirs is None or self.ours is None


def warns(key: str) -> bool:
    """Whether a difference in this key refuses nothing."""
    return any(fnmatchcase(key.removeprefix("outer."), pattern) for pattern in WARNED)


def differences(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    their_defaults: Mapping[str, Any] | None = None,
    our_defaults: Mapping[str, Any] | None = None,
) -> list[Difference]:
    """Every key in which two configs differ, sorted. `..._defaults`: the same config as the engine's own class
    completes it; what it does not know either, and the other one says as null, is no difference.
    """
    left, right = _Side(theirs, their_defaults), _Side(ours, our_defaults)
    found = []
    for key in sorted(left.keys | right.keys):
        mine, other = left.value(key), right.value(key)
        if mine != other and not (mine in (None, "null") and other in (None, "null")):
            found.append(Difference(key, mine, other))
    return found


class _Side:
    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> None:
        self._own = view(config)
        self._defaults = view(defaults) if defaults else {}
        self.keys = frozenset(self._own)

    def value(self, key: str) -> str | None:
        """As JSON text. A null is what the class makes of it."""
        value = self._own.get(key)
        if value is None:
            value = self._defaults.get(key)
        if value is None and key not in self._own and key not in self._defaults:
            return None
        return text_of(value)
