"""Plain unsharded generation from a toy checkpoint: no shards, no fused weights, no cache, float64.

Written apart from `model.py`: what an engine answers is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_adapter.testing.toy.checkpoint import text_prefix
from engine_adapter.testing.toy.config import ToyConfig
from engine_adapter.testing.toy.slicer import load_tensors

#: Two logits closer than this could change places between two ways to add the same numbers.
MARGIN = 1e-6


class NarrowMargin(ValueError):
    """The two best tokens are too close for an exact comparison: take another prompt or seed."""


@dataclass(frozen=True, slots=True)
class ToyReference:
    """A loaded checkpoint. Load once, generate often."""

    config: ToyConfig
    weights: dict[str, torch.Tensor]

    @classmethod
    def load(cls, folder: str | Path) -> ToyReference:
        return cls(ToyConfig.load(folder), load_tensors(folder))

    def generate(self, prompt: Sequence[int], tokens: int, *, stop: Sequence[int] = ()) -> tuple[int, ...]:
        """Greedy, up to `tokens` new tokens; ends after one of `stop`. Raises NarrowMargin."""
        made: list[int] = []
        while len(made) < tokens and not (made and made[-1] in stop):
            made.append(self._best([*prompt, *made]))
        return tuple(made)

    def _best(self, tokens: Sequence[int]) -> int:
        best = self.logits(tokens).topk(2)
        if float(best.values[0] - best.values[1]) < MARGIN:
            raise NarrowMargin(f"after {len(tokens)} tokens")
        return int(best.indices[0])

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the last position, [vocab_size], float64."""
        c, at = self.config, text_prefix(self.config)
        x = self._weight(f"{at}embed_tokens")[torch.tensor(list(tokens))]
        if c.wrapper != "none":
            x = x + self._picture()
        for layer in range(c.num_hidden_layers):
            x = x + self._attention(f"{at}layers.{layer}.", self._normed(x, f"{at}layers.{layer}.input_layernorm"))
            inner = self._normed(x, f"{at}layers.{layer}.post_attention_layernorm")
            x = x + self._mlp(f"{at}layers.{layer}.mlp.", inner)
        head = "language_model.lm_head" if c.wrapper == "old" else "lm_head"
        return self._weight(f"{at}embed_tokens" if c.tie_word_embeddings else head) @ self._normed(x[-1], f"{at}norm")

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"].double()
        scale = self.weights.get(f"{name}.weight_scale")
        return weight if scale is None else weight * scale.double()

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._unit(x) * self._weight(name)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()

    def _picture(self) -> torch.Tensor:
        """The wrapper's tower applied to one fixed picture: added to every position."""
        tower = "model.visual." if self.config.wrapper == "new" else "visual."
        patch = torch.linspace(-1.0, 1.0, self.config.hidden_size, dtype=torch.float64)
        return self._normed(self._weight(f"{tower}patch_embed.proj") @ patch, f"{tower}merger.norm")

    def _attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        c, count = self.config, x.shape[0]
        heads = []
        queries = x @ self._weight(f"{at}self_attn.q_proj").T
        keys = x @ self._weight(f"{at}self_attn.k_proj").T
        values = x @ self._weight(f"{at}self_attn.v_proj").T
        mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)
        for head in range(c.num_attention_heads):
            group = head * c.num_key_value_heads // c.num_attention_heads
            q = self._rotated(self._head(queries, head, f"{at}self_attn.q_norm"))
            k = self._rotated(self._head(keys, group, f"{at}self_attn.k_norm"))
            v = values[:, group * c.head_dim : (group + 1) * c.head_dim]
            heads.append(torch.softmax(q @ k.T / c.head_dim**0.5 + mask, -1) @ v)
        return torch.cat(heads, -1) @ self._weight(f"{at}self_attn.o_proj").T

    def _head(self, x: torch.Tensor, head: int, norm: str) -> torch.Tensor:
        cut = slice(head * self.config.head_dim, (head + 1) * self.config.head_dim)
        part = x[:, cut]
        return self._unit(part) * self._weight(norm)[cut] if self.config.qk_norm == "per_head" else part

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding: pairs (i, i + half) turned by position / theta^(2i / head_dim)."""
        half = self.config.head_dim // 2
        speeds = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / self.config.head_dim)
        angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * speeds
        pair = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    def _mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        if not self.config.experts:
            gate, up, down = (self._weight(f"{at}{name}_proj") for name in ("gate", "up", "down"))
            return _gated(x, gate, up, down)
        return torch.stack([self._mixture(at, row) for row in x])

    def _mixture(self, at: str, row: torch.Tensor) -> torch.Tensor:
        """Top experts by sigmoid score plus bias, weighted by the scores alone, made to sum to one."""
        scores = torch.sigmoid(self._weight(f"{at}gate") @ row)
        chosen = (scores + self.weights[f"{at}gate.e_score_correction_bias"].double()).topk(
            self.config.experts_per_token
        )
        total = sum(float(scores[expert]) for expert in chosen.indices)
        out = torch.zeros_like(row)
        for expert in chosen.indices.tolist():
            out += scores[expert] / total * _gated(row, *self._expert(f"{at}experts.", expert))
        return out

    def _expert(self, at: str, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.config.fused_experts:
            both = self.weights[f"{at}gate_up_proj"][expert].double()
            gate, up = both.chunk(2)
            return gate, up, self.weights[f"{at}down_proj"][expert].double()
        gate, up, down = (self._weight(f"{at}{expert}.{name}_proj") for name in ("gate", "up", "down"))
        return gate, up, down


def _gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = x @ gate.T
    return (hidden * torch.sigmoid(hidden) * (x @ up.T)) @ down.T


def reference_generate(
    folder: str | Path, prompt: Sequence[int], tokens: int, *, stop: Sequence[int] = ()
) -> tuple[int, ...]:
    """What a toy engine on `folder` must answer, greedily: up to `tokens` new token ids.

    Raises NarrowMargin where the comparison would not be safe.
    """
    return ToyReference.load(folder).generate(prompt, tokens, stop=stop)
