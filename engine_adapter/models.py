"""Small real checkpoints whose greedy tokens are safe to compare, and big random ones for benchmarks.

A random small model has near-ties: another batch shape or another rank count flips its argmax. The models made here are
*constructed*, so that every token is decided by a wide margin and by everything that an update can get wrong:

- the residual stream holds a constant, a code of +-1 per token (subspace S1) and a scratch subspace S2;
- in each layer, constant queries and keys select exactly one earlier position, because under rotary embeddings their
  product depends on the distance alone and peaks at one offset; values carry that position's code into S2, and the
  MLP moves it back into S1, both through signed permutations;
- the head maps the code that arrives to the next token.

So token i + 1 is a fixed function of token i - D (D: the sum of the layers' offsets). Codes, permutations, phases and
offsets come from the seed: old keys or values, a stale projection, swapped K and V, or one layer of another version
give other tokens. Small noise fills every weight, so that no region of any tensor is constant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from engine_adapter.model_files import model_config, write_shards, write_tokenizer

Family = Literal["llama", "qwen2", "qwen3", "mixtral"]

#: head_dim -> {index of a rotary frequency: its weight}; found by search for a wide gap between the best and the
#: second best distance, for distances below 512 and offsets 1 to 3 and 12 to 16, at rope_theta 100.
_FREQUENCIES: dict[int, dict[int, float]] = {
    8: {0: 0.8, 1: 0.6, 2: 0.4, 3: 0.3},
    16: {0: 0.8, 1: 0.9, 3: 0.6, 5: 0.2},
    32: {0: 0.7, 2: 0.9, 5: 0.9, 12: 0.5},
    64: {0: 0.7, 6: 0.5, 10: 0.3, 28: 0.2},
}
_ROPE_THETA = 100.0
_SHORT_OFFSETS, _LONG_OFFSETS = (1, 2, 3), (12, 13, 14, 15, 16)
_PEAK = 150.0  # attention score of the selected position
_GATE = 8.0  # input of silu in the MLP
_TOP_LOGIT = 24.0
#: A margin above which no rank count, batch shape or cache layout changes the token (bfloat16 moves logits by less
#: than 0.5 here).
SAFE_MARGIN = 2.0
#: Tokens with codes of their own first: they are what the model says.
_SPOKEN = (10, *range(32, 127))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a test model. Needs hidden > 2 C and intermediate >= 2 C, where C = kv_heads * head_dim >= 16."""

    family: Family = "llama"
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 260  # the head is split over 2 or 4 ranks
    experts: int = 4
    tied: bool = False

    @property
    def code(self) -> int:
        """C: elements of a token's code."""
        return self.kv_heads * self.head_dim

    def check(self) -> None:
        """Raises ValueError for sizes that the construction has no room for."""
        if self.head_dim not in _FREQUENCIES:
            raise ValueError(f"head_dim {self.head_dim} is not one of {sorted(_FREQUENCIES)}")
        if self.code < 16 or self.hidden <= 2 * self.code or self.intermediate < 2 * self.code:
            raise ValueError(f"no room for codes of {self.code}: {self}")
        if self.vocab < 257 or self.heads % self.kv_heads or self.layers < 1:
            raise ValueError(f"needs vocab >= 257, heads divisible by kv_heads, a layer: {self}")


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain `generate` says: greedy tokens, and per token the top logit less the second."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def make_model(
    directory: str | Path, shape: ModelShape | None = None, *, seed: int = 0, shards: int = 1, margin: float = 0.0
) -> Path:
    """Write a checkpoint (bfloat16 safetensors, config, byte-level tokenizer) into `directory` and return it.

    `margin` > 0: load it with transformers, generate, and raise ValueError if any step's margin is smaller. Prompts
    should have at least `longest_offset(shape)` + 1 tokens: before that the first positions have little to look at.
    """
    shape = shape or ModelShape()
    shape.check()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    write_shards(path, _weights(shape, seed), shards=shards)
    config = model_config(asdict(shape), rope_theta=_ROPE_THETA)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    write_tokenizer(path)
    if margin > 0 and (least := least_margin(path)) < margin:
        raise ValueError(f"{path}: least margin {least:.3f} is below {margin}")
    return path


def make_versions(
    directory: str | Path, count: int, shape: ModelShape | None = None, *, seed: int = 0, **options: Any
) -> tuple[Path, ...]:
    """`count` checkpoints v1, v2, ... of one config under `directory`, every one with tokens of its own."""
    root = Path(directory)
    return tuple(make_model(root / f"v{i + 1}", shape, seed=seed + i, **options) for i in range(count))


def longest_offset(shape: ModelShape) -> int:
    """The most positions back that a token of any version depends on."""
    return max(_LONG_OFFSETS) + max(_SHORT_OFFSETS) * (shape.layers - 1)


