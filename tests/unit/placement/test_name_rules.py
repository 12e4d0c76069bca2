"""Name rules: order of the kinds, all rules of a kind, last stacked hit, drops, undoing."""

from __future__ import annotations

import pytest

from engine_adapter.placement.declared.names import Mapper, NameRules, Shard, Stacked, nearest


def mapped(rules: NameRules, name: str) -> tuple[str | None, tuple[Shard, ...]]:
    found = Mapper(rules).map(name)
    return found.parameter, found.shards


def test_kinds_apply_in_order() -> None:
    rules = NameRules(
        renaming=(("^a", "b"),),
        regex=(("b", "c"),),
        substring=(("c", "d"),),
        stacked=(Stacked("d", "e", "q"),),
        prefix=(("e", "f"),),
        suffix=(("f", "g"),),
    )
    assert mapped(rules, "a") == ("g", (Shard("q"),))


def test_every_rule_of_a_kind_is_tried_on_the_result_of_the_one_before() -> None:
    rules = NameRules(substring=(("one", "two"), ("two", "three")), prefix=(("x.", "y."), ("y.", "z.")))
    assert mapped(rules, "x.one") == ("z.three", (Shard(),))


def test_renaming_and_substring_replace_one_hit_regex_all() -> None:
    assert mapped(NameRules(renaming=(("a", "b"),)), "a.a")[0] == "b.a"
    assert mapped(NameRules(substring=(("a", "b"),)), "a.a")[0] == "b.a"
    assert mapped(NameRules(regex=(("a", "b"),)), "a.a")[0] == "b.b"


def test_regex_groups_are_carried_over() -> None:
    assert mapped(NameRules(regex=((r"h\.(\d+)\.", r"layers.\1."),)), "h.12.w")[0] == "layers.12.w"


def test_the_last_stacked_hit_wins() -> None:
    rules = NameRules(stacked=(Stacked("proj", "fused", "a"), Stacked("k_proj", "qkv", "k")))
    assert mapped(rules, "k_proj.w") == ("qkv.w", (Shard("k"),))
    backwards = NameRules(stacked=tuple(reversed(rules.stacked)))
    assert mapped(backwards, "k_proj.w") == ("k_fused.w", (Shard("a"),))


@pytest.mark.case("B055")
def test_stacked_rules_look_at_the_name_before_any_of_them_rewrote_it() -> None:
    """Else `up_proj` would hit the `gate_up_proj` that the gate's rule has just written."""
    rules = NameRules(stacked=(Stacked("gate_proj", "gate_up_proj", "gate"), Stacked("up_proj", "gate_up_proj", "up")))
    assert mapped(rules, "gate_proj.w") == ("gate_up_proj.w", (Shard("gate"),))
    assert mapped(rules, "up_proj.w") == ("gate_up_proj.w", (Shard("up"),))


def test_several_parts_are_aliases_of_one_tensor() -> None:
    rules = NameRules(stacked=(Stacked("kv", "qkv", ("k", "v")),))
    assert mapped(rules, "kv.w") == ("qkv.w", (Shard("k"), Shard("v")))


def test_expert_index_is_read_from_the_name() -> None:
    rules = NameRules(stacked=(Stacked(".experts.{e}.w1", ".w13", "gate"),))
    assert mapped(rules, "l.experts.11.w1") == ("l.w13", (Shard("gate", 11),))
    assert mapped(rules, "l.experts.x.w1") == ("l.experts.x.w1", (Shard(),))


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (NameRules(regex=(("^drop", None),)), "drop.w"),
        (NameRules(substring=((".draft.", None),)), "a.draft.w"),
        (NameRules(prefix=(("mtp.", None),)), "mtp.w"),
        (NameRules(suffix=((".scale", None),)), "a.scale"),
        (NameRules(ignored=("*.inv_freq",)), "a.inv_freq"),
    ],
)
def test_mapping_to_nothing_drops_and_says_by_what(rules: NameRules, name: str) -> None:
    found = Mapper(rules).map(name)
    assert found.parameter is None
    assert found.dropped_by
    assert Mapper(rules).map("other").parameter == "other"


def test_a_drop_in_an_early_kind_wins_over_later_kinds() -> None:
    rules = NameRules(substring=(("x", None),), prefix=(("x", "y"),))
    assert mapped(rules, "x.w")[0] is None


def test_undoing_gives_the_name_a_checkpoint_would_use() -> None:
    rules = NameRules(
        stacked=(Stacked(".q_proj", ".qkv_proj", "q"), Stacked(".experts.{e}.w1", ".w13", "gate")),
        prefix=(("model.language_model.", "model."),),
    )
    mapper = Mapper(rules)
    assert mapper.sources("l.qkv_proj.weight", Shard("q"))[0] == "l.q_proj.weight"
    assert mapper.sources("l.w13", Shard("gate", 3)) == ["l.experts.3.w1"]
    assert set(mapper.sources("model.a", Shard())) == {"model.a", "model.language_model.a"}
    assert mapper.sources("l.qkv_proj.weight", Shard("z")) == []


def test_nearest_names_come_best_first() -> None:
    assert nearest("model.embd.weight", ["lm_head.bias", "model.embed.weight"]) == ["model.embed.weight"]
