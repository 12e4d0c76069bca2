"""F04: a placement is proved for one spelling. What is fused or split otherwise is refused until somebody says how it
lies, and then lies where it belongs. The oracle is the slicer of the small model, over the tensors before they were
fused; ranks, rules and agents are real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from engine_adapter.placement.declared.layouts import Merged
from engine_adapter.placement.declared.names import NameRules, Stacked
from engine_adapter.placement.declared.rules import Rules, declare, targets_of
from engine_adapter.placement.fusion import FusionError, fusion_of
from engine_adapter.rank.messages import RankDiscard, RankPlan
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Tensors,
    checkpoint,
    holds,
    manifest_of,
    replica,
    sliced,
)
from transports.testing import MemorySource
from updater.core.errors import LiveweightsError
from updater.core.participant import DiskOffer
from updater.core.policy import SourceLayout as L
from updater.protocol.manifest import Manifest, TensorSpec

pytestmark = pytest.mark.case("F04")

QKV, GATE_UP = "l.attn.qkv_proj.weight", "l.mlp.gate_up_proj.weight"
W13, W2 = "l.experts.w13", "l.experts.w2"


_serials = count(100)


def feed(made: BareReplica, tensors: Tensors, manifest: Manifest | None = None) -> None:
    made.open_source = lambda _rank: MemorySource(tensors, manifest or manifest_of(tensors))


def started(tensors: Tensors, size: int = 1, **more: Any) -> BareReplica:
    """A replica that was started on a checkpoint of this spelling: its plan is what the replay proves."""
    made = replica(checkpoint(1), size, **more)
    prove(made, tensors)
    return made


def prove(made: BareReplica, tensors: Tensors, manifest: Manifest | None = None) -> None:
    feed(made, tensors, manifest)
    serial = next(_serials)
    for agent in made.agents:
        agent.plan(RankPlan(serial, DiskOffer(""), (), "", start=True, known=True))
        agent.discard(RankDiscard(serial))


def refused(made: BareReplica, **plan: Any) -> set[tuple[str, str]]:
    serial = next(_serials)
    with pytest.raises(LiveweightsError) as caught:
        made.update(serial, f"0-{serial}", **plan)
    return {(failure.code, failure.tensor) for failure in caught.value.failures}


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def parts_of(tensors: Tensors, at: str, *names: str) -> list[torch.Tensor]:
    return [tensors[f"{at}.{name}.weight"] for name in names]


def by_kv_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[q0 q1 k0 v0 q2 q3 k1 v1], each a head of rows."""
    heads = [part.view(-1, HEAD_DIM, part.shape[1]) for part in (q, k, v)]
    share = HEADS // KV_HEADS
    rows = [(*heads[0][g * share : (g + 1) * share], heads[1][g], heads[2][g]) for g in range(KV_HEADS)]
    return torch.cat([head for group in rows for head in group])


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([gate, up], 1).flatten(0, 1)


