"""Declared placements: kinds of cut, names set aside, everything wrong at once."""

from __future__ import annotations

import pytest

from engine_adapter.placement.declared.layouts import QKV, Experts, Heads, Layout, Merged, PaddedVocab, Sharded
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, Target, analyse, declare
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow
from transports.base import Box
from transports.testing import refused
from updater.protocol.manifest import TensorSpec


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, "BF16", shape) for name, shape in shapes.items()}


def one(layout: Layout, source: tuple[int, ...], local: tuple[int, ...], rank: int, size: int) -> list[object]:
    rules = Rules(layouts=(("w", layout),))
    return list(declare(specs(w=source), {"w": Target(local)}, rules, rank, size).rows)


def test_unnamed_parameters_are_whole_and_only_with_the_same_shape() -> None:
    assert declare(specs(w=(4, 4)), {"w": Target((4, 4))}, Rules(), 1, 2).rows == (
        CopyRow("w", Box((0, 0), (4, 4)), "w", Box((0, 0), (4, 4))),
    )
    with refused("tensor_shape", tensors=["w"]):
        declare(specs(w=(4, 4)), {"w": Target((2, 4))}, Rules(), 1, 2)


@pytest.mark.parametrize(("dim", "local", "start"), [(0, (2, 6), (2, 0)), (1, (4, 3), (0, 3))])
def test_column_and_row_cuts(dim: int, local: tuple[int, int], start: tuple[int, int]) -> None:
    assert one(Sharded(dim), (4, 6), local, 1, 2) == [CopyRow("w", Box(start, local), "w", Box((0, 0), local))]


def test_uneven_cuts_are_refused_unless_declared() -> None:
    with refused("tensor_shape", tensors=["w"]):
        one(Sharded(0), (5,), (3,), 0, 2)
    assert one(Sharded(0, uneven=True), (5,), (3,), 0, 2) == [CopyRow("w", Box((0,), (3,)), "w", Box((0,), (3,)))]
    assert one(Sharded(0, uneven=True), (5,), (2,), 1, 2) == [CopyRow("w", Box((3,), (2,)), "w", Box((0,), (2,)))]
    assert one(Sharded(0, uneven=True), (5,), (0,), 3, 4) == []
    with refused("tensor_shape", tensors=["w"]):
        one(Sharded(0, uneven=True), (5,), (3,), 1, 2)


def test_padding_is_filled_on_the_rank_that_holds_it() -> None:
    rows = one(PaddedVocab(257), (257, 2), (160, 2), 1, 2)
    assert rows == [
        FillRow("w", Box((97, 0), (63, 2)), 0.0),
        CopyRow("w", Box((160, 0), (97, 2)), "w", Box((0, 0), (97, 2))),
    ]
    assert one(PaddedVocab(3, padded=8), (3,), (2,), 3, 4) == [FillRow("w", Box((0,), (2,)), 0.0)]


def test_a_shorter_vocabulary_is_not_padding() -> None:
    with refused("tensor_shape", tensors=["w"]):
        one(PaddedVocab(257), (200, 2), (160, 2), 0, 2)


def test_heads_are_replicated_but_never_split() -> None:
    assert one(Heads(2, 4), (8,), (4,), 3, 4) == [CopyRow("w", Box((4,), (4,)), "w", Box((0,), (4,)))]
    with refused("placement_refused", tensors=["w"]):
        one(Heads(3, 4), (12,), (6,), 0, 2)
    with refused("tensor_shape", tensors=["w"]):
        one(Heads(2, 4), (8,), (2,), 0, 4)


def test_a_fused_source_is_cut_part_by_part() -> None:
    rows = one(Merged(("k", "v")), (8, 2), (4, 2), 1, 2)
    assert rows == [
        CopyRow("w", Box((2, 0), (2, 2)), "w", Box((0, 0), (2, 2))),
        CopyRow("w", Box((6, 0), (2, 2)), "w", Box((2, 0), (2, 2))),
    ]
    rows = one(QKV(4, 2, 1), (8,), (4,), 1, 2)
    assert [(row.source_box.start, row.target_box.start) for row in rows] == [((2,), (0,)), ((5,), (2,)), ((7,), (3,))]


def test_unequal_merged_parts() -> None:
    rows = one(Merged(("a", "b"), sizes=(8, 4)), (12,), (6,), 1, 2)
    assert [(row.source_box, row.target_box) for row in rows] == [
        (Box((4,), (4,)), Box((0,), (4,))),
        (Box((10,), (2,)), Box((4,), (2,))),
    ]
    with refused("placement_refused", tensors=["w"]):
        one(Merged(("a", "b"), sizes=(8, 3)), (11,), (6,), 1, 2)


def test_stacked_experts_in_one_row_and_their_owner() -> None:
    layout = Experts(4, Sharded(1))
    assert one(layout, (4, 2, 6), (4, 2, 3), 1, 2) == [
        CopyRow("w", Box((0, 0, 3), (4, 2, 3)), "w", Box((0, 0, 0), (4, 2, 3)))
    ]
    assert one(Experts(4, Sharded(1), "ep"), (4, 2, 6), (2, 2, 6), 1, 2) == [
        CopyRow("w", Box((2, 0, 0), (2, 2, 6)), "w", Box((0, 0, 0), (2, 2, 6)))
    ]
    with refused("placement_refused", tensors=["w"]):
        one(Experts(5, Sharded(1), "ep"), (5, 2, 6), (2, 2, 6), 1, 2)