def encode(text: str) -> tuple[int, ...]:
    """What the byte-level tokenizer says: UTF-8 bytes."""
    return tuple(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def reference_tokens(directory: str | Path, prompt: Sequence[int], count: int) -> Reference:
    """`count` greedy tokens by transformers' plain `generate`, in this process and on one thread.

    Models and answers are cached per path and modification time.
    """
    path = Path(directory).resolve()
    stamp = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(path.glob("*.safetensors")))
    return _generate(str(path), stamp, tuple(prompt), count)


@lru_cache(maxsize=1024)
def _generate(path: str, stamp: tuple[tuple[str, int], ...], prompt: tuple[int, ...], count: int) -> Reference:
    model = _load(path, stamp)
    ids = torch.tensor([prompt])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by more, and beside busy engines they lose a lot
    try:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
    finally:
        torch.set_num_threads(threads)
    tops = [step[0].float().topk(2).values for step in out.logits]
    return Reference(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(float(top[0] - top[1]) for top in tops))


def least_margin(directory: str | Path, prompts: Sequence[str] = ("the quick brown fox jumps over it",)) -> float:
    """The smallest top-2 margin over 24 greedy tokens after each prompt."""
    return min(min(reference_tokens(directory, encode(prompt), 24).margins) for prompt in prompts)


@lru_cache(maxsize=8)
def _load(path: str, _stamp: tuple[tuple[str, int], ...]) -> Any:
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


# --- the construction ----------------------------------------------------------------------------------------------


def _weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by name, bfloat16, in the spelling that the family's checkpoints have."""
    maker = _Maker(shape, seed)
    weights = maker.ends()
    for layer in range(shape.layers):
        weights |= maker.layer(layer)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


