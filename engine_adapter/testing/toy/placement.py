"""The toy engine's declared placement, with a kernel layout reached by rows and defects that tests may order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from engine_adapter.placement.declared.layouts import QKV, Experts, Heads, Layout, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.rows import CopyRow, Placement, Row
from engine_adapter.testing.toy.config import ToyConfig, ToyOptions
from transports.base import Box
from updater.protocol.manifest import TensorSpec

#: Both spellings of the vision-language wrapper, whichever one the engine started on.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

#: Order matters: the last hit wins, so scales and experts come after the weights whose names they contain.
_STACKED = (
    Stacked(".q_proj", ".qkv_proj", "q"),
    Stacked(".k_proj", ".qkv_proj", "k"),
    Stacked(".v_proj", ".qkv_proj", "v"),
    Stacked(".gate_proj", ".gate_up_proj", "gate"),
    Stacked(".up_proj", ".gate_up_proj", "up"),
    Stacked(".q_proj.weight_scale", ".qkv_proj.q_scale"),
    Stacked(".k_proj.weight_scale", ".qkv_proj.k_scale"),
    Stacked(".v_proj.weight_scale", ".qkv_proj.v_scale"),
    Stacked(".gate_proj.weight_scale", ".gate_up_proj.gate_scale"),
    Stacked(".up_proj.weight_scale", ".gate_up_proj.up_scale"),
    Stacked(".experts.{e}.gate_proj.weight", ".experts.w13_weight", "gate"),
    Stacked(".experts.{e}.up_proj.weight", ".experts.w13_weight", "up"),
    Stacked(".experts.{e}.down_proj.weight", ".experts.w2_weight"),
    Stacked(".experts.gate_up_proj", ".experts.w13_weight"),
    Stacked(".experts.down_proj", ".experts.w2_weight"),
)


def toy_rules(config: ToyConfig, options: ToyOptions) -> Rules:
    """What a toy engine declares, the same on every rank."""
    c, inner = config, config.expert_intermediate
    vocab = PaddedVocab(c.vocab_size, multiple=options.pad_vocab)
    parallel: Literal["tp", "ep"] = "ep" if options.expert_parallel else "tp"
    layouts: tuple[tuple[str, Layout], ...] = (
        ("model.embed_tokens.weight", vocab),
        ("lm_head.weight", vocab),
        ("*.qkv_proj.weight", QKV(c.num_attention_heads, c.num_key_value_heads, c.head_dim)),
        ("*.q_norm.weight", Heads(c.num_attention_heads, c.head_dim)),
        ("*.k_norm.weight", Heads(c.num_key_value_heads, c.head_dim)),
        ("*.o_proj.weight", Sharded(1)),
        ("*.gate_up_proj.weight", Merged(sizes=(c.intermediate_size,) * 2, interleaved=options.interleaved)),
        ("*.down_proj.weight", Sharded(1)),
        ("*.w13_weight", Experts(c.experts, Merged(sizes=(inner, inner), interleaved=options.interleaved), parallel)),
        ("*.w2_weight", Experts(c.experts, Sharded(1), parallel)),
    )
    hints = (("*lm_head.weight", "config.json says tie_word_embeddings is false"),)
    return Rules(NameRules(stacked=_STACKED, prefix=_PREFIXES), layouts=layouts, hints=hints)


def toy_placement(
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, Target],
    config: ToyConfig,
    options: ToyOptions,
    rank: int,
    size: int,
    *,
    defect: bool = False,
) -> Placement:
    """Rows of one rank. `defect`: also do what `skip_target` and `as_rank` of the options say.

    Raises `Rejected` as `declare` does.
    """
    wrong_rank = defect and options.as_rank >= 0
    found = declare(specs, targets, toy_rules(config, options), options.as_rank if wrong_rank else rank, size)
    rows: tuple[Row, ...] = found.rows
    if options.kernel == "swap":
        rows = tuple(moved for row in rows for moved in _swapped(row, targets[row.target].shape))
    if defect and options.skip_target:
        rows = tuple(row for row in rows if row.target != options.skip_target)
    return replace(found, rank=rank, rows=rows)


def _swapped(row: Row, shape: tuple[int, ...]) -> Iterator[Row]:
    """The kernel layout: the halves of a down projection's output rows change places."""
    if not (isinstance(row, CopyRow) and row.target.endswith(("down_proj.weight", "w2_weight"))):
        yield row
        return
    dim, half = len(shape) - 2, shape[-2] // 2
    source_dim = len(row.source_box.size) - 2
    for first, goes_to, length in ((0, shape[-2] - half, half), (half, 0, shape[-2] - half)):
        yield replace(
            row,
            source_box=_part(row.source_box, source_dim, first, length),
            target_box=_part(row.target_box, dim, goes_to, length),
        )


def _part(box: Box, dim: int, first: int, length: int) -> Box:
    """`length` from `first` on of `box` along `dim`; the box starts at 0 there."""
    start, size = list(box.start), list(box.size)
    start[dim], size[dim] = first, length
    return Box(tuple(start), tuple(size))
