"""Tied embeddings, experts, and weights that vLLM packs: one engine has them all.

In float32 vLLM packs every linear, the tied head and the experts on CPU: what runs is not what a checkpoint holds. Its
ranks fail on order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_adapter.model_files import write_safetensors
from engine_adapter.models import ModelShape, encode, make_model, reference_tokens
from engine_adapter.vllm.testing import EXTENSION, ORDERS
from tests.vllm_server.fleet import Fleet, Tensors, coordinator, member
from tests.vllm_server.models import PROMPTS
from tests.vllm_server.test_cases import (
    COUNT,
    EMBEDDING,
    HEAD,
    STREAMS,
    TRANSPORTS,
    accepted,
    digest_of,
    found,
    nothing_shows_before_the_commit,
    push,
    refused,
    refusing,
    renamed,
    serves,
    settled,
    tensors_of,
    view,
)
from updater.core.errors import LiveweightsError

SHAPE = ModelShape("mixtral", hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=256, tied=True)
MOE = "model.layers.1.block_sparse_moe"
PARTS = ("w1", "w2", "w3")
ROUTER = f"{MOE}.gate.weight"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("experts")
    first, second = (wide(make_model(home / f"v{seed}", SHAPE, seed=seed)) for seed in (11, 12))
    extension = ("--worker-extension-cls", EXTENSION)
    environment = {ORDERS: str(home / "orders")}
    with coordinator(home / "coordinator", [home]) as at:
        log = home / "server.log"
        with member(
            first, log, at, roots=[home], dtype="float32", arguments=extension, environment=environment
        ) as server:
            yield Fleet(at, server, first, second, first, home=home)


def wide(folder: Path) -> Path:
    """The same checkpoint in float32, with something in its low bits."""
    file, config = folder / "model.safetensors", folder / "config.json"
    write_safetensors(file, {name: tensor.float() * (1 + 2**-12) for name, tensor in tensors_of(folder).items()})
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    return folder


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    """Nothing is ordered before and after."""
    yield settled(shared)
    order(shared)


@pytest.fixture
def new(fleet: Fleet) -> Tensors:
    """The tensors that are not live."""
    return tensors_of(fleet.other)


def order(fleet: Fleet, *orders: str) -> None:
    """To the rank, at once and whole."""
    fresh = fleet.home / "orders.new"
    fresh.write_text("\n".join(orders))
    fresh.replace(fleet.home / "orders")


# ----- names


@pytest.mark.case("B038")
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_a_tied_model_accepts_an_equal_head_and_says_so(fleet: Fleet, new: Tensors, transport: str) -> None:
    receipt = accepted(fleet, new | {HEAD: new[EMBEDDING].clone()}, transport)
    assert [HEAD in warning for warning in receipt["warnings"] if "redundant tied copy" in warning] == [True]


@pytest.mark.case("B038")
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_a_tied_model_refuses_another_head(fleet: Fleet, new: Tensors, transport: str) -> None:
    """No rank stores it: it is read all the same, also from a bare folder that promises no digest."""
    other = new[EMBEDDING].clone()
    other[7, 7] += 1
    assert found(refused(fleet, new | {HEAD: other}, transport)) == {("tensor_digest", HEAD)}


@pytest.mark.case("B040")
def test_a_tied_model_without_its_embedding_is_not_fed_by_its_head(fleet: Fleet, new: Tensors) -> None:
    new[HEAD] = new.pop(EMBEDDING)
    assert ("tensor_missing", EMBEDDING) in found(refused(fleet, new))


@pytest.mark.case("B054")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_one_by_one_reach_their_places(fleet: Fleet, new: Tensors, transport: str) -> None:
    accepted(fleet, new, transport)


@pytest.mark.case("B054")
def test_stacked_experts_are_refused_where_the_engine_knows_none(fleet: Fleet, new: Tensors) -> None:
    """vLLM's own loader of this family takes experts one by one, and passes over the rest in silence."""
    names = {name for name in new if ".experts." in name}
    for at in (f"model.layers.{layer}.block_sparse_moe.experts" for layer in (0, 1)):
        w1, w2, w3 = ([new.pop(f"{at}.{e}.{part}.weight") for e in range(SHAPE.experts)] for part in PARTS)
        both = [torch.cat(pair) for pair in zip(w1, w3, strict=True)]
        new |= {f"{at}.gate_up_proj": torch.stack(both), f"{at}.down_proj": torch.stack(w2)}
    assert found(refused(fleet, new)) >= {("tensor_missing", name) for name in names}


@pytest.mark.case("B054")
def test_a_missing_expert_is_refused_by_its_index(fleet: Fleet, new: Tensors) -> None:
    gone = {f"{MOE}.experts.3.{part}.weight" for part in PARTS}
    failures = refused(fleet, {name: tensor for name, tensor in new.items() if name not in gone})
    assert found(failures) == {("tensor_missing", name) for name in gone}


