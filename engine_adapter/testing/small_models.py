"""One small model for bare ranks: a checkpoint with every kind of cut, its rules, and a slicer by plain indexing.

The slicer is the oracle: it shares no code with the placement.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from engine_adapter.placement.declared.layouts import QKV, Experts, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules
from engine_adapter.testing.bare import BareEngine, BareReplica
from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES
from transports.testing import MemorySource
from updater.protocol.manifest import Manifest, TensorEntry

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, EXPERT_INNER = 257, 16, 4, 2, 4, 24, 4, 8

STACKED = (
    Stacked(".q_proj", ".qkv_proj", "q"),
    Stacked(".k_proj", ".qkv_proj", "k"),
    Stacked(".v_proj", ".qkv_proj", "v"),
    Stacked(".gate_proj", ".gate_up_proj", "gate"),
    Stacked(".up_proj", ".gate_up_proj", "up"),
    Stacked(".experts.{e}.w1.weight", ".experts.w13", "gate"),
    Stacked(".experts.{e}.w3.weight", ".experts.w13", "up"),
    Stacked(".experts.{e}.w2.weight", ".experts.w2", ""),
)

Parallel = Literal["tp", "ep"]
Tensors = dict[str, torch.Tensor]


def rules(parallel: Parallel = "tp", interleaved: bool = False) -> Rules:
    inner = Merged(interleaved=interleaved)
    return Rules(
        NameRules(stacked=STACKED),
        layouts=(
            ("*.qkv_proj.weight", QKV(HEADS, KV_HEADS, HEAD_DIM)),
            ("*.gate_up_proj.weight", inner),
            ("*.o_proj.weight", Sharded(1)),
            ("*.down_proj.weight", Sharded(1)),
            ("*.experts.w13", Experts(EXPERTS, inner, parallel)),
            ("*.experts.w2", Experts(EXPERTS, Sharded(1), parallel)),
            ("embed.weight", PaddedVocab(VOCAB)),
            ("lm_head.weight", PaddedVocab(VOCAB)),
        ),
        hints=(("lm_head.weight", "config.json has tie_word_embeddings=false"),),
    )


def checkpoint(seed: int = 0, experts: bool = True) -> Tensors:
    """bf16, one layer; every element of a tensor differs from its neighbours."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    tensors = {
        "embed.weight": rand(VOCAB, HIDDEN),
        "lm_head.weight": rand(VOCAB, HIDDEN),
        "norm.weight": rand(HIDDEN),
        "l.attn.q_proj.weight": rand(HEADS * HEAD_DIM, HIDDEN),
        "l.attn.k_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
        "l.attn.v_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
        "l.attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
        "l.mlp.gate_proj.weight": rand(INNER, HIDDEN),
        "l.mlp.up_proj.weight": rand(INNER, HIDDEN),
        "l.mlp.down_proj.weight": rand(HIDDEN, INNER),
    }
    if experts:
        for e in range(EXPERTS):
            tensors[f"l.experts.{e}.w1.weight"] = rand(EXPERT_INNER, HIDDEN)
            tensors[f"l.experts.{e}.w3.weight"] = rand(EXPERT_INNER, HIDDEN)
            tensors[f"l.experts.{e}.w2.weight"] = rand(HIDDEN, EXPERT_INNER)
    return tensors


def sliced(tensors: Tensors, rank: int, size: int, parallel: Parallel = "tp", interleaved: bool = False) -> Tensors:
    """What rank `rank` must hold, by plain indexing: written without the placement code."""

    def rows(name: str, heads: int = 0) -> torch.Tensor:
        full = tensors[name]
        if not heads:
            share = full.shape[0] // size
            return full[rank * share : (rank + 1) * share]
        if heads >= size:
            mine = range(rank * heads // size, (rank + 1) * heads // size)
        else:
            mine = range(rank * heads // size, rank * heads // size + 1)
        return torch.cat([full[h * HEAD_DIM : (h + 1) * HEAD_DIM] for h in mine])

    def columns(full: torch.Tensor) -> torch.Tensor:
        share = full.shape[1] // size
        return full[:, rank * share : (rank + 1) * share]

    def fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack([gate, up], 1).flatten(0, 1) if interleaved else torch.cat([gate, up])

    def padded(name: str) -> torch.Tensor:
        whole = torch.zeros(320, HIDDEN, dtype=torch.bfloat16)
        whole[:VOCAB] = tensors[name]
        return whole[rank * (320 // size) : (rank + 1) * (320 // size)]

    at = "l.attn."
    result = {
        "embed.weight": padded("embed.weight"),
        "lm_head.weight": padded("lm_head.weight"),
        "norm.weight": tensors["norm.weight"],
        at + "qkv_proj.weight": torch.cat(
            [
                rows(at + "q_proj.weight", HEADS),
                rows(at + "k_proj.weight", KV_HEADS),
                rows(at + "v_proj.weight", KV_HEADS),
            ]
        ),
        at + "o_proj.weight": columns(tensors[at + "o_proj.weight"]),
        "l.mlp.gate_up_proj.weight": fused(rows("l.mlp.gate_proj.weight"), rows("l.mlp.up_proj.weight")),
        "l.mlp.down_proj.weight": columns(tensors["l.mlp.down_proj.weight"]),
    }
    if "l.experts.0.w1.weight" in tensors:
        if parallel == "ep":
            mine = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
            w13 = [fused(tensors[f"l.experts.{e}.w1.weight"], tensors[f"l.experts.{e}.w3.weight"]) for e in mine]
            w2 = [tensors[f"l.experts.{e}.w2.weight"] for e in mine]
        else:
            w13 = [fused(rows(f"l.experts.{e}.w1.weight"), rows(f"l.experts.{e}.w3.weight")) for e in range(EXPERTS)]
            w2 = [columns(tensors[f"l.experts.{e}.w2.weight"]) for e in range(EXPERTS)]
        result["l.experts.w13"], result["l.experts.w2"] = torch.stack(w13), torch.stack(w2)
    return result


def manifest_of(tensors: Tensors, digests: bool = True) -> Manifest:
    return Manifest(
        tuple(
            TensorEntry(name, DTYPE_NAMES[t.dtype], tuple(t.shape), to_hex(tensor_digest(t)) if digests else "")
            for name, t in sorted(tensors.items())
        )
    )


def replica(
    tensors: Tensors,
    size: int = 1,
    *,
    parallel: Parallel = "tp",
    interleaved: bool = False,
    digests: bool = True,
    live: Tensors | None = None,
    **agent_options: Any,
) -> BareReplica:
    """A replica over the model of `tensors`, whose source holds `tensors` with a manifest. `live`: start bytes."""
    made = rules(parallel, interleaved)
    start = live if live is not None else checkpoint(99, experts="l.experts.0.w1.weight" in tensors)
    engines = []
    for rank in range(size):
        local = sliced(start, rank, size, parallel, interleaved)
        engine = BareEngine({name: tuple(t.shape) for name, t in local.items()}, made, rank, size)
        for name, tensor in local.items():
            engine.bound[name].copy_(tensor)
        engines.append(engine)
    return BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors, digests)), **agent_options)


def holds(replica: BareReplica, expected: list[Tensors]) -> bool:
    """Whether what every rank's forward pass would read is bytewise what is expected."""
    return all(
        set(engine.bound) == set(want)
        and all(torch.equal(engine.bound[n].view(torch.int16), want[n].contiguous().view(torch.int16)) for n in want)
        for engine, want in zip(replica.engines, expected, strict=True)
    )
