"""Declared rules of the model families, for ranks without DTensors: names and cuts of Llama, Qwen and Mixtral shapes.

At size 1 every cut is the whole. At larger sizes the DTensors say the same (a test compares them), so the rules name
the cuts too. A family that is not listed is taken as it is: checkpoint names are parameter names, nothing is cut;
the replay at join proves it or refuses.
"""

from __future__ import annotations

from typing import Any

from engine_adapter.placement.declared.layouts import Experts, Heads, Layout, Merged, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules

DENSE = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def rules_of(config: Any) -> Rules:
    """Rules for a transformers config."""
    if config.model_type == "mixtral":
        return _mixtral(config)
    if config.model_type in DENSE:
        return Rules(layouts=(*_attention(config), *_mlp(), *_ends(config)))
    return Rules()


def _attention(config: Any) -> tuple[tuple[str, Layout], ...]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (
        ("*.self_attn.q_proj.*", Heads(heads, size)),
        ("*.self_attn.k_proj.*", Heads(kv_heads, size)),
        ("*.self_attn.v_proj.*", Heads(kv_heads, size)),
        ("*.self_attn.o_proj.weight", Sharded(1)),
    )


def _mlp() -> tuple[tuple[str, Layout], ...]:
    return (
        ("*.mlp.gate_proj.*", Sharded(0)),
        ("*.mlp.up_proj.*", Sharded(0)),
        ("*.mlp.down_proj.weight", Sharded(1)),
    )


def _ends(config: Any) -> tuple[tuple[str, Layout], ...]:
    """The library shards the head by rows, and the embedding only where it is tied to the head."""
    head = (("lm_head.*", Sharded(0)),)
    return (*head, ("*.embed_tokens.weight", Sharded(0))) if config.tie_word_embeddings else head


def _mixtral(config: Any) -> Rules:
    """The library stacks the experts of a layer: [experts, 2 * intermediate, hidden] and [experts, hidden,
    intermediate]; checkpoints hold them one by one (w1 gate, w3 up, w2 down) or already stacked."""
    count = config.num_local_experts
    names = NameRules(
        substring=((".block_sparse_moe.", ".mlp."),),
        stacked=(
            Stacked(".experts.{e}.w1.weight", ".experts.gate_up_proj", "gate"),
            Stacked(".experts.{e}.w3.weight", ".experts.gate_up_proj", "up"),
            Stacked(".experts.{e}.w2.weight", ".experts.down_proj"),
        ),
    )
    experts: tuple[tuple[str, Layout], ...] = (
        ("*.mlp.experts.gate_up_proj", Experts(count, Merged(("gate", "up")))),
        ("*.mlp.experts.down_proj", Experts(count, Sharded(1))),
    )
    tested = tuple(glob for glob, _ in experts)
    return Rules(names=names, layouts=(*experts, *_attention(config), *_ends(config)), tested=tested)
