"""Names of megatron core and what they become, as data.

Megatron's names may hold `{layer}` (numbered over all stages), `{expert}` (within the rank; the checkpoint's number
counts over all ranks) and `{part}` (weight or bias). To support another model, put rules of yours before these:

    rules = (Rule("decoder.layers.{layer}.my_gate.weight", "whole", "model.layers.{layer}.my_gate.weight"), *LLAMA)
    MegatronSource(model, naming=rules)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from trainer_side.megatron.layouts import LAYOUTS
from updater.core.errors import refuse

_FIELDS = {"layer": r"\d+", "expert": r"\d+", "part": "weight|bias"}
#: State that layers add beside their weights.
IGNORED = ("*._extra_state",)


@dataclass(frozen=True)
class Rule:
    """`layout`: a name of `layouts.LAYOUTS`. `targets`: names in the order in which the layout yields them."""

    pattern: str
    layout: str
    targets: tuple[str, ...]
    matcher: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __init__(self, pattern: str, layout: str, *targets: str) -> None:
        if layout not in LAYOUTS:
            raise refuse("bad_request", f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
        text = re.escape(pattern)
        for name, form in _FIELDS.items():
            text = text.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{form})")
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "matcher", re.compile(text))

    @property
    def of_experts(self) -> bool:
        """Cut over the expert ranks and their own tensor parallelism, instead of the model's."""
        return "{expert}" in "".join(self.targets)


@dataclass(frozen=True, slots=True)
class Match:
    rule: Rule
    fields: Mapping[str, str]

    @property
    def local_expert(self) -> int:
        return int(self.fields.get("expert", 0))

    @property
    def layer(self) -> int | None:
        return int(self.fields["layer"]) if "layer" in self.fields else None

    def target(self, number: int, expert: int) -> str:
        """`expert`: over all ranks."""
        return self.rule.targets[number].format(**{**self.fields, "expert": expert})


def find(name: str, rules: Sequence[Rule]) -> Match | None:
    """The first rule decides."""
    for rule in rules:
        if matched := rule.matcher.fullmatch(name):
            return Match(rule, matched.groupdict())
    return None


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _mlp(local: str, target: str, names: tuple[str, str, str], part: str = "{part}") -> tuple[Rule, ...]:
    """A gated MLP: fc1 is gate and up, fc2 is down; `names` in the order gate, up, down."""
    gate, up, down = (f"{target}{name}.{part}" for name in names)
    rules = [Rule(f"{local}linear_fc1.{part}", "gate_up", gate, up)]
    rules += [Rule(f"{local}linear_fc2.weight", "columns", down.replace("{part}", "weight"))]
    if part == "{part}":
        rules += [Rule(f"{local}linear_fc2.bias", "whole", down.replace("{part}", "bias"))]
    return tuple(rules)


def _experts(target: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Expert by expert (SequentialMLP), numbered (Transformer Engine), or all of a rank in one tensor (GroupedMLP)."""
    experts = f"{_LAYER}mlp.experts."
    gate, up, down = (f"{target}{{expert}}.{name}.weight" for name in names)
    return (
        *_mlp(f"{experts}local_experts.{{expert}}.", f"{target}{{expert}}.", names, "weight"),
        Rule(f"{experts}linear_fc1.weight{{expert}}", "gate_up", gate, up),
        Rule(f"{experts}linear_fc2.weight{{expert}}", "columns", down),
        Rule(f"{experts}weight1", "grouped_fc1", gate, up),
        Rule(f"{experts}weight2", "grouped_fc2", down),
    )


_ENDS = (
    Rule("embedding.word_embeddings.weight", "vocabulary", _EMBEDDING),
    Rule("decoder.final_layernorm.{part}", "whole", "model.norm.{part}"),
    Rule("output_layer.weight", "vocabulary", _HEAD),
)
_ATTENTION = (
    Rule(f"{_LAYER}input_layernorm.{{part}}", "whole", f"{_HF}input_layernorm.{{part}}"),
    Rule(f"{_LAYER}self_attention.linear_qkv.layer_norm_{{part}}", "whole", f"{_HF}input_layernorm.{{part}}"),
    Rule(
        f"{_LAYER}self_attention.linear_qkv.{{part}}",
        "query_key_value",
        *(f"{_HF}self_attn.{name}_proj.{{part}}" for name in "qkv"),
    ),
    Rule(f"{_LAYER}self_attention.linear_proj.weight", "columns", f"{_HF}self_attn.o_proj.weight"),
    Rule(f"{_LAYER}self_attention.linear_proj.bias", "whole", f"{_HF}self_attn.o_proj.bias"),
    Rule(f"{_LAYER}self_attention.q_layernorm.{{part}}", "whole", f"{_HF}self_attn.q_norm.{{part}}"),
    Rule(f"{_LAYER}self_attention.k_layernorm.{{part}}", "whole", f"{_HF}self_attn.k_norm.{{part}}"),
    Rule(f"{_LAYER}pre_mlp_layernorm.{{part}}", "whole", f"{_HF}post_attention_layernorm.{{part}}"),
    Rule(f"{_LAYER}mlp.linear_fc1.layer_norm_{{part}}", "whole", f"{_HF}post_attention_layernorm.{{part}}"),
)
_NAMES = ("gate_proj", "up_proj", "down_proj")

LLAMA = (*_ENDS, *_ATTENTION, *_mlp(f"{_LAYER}mlp.", f"{_HF}mlp.", _NAMES))
MIXTRAL = (
    *_ENDS,
    *_ATTENTION,
    Rule(f"{_LAYER}mlp.router.weight", "whole", f"{_HF}block_sparse_moe.gate.weight"),
    *_experts(f"{_HF}block_sparse_moe.experts.", ("w1", "w3", "w2")),
)
QWEN_MOE = (
    *LLAMA,  # some of its layers may be dense
    Rule(f"{_LAYER}mlp.router.weight", "whole", f"{_HF}mlp.gate.weight"),
    *_experts(f"{_HF}mlp.experts.", _NAMES),
    *_mlp(f"{_LAYER}mlp.shared_experts.", f"{_HF}mlp.shared_expert.", _NAMES, "weight"),
    Rule(f"{_LAYER}mlp.shared_experts.gate_weight", "whole", f"{_HF}mlp.shared_expert_gate.weight"),
)

#: The names of model families. Mistral, Qwen2 and Qwen3 have Llama's; Qwen2-MoE and Qwen3-MoE share theirs.
NAMINGS: Mapping[str, tuple[Rule, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
}
#: (alias, canonical) where the output layer is the embedding.
TIE = (_HEAD, _EMBEDDING)


def rules_of(naming: str | Sequence[Rule]) -> tuple[Rule, ...]:
    if not isinstance(naming, str):
        return tuple(naming)
    if naming not in NAMINGS:
        raise refuse("bad_request", f"naming {naming!r} is not one of {', '.join(NAMINGS)}")
    return NAMINGS[naming]
