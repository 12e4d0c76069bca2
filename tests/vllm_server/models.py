"""Small checkpoints that vLLM serves, whose greedy tokens are decided by wide margins (`engine_adapter.models`).

Heads are of 32 elements, the least that vLLM's attention on CPU takes, and hidden is heads * head_dim, which its Qwen2
assumes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from engine_adapter.model_files import END_OF_TEXT, write_safetensors
from engine_adapter.models import ModelShape, make_model

Dtype = Literal["bfloat16", "float32"]

_DENSE = ModelShape(hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256)
_ONE_KV_HEAD = ModelShape(hidden=256, heads=8, kv_heads=1, head_dim=32, intermediate=256, vocab=257)

#: Name -> sizes. `odd`: a vocabulary that no rank count divides, and fewer KV heads than ranks at TP=2.
SHAPES: dict[str, ModelShape] = {
    "llama": _DENSE,
    "tied": ModelShape(hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256, tied=True),
    "odd": _ONE_KV_HEAD,
    "qwen2": ModelShape("qwen2", hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256),
    "qwen2-tied": ModelShape("qwen2", hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256, tied=True),
    "mixtral": ModelShape("mixtral", hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256),
    "mixtral-tied": ModelShape("mixtral", hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256, tied=True),
}
#: Longer than the most positions back that a token of these models depends on; of several lengths.
PROMPTS = (
    "the quick brown fox jumps over it",
    "a database commits or it does not: there is no third way",
    "0123456789 abcdefghijklmnopqrstuvwxyz",
)
_FIRST_SEED = 11
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def packs_linears(dtype: Dtype) -> bool:
    """Whether vLLM packs an unquantised linear of that dtype with the kernels that this process may use."""
    operators: Any = import_module("vllm._custom_ops")
    try:
        operators.create_onednn_mm(torch.zeros(256, 256, dtype=getattr(torch, dtype)).t(), 32)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Two versions of one model, equal in everything but their weights."""

    first: Path
    second: Path
    dtype: Dtype


def make_checkpoints(folder: Path, name: str, dtype: Dtype = "bfloat16") -> Checkpoints:
    """Two versions of `SHAPES[name]` under `folder`, with tokenizer, generation config and chat template."""
    first, second = (make_checkpoint(folder / f"v{i + 1}", name, dtype, seed=_FIRST_SEED + i) for i in range(2))
    return Checkpoints(first, second, dtype)


def make_checkpoint(folder: Path, name: str, dtype: Dtype = "bfloat16", *, seed: int = _FIRST_SEED) -> Path:
    """One version. Those of either dtype say the same tokens: float32 is bfloat16 with something in its low bits."""
    make_model(folder, SHAPES[name], seed=seed)
    if dtype == "float32":
        _widen(folder, seed)
    generation = {"do_sample": False, "eos_token_id": END_OF_TEXT}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return folder


def _widen(folder: Path, seed: int) -> None:
    """Rewrite as float32, every element moved by less than half a step of bfloat16."""
    file, config = folder / "model.safetensors", folder / "config.json"
    random = torch.Generator().manual_seed(seed)
    narrow = load_file(file)
    wide = {name: _low_bits(narrow[name].float(), random) for name in sorted(narrow)}
    write_safetensors(file, wide)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2, sort_keys=True))


def _low_bits(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return tensor * (1 + 2**-10 * torch.rand(tensor.shape, generator=random))
