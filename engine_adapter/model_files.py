"""The files of a checkpoint folder: safetensors shards with their index, config, byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
END_OF_TEXT = 256


def model_config(shape: Mapping[str, Any], *, rope_theta: float) -> dict[str, Any]:
    """config.json of a `ModelShape`'s fields."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape["family"]]],
        "model_type": shape["family"],
        "dtype": "bfloat16",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": shape["tied"],
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": None,
    }
    if shape["family"] == "mixtral":
        config |= {"num_local_experts": shape["experts"], "num_experts_per_tok": 2, "sliding_window": None}
    return config


def write_shards(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """One `model.safetensors`, or `shards` files of about equal size and their index. Old weight files go first."""
    for old in (*directory.glob("*.safetensors"), directory / INDEX):
        old.unlink(missing_ok=True)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for position, (name, tensor) in enumerate(sorted(tensors.items())):
        groups[position * shards // len(tensors)][name] = tensor
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file, group)
        weight_map |= dict.fromkeys(group, file)
    write_index(directory, weight_map, sum(tensor.nbytes for tensor in tensors.values()))


def write_index(directory: Path, weight_map: Mapping[str, str], total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=1))


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors may share memory: each is stored by itself, as a checkpoint with aliases has it."""
    apart: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        storage = own.untyped_storage().data_ptr()
        apart[name] = own.clone() if storage in storages else own
        storages.add(storage)
    save_file(apart, path, metadata={"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """Token id = byte, 256 = end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in alphabet.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 4096}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (fixed by that format)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in plain else next(spare)) for byte in range(256)}