@pytest.mark.case("B054")
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_an_expert_too_many_is_refused_by_its_index(fleet: Fleet, new: Tensors, transport: str) -> None:
    extra = {f"{MOE}.experts.4.{part}.weight": new[f"{MOE}.experts.0.{part}.weight"] for part in PARTS}
    assert found(refused(fleet, new | extra, transport)) == {("tensor_unexpected", name) for name in extra}


@pytest.mark.case("B055")
def test_gate_and_up_of_experts_land_in_their_halves_in_whatever_order_they_come(fleet: Fleet, new: Tensors) -> None:
    accepted(fleet, {name: new[name] for name in reversed(list(new))}, "shared_memory")
    push(fleet, renamed(tensors_of(fleet.other), swap_gate_and_up))
    assert view(fleet).tokens != reference_tokens(fleet.other, encode(PROMPTS[0]), COUNT).tokens
    fleet.publish(fleet.other)


def swap_gate_and_up(name: str) -> str:
    for one, other in (("w1", "w3"), ("w3", "w1")):
        if name.endswith(f".{one}.weight"):
            return name.replace(f".{one}.", f".{other}.")
    return name


# ----- dtypes, packed weights


@pytest.mark.case("B070")
def test_a_float32_router_travels_as_float32_on_every_transport(fleet: Fleet) -> None:
    said = []
    for transport in TRANSPORTS:
        tensors = tensors_of(fleet.first)
        tensors[ROUTER][2, 5] = 1 + 2.0**-12  # bfloat16 cannot hold it
        said.append(set(push(fleet, tensors, transport)["observed"].values()))
        fleet.publish(fleet.second)
    assert said == [{digest_of(tensors)}] * len(TRANSPORTS)


@pytest.mark.case("B070")
def test_bfloat16_is_widened_exactly(fleet: Fleet, new: Tensors) -> None:
    path = fleet.other
    narrow = {name: tensor.bfloat16() for name, tensor in new.items()}
    scores = []
    for tensors in (narrow, {name: tensor.float() for name, tensor in narrow.items()}):
        push(fleet, tensors)
        now = view(fleet)
        assert now.tokens == reference_tokens(path, encode(PROMPTS[0]), COUNT).tokens
        scores.append(now.scores)
        fleet.publish(fleet.path)
    assert scores[0] == scores[1]


@pytest.mark.case("B072")
def test_what_is_packed_follows_every_publication_and_every_way_back(fleet: Fleet) -> None:
    """To the last bit: a kernel that stayed behind would show in the log-probabilities."""
    seen = {}
    for path in (fleet.first, fleet.second, fleet.first, fleet.second):
        before = fleet.live
        receipt = fleet.publish(path)
        serves(fleet, path, receipt)
        assert seen.setdefault(path, view(fleet).scores) == view(fleet).scores
    fleet.coordinator.rollback(before, receipt["version"])
    fleet.path = fleet.first
    assert view(fleet).scores == seen[fleet.first] != seen[fleet.second]


@pytest.mark.case("B072")
@pytest.mark.parametrize("fault", ["raise:before:install:0", "once:before:set_version:0", "once:after:set_version:0"])
def test_what_is_packed_goes_back_with_an_install_that_failed(fleet: Fleet, fault: str) -> None:
    with refusing(fleet):
        order(fleet, fault)
        problem = fleet.publish(fleet.other, expect=424)
        assert problem["outcome"] == "rolled_back"
        order(fleet)


@pytest.mark.case("B073")
def test_the_same_bytes_three_times_change_nothing(fleet: Fleet) -> None:
    """Packed weights are not packed once more."""
    fleet.publish(fleet.path)
    before = view(fleet)
    for _ in range(3):
        assert fleet.publish(fleet.path)["tensors_changed"] == 0
        now = view(fleet)
        assert (now.tokens, now.scores, now.digests) == (before.tokens, before.scores, before.digests)


@pytest.mark.case("B074")
@pytest.mark.parametrize("transport", STREAMS)
def test_weights_are_packed_once_when_all_chunks_are_there(fleet: Fleet, new: Tensors, transport: str) -> None:
    receipt, path = nothing_shows_before_the_commit(fleet, new, transport, 256 << 10)
    serves(fleet, path, receipt)


# ----- a rank that fails


@pytest.mark.case("B090", "B095")
@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("verb", ["stage", "verify"])
def test_a_trainer_hears_of_the_rank_that_failed_and_the_next_update_is_good(
    fleet: Fleet, new: Tensors, transport: str, verb: str
) -> None:
    with refusing(fleet):
        order(fleet, f"raise:before:{verb}:0")
        with pytest.raises(LiveweightsError) as caught:
            push(fleet, new, transport)
    first = caught.value.failures[0]
    assert (first.code, first.rank, verb in first.message) == ("rank_failed", 0, True)
    order(fleet)
    accepted(fleet, new, transport)
