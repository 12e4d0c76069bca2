"""The sharded forward pass of a toy engine: fused, vocabulary-parallel, tensor- or expert-parallel, float64 inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from engine_adapter.base import Derived, EngineSpec
from engine_adapter.groups import broadcast_bytes, join_group
from engine_adapter.testing.toy.config import RankShape, ToyConfig, ToyOptions

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class KeyValues:
    """Of one sequence, per layer: [tokens, kv_heads of this rank, head_dim], float64."""

    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.layers[0][0].shape[0] if self.layers else 0


class ToyModel:
    """`parameters` holds what the forward pass reads: replacing an entry is all that rebinding takes.

    Activations are float64, so that shards and batch shapes change a logit by about 1e-14 and argmax is exact.
    """

    def __init__(
        self,
        config: ToyConfig,
        options: ToyOptions,
        ranks: ToyRanks,
        parameters: dict[str, torch.Tensor],
    ) -> None:
        self.config, self.options, self.parameters = config, options, parameters
        self._ranks = ranks
        if config.fp8 and options.interleaved:
            raise ValueError("float8 scales of interleaved gate and up rows are not supported")
        self._shape = RankShape.of(config, options, ranks.size)
        self._packed: dict[str, torch.Tensor] = {}
        self.buffers = self.fresh_buffers()
        for each in self.derived():
            each.bind(each.build({name: parameters[name] for name in each.feeds}))

    def fresh_buffers(self) -> dict[str, torch.Tensor]:
        """Tensors outside the parameter list that no checkpoint holds: rotary speeds and the fixed picture."""
        c, half = self.config, self.config.head_dim // 2
        steps = torch.arange(half, dtype=torch.float64) * 2 / c.head_dim
        return {
            "rotary_speeds": c.rope_theta**-steps,
            "picture": torch.linspace(-1.0, 1.0, c.hidden_size, dtype=torch.float64),
        }

    # ----- derived tensors

    def derived(self) -> tuple[Derived, ...]:
        """What is computed from the parameters; a state maps entries of `_packed` to tensors."""
        made: list[Derived] = []
        if self.options.head32:
            made.append(self._derived("head32", (self._head_name(),), _single_precision))
        if self.options.kernel == "packed":
            made.append(self._derived("packed_down", tuple(filter(_is_down, self.parameters)), _packed))
        return tuple(made)

    def _derived(self, name: str, feeds: tuple[str, ...], build: Callable[[Tensors], Tensors]) -> Derived:
        def bind(state: object) -> None:
            self._packed.update(cast(Tensors, state))

        return Derived(name, feeds, build, bind, lambda: dict(self._packed))

    def _head_name(self) -> str:
        return "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"

    # ----- the pass

    def forward(self, batch: Sequence[tuple[Sequence[int], KeyValues]]) -> torch.Tensor:
        """New tokens of several sequences after the keys and values that they have; extends those.

        Returns the logits of each sequence's last position, [sequences, vocab_size], float64.
        """
        counts = [len(tokens) for tokens, _ in batch]
        x = self._embed([token for tokens, _ in batch for token in tokens])
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}."
            attended = self._attention(f"{at}self_attn.", layer, self._normed(x, f"{at}input_layernorm"), batch, counts)
            x = x + self._ranks.sum(attended)
            inner = self._normed(x, f"{at}post_attention_layernorm")
            x = x + self._ranks.sum(self._mlp(f"{at}mlp.", inner))
        last = torch.tensor(counts).cumsum(0) - 1
        return self._logits(self._normed(x[last], "model.norm"))

    def _double(self, name: str) -> torch.Tensor:
        return self.parameters[name].double()

    def _linear(self, x: torch.Tensor, name: str, scales: Sequence[tuple[str, int]] = ()) -> torch.Tensor:
        """`scales`: of a fused weight, each scale's name and how many rows it covers; else `weight_scale`."""
        out = x @ self._double(f"{name}.weight").T
        if not self.config.fp8:
            return out
        scales = scales or (("weight_scale", out.shape[-1]),)
        return out * torch.cat([self._double(f"{name}.{scale}").expand(rows) for scale, rows in scales])

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._unit(x) * self._double(f"{name}.weight")

    def _embed(self, tokens: list[int]) -> torch.Tensor:
        """Each rank looks up the rows that it holds; the sum over ranks is the embedding."""
        local = torch.tensor(tokens) - self._ranks.rank * self._shape.vocab
        here = (local >= 0) & (local < self._shape.vocab)
        rows = self._double("model.embed_tokens.weight")[local.clamp(0, self._shape.vocab - 1)]
        x = self._ranks.sum(torch.where(here[:, None], rows, 0.0))
        if self.config.wrapper != "none":
            seen = self._double("visual.patch_embed.proj.weight") @ self.buffers["picture"]
            x = x + self._normed(seen, "visual.merger.norm")
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Over the whole vocabulary; the padding is cut off."""
        head = self._packed["head32"].double() if self.options.head32 else self._double(self._head_name())
        return self._ranks.gather(x @ head.T)[:, : self.config.vocab_size]

    def _attention(
        self,
        at: str,
        layer: int,
        x: torch.Tensor,
        batch: Sequence[tuple[Sequence[int], KeyValues]],
        counts: list[int],
    ) -> torch.Tensor:
        s, dim = self._shape, self.config.head_dim
        widths = [s.heads * dim, s.kv_heads * dim, s.kv_heads * dim]
        scales = list(zip(("q_scale", "k_scale", "v_scale"), widths, strict=True))
        fused = self._linear(x, f"{at}qkv_proj", scales)
        q, k, v = (torch.unflatten(part, -1, (-1, dim)) for part in torch.split(fused, widths, -1))
        if self.config.qk_norm == "per_head":
            q = self._unit(q) * self._double(f"{at}q_norm.weight").view(-1, dim)
            k = self._unit(k) * self._double(f"{at}k_norm.weight").view(-1, dim)
        outs = []
        parts = zip(*(torch.split(part, counts) for part in (q, k, v)), batch, strict=True)
        for new_q, new_k, new_v, (_, past) in parts:
            outs.append(self._attend(new_q, new_k, new_v, past, layer))
        return self._linear(torch.cat(outs).flatten(1), f"{at}o_proj")

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: KeyValues, layer: int) -> torch.Tensor:
        """Causal attention of one sequence's new tokens. [new, heads, head_dim] in and out."""
        old = past.layers[layer] if layer < len(past.layers) else (k[:0], v[:0])
        start = old[0].shape[0]
        keys, values = torch.cat([old[0], self._rotate(k, start)]), torch.cat([old[1], v])
        past.layers[layer : layer + 1] = [(keys, values)]
        repeat = self._shape.heads // self._shape.kv_heads
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", self._rotate(q, start), keys) * self.config.head_dim**-0.5
        ahead = torch.arange(keys.shape[0])[None, :] > torch.arange(start, keys.shape[0])[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), values)

    def _rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        angle = torch.arange(start, start + x.shape[0], dtype=torch.float64)[:, None] * self.buffers["rotary_speeds"]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    # ----- feed forward

    def _mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        if self.config.experts:
            return self._mixture(at, x)
        width = self._shape.intermediate
        hidden = self._gated(self._linear(x, f"{at}gate_up_proj", [("gate_scale", width), ("up_scale", width)]))
        scale = self.parameters.get(f"{at}down_proj.weight_scale")
        out = hidden @ self._down(f"{at}down_proj.weight")
        return out if scale is None else out * scale.double()

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        if self.options.interleaved:
            gate, up = both[..., 0::2], both[..., 1::2]
        else:
            gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def _down(self, name: str) -> torch.Tensor:
        """[..., inner, hidden], from whatever layout the kernel option stores."""
        if self.options.kernel == "packed":
            return self._packed[name]
        weight = self._double(name)
        if self.options.kernel == "swap":
            weight = weight.roll(weight.shape[-2] // 2, -2)
        return weight.transpose(-1, -2)

    def _mixture(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """Every rank routes alike and adds what its experts, or its slices of all experts, contribute."""
        score = (x @ self._double(f"{at}gate.weight").T).sigmoid()
        bias = self._double(f"{at}gate.e_score_correction_bias")
        _, chosen = (score + bias).topk(self.config.experts_per_token, -1)
        weights = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        w13, down = self._double(f"{at}experts.w13_weight"), self._down(f"{at}experts.w2_weight")
        first = self._ranks.rank * self._shape.experts if self.options.expert_parallel else 0
        out = torch.zeros_like(x)
        for local in range(self._shape.experts):
            hidden = self._gated(x @ w13[local].T)
            out += weights[:, first + local, None] * (hidden @ down[local])
        return out


def _single_precision(tensors: Tensors) -> Tensors:
    """A float32 copy of the head."""
    (head,) = tensors.values()
    return {"head32": head.to(torch.float32, copy=True)}


def _packed(tensors: Tensors) -> Tensors:
    """Down projections as the packed kernel reads them: [..., inner, hidden], float64."""
    return {name: tensor.double().transpose(-1, -2).contiguous() for name, tensor in tensors.items()}


def _is_down(name: str) -> bool:
    return name.endswith(("down_proj.weight", "w2_weight"))


class ToyRanks:
    """The collectives of one replica. With one rank nothing is started and every call is the identity."""

    def __init__(self, spec: EngineSpec, timeout_s: float) -> None:
        self.rank, self.size = spec.rank, spec.size
        if spec.size > 1:
            join_group(spec, timeout_s)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenated along the last dimension in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def schedule(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's message, on every rank; the others pass None. JSON only: nothing is unpickled (I10)."""
        if self.size == 1:
            if message is None:
                raise ValueError("rank 0 has to give the schedule")
            return message
        payload = json.dumps(message).encode() if self.rank == 0 else None
        parsed: dict[str, Any] = json.loads(broadcast_bytes(payload))
        return parsed

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
