"""Names. Ranks, rules and rank agents are real; the source is in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_adapter.placement.declared.layouts import Merged
from engine_adapter.placement.declared.names import NameRules
from engine_adapter.placement.declared.rules import Rules
from engine_adapter.rank.messages import RankPlan, RankStatus
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import (
    EXPERTS,
    STACKED,
    Tensors,
    checkpoint,
    holds,
    manifest_of,
    replica,
    sliced,
)
from transports.testing import MemorySource
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import DiskOffer


def offer(made: BareReplica, tensors: Tensors) -> list[MemorySource]:
    """Let the replica's ranks open these tensors from now on; answers the list of what they opened."""
    opened: list[MemorySource] = []

    def open_source(_rank: int) -> MemorySource:
        opened.append(MemorySource(tensors, manifest_of(tensors)))
        return opened[-1]

    made.open_source = open_source
    return opened


def refused(made: BareReplica, tensors: Tensors) -> tuple[Failure, ...]:
    """The whole update is refused at this level: nothing live, spent, paused or held."""
    opened = offer(made, tensors)
    before = [{name: t.clone() for name, t in engine.bound.items()} for engine in made.engines]
    states = [agent.status(RankStatus()) for agent in made.agents]
    with pytest.raises(LiveweightsError) as caught:
        made.update(9, "0-9")
    assert holds(made, before)
    after = [agent.status(RankStatus()) for agent in made.agents]
    for was, now in zip(states, after, strict=True):
        assert now.spare_state == "empty" or now == was
        assert not now.paused
    assert all(source.closed for source in opened)
    return caught.value.failures


def found(failures: tuple[Failure, ...]) -> set[tuple[str, str]]:
    return {(failure.code, failure.tensor) for failure in failures}


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


@pytest.mark.case("B036")
def test_one_misspelt_name_lists_one_unknown_and_one_missing() -> None:
    new = checkpoint(1)
    failures = refused(replica(new), renamed(new, lambda n: n.replace("l.mlp.up_proj", "l.mlp.upp_proj")))
    assert found(failures) == {
        ("tensor_unexpected", "l.mlp.upp_proj.weight"),
        ("tensor_missing", "l.mlp.up_proj.weight"),
    }


@pytest.mark.case("B037")
def test_all_names_renamed_matches_none() -> None:
    new = checkpoint(1, experts=False)
    strange = renamed(new, lambda n: "net." + n.replace("_proj", ".to"))
    failures = refused(replica(new), strange)
    assert {f.tensor for f in failures if f.code == "tensor_unexpected"} == set(strange)
    assert {f.tensor for f in failures if f.code == "tensor_missing"} == set(new)
    assert any(f"0 of {len(new)} " in f.message for f in failures)


def tied(head: torch.Tensor | None, embed: torch.Tensor | None) -> BareReplica:
    engine = BareEngine({"embed": (4, 2)}, Rules(), aliases={"embed": ("lm_head",)})
    tensors = {name: t for name, t in (("embed", embed), ("lm_head", head)) if t is not None}
    return BareReplica([engine], lambda _rank: MemorySource(tensors, manifest_of(tensors)))


@pytest.mark.case("B038")
def test_a_tied_model_accepts_an_equal_head_and_says_so() -> None:
    weight = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    made = tied(weight.clone(), weight)
    vote = made.update(1, "0-1")
    assert torch.equal(made.engines[0].bound["embed"], weight)
    assert (vote.proof, len(vote.warnings)) == ("digests", 1)
    assert "lm_head" in vote.warnings[0]


@pytest.mark.case("B038")
def test_a_tied_model_refuses_another_head() -> None:
    weight = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    with pytest.raises(LiveweightsError) as caught:
        tied(weight + 1, weight).update(1, "0-1")
    assert found(caught.value.failures) == {("tensor_digest", "lm_head")}


@pytest.mark.case("F34")
def test_a_tied_head_alone_feeds_both_and_the_receipt_says_so() -> None:
    weight = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    made = tied(weight, None)
    (line,) = made.agents[0].plan(RankPlan(1, DiskOffer(""), (), "")).warnings
    assert {"lm_head", "embed", "tied:"} <= set(line.split())
    made.update(2, "0-2")
    assert torch.equal(made.engines[0].bound["embed"], weight)


@pytest.mark.case("B038")
@pytest.mark.parametrize("digests", [True, False])
def test_the_head_is_read_also_where_nobody_promised_digests(digests: bool) -> None:
    weight = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    made = tied(None, None)
    tensors = {"embed": weight, "lm_head": weight + 1}
    made.open_source = lambda _rank: MemorySource(tensors, manifest_of(tensors, digests))
    assert found(made.vote(1).failures) == {("tensor_digest", "lm_head")}


@pytest.mark.case("B040", "B190")
def test_an_untied_model_without_head_is_refused_naming_the_flag() -> None:
    new = checkpoint(1)
    failures = refused(replica(new), {n: t for n, t in new.items() if n != "lm_head.weight"})
    assert found(failures) == {("tensor_missing", "lm_head.weight")}
    assert "tie_word_embeddings" in failures[0].message


@pytest.mark.case("B046")
def test_a_missing_embedding_is_refused() -> None:
    new = checkpoint(1)
    zeros = {name: torch.zeros_like(t) for name, t in checkpoint(0).items()}
    failures = refused(replica(new, 2, live=zeros), {n: t for n, t in new.items() if n != "embed.weight"})
    assert found(failures) == {("tensor_missing", "embed.weight")}


OLD_AND_NEW = Rules(
    NameRules(
        prefix=(("language_model.model.", "model."), ("model.language_model.", "model."), ("visual.", "model.visual."))
    )
)
NEW_NAMES = ["model.language_model.embed", "model.language_model.norm", "model.visual.patch"]