def concatenated(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


FUSE = {L.CONCATENATED: concatenated, L.BY_KV_HEAD: by_kv_head, L.INTERLEAVED: interleaved}


def with_qkv(tensors: Tensors, kind: L) -> Tensors:
    whole = FUSE[kind](*parts_of(tensors, "l.attn", "q_proj", "k_proj", "v_proj"))
    return without(tensors, ".q_proj", ".k_proj", ".v_proj") | {QKV: whole}


def with_gate_up(tensors: Tensors, kind: L) -> Tensors:
    whole = FUSE[kind](*parts_of(tensors, "l.mlp", "gate_proj", "up_proj"))
    return without(tensors, ".mlp.gate_proj", ".mlp.up_proj") | {GATE_UP: whole}


def with_experts(tensors: Tensors, kind: L) -> Tensors:
    fuse = interleaved if kind is L.INTERLEAVED else concatenated
    w13 = torch.stack([fuse(*parts_of(tensors, f"l.experts.{e}", "w1", "w3")) for e in range(EXPERTS)])
    w2 = torch.stack([tensors[f"l.experts.{e}.w2.weight"] for e in range(EXPERTS)])
    if kind is L.STACKED_TRANSPOSED:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return without(tensors, ".experts.") | {W13: w13, W2: w2}


# --- fused, where the proved spelling has parts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [L.CONCATENATED, L.BY_KV_HEAD])
def test_a_fused_projection_is_refused_however_it_lies(size: int, kind: L) -> None:
    """Its rows look alike in both: nothing but a word of somebody tells them apart."""
    new = checkpoint(1)
    made = started(checkpoint(99), size)
    before = [{name: t.clone() for name, t in engine.bound.items()} for engine in made.engines]
    feed(made, with_qkv(new, kind))
    with pytest.raises(LiveweightsError) as caught:
        made.update(1, "0-1")
    assert {(f.code, f.tensor) for f in caught.value.failures} == {("layout_unproved", QKV)}
    assert all(f'{{"{QKV}": "concatenated"}}' in failure.hint for failure in caught.value.failures)
    feed(made, with_gate_up(new, L.CONCATENATED))
    assert refused(made) == {("layout_unproved", GATE_UP)}
    feed(made, with_experts(new, L.STACKED))
    assert refused(made) == {("layout_unproved", W13), ("layout_unproved", W2)}
    assert holds(made, before)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", [L.CONCATENATED, L.BY_KV_HEAD])
def test_queries_keys_and_values_land_where_they_belong(size: int, kind: L) -> None:
    new = checkpoint(1)
    made = started(checkpoint(99), size)
    feed(made, with_qkv(new, kind))
    vote = made.update(1, "0-1", layouts=(("*.qkv_proj.weight", kind),))
    assert holds(made, [sliced(new, rank, size) for rank in range(size)])
    assert vote.proof == "digests"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("of_parameter", [False, True])
@pytest.mark.parametrize("kind", [L.CONCATENATED, L.INTERLEAVED])
def test_gate_and_up_land_where_they_belong(size: int, of_parameter: bool, kind: L) -> None:
    """Whether the parameter itself is interleaved or not: that says nothing of the source."""
    new = checkpoint(1)
    made = started(checkpoint(99), size, interleaved=of_parameter)
    feed(made, with_gate_up(new, kind))
    made.update(1, "0-1", layouts=(("*.gate_up_proj.*", kind),))
    assert holds(made, [sliced(new, rank, size, interleaved=of_parameter) for rank in range(size)])


@pytest.mark.parametrize(("parallel", "size"), [("tp", 1), ("tp", 2), ("ep", 2), ("ep", 4)])
@pytest.mark.parametrize("kind", [L.STACKED, L.STACKED_TRANSPOSED, L.INTERLEAVED])
def test_experts_land_where_they_belong(parallel: Any, size: int, kind: L) -> None:
    new = checkpoint(1)
    made = started(checkpoint(99), size, parallel=parallel)
    sent = with_experts(new, kind)
    feed(made, sent)
    assert refused(made)
    stated = [(W13, kind), (W2, L.STACKED if kind is L.INTERLEAVED else kind)]
    made.update(2, "0-2", layouts=tuple(stated))
    assert holds(made, [sliced(new, rank, size, parallel) for rank in range(size)])


def test_a_rank_that_holds_one_expert_sees_a_stack_too() -> None:
    made = started(checkpoint(99), EXPERTS, parallel="ep")
    feed(made, with_experts(checkpoint(1), L.STACKED))
    made.agents = made.agents[1:2]
    assert refused(made) == {("layout_unproved", W13), ("layout_unproved", W2)}


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (L.STACKED, lambda new: with_qkv(new, L.CONCATENATED)),
        (L.INTERLEAVED, lambda new: with_qkv(new, L.CONCATENATED)),  # parts of unequal sizes
        (L.BY_KV_HEAD, lambda new: with_gate_up(new, L.CONCATENATED)),
        (L.CONCATENATED, lambda new: with_experts(new, L.STACKED)),
        (L.BY_KV_HEAD, lambda new: with_experts(new, L.STACKED)),
    ],
)
def test_a_word_that_does_not_fit_is_refused_by_name(kind: L, sent: Any) -> None:
    made = started(checkpoint(99))
    feed(made, sent(checkpoint(1)))
    found = refused(made, layouts=(("*", kind),))
    assert {code for code, _ in found} == {"layout_unproved"}


def test_heads_that_the_engine_does_not_know_are_refused_by_name() -> None:
    made = started(checkpoint(99))
    engine = made.engines[0]
    engine._placement = lambda specs: replace(
        declare(specs, targets_of(engine.parameters()), engine.rules, 0, 1), kv_heads=0
    )
    feed(made, with_qkv(checkpoint(1), L.BY_KV_HEAD))
    assert refused(made, layouts=((QKV, L.BY_KV_HEAD),)) == {("layout_unproved", QKV)}


