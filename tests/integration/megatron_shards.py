"""What each rank of a Megatron-core model holds of a Hugging Face checkpoint: plain slicing, for the tests alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


class Slicer:
    """`sizes`: tp, pp, vp, ep, etp. `rank`: of two processes, in Megatron's order (tensor ranks are neighbours)."""

    def __init__(self, config: Mapping[str, Any], sizes: Mapping[str, int], rank: int, padding: float = 7.25) -> None:
        self.config, self.sizes = config, {"tp": 1, "pp": 1, "vp": 1, "ep": 1, "etp": 1, **sizes}
        self.padding = padding
        self.tp = rank % self.sizes["tp"]
        self.pp = rank // self.sizes["tp"] if self.sizes["pp"] > 1 else 0
        self.ep = rank % self.sizes["ep"]
        self.etp = rank % self.sizes["etp"]

    def value(self, name: str, chunk: int, whole: Tensors, rows: int) -> torch.Tensor:
        """Of the parameter that chunk number `chunk` of this rank calls `name`. `rows`: padded vocabulary."""
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(whole["model.embed_tokens.weight"], rows)
        if name == "output_layer.weight":
            tied = self.config["tie_word_embeddings"]
            return self._vocabulary(whole["model.embed_tokens.weight" if tied else "lm_head.weight"], rows)
        if name == "decoder.final_layernorm.weight":
            return whole["model.norm.weight"]
        matched = LAYER.fullmatch(name)
        assert matched is not None, name
        per_chunk = self.config["num_hidden_layers"] // (self.sizes["pp"] * self.sizes["vp"])
        layer = (chunk * self.sizes["pp"] + self.pp) * per_chunk + int(matched[1])
        return self._layer(matched[2], lambda rest: whole[f"model.layers.{layer}.{rest}"])

    def _layer(self, name: str, of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        tp = (self.tp, self.sizes["tp"])
        if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            part = name.rpartition(".")[2]
            return _rows(self._fused(*(of(f"self_attn.{kind}_proj.{part}") for kind in "qkv")), *tp)
        plain = {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.router.weight": "block_sparse_moe.gate.weight",
        }
        if name in plain:
            return of(plain[name])
        if name == "self_attention.linear_proj.weight":
            return _columns(of("self_attn.o_proj.weight"), *tp)
        if name == "mlp.linear_fc1.weight":
            return torch.cat([_rows(of("mlp.gate_proj.weight"), *tp), _rows(of("mlp.up_proj.weight"), *tp)])
        if name == "mlp.linear_fc2.weight":
            return _columns(of("mlp.down_proj.weight"), *tp)
        matched = EXPERT.fullmatch(name)
        assert matched is not None, name
        here = self.config["num_local_experts"] // self.sizes["ep"]
        expert = f"block_sparse_moe.experts.{self.ep * here + int(matched[1])}"
        etp = (self.etp, self.sizes["etp"])
        if matched[2] == "linear_fc2.weight":
            return _columns(of(f"{expert}.w2.weight"), *etp)
        assert matched[2] == "linear_fc1.weight", name
        return torch.cat([_rows(of(f"{expert}.w1.weight"), *etp), _rows(of(f"{expert}.w3.weight"), *etp)])

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Group by group: its queries, its key, its value."""
        groups = self.config["num_key_value_heads"]
        split = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
        return torch.cat([each for group in split for each in group])

    def _vocabulary(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The padding holds what no checkpoint should ever see; a loss does see it, so training wants it small."""
        padding = torch.full((rows - tensor.shape[0], tensor.shape[1]), self.padding, dtype=tensor.dtype)
        return _rows(torch.cat([tensor, padding]), self.tp, self.sizes["tp"])


def _rows(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim=0)[rank]


def _columns(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim=1)[rank]
