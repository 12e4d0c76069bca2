"""Slices, end to end: real rank processes, live bytes compared with tensors cut by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.testing import ToyOptions, expected_digests, make_toy_checkpoint, write_shards
from engine_adapter.testing.harness import RankHarness
from transports.digest import tensor_digest, to_hex
from updater.core.errors import LiveweightsError

pytestmark = pytest.mark.engine

torch.set_num_threads(1)

TOY = "engine_adapter.testing:build_toy"
PROMPT = tuple(range(40, 53))
ATTENTION = "model.layers.1.self_attn"


def digest(tensor: torch.Tensor) -> str:
    return to_hex(tensor_digest(tensor.contiguous()))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def refused_and_unchanged(replica: RankHarness, folder: Path) -> LiveweightsError:
    """Stage `folder`: refused, and the replica serves what it served, with nothing staged."""
    before, tokens = replica.digests(), replica.generate(PROMPT, 8).tokens
    with pytest.raises(LiveweightsError) as refused:
        replica.stage(folder)
    assert replica.digests() == before
    after = replica.generate(PROMPT, 8)
    assert (after.tokens, set(after.versions)) == (tokens, {replica.version})
    assert {status.spare_state for status in replica.status()} <= {"empty", "previous"}
    return refused.value


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def over_four(home: Path) -> Iterator[RankHarness]:
    """M0 has two key/value heads: at TP 4 each lies on two ranks."""
    with RankHarness(TOY, make_toy_checkpoint(home / "four", seed=7), 4) as replica:
        yield replica


def heads_filled_with_their_index(folder: Path) -> dict[str, torch.Tensor]:
    tensors = tensors_of(make_toy_checkpoint(folder, seed=8))
    for name in ("k_proj", "v_proj", "k_norm"):
        for head in range(2):
            tensors[f"{ATTENTION}.{name}.weight"][4 * head : 4 * head + 4] = head + 1
    write_shards(folder, tensors)
    return tensors


@pytest.mark.case("B058")
def test_more_ranks_than_heads_hold_each_head_twice(over_four: RankHarness, tmp_path: Path) -> None:
    tensors = heads_filled_with_their_index(tmp_path)
    over_four.publish(tmp_path, "replicated-heads")
    live = over_four.digests()
    query = tensors[f"{ATTENTION}.q_proj.weight"]
    for rank, head in enumerate((0, 0, 1, 1)):
        filled = torch.full((8, 16), head + 1, dtype=torch.bfloat16)
        fused = torch.cat([query[4 * rank : 4 * rank + 4], filled])
        assert live[rank][f"{ATTENTION}.qkv_proj.weight"] == digest(fused)
    assert live == [expected_digests(tmp_path, rank, 4) for rank in range(4)]


@pytest.mark.case("B060")
def test_a_norm_per_head_follows_its_replicated_head(over_four: RankHarness, tmp_path: Path) -> None:
    heads_filled_with_their_index(tmp_path)
    over_four.publish(tmp_path, "head-norm")
    norms = [rank[f"{ATTENTION}.k_norm.weight"] for rank in over_four.digests()]
    first, second = (digest(torch.full((4,), value, dtype=torch.bfloat16)) for value in (1.0, 2.0))
    assert norms == [first, first, second, second]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"num_attention_heads": 6, "num_key_value_heads": 3}, id="half-a-head", marks=pytest.mark.case("B060")
        ),
        pytest.param({"intermediate_size": 25}, id="intermediate", marks=pytest.mark.case("B064")),
    ],
)
def test_sizes_that_do_not_divide_never_start(home: Path, changes: dict[str, int]) -> None:
    folder = make_toy_checkpoint(home / "-".join(changes), seed=7, **changes)
    with pytest.raises(LiveweightsError) as refused, RankHarness(TOY, folder, 2):
        pass
    assert {(failure.code, failure.rank) for failure in refused.value.failures} == {
        ("placement_refused", 0),
        ("placement_refused", 1),
    }


@pytest.mark.case("B061")
def test_ranks_that_all_take_the_first_slice_are_refused_at_the_join(home: Path) -> None:
    folder = make_toy_checkpoint(home / "first-slice", seed=7)
    with pytest.raises(LiveweightsError) as refused, RankHarness(TOY, folder, 2, {"as_rank": 0}):
        pass
    lost = {failure.tensor for failure in refused.value.failures if failure.code == "tensor_unwritten"}
    assert {"model.embed_tokens.weight", f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.o_proj.weight"} <= lost


@pytest.mark.case("B061")
def test_ranks_that_take_one_slice_later_are_refused_before_a_byte_moves(home: Path) -> None:
    options: dict[str, str | int | float | bool] = {"as_rank": 0, "defect_from": 2}
    with RankHarness(TOY, make_toy_checkpoint(home / "later", seed=7), 2, options) as replica:
        eight = make_toy_checkpoint(home / "later-8", seed=8)
        refused = refused_and_unchanged(replica, eight)
        assert f"{ATTENTION}.q_proj.weight" in {
            failure.tensor for failure in refused.failures if failure.code == "tensor_unwritten"
        }


@pytest.mark.case("B062")
def test_padding_rows_are_zero_after_every_update(home: Path) -> None:
    with RankHarness(TOY, make_toy_checkpoint(home / "padded", seed=7), 2) as replica:
        for seed in (8, 9):
            folder = make_toy_checkpoint(home / f"padded-{seed}", seed=seed)
            replica.publish(folder, f"padded-{seed}")
            source = tensors_of(folder)
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                rows = source[name]
                second = torch.cat([rows[160:257], torch.zeros(63, 16, dtype=torch.bfloat16)])
                assert [rank[name] for rank in replica.digests()] == [digest(rows[:160]), digest(second)]
        replica.rollback()
        assert replica.digests() == [expected_digests(home / "padded-8", rank, 2) for rank in range(2)]


@pytest.mark.case("B064")
def test_a_vocabulary_that_does_not_divide_is_never_shortened(home: Path) -> None:
    folder = make_toy_checkpoint(home / "unpadded", seed=7)
    with pytest.raises(LiveweightsError) as refused, RankHarness(TOY, folder, 2, {"pad_vocab": 1}):
        pass
    assert {failure.code for failure in refused.value.failures} == {"placement_refused"}
    with RankHarness(TOY, folder, 1, {"pad_vocab": 1}) as replica:
        replica.publish(make_toy_checkpoint(home / "unpadded-8", seed=8), "unpadded")
        assert replica.digests()[0]["lm_head.weight"] == digest(tensors_of(home / "unpadded-8")["lm_head.weight"])


@pytest.mark.case("B068")
def test_each_rank_holds_half_the_gate_then_half_the_up(home: Path) -> None:
    changes = {"fused_experts": True}
    with RankHarness(TOY, make_toy_checkpoint(home / "fused", "M2", seed=7, **changes), 2) as replica:
        folder = make_toy_checkpoint(home / "fused-8", "M2", seed=8, **changes)
        tensors = tensors_of(folder)
        both = tensors["model.layers.0.mlp.experts.gate_up_proj"]
        both[:, :8], both[:, 8:] = 1.0, 2.0
        write_shards(folder, tensors)
        replica.publish(folder, "halves")
        halves = torch.cat([torch.full((4, 4, 16), value, dtype=torch.bfloat16) for value in (1.0, 2.0)], 1)
        assert [rank["model.layers.0.mlp.experts.w13_weight"] for rank in replica.digests()] == [digest(halves)] * 2


@pytest.mark.case("B069")
def test_experts_of_two_ranks_are_the_same_however_the_files_lie(home: Path) -> None:
    options: dict[str, str | int | float | bool] = {"expert_parallel": True}
    with RankHarness(TOY, make_toy_checkpoint(home / "experts", "M2", seed=7), 2, options) as replica:
        found = []
        for shards in (1, 3):
            folder = make_toy_checkpoint(home / f"experts-{shards}", "M2", seed=8, shards=shards)
            replica.publish(folder, f"experts-{shards}")
            found.append(replica.digests())
            replica.publish(home / "experts", f"experts-{shards}-back")
        assert found[0] == found[1]
        parsed = ToyOptions.parse(options)
        assert found[0] == [expected_digests(home / "experts-3", rank, 2, parsed) for rank in range(2)]