def test_scalars_meet_one_element_vectors() -> None:
    assert declare(specs(w=()), {"w": Target((1,))}, Rules(), 0, 1).rows == (
        CopyRow("w", Box((), ()), "w", Box((0,), (1,))),
    )


FUSED = Rules(NameRules(stacked=(Stacked(".gate", ".gu", "gate"), Stacked(".up", ".gu", "up"))), (("m.gu", Merged()),))


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    found = analyse(
        specs(**{"m.gate": (4, 2), "m.gaet": (4, 2), "x": (9,), "extra": (1,)}),
        {"m.gu": Target((8, 2)), "x": Target((4,)), "y": Target((4,))},
        FUSED,
        0,
        1,
    )
    assert sorted((failure.code, failure.tensor) for failure in found.failures) == [
        ("tensor_missing", "m.up"),
        ("tensor_missing", "y"),
        ("tensor_shape", "x"),
        ("tensor_unexpected", "extra"),
        ("tensor_unexpected", "m.gaet"),
    ]
    assert found.placement.missing == ("m.up", "y")
    assert found.placement.unexpected == ("extra", "m.gaet")


def test_one_part_twice_is_refused_naming_both() -> None:
    rules = Rules(NameRules(substring=(("old.", "m."),), stacked=FUSED.names.stacked), FUSED.layouts)
    found = analyse(
        specs(**{"m.gate": (4, 2), "old.gate": (4, 2), "m.up": (4, 2)}), {"m.gu": Target((8, 2))}, rules, 0, 1
    )
    assert [failure.code for failure in found.failures] == ["tensor_duplicate"]
    assert {"m.gate", "old.gate"} == {found.failures[0].tensor, found.failures[0].message.split()[-1]}


def test_fused_and_single_spelling_of_one_part_are_a_duplicate() -> None:
    with refused("tensor_duplicate"):
        declare(specs(**{"m.gu": (8, 2), "m.gate": (4, 2)}), {"m.gu": Target((8, 2))}, FUSED, 0, 1)


def test_stray_names_are_dropped_only_where_no_parameter_has_them() -> None:
    rules = Rules(NameRules(stray=("*.bias",)))
    found = declare(specs(**{"a.bias": (2,), "b.bias": (2,)}), {"a.bias": Target((2,))}, rules, 0, 1)
    assert found.ignored == (("b.bias", "*.bias"),)
    assert found.loaded == {"a.bias"}


def test_rotary_tables_are_ignored_with_their_pattern() -> None:
    found = declare(specs(**{"l.rotary_emb.inv_freq": (2,), "w": (1,)}), {"w": Target((1,))}, Rules(), 0, 1)
    assert found.ignored == (("l.rotary_emb.inv_freq", "*rotary_emb.inv_freq"),)


def test_carried_parameters_need_no_source_and_take_none() -> None:
    rules = Rules(carried=("scale",))
    assert declare({}, {"scale": Target((2,))}, rules, 0, 1).rows == (CarryRow("scale", Box((0,), (2,))),)
    with refused("tensor_unexpected", tensors=["scale"]):
        declare(specs(scale=(2,)), {"scale": Target((2,))}, rules, 0, 1)


@pytest.mark.case("F34")
def test_a_tie_is_redundant_beside_the_canonical_and_feeds_alone() -> None:
    targets = {"embed": Target((4, 2), ("head",))}
    both = declare(specs(embed=(4, 2), head=(4, 2)), targets, Rules(), 0, 1)
    assert (both.redundant, both.loaded) == ((("head", "embed"),), {"embed"})
    alone = declare(specs(head=(4, 2)), targets, Rules(), 0, 1)
    assert (alone.redundant, alone.loaded) == ((), {"head"})
    assert (both.tied, alone.tied) == ((), (("head", ("embed", "head")),))
    with refused("tensor_shape", tensors=["head"]):
        declare(specs(embed=(4, 2), head=(5, 2)), targets, Rules(), 0, 1)


def test_aliased_parts_read_one_tensor_twice() -> None:
    rules = Rules(NameRules(stacked=(Stacked("kv", "w", ("k", "v")),)), (("w", Merged(("k", "v"))),))
    rows = declare(specs(kv=(4,)), {"w": Target((4,))}, rules, 1, 2).rows
    assert rows == (
        CopyRow("kv", Box((2,), (2,)), "w", Box((0,), (2,))),
        CopyRow("kv", Box((2,), (2,)), "w", Box((2,), (2,))),
    )


@pytest.mark.case("F29")
@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model.", "model."])
def test_a_missing_name_is_spelled_as_the_others_of_the_checkpoint(wrapper: str) -> None:
    """Three spellings feed one model; the one that is told is that of the checkpoint."""
    names = NameRules(
        prefix=(("language_model.model.", "model.language_model."), ("model.layers.", "model.language_model.layers."))
    )
    rules = Rules(names=names)
    targets = {f"model.language_model.layers.{layer}.w": Target((2,)) for layer in range(3)}
    held = {f"{wrapper}layers.{layer}.w": (2,) for layer in range(2)}
    found = analyse(specs(**held), targets, rules, 0, 1)
    assert [(each.code, each.tensor) for each in found.failures] == [("tensor_missing", f"{wrapper}layers.2.w")]