@pytest.mark.case("B054")
def test_a_library_whose_way_was_tried_needs_no_word() -> None:
    """One per expert and stacked, where the rules say that both were tried."""
    made = replica(checkpoint(1))
    for engine in made.engines:
        engine.rules = replace(engine.rules, tested=("*.experts.*",))
    new = checkpoint(1)
    spellings = (checkpoint(99), with_experts(new, L.STACKED)), (with_experts(new, L.STACKED), new)
    for serial, (first, second) in enumerate(spellings, 1):
        prove(made, first)
        feed(made, second)
        made.update(serial, f"0-{serial}")
        assert holds(made, [sliced(new, 0, 1)])
    feed(made, with_qkv(new, L.CONCATENATED))
    assert refused(made) == {("layout_unproved", QKV)}


# --- split, where the proved spelling was fused


@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_what_was_proved_fused_are_refused_until_somebody_says_so(size: int) -> None:
    new = checkpoint(1)
    start = with_experts(with_gate_up(with_qkv(checkpoint(99), L.CONCATENATED), L.CONCATENATED), L.STACKED)
    made = started(start, size)
    parts = set(new) - set(start)
    feed(made, new)
    assert refused(made) == {("layout_unproved", name) for name in parts}
    flat = (("*.experts.*", L.STACKED), ("*", L.CONCATENATED))
    grouped = (("*.experts.*", L.STACKED), ("*", L.BY_KV_HEAD))
    assert ("layout_unproved", "l.attn.k_proj.weight") in refused(made, layouts=grouped)
    # What is said of one part alone says nothing of the others beside it.
    one = (("*.k_proj.*", L.CONCATENATED), ("*.experts.*", L.STACKED), ("*.mlp.*", L.CONCATENATED))
    assert refused(made, layouts=one) == {("layout_unproved", name) for name in parts if ".attn." in name}
    made.update(2, "0-2", layouts=flat)
    assert holds(made, [sliced(new, rank, size) for rank in range(size)])
    plan = RankPlan(next(_serials), DiskOffer(""), (), "", layouts=flat)
    lines = made.agents[0].plan(plan).warnings
    assert {glob for glob, _ in flat} == {
        line.split(": ")[1].split(" ")[0] for line in lines if line.startswith("layout")
    }


def test_every_tensor_is_named_in_order_with_the_word_that_may_fit() -> None:
    made = started(checkpoint(99))
    feed(made, with_experts(with_qkv(checkpoint(1), L.CONCATENATED), L.STACKED))
    with pytest.raises(LiveweightsError) as caught:
        made.update(1, "0-1")
    named = [failure.tensor for failure in caught.value.failures]
    assert named == sorted({QKV, W13, W2})
    likely = {QKV: "concatenated", W13: "stacked", W2: "stacked"}
    assert all(f'"{likely[failure.tensor]}"' in failure.hint for failure in caught.value.failures)


@pytest.mark.parametrize("size", [1, 2])
def test_the_fused_spelling_is_proved_where_the_engine_started_on_it(size: int) -> None:
    def fused(tensors: Tensors) -> Tensors:
        return with_experts(with_gate_up(with_qkv(tensors, L.CONCATENATED), L.CONCATENATED), L.STACKED)

    new = checkpoint(1)
    made = started(fused(checkpoint(99)), size)
    feed(made, fused(new))
    made.update(1, "0-1")
    assert holds(made, [sliced(new, rank, size) for rank in range(size)])


def test_what_is_said_against_the_proved_spelling_is_refused_unless_its_start_said_the_same() -> None:
    start, new = with_qkv(checkpoint(99), L.CONCATENATED), with_qkv(checkpoint(1), L.CONCATENATED)
    made = started(start)
    feed(made, new)
    grouped = ((QKV, L.BY_KV_HEAD),)
    assert refused(made, layouts=grouped) == {("layout_unproved", QKV)}
    prove(made, start, replace(manifest_of(start), layouts=grouped))
    feed(made, new)
    made.update(2, "0-2", layouts=grouped)


# --- the same spelling


def test_other_names_another_order_and_redundant_copies_are_the_same_spelling() -> None:
    names = NameRules(prefix=(("old.", "new."),))
    shapes: dict[str, tuple[int, ...]] = {"new.embed": (4, 2), "new.scale": (1,)}
    engine = BareEngine(shapes, Rules(names), aliases={"new.embed": ("new.head",)})
    made = BareReplica([engine], lambda _rank: MemorySource({}))
    table, scale = torch.arange(8.0).view(4, 2).to(torch.bfloat16), torch.ones(()).to(torch.bfloat16)
    spellings: list[Mapping[str, torch.Tensor]] = [
        {"new.embed": table, "new.scale": scale},
        {"old.scale": scale.view(1), "old.embed": table},
        {"new.head": table.clone(), "new.embed": table, "old.scale": scale},
        {"old.head": table, "new.scale": scale},
    ]
    prove(made, dict(spellings[0]))
    for serial, tensors in enumerate(spellings, 1):
        feed(made, dict(tensors))
        made.update(serial, f"0-{serial}")
        assert torch.equal(engine.bound["new.embed"], table)