class _Maker:
    """Draws everything from one generator, in a fixed order."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(seed * 7919 + 17)
        c, h = shape.code, shape.hidden
        self.const = math.sqrt(c)  # the constant in dimension 0
        self.rms_attention = math.sqrt((self.const**2 + c) / h)  # of the residual stream before attention
        self.rms_mlp = math.sqrt((self.const**2 + 2 * c) / h)  # and before the MLP, where S2 is filled
        self.s1, self.s2 = slice(1, 1 + c), slice(1 + c, 1 + 2 * c)
        self.codes = _codebook(c, self.random)
        self.spoken = _spoken(len(self.codes) if shape.tied else len(_SPOKEN), self.random)
        self.moves = [(self._signed(), self._signed(), self._signed()) for _ in range(shape.layers)]
        if shape.tied:
            self.moves[-1] = self._closing_moves()

    def _noise(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.random) * (0.04 / math.sqrt(self.shape.hidden))

    def _signed(self) -> torch.Tensor:
        """A random signed permutation, (C, C)."""
        c = self.shape.code
        signs = torch.randint(0, 2, (c, 1), generator=self.random) * 2.0 - 1.0
        return torch.eye(c)[torch.randperm(c, generator=self.random)] * signs

    def _pick(self, choices: tuple[int, ...]) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=self.random))]

    def _total(self) -> torch.Tensor:
        """What a code has gone through after all layers, (C, C)."""
        total = torch.eye(self.shape.code)
        for value, out, down in self.moves:
            total = down @ out @ value @ total
        return total

    def _closing_moves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Last moves that make the whole a cyclic shift: codes then arrive as codes, and a tied head can read them."""
        value, out, _ = self.moves[-1]
        self.moves[-1] = (value, out, torch.eye(self.shape.code))
        steps = self._pick(tuple(range(1, self.shape.code)))
        shift = torch.roll(torch.eye(self.shape.code), steps, dims=0)
        return value, out, shift @ self._total().T

    def ends(self) -> dict[str, torch.Tensor]:
        """Embedding, final norm and head."""
        shape = self.shape
        embed = self._noise(shape.vocab, shape.hidden)
        embed[:, 0] += self.const
        for token in range(shape.vocab):
            index = self.spoken.get(token)
            # Tokens that are never said share a code, at half strength.
            code = 0.5 * self.codes[token % len(_SPOKEN)] if index is None else self.codes[index]
            embed[token, self.s1] += code
        weights = {"model.embed_tokens.weight": embed, "model.norm.weight": 1 + self._noise(shape.hidden)}
        if not shape.tied:
            head = self._noise(shape.vocab, shape.hidden)
            said = list(self.spoken)
            order = torch.randperm(len(said), generator=self.random).tolist()
            arriving = self.codes @ self._total().T * (_TOP_LOGIT * self.rms_attention / shape.code)
            for token, target in zip(said, order, strict=True):
                head[said[target], self.s1] += arriving[self.spoken[token]]
            weights["lm_head.weight"] = head
        return weights

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        shape, prefix = self.shape, f"model.layers.{index}."
        weights = {
            f"{prefix}input_layernorm.weight": 1 + self._noise(shape.hidden),
            f"{prefix}post_attention_layernorm.weight": 1 + self._noise(shape.hidden),
        }
        weights |= {f"{prefix}self_attn.{name}": tensor for name, tensor in self._attention(index).items()}
        if shape.family != "mixtral":
            gate, up, down = self._mlp(index)
            return weights | {
                f"{prefix}mlp.gate_proj.weight": gate,
                f"{prefix}mlp.up_proj.weight": up,
                f"{prefix}mlp.down_proj.weight": down,
            }
        moe = f"{prefix}block_sparse_moe."
        weights[f"{moe}gate.weight"] = torch.randn(shape.experts, shape.hidden, generator=self.random) * 0.3
        for expert in range(shape.experts):
            parts = zip(("w1", "w3", "w2"), self._mlp(index), strict=True)
            weights |= {f"{moe}experts.{expert}.{name}.weight": tensor for name, tensor in parts}
        return weights

    def _attention(self, index: int) -> dict[str, torch.Tensor]:
        """Select the position `offset` back and bring its code into S2."""
        shape = self.shape
        last = index == shape.layers - 1 and shape.layers > 1
        offset = self._pick(_LONG_OFFSETS if last else _SHORT_OFFSETS)
        chosen = _FREQUENCIES[shape.head_dim]
        strength = _PEAK * math.sqrt(shape.head_dim) / sum(chosen.values())
        query, key = self._noise(shape.heads * shape.head_dim, shape.hidden), self._noise(shape.code, shape.hidden)
        group = shape.heads // shape.kv_heads
        for kv_head in range(shape.kv_heads):
            for pair, weight in chosen.items():
                phase = float(torch.rand(1, generator=self.random)) * 2 * math.pi
                frequency = _ROPE_THETA ** (-2 * pair / shape.head_dim)
                size = math.sqrt(weight * strength) * self.rms_attention / self.const
                self._turn(key, kv_head, pair, size, phase + offset * frequency)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    self._turn(query, head, pair, size, phase)
        value_move, out_move, _ = self.moves[index]
        value, out = self._noise(shape.code, shape.hidden), self._noise(shape.hidden, shape.heads * shape.head_dim)
        value[:, self.s1] += value_move * self.rms_attention
        for head in range(shape.heads):
            source = slice(head // group * shape.head_dim, (head // group + 1) * shape.head_dim)
            target = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            out[self.s2, target] += out_move[:, source] / group
        found = {
            "q_proj.weight": query,
            "k_proj.weight": key,
            "v_proj.weight": value,
            "o_proj.weight": out,
        }
        if shape.family == "qwen3":  # its norms take the size out of queries and keys, their weights put it back
            size = math.sqrt(strength * sum(chosen.values()) / shape.head_dim)
            found["q_norm.weight"] = size + self._noise(shape.head_dim)
            found["k_norm.weight"] = size + self._noise(shape.head_dim)
        if shape.family == "qwen2":
            for name in ("q_proj", "k_proj", "v_proj"):
                found[f"{name}.bias"] = self._noise(found[f"{name}.weight"].shape[0])
        return found

    def _turn(self, weight: torch.Tensor, head: int, pair: int, size: float, angle: float) -> None:
        """Add a constant of the given angle to one rotary pair of one head."""
        row = head * self.shape.head_dim + pair
        weight[row, 0] += size * math.cos(angle)
        weight[row + self.shape.head_dim // 2, 0] += size * math.sin(angle)

    def _mlp(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A linear map in disguise: S1 becomes the moved S2, S2 becomes empty. Gates are driven by the constant."""
        shape, c = self.shape, self.shape.code
        gate, up = self._noise(shape.intermediate, shape.hidden), self._noise(shape.intermediate, shape.hidden)
        down = self._noise(shape.hidden, shape.intermediate)
        gate[: 2 * c, 0] += _GATE * self.rms_mlp / self.const
        up[: 2 * c, 1 : 1 + 2 * c] += torch.eye(2 * c) * self.rms_mlp
        through = 1 / (_GATE / (1 + math.exp(-_GATE)))
        down[self.s1, :c] -= torch.eye(c) * through
        down[self.s1, c : 2 * c] += self.moves[index][2] * through
        down[self.s2, c : 2 * c] -= torch.eye(c) * through
        return gate, up, down


def _codebook(size: int, random: torch.Generator) -> torch.Tensor:
    """At least 96 codes of `size` elements +-1, closed under cyclic shifts, far apart: (n, size)."""
    distance = max(size * 5 // 16, 3)
    codes = torch.empty(0, size)
    tries = 0
    while len(codes) < len(_SPOKEN):
        base = torch.randint(0, 2, (size,), generator=random) * 2.0 - 1.0
        orbit = torch.stack([torch.roll(base, step) for step in range(size)])
        candidates = torch.cat((codes, orbit))
        products = candidates @ candidates.T
        products.fill_diagonal_(-size)
        if float(products.max()) <= size - 2 * distance:
            codes = candidates
        tries += 1
        if tries % 2000 == 0:
            distance -= 1
    return codes


def _spoken(count: int, random: torch.Generator) -> dict[int, int]:
    """Token -> index of its code, for `count` tokens, printable ones first."""
    rest = [token for token in range(256) if token not in _SPOKEN]
    order = torch.randperm(count, generator=random).tolist()
    return dict(zip((*_SPOKEN, *rest)[:count], order, strict=True))
