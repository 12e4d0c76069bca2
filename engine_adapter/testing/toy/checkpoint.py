"""Checkpoints of toy models, named as Hugging Face names them, with values that differ between seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine_adapter.model_files import write_shards
from engine_adapter.testing.toy.config import ToyConfig, fixture_config

_NEW, _OLD, _PLAIN = "model.language_model.", "language_model.model.", "model."


def make_toy_checkpoint(
    folder: str | Path, fixture: str = "M0", seed: int = 7, shards: int = 1, **changes: Any
) -> Path:
    """Write a checkpoint into `folder` (made if needed) and return its path.

    `fixture`: a key of `config.FIXTURES`; `changes`: fields of `ToyConfig` to change. With `shards` > 1 an index is
    written too. Two seeds of different parity differ in *every* element: the seed's lowest bit is the lowest bit of
    each value.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = fixture_config(fixture, **changes)
    config.save(folder)
    write_shards(folder, toy_tensors(config, seed), shards)
    return folder


def text_prefix(config: ToyConfig) -> str:
    return {"none": _PLAIN, "new": _NEW, "old": _OLD}[config.wrapper]


def toy_tensors(config: ToyConfig, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of one checkpoint. Weights bfloat16 (M4: float8 with float32 scales), router bias float32."""
    return _Maker(config, seed).all()


class _Maker:
    def __init__(self, config: ToyConfig, seed: int) -> None:
        self._config = config
        self._parity = seed & 1
        self._random = torch.Generator().manual_seed(seed)
        self._made: dict[str, torch.Tensor] = {}

    def all(self) -> dict[str, torch.Tensor]:
        c, prefix = self._config, text_prefix(self._config)
        self._weight(f"{prefix}embed_tokens.weight", (c.vocab_size, c.hidden_size), 1.0)
        for layer in range(c.num_hidden_layers):
            self._layer(f"{prefix}layers.{layer}.")
        self._norm(f"{prefix}norm.weight", c.hidden_size)
        if not c.tie_word_embeddings:
            head = "language_model.lm_head.weight" if c.wrapper == "old" else "lm_head.weight"
            self._weight(head, (c.vocab_size, c.hidden_size), 1.0)
        if c.wrapper != "none":
            tower = "model.visual." if c.wrapper == "new" else "visual."
            self._weight(f"{tower}patch_embed.proj.weight", (c.hidden_size, c.hidden_size), 0.3)
            self._norm(f"{tower}merger.norm.weight", c.hidden_size)
        return self._made

    def _layer(self, at: str) -> None:
        c = self._config
        self._norm(f"{at}input_layernorm.weight", c.hidden_size)
        self._linear(f"{at}self_attn.q_proj", (c.num_attention_heads * c.head_dim, c.hidden_size))
        self._linear(f"{at}self_attn.k_proj", (c.num_key_value_heads * c.head_dim, c.hidden_size))
        self._linear(f"{at}self_attn.v_proj", (c.num_key_value_heads * c.head_dim, c.hidden_size))
        self._linear(f"{at}self_attn.o_proj", (c.hidden_size, c.num_attention_heads * c.head_dim))
        if c.qk_norm == "per_head":
            self._norm(f"{at}self_attn.q_norm.weight", c.num_attention_heads * c.head_dim)
            self._norm(f"{at}self_attn.k_norm.weight", c.num_key_value_heads * c.head_dim)
        self._norm(f"{at}post_attention_layernorm.weight", c.hidden_size)
        if not c.experts:
            self._gated(f"{at}mlp.", c.intermediate_size)
            return
        self._weight(f"{at}mlp.gate.weight", (c.experts, c.hidden_size), 1.0)
        self._store(f"{at}mlp.gate.e_score_correction_bias", self._draw((c.experts,), 0.3).float())
        if c.fused_experts:
            inner = c.expert_intermediate
            self._weight(f"{at}mlp.experts.gate_up_proj", (c.experts, 2 * inner, c.hidden_size), c.hidden_size**-0.5)
            self._weight(f"{at}mlp.experts.down_proj", (c.experts, c.hidden_size, inner), inner**-0.5)
            return
        for expert in range(c.experts):
            self._gated(f"{at}mlp.experts.{expert}.", c.expert_intermediate)

    def _gated(self, at: str, inner: int) -> None:
        hidden = self._config.hidden_size
        self._linear(f"{at}gate_proj", (inner, hidden))
        self._linear(f"{at}up_proj", (inner, hidden))
        self._linear(f"{at}down_proj", (hidden, inner))

    def _linear(self, name: str, shape: tuple[int, int]) -> None:
        std = 2.5 * shape[1] ** -0.5
        if not (self._config.fp8 and "experts" not in name):
            self._weight(f"{name}.weight", shape, std)
            return
        exact = self._draw(shape, std)
        scale = exact.abs().max() / 240.0
        self._store(f"{name}.weight", (exact / scale).to(torch.float8_e4m3fn))
        self._store(f"{name}.weight_scale", scale.float())

    def _weight(self, name: str, shape: tuple[int, ...], std: float) -> None:
        self._store(name, self._draw(shape, std).to(torch.bfloat16))

    def _norm(self, name: str, size: int) -> None:
        self._store(name, (1.0 + self._draw((size,), 0.2)).to(torch.bfloat16))

    def _draw(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64) * std

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        bits = tensor.contiguous().view(whole)
        self._made[name] = ((bits & ~1) | self._parity).view(tensor.dtype)
