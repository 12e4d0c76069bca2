"""What a toy model is, what a toy engine is asked to do, and the sizes that one rank holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from updater.core.errors import refuse

MODEL_TYPE = "liveweights_toy"


@dataclass(frozen=True, slots=True)
class ToyConfig:
    """The `config.json` of a toy checkpoint. Sizes in elements.

    `experts` 0: a dense gated MLP. `wrapper`: none, `new` (`model.language_model.`) or `old`
    (`language_model.model.`) spelling of a vision-language wrapper. `qk_norm`: none, or `per_head`: vectors of
    heads * head_dim and kv_heads * head_dim. `fp8`: linears of the decoder as float8_e4m3 with one float32 scale each.
    """

    vocab_size: int = 257
    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 4
    intermediate_size: int = 24
    tie_word_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 2
    expert_intermediate: int = 8
    fused_experts: bool = False  # one stacked tensor per layer instead of one per expert
    qk_norm: str = "per_head"
    wrapper: str = "none"
    fp8: bool = False
    eos_token_id: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    model_type: str = MODEL_TYPE

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> ToyConfig:
        """Raises ValueError for the config of something else."""
        values = json.loads((Path(folder) / "config.json").read_text())
        if values.get("model_type") != MODEL_TYPE:
            raise ValueError(f"{folder}: model_type {values.get('model_type')!r} is not {MODEL_TYPE!r}")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


#: The fixtures that tests name: dense, tied, experts, vision-language wrapper, quantised.
FIXTURES: dict[str, ToyConfig] = {
    "M0": ToyConfig(),
    "M1": ToyConfig(tie_word_embeddings=True),
    "M2": ToyConfig(experts=4),
    "M3": ToyConfig(wrapper="new"),
    "M4": ToyConfig(fp8=True),
}


def fixture_config(fixture: str, **changes: Any) -> ToyConfig:
    """A named fixture with some fields changed. Raises KeyError for an unknown name, TypeError for an unknown field."""
    return replace(FIXTURES[fixture], **changes)


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """`EngineSpec.options` of the toy engine.

    `pad_vocab`: the rows of the vocabulary are rounded up to a multiple of this (1: no padding).
    `expert_parallel`: whole experts per rank instead of slices of every expert. `interleaved`: gate and up rows
    alternate in the fused parameter. `kernel`: `none`, `swap` (the halves of every down projection are stored
    swapped: a kernel layout reached by placement) or `packed` (a transposed copy, rebuilt after every install).
    `head32`: logits are made by a float32 copy of the head, also rebuilt. `namespaced`: cache keys carry version
    and digest. `context`: tokens that a prompt may have.
    `step_ms`: how long a step takes at least. `pace`: the FIFO that steps wait for, see `pace.py`.
    `fault`: see `faults.py`; `skip_target`, `as_rank`,
    `cache_refuses`, `cache_lies`: defects for tests, each with -1 or "" for none; the first two begin with
    placement number `defect_from` (1 is the replay at the join). `rot`: after every install by `flip`, a bit of
    what is `live` or of the `spare` changes on rank `rot_rank`.
    """

    block_size: int = 4
    blocks: int = 64
    context: int = 2048
    max_running: int = 16
    pad_vocab: int = 64
    expert_parallel: bool = False
    interleaved: bool = False
    kernel: str = "none"
    head32: bool = False
    namespaced: bool = True
    tiers: str = "device,host"
    step_ms: float = 0.0
    pace: str = ""
    collective_timeout_s: float = 600.0
    fault: str = ""
    skip_target: str = ""
    as_rank: int = -1
    defect_from: int = 1
    defect_rank: int = -1  # -1: every rank
    cache_refuses: str = ""
    cache_lies: str = ""
    step_skew: int = 0
    rot: str = ""
    rot_rank: int = 0

    @classmethod
    def parse(cls, options: dict[str, str | int | float | bool]) -> ToyOptions:
        """Raises ValueError for an option that the toy engine does not have."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown toy options: {', '.join(unknown)}")
        defaults = cls()
        return replace(defaults, **{name: _like(getattr(defaults, name), value) for name, value in options.items()})


def _like(default: Any, value: Any) -> Any:
    """Options that came as text (a command line) take the type of the default."""
    if isinstance(default, bool):
        return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
    return type(default)(value)


@dataclass(frozen=True, slots=True)
class RankShape:
    """How much of each thing one rank holds. `of` raises `Rejected` (placement_refused) where sizes do not divide."""

    heads: int
    kv_heads: int
    intermediate: int
    experts: int
    expert_intermediate: int
    vocab: int  # rows of the padded vocabulary

    @classmethod
    def of(cls, config: ToyConfig, options: ToyOptions, size: int) -> RankShape:
        kv = config.num_key_value_heads
        if kv % size and size % kv:
            raise refuse("placement_refused", f"{kv} key/value heads over {size} ranks would split a head")
        split_experts = size if options.expert_parallel else 1
        split_inner = 1 if options.expert_parallel else size
        return cls(
            heads=_divide("attention heads", config.num_attention_heads, size),
            kv_heads=max(1, kv // size),
            intermediate=_divide("intermediate_size", config.intermediate_size, size),
            experts=_divide("experts", config.experts, split_experts),
            expert_intermediate=_divide("expert_intermediate", config.expert_intermediate, split_inner),
            vocab=_divide("padded vocabulary", padded_vocab(config, options), size),
        )


def padded_vocab(config: ToyConfig, options: ToyOptions) -> int:
    return -(-config.vocab_size // options.pad_vocab) * options.pad_vocab


def _divide(what: str, total: int, parts: int) -> int:
    if total % parts:
        raise refuse("placement_refused", f"{what}: {total} does not divide over {parts} ranks")
    return total // parts