def old_name(name: str) -> str:
    return name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual.")


@pytest.mark.case("B052")
@pytest.mark.parametrize("old", [set(), set(NEW_NAMES), {"model.language_model.norm"}, {"model.visual.patch"}])
def test_old_new_and_half_half_spellings_give_the_same_bytes(old: set[str]) -> None:
    values = {name: torch.full((2, 3), float(i + 1)).to(torch.bfloat16) for i, name in enumerate(NEW_NAMES)}
    engine = BareEngine(dict.fromkeys(["model.embed", "model.norm", "model.visual.patch"], (2, 3)), OLD_AND_NEW)
    made = BareReplica([engine], lambda _rank: MemorySource({}))
    offer(made, renamed(values, lambda name: old_name(name) if name in old else name))
    made.update(1, "0-1")
    assert [engine.bound[n][0, 0].item() for n in ("model.embed", "model.norm", "model.visual.patch")] == [1, 2, 3]


@pytest.mark.case("B052")
def test_both_spellings_of_one_parameter_are_refused() -> None:
    values = {name: torch.ones(2, 3).to(torch.bfloat16) for name in NEW_NAMES}
    engine = BareEngine(dict.fromkeys(["model.embed", "model.norm", "model.visual.patch"], (2, 3)), OLD_AND_NEW)
    made = BareReplica([engine], lambda _rank: MemorySource({}))
    failures = refused(made, values | {"visual.patch": values["model.visual.patch"]})
    assert [f.code for f in failures] == ["tensor_duplicate"]
    text = failures[0].tensor + failures[0].message
    assert "model.visual.patch" in text
    assert " visual.patch" in " " + text.replace("model.visual.patch", "")


def stacked_experts(tensors: Tensors, count: int = EXPERTS) -> Tensors:
    """Per-expert tensors as two stacked ones, `[experts, 2 * inter, hidden]` and `[experts, hidden, inter]`."""
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    picks = [e % EXPERTS for e in range(count)]
    w13 = [torch.cat([tensors[f"l.experts.{e}.w1.weight"], tensors[f"l.experts.{e}.w3.weight"]]) for e in picks]
    w2 = [tensors[f"l.experts.{e}.w2.weight"] for e in picks]
    return rest | {"l.experts.w13": torch.stack(w13), "l.experts.w2": torch.stack(w2)}


@pytest.mark.case("B054")
@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_per_expert_and_stacked_give_the_same_bytes(parallel: str) -> None:
    new = checkpoint(1)
    want = [sliced(new, rank, 2, parallel) for rank in range(2)]  # type: ignore[arg-type]
    for sent in (new, stacked_experts(new)):
        made = replica(new, 2, parallel=parallel)  # type: ignore[arg-type]
        offer(made, sent)
        made.update(1, "0-1")
        assert holds(made, want)


@pytest.mark.case("B054")
def test_a_missing_expert_is_refused_naming_its_index() -> None:
    new = checkpoint(1)
    failures = refused(replica(new, 2), {n: t for n, t in new.items() if ".experts.3." not in n})
    assert found(failures) == {("tensor_missing", f"l.experts.3.w{i}.weight") for i in (1, 2, 3)}
    assert all("expert 3" in failure.message for failure in failures)


@pytest.mark.case("B054")
def test_an_expert_too_many_is_refused_naming_its_index() -> None:
    new = checkpoint(1)
    failures = refused(replica(new, 2), stacked_experts(new, EXPERTS + 1))
    assert found(failures) == {("tensor_shape", "l.experts.w13"), ("tensor_shape", "l.experts.w2")}
    assert all("expert 4" in failure.message for failure in failures)
    failures = refused(replica(new, 2), new | {"l.experts.4.w1.weight": new["l.experts.0.w1.weight"]})
    assert found(failures) == {("tensor_unexpected", "l.experts.4.w1.weight")}
    assert "expert 4" in failures[0].message


@pytest.mark.case("B055")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_gate_and_up_land_in_their_halves(interleaved: bool, backwards: bool) -> None:
    parts = [("gate_proj", torch.ones(4, 3)), ("up_proj", torch.full((4, 3), 2.0))]
    tensors = {f"m.{name}": t.to(torch.bfloat16) for name, t in (reversed(parts) if backwards else parts)}
    engines = [
        BareEngine({"m.gate_up_proj": (4, 3)}, rules_of(Merged(interleaved=interleaved)), rank, 2) for rank in (0, 1)
    ]
    BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors))).update(1, "0-1")
    want = [1, 2, 1, 2] if interleaved else [1, 1, 2, 2]
    assert [engine.bound["m.gate_up_proj"][:, 0].tolist() for engine in engines] == [want, want]


@pytest.mark.case("B055")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_fused_source_in_the_parameters_own_arrangement(interleaved: bool) -> None:
    gate, up = torch.ones(4, 3), torch.full((4, 3), 2.0)
    fused = torch.stack([gate, up], 1).flatten(0, 1) if interleaved else torch.cat([gate, up])
    engines = [
        BareEngine({"m.gate_up_proj": (4, 3)}, rules_of(Merged(interleaved=interleaved)), rank, 2) for rank in (0, 1)
    ]
    tensors = {"m.gate_up_proj": fused.to(torch.bfloat16)}
    BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors))).update(1, "0-1")
    want = [1, 2, 1, 2] if interleaved else [1, 1, 2, 2]
    assert [engine.bound["m.gate_up_proj"][:, 0].tolist() for engine in engines] == [want, want]


def rules_of(layout: Merged) -> Rules:
    return Rules(NameRules(stacked=STACKED[3:5]), (("m.gate_up_proj", layout),))
