"""Random checkpoints of gigabytes for benchmarks, written in a stream without building a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engine_adapter.model_files import model_config, write_index, write_tokenizer

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 2048, 5632, 16, 8, 128, 8192
_BLOCK = 16 << 20  # elements of the random block that everything is cut from
_SHARD_BYTES = 512 << 20


def make_big(directory: str | Path, gigabytes: float, *, seed: int = 0) -> Path:
    """A Llama-shaped bfloat16 checkpoint of at least `gigabytes` * 10^9 bytes, sharded with an index.

    One config for all seeds of a size. Tokens are noise: only bytes and times matter. A few seconds per GB.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    layers = _layers(gigabytes)
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(torch.bfloat16)
    shards = list(_cut(list(_shapes(layers))))
    weight_map: dict[str, str] = {}
    turn = seed
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        turn = _write_shard(path / file, shard, block, turn)
        weight_map |= {name: file for name, _ in shard}
    write_index(path, weight_map, sum(_size(shape) for shard in shards for _, shape in shard))
    config = model_config(
        {
            "family": "llama",
            "hidden": _HIDDEN,
            "intermediate": _INTERMEDIATE,
            "layers": layers,
            "heads": _HEADS,
            "kv_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "vocab": _VOCAB,
            "tied": False,
        },
        rope_theta=10_000.0,
    )
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    write_tokenizer(path)
    return path


def _layers(gigabytes: float) -> int:
    ends = sum(_size(shape) for _, shape in _shapes(0))
    layer = sum(_size(shape) for _, shape in _shapes(1)) - ends
    return max(1, -int(-(gigabytes * 1e9 - ends) // layer))


def _size(shape: tuple[int, ...]) -> int:
    return 2 * torch.Size(shape).numel()


def _shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    q, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for index in range(layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}self_attn.q_proj.weight", (q, _HIDDEN)
        yield f"{prefix}self_attn.k_proj.weight", (kv, _HIDDEN)
        yield f"{prefix}self_attn.v_proj.weight", (kv, _HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (_HIDDEN, q)
        yield f"{prefix}post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}mlp.gate_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (_HIDDEN, _INTERMEDIATE)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _cut(tensors: list[tuple[str, tuple[int, ...]]]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Shards of up to 512 MiB, in order."""
    shard: list[tuple[str, tuple[int, ...]]] = []
    total = 0
    for name, shape in tensors:
        if shard and total + _size(shape) > _SHARD_BYTES:
            yield shard
            shard, total = [], 0
        shard.append((name, shape))
        total += _size(shape)
    yield shard


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], block: torch.Tensor, turn: int) -> int:
    """Every tensor is a stretch of the block with other low bits: distinct, and as fast as the disk."""
    with path.open("wb") as file:
        file.write(safetensors_header({name: ("BF16", shape, _size(shape)) for name, shape in shard}))
        for _, shape in shard:
            if len(shape) == 1:  # a norm: about one
                ones = 1 + block[: shape[0]].float()
                file.write(raw(ones.to(torch.bfloat16)))
                continue
            left = torch.Size(shape).numel()
            while left:
                turn += 1
                start = turn * 104_729 % (len(block) // 2)
                piece = block[start : start + min(left, len(block) // 2)].view(torch.int16) ^ (turn * 5 & 7)
                file.write(raw(piece))
                left -= len(piece)
    return turn


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """Length prefix and JSON for (dtype, shape, bytes) in the given order, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