def test_one_tensor_that_is_two_parts_by_itself_is_an_alias_and_no_fusion() -> None:
    """Keys that are values too: the whole of it goes to both places."""
    stacked = (Stacked(".kv", ".both", ("k", "v")), Stacked(".k_", ".both", "k"), Stacked(".v_", ".both", "v"))
    engine = BareEngine({"a.both": (4, 3)}, Rules(NameRules(stacked=stacked), (("*.both", Merged(("k", "v"))),)))
    made = BareReplica([engine], lambda _rank: MemorySource({}))
    one = torch.ones(2, 3).to(torch.bfloat16)
    prove(made, {"a.kv": one})
    feed(made, {"a.k_": one, "a.v_": one * 2})
    made.update(1, "0-1")
    assert engine.bound["a.both"][:, 0].tolist() == [1, 1, 2, 2]


# --- who says it


def test_the_manifest_says_it_too_and_must_not_say_otherwise() -> None:
    new = checkpoint(1)
    sent = with_qkv(new, L.BY_KV_HEAD)
    manifest = replace(manifest_of(sent), layouts=(("*.qkv_proj.*", L.BY_KV_HEAD),))
    made = started(checkpoint(99))
    feed(made, sent, manifest)
    assert refused(made, layouts=((QKV, L.CONCATENATED),)) == {("layout_unproved", QKV)}
    made.update(2, "0-2", layouts=((QKV, L.BY_KV_HEAD),))
    made.update(3, "0-3")
    assert holds(made, [sliced(new, 0, 1)])


def test_the_plan_says_what_was_taken_on_whose_word() -> None:
    made = started(checkpoint(99))
    feed(made, with_qkv(checkpoint(1), L.BY_KV_HEAD))
    plan = RankPlan(1, DiskOffer(""), (), "", layouts=(("*.qkv_proj.*", L.BY_KV_HEAD), ("*.other", L.STACKED)))
    (line,) = made.agents[0].plan(plan).warnings
    assert {"*.qkv_proj.*", "by_kv_head"} <= set(line.split())


# --- what cannot be so, said of it


@pytest.mark.parametrize(
    ("kind", "whole", "parts", "kv_heads"),
    [
        (L.BY_KV_HEAD, (8, 4), {"a.q_proj": (4, 4), "a.k_proj": (4, 4)}, 2),
        (L.BY_KV_HEAD, (12, 4), {"a.q_proj": (6, 4), "a.k_proj": (4, 4), "a.v_proj": (2, 4)}, 2),
        (L.BY_KV_HEAD, (12, 4), {"a.q_proj": (8, 4), "a.k_proj": (2, 4), "a.v_proj": (2, 4)}, 0),
        (L.BY_KV_HEAD, (12, 4), {"a.q_proj": (8, 4), "a.k_proj": (2, 4), "a.v_proj": (2, 4)}, 4),
        (L.INTERLEAVED, (6, 4), {"a.gate_proj": (4, 4), "a.up_proj": (2, 4)}, 0),
        (L.INTERLEAVED, (4, 4), {"a.gate_proj": (4, 4)}, 0),
        (L.STACKED, (2, 4, 4), {"a.experts.0.w": (4, 4), "a.experts.2.w": (4, 4)}, 0),
        (L.STACKED, (2, 4, 4), {"a.one.w": (4, 4), "a.two.w": (4, 4)}, 0),
        (L.STACKED, (2, 4), {"a.experts.0.w": (4,), "a.experts.1.w": (2, 2)}, 0),
        (L.CONCATENATED, (9, 4), {"a.gate_proj": (4, 4), "a.up_proj": (4, 4)}, 0),
        (L.STACKED_TRANSPOSED, (2, 4), {"a.experts.0.w": (4,), "a.experts.1.w": (4,)}, 0),
    ],
)
def test_parts_that_a_layout_cannot_hold(
    kind: L, whole: tuple[int, ...], parts: dict[str, tuple[int, ...]], kv_heads: int
) -> None:
    specs = {name: TensorSpec(name, "F32", shape) for name, shape in parts.items()}
    with pytest.raises(FusionError):
        fusion_of(kind, TensorSpec("a.whole", "F32", whole), specs, {}, kv_heads)
