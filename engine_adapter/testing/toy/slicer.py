"""An independent slicer: what each rank of a toy engine must hold, by plain indexing of the checkpoint.

It shares no code with `engine_adapter.placement` on purpose: it is the oracle that placements are compared with, and
the loader with which a toy engine starts, so that the replay at the join compares two independent derivations.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine_adapter.testing.toy.checkpoint import text_prefix
from engine_adapter.testing.toy.config import RankShape, ToyConfig, ToyOptions
from transports.digest import tensor_digest, to_hex


def load_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a toy checkpoint, whatever its shards."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def expected_parameters(
    folder: str | Path, rank: int, size: int, options: ToyOptions | None = None
) -> dict[str, torch.Tensor]:
    """Parameter name -> the tensor that `rank` of `size` holds after loading `folder`.

    Raises KeyError for a missing tensor and `Rejected` where the sizes do not divide.
    """
    config = ToyConfig.load(folder)
    return slice_tensors(load_tensors(folder), config, rank, size, options or ToyOptions())


def expected_digests(folder: str | Path, rank: int, size: int, options: ToyOptions | None = None) -> dict[str, str]:
    """Parameter name -> parameter digest (16 hex digits) of what `expected_parameters` gives."""
    expected = expected_parameters(folder, rank, size, options)
    return {name: to_hex(tensor_digest(tensor)) for name, tensor in expected.items()}


def slice_tensors(
    tensors: dict[str, torch.Tensor], config: ToyConfig, rank: int, size: int, options: ToyOptions
) -> dict[str, torch.Tensor]:
    """The same from tensors that are already loaded."""
    return _Slicer(tensors, config, rank, size, options).all()


def take(tensor: torch.Tensor, dim: int, indices: Iterable[int]) -> torch.Tensor:
    """Index along one dimension, through integers so that every dtype can."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    wanted = torch.tensor(list(indices), dtype=torch.int64)
    return tensor.view(whole).index_select(dim, wanted).view(tensor.dtype)


class _Slicer:
    def __init__(
        self, tensors: dict[str, torch.Tensor], config: ToyConfig, rank: int, size: int, options: ToyOptions
    ) -> None:
        self._source, self._config, self._options = tensors, config, options
        self._rank, self._size = rank, size
        self._shape = RankShape.of(config, options, size)
        self._out: dict[str, torch.Tensor] = {}

    def all(self) -> dict[str, torch.Tensor]:
        c, prefix = self._config, text_prefix(self._config)
        self._out["model.embed_tokens.weight"] = self._vocab(self._source[f"{prefix}embed_tokens.weight"])
        for layer in range(c.num_hidden_layers):
            self._layer(f"{prefix}layers.{layer}.", f"model.layers.{layer}.")
        self._out["model.norm.weight"] = self._source[f"{prefix}norm.weight"]
        if not c.tie_word_embeddings:
            head = "language_model.lm_head.weight" if c.wrapper == "old" else "lm_head.weight"
            self._out["lm_head.weight"] = self._vocab(self._source[head])
        if c.wrapper != "none":
            tower = "model.visual." if c.wrapper == "new" else "visual."
            for name in ("patch_embed.proj.weight", "merger.norm.weight"):
                self._out[f"visual.{name}"] = self._source[tower + name]
        return {name: tensor.contiguous().clone() for name, tensor in self._out.items()}

    def _vocab(self, table: torch.Tensor) -> torch.Tensor:
        rows = []
        for local in range(self._shape.vocab):
            row = self._rank * self._shape.vocab + local
            rows.append(table[row] if row < self._config.vocab_size else torch.zeros_like(table[0]))
        return torch.stack(rows)

    def _layer(self, source: str, target: str) -> None:
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            self._out[target + norm] = self._source[source + norm]
        self._attention(f"{source}self_attn.", f"{target}self_attn.")
        if not self._config.experts:
            self._dense(f"{source}mlp.", f"{target}mlp.")
            return
        self._out[f"{target}mlp.gate.weight"] = self._source[f"{source}mlp.gate.weight"]
        bias = "mlp.gate.e_score_correction_bias"
        self._out[target + bias] = self._source[source + bias]
        self._experts(f"{source}mlp.experts.", f"{target}mlp.experts.")

    def _attention(self, source: str, target: str) -> None:
        c, shape = self._config, self._shape
        head_rows = list(range(c.head_dim))
        query = [self._rank * shape.heads + h for h in range(shape.heads)]
        if c.num_key_value_heads >= self._size:
            kv = [self._rank * shape.kv_heads + h for h in range(shape.kv_heads)]
        else:
            kv = [self._rank * c.num_key_value_heads // self._size]
        q_rows = [head * c.head_dim + row for head in query for row in head_rows]
        kv_rows = [head * c.head_dim + row for head in kv for row in head_rows]
        parts = [
            take(self._source[f"{source}{name}_proj.weight"], 0, rows)
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        ]
        self._out[f"{target}qkv_proj.weight"] = _joined(parts)
        self._out[f"{target}o_proj.weight"] = take(self._source[f"{source}o_proj.weight"], 1, q_rows)
        if c.qk_norm == "per_head":
            self._out[f"{target}q_norm.weight"] = take(self._source[f"{source}q_norm.weight"], 0, q_rows)
            self._out[f"{target}k_norm.weight"] = take(self._source[f"{source}k_norm.weight"], 0, kv_rows)
        if c.fp8:
            for name in "qkv":
                self._out[f"{target}qkv_proj.{name}_scale"] = self._source[f"{source}{name}_proj.weight_scale"]
            self._out[f"{target}o_proj.weight_scale"] = self._source[f"{source}o_proj.weight_scale"]

    def _dense(self, source: str, target: str) -> None:
        width = self._shape.intermediate
        inner = range(self._rank * width, (self._rank + 1) * width)
        gate, up = (take(self._source[f"{source}{name}_proj.weight"], 0, inner) for name in ("gate", "up"))
        self._out[f"{target}gate_up_proj.weight"] = self._fused(gate, up)
        self._out[f"{target}down_proj.weight"] = self._kernel(take(self._source[f"{source}down_proj.weight"], 1, inner))
        if self._config.fp8:
            for name in ("gate", "up"):
                self._out[f"{target}gate_up_proj.{name}_scale"] = self._source[f"{source}{name}_proj.weight_scale"]
            self._out[f"{target}down_proj.weight_scale"] = self._source[f"{source}down_proj.weight_scale"]

    def _experts(self, source: str, target: str) -> None:
        shape, part = self._shape, self._options.expert_parallel
        first = self._rank * shape.experts if part else 0
        start = 0 if part else self._rank * shape.expert_intermediate
        inner = range(start, start + shape.expert_intermediate)
        gate_up, down = [], []
        for expert in range(first, first + shape.experts):
            gate, up, out = self._expert(source, expert)
            gate_up.append(self._fused(take(gate, 0, inner), take(up, 0, inner)))
            down.append(self._kernel(take(out, 1, inner)))
        self._out[f"{target}w13_weight"] = _stacked(gate_up)
        self._out[f"{target}w2_weight"] = _stacked(down)

    def _expert(self, source: str, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._config.fused_experts:
            both = self._source[f"{source}gate_up_proj"][expert]
            middle = self._config.expert_intermediate
            return both[:middle], both[middle:], self._source[f"{source}down_proj"][expert]
        gate, up, down = (self._source[f"{source}{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return gate, up, down

    def _fused(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Gate rows then up rows, or gate 0, up 0, gate 1, up 1 and so on."""
        both, count = _joined([gate, up]), gate.shape[0]
        if not self._options.interleaved:
            return both
        return take(both, 0, [row for pair in range(count) for row in (pair, count + pair)])

    def _kernel(self, down: torch.Tensor) -> torch.Tensor:
        """The stored layout of a down projection: halves of its output rows swapped under `kernel=swap`."""
        if self._options.kernel != "swap":
            return down
        half = down.shape[0] // 2
        return take(down, 0, [*range(half, down.shape[0]), *range(half)])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows, through bytes so that float8 can."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)
