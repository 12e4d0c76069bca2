"""What a rank agent decides: dtypes, scalars, NaN, what a source did not write, a reused buffer, derived values.

Derived values are in tests/unit/rank/test_rank_agent.py as well, with the order of bind and label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_adapter.base import Derived
from engine_adapter.placement.declared.rules import Rules
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.messages import RankPlan, RankStatus
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import Tensors, checkpoint, holds, manifest_of, replica, sliced
from transports.base import Source
from transports.disk.source import DiskSource
from transports.testing import LyingSource, MemorySource, PoisonSource, refused, write_checkpoint, write_sharded
from updater.core.errors import LiveweightsError
from updater.core.participant import DiskOffer
from updater.core.policy import InstallMode


def single(
    tensors: Tensors,
    dtypes: dict[str, torch.dtype],
    source: Callable[[int], Source] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> BareReplica:
    """One rank whose parameters have the names of the tensors, and these dtypes."""
    local = shapes or {name: tuple(t.shape) for name, t in tensors.items()}
    engine = BareEngine(local, Rules(), dtypes=dtypes)
    return BareReplica([engine], source or (lambda _rank: MemorySource(tensors, manifest_of(tensors))))


def still_old(made: BareReplica, before: list[Tensors]) -> bool:
    states = [agent.status(RankStatus()) for agent in made.agents]
    return holds(made, before) and all(s.spare_state == "empty" and not s.paused for s in states)


@pytest.mark.case("B030")
@pytest.mark.parametrize(("source", "target"), [((), (1,)), ((1,), ())])
def test_scalars_and_one_element_vectors_are_equal_values(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    tensors = {"scale": torch.full(source, 1.5)}
    made = single(tensors, {"scale": torch.float32}, shapes={"scale": target})
    made.update(1, "0-1")
    assert made.engines[0].bound["scale"].item() == 1.5
    assert made.engines[0].bound["scale"].shape == target


@pytest.mark.case("B030")
def test_two_elements_for_one_are_refused() -> None:
    made = single({"scale": torch.ones(2)}, {"scale": torch.float32}, shapes={"scale": (1,)})
    with refused("tensor_shape", tensors=["scale"]):
        made.vote(1)


@pytest.mark.case("B033")
@pytest.mark.parametrize("size", [1, 2])
def test_a_reused_buffer_leaves_right_bytes_in_fused_parameters(size: int) -> None:
    tensors = checkpoint(1)
    made = replica(tensors, size)
    made.open_source = lambda _rank: PoisonSource(tensors, manifest=manifest_of(tensors))
    made.update(1, "0-1")
    assert holds(made, [sliced(tensors, rank, size) for rank in range(size)])


BIAS = torch.tensor([1 + 2**-12, -1.0, 0.5])


def from_disk(tmp_path: Path, tensors: Tensors) -> Callable[[int], Source]:
    path = write_checkpoint(tmp_path / "model.safetensors", tensors)
    return lambda _rank: DiskSource.open(str(path), (str(tmp_path),), manifest_of(tensors).to_json())


@pytest.mark.case("B070")
def test_float32_stays_float32_from_disk(tmp_path: Path) -> None:
    made = single({"bias": BIAS}, {"bias": torch.float32}, from_disk(tmp_path, {"bias": BIAS}))
    assert made.update(1, "0-1").proof == "digests"
    assert torch.equal(made.engines[0].bound["bias"], BIAS)


@pytest.mark.case("B070")
def test_a_lossy_cast_needs_the_policy_and_keeps_the_proof(tmp_path: Path) -> None:
    made = single({"bias": BIAS}, {"bias": torch.bfloat16}, from_disk(tmp_path, {"bias": BIAS}))
    with refused("tensor_narrowing", tensors=["bias"]):
        made.vote(1)
    with refused("tensor_narrowing", tensors=["bias"]):
        made.vote(2, allow_narrowing=(("F32", "F16"),))
    found = made.update(3, "0-3", allow_narrowing=(("F32", "BF16"),))
    assert (found.proof, found.failures) == ("digests", ())
    assert torch.equal(made.engines[0].bound["bias"], BIAS.to(torch.bfloat16))


@pytest.mark.case("F26")
def test_a_lossy_cast_that_is_refused_names_the_policy_that_allows_it(tmp_path: Path) -> None:
    made = single({"bias": BIAS}, {"bias": torch.bfloat16}, from_disk(tmp_path, {"bias": BIAS}))
    with pytest.raises(LiveweightsError) as caught:
        made.vote(1)
    assert 'allow_narrowing=[["F32", "BF16"]]' in caught.value.failures[0].hint
    assert "F32:BF16" in str(caught.value)


@pytest.mark.case("B070")
def test_what_was_narrowed_wrongly_is_caught() -> None:
    """The proof of a lossy cast: the source's bytes are the promised ones, and their cast is what lies here."""
    promised = {"bias": BIAS}
    damaged = {"bias": BIAS + 2**-20}  # the same bfloat16, other float32 bytes
    assert torch.equal(BIAS.bfloat16(), damaged["bias"].bfloat16())
    narrow = (("F32", "BF16"),)
    made = single(promised, {"bias": torch.bfloat16}, lambda _r: MemorySource(damaged, manifest_of(promised)))
    assert [f.code for f in made.vote(1, allow_narrowing=narrow).failures] == ["tensor_digest"]
    made = single(promised, {"bias": torch.bfloat16}, lambda _r: Late(promised, manifest=manifest_of(promised)))
    with refused("tensor_digest", tensors=["bias"]):
        made.vote(1, allow_narrowing=narrow)


class Late(MemorySource):
    """Brings other bytes when staged than when it is read again for the proof."""

    times = 0

    def deliver(self, region: torch.Tensor, target: torch.Tensor) -> None:
        self.times += 1
        super().deliver(region if self.times > 1 else region * 2, target)


@pytest.mark.case("B070")
def test_exact_widening_keeps_the_proof() -> None:
    weight = torch.arange(-8.0, 8.0).view(4, 4).to(torch.bfloat16) / 3
    made = single({"w": weight}, {"w": torch.float32})
    found = made.update(1, "0-1")
    assert (found.proof, found.failures) == ("digests", ())
    assert torch.equal(made.engines[0].bound["w"], weight.float())


class Nudging(MemorySource):
    """Delivers a float32 that no bfloat16 widens to."""

    def deliver(self, region: torch.Tensor, target: torch.Tensor) -> None:
        super().deliver(region, target)
        target[0, 0] += 2**-20


@pytest.mark.case("B070")
def test_a_widened_value_that_no_source_value_widens_to_is_caught() -> None:
    tensors = {"w": torch.ones(4, 4).to(torch.bfloat16)}
    made = single(tensors, {"w": torch.float32}, lambda _r: Nudging(tensors, manifest_of(tensors)))
    with refused("tensor_digest", tensors=["w"]):
        made.vote(1)


@pytest.mark.case("B070")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "int32"])
def test_other_kinds_of_number_never_meet(dtype: str) -> None:
    made = single({"w": torch.zeros(4).to(getattr(torch, dtype))}, {"w": torch.bfloat16})
    with refused("tensor_dtype", tensors=["w"]):
        made.vote(1, allow_narrowing=(("F8_E4M3", "BF16"), ("I8", "BF16"), ("I32", "BF16")))


@pytest.mark.case("B072")
@pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
def test_a_derived_copy_is_fresh_when_the_new_version_is_visible(mode: InstallMode) -> None:
    tensors = {"lm_head": torch.full((4, 4), 2.0).to(torch.bfloat16)}
    cached: dict[str, torch.Tensor] = {}
    engines: list[BareEngine] = []
    head = Derived(
        "fp32_head",
        ("lm_head",),
        build=lambda tensors: tensors["lm_head"].float(),
        bind=lambda state: cached.update(head=state),
        bound=lambda: torch.zeros(4, 4),
    )
    engines.append(BareEngine({"lm_head": (4, 4)}, Rules(), derived=(head,)))
    seen: list[float] = []
    engines[0].before_label = lambda _version: seen.append(cached["head"][0, 0].item())
    BareReplica(engines, lambda _rank: MemorySource(tensors, manifest_of(tensors))).update(1, "0-1", mode)
    assert seen == [2.0]


@pytest.mark.case("B074")
def test_nothing_is_visible_before_the_end_and_the_end_comes_once() -> None:
    """Bytes arrive tensor by tensor; what serves stays old until the install, derived values are made once."""
    tensors = checkpoint(2)
    made = replica(tensors)
    engine = made.engines[0]
    before = [{name: t.clone() for name, t in engine.bound.items()}]
    built: list[str] = []
    bound: list[bool] = []
    engine._derived = (
        Derived(
            "packed",
            tuple(engine.bound),
            build=lambda given: built.extend(given),
            bind=lambda _state: bound.append(holds(made, [sliced(tensors, 0, 1)])),
            bound=lambda: None,
        ),
    )
    made = BareReplica(made.engines, made.open_source)
    arrivals: list[bool] = []

    class Watched(MemorySource):
        def deliver(self, region: torch.Tensor, target: torch.Tensor) -> None:
            super().deliver(region, target)
            arrivals.append(holds(made, before) and not engine.paused)

    made.open_source = lambda _rank: Watched(tensors, manifest_of(tensors))
    made.update(1, "0-1")
    assert len(arrivals) == len(tensors)
    assert all(arrivals)
    assert (sorted(built), bound) == (sorted(engine.bound), [True])


@pytest.mark.case("B075")
@pytest.mark.parametrize("digests", [True, False])
def test_a_tensor_that_was_never_written_is_refused(digests: bool) -> None:
    """With promised digests by the digest; without, because the spare was poisoned before."""
    tensors = checkpoint(3)
    made = replica(tensors, 2)
    before = [{n: t.clone() for n, t in engine.bound.items()} for engine in made.engines]
    silent = frozenset({"l.attn.k_proj.weight"})
    made.open_source = lambda _rank: LyingSource(tensors, silent, manifest=manifest_of(tensors, digests))
    with refused("tensor_digest" if digests else "tensor_nonfinite", tensors=["l.attn.k_proj.weight"]):
        made.update(1, "0-1")
    assert still_old(made, before)


@pytest.mark.case("B075")
def test_a_placement_that_skips_a_parameter_is_refused_before_any_byte() -> None:
    tensors = checkpoint(3, experts=False)
    made = replica(tensors)
    engine = made.engines[0]
    honest = engine.placement

    def skips(specs):  # type: ignore[no-untyped-def]
        found = honest(specs)
        return replace(found, rows=tuple(row for row in found.rows if row.target != "norm.weight"))

    rest = BareEngine({n: tuple(t.shape) for n, t in engine.bound.items()}, engine.rules, placement=skips)
    opened: list[MemorySource] = []
    made = BareReplica([rest], lambda _rank: opened.append(MemorySource(tensors)) or opened[-1])
    with refused("tensor_unwritten", tensors=["norm.weight"]):
        made.vote(1)
    assert made.agents[0].status(RankStatus()).spare_state == "empty"
    assert opened[0].closed


@pytest.mark.case("B075")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_from_the_trainer_need_the_policy(bad: float) -> None:
    tensors = checkpoint(4)
    tensors["l.mlp.up_proj.weight"][5, 3] = bad
    tensors["norm.weight"][2] = bad
    made = replica(tensors, 2)
    before = [{n: t.clone() for n, t in engine.bound.items()} for engine in made.engines]
    with pytest.raises(LiveweightsError) as caught:
        made.update(1, "0-1")
    assert {f.code for f in caught.value.failures} == {"tensor_nonfinite"}
    assert "norm.weight" in {f.tensor for f in caught.value.failures}
    assert still_old(made, before)
    made.update(2, "0-2", allow_nonfinite=True)
    assert holds(made, [sliced(tensors, rank, 2) for rank in range(2)])


@pytest.mark.case("B075")
def test_the_tensor_is_named_and_not_its_neighbours_in_the_parameter() -> None:
    tensors = checkpoint(4)
    tensors["l.attn.v_proj.weight"][0, 0] = float("nan")
    with pytest.raises(LiveweightsError) as caught:
        replica(tensors).vote(1)
    assert [f.tensor for f in caught.value.failures] == ["l.attn.v_proj.weight"]


@pytest.mark.case("B085")
def test_three_norms_of_twenty_that_never_landed_are_refused() -> None:
    tensors = {f"norm.{i}": torch.full((8,), i + 1.0) for i in range(20)}
    dtypes = dict.fromkeys(tensors, torch.float32)
    silent = frozenset({"norm.3", "norm.7", "norm.19"})
    made = single(tensors, dtypes, lambda _rank: LyingSource(tensors, silent, manifest=manifest_of(tensors)))
    found = made.vote(1)
    assert {(f.code, f.tensor) for f in found.failures} == {("tensor_digest", name) for name in silent}
    warned = [warning for warning in found.warnings if "norm.3" in warning]
    assert len(warned) == 1
    assert all(name in warned[0] for name in silent)
    assert "norm.4" not in warned[0]


@pytest.mark.case("B105")
@pytest.mark.parametrize("digests", [True, False])
def test_success_without_a_byte_is_refused(digests: bool) -> None:
    tensors = checkpoint(5)
    made = replica(tensors, 2)
    before = [{n: t.clone() for n, t in engine.bound.items()} for engine in made.engines]
    made.open_source = lambda _rank: LyingSource(tensors, manifest=manifest_of(tensors, digests))
    with pytest.raises(LiveweightsError) as caught:
        made.update(1, "0-1")
    assert {f.code for f in caught.value.failures} == {"tensor_digest" if digests else "tensor_nonfinite"}
    assert {f.tensor for f in caught.value.failures} == set(tensors)
    assert still_old(made, before)


@pytest.mark.case("B105")
def test_a_stale_spare_does_not_pass_for_new_bytes() -> None:
    """The second update finds the first one's bytes in the spare: finite, plausible, and not the promised ones."""
    made = replica(checkpoint(6))
    made.update(1, "0-1")
    new = checkpoint(7)
    for digests in (True, False):
        made.open_source = lambda _rank, d=digests: LyingSource(new, manifest=manifest_of(new, d))
        with pytest.raises(LiveweightsError):
            made.update(2 + digests, "0-2")
    assert holds(made, [sliced(checkpoint(6), 0, 1)])


def test_a_rank_agent_opens_the_disk_by_itself(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    write_checkpoint(tmp_path / "model.safetensors", {"w": weight})
    agent = RankAgent(BareEngine({"w": (3, 4)}, Rules(), dtypes={"w": torch.float32}))
    reply = agent.plan(RankPlan(1, DiskOffer(str(tmp_path)), (str(tmp_path),), ""))
    assert (reply.bytes_to_read, reply.manifest_digest) == (48, "")
    with refused("source_outside_roots"):
        agent.plan(RankPlan(2, DiskOffer(str(tmp_path)), (str(tmp_path / "other"),), ""))


@pytest.mark.case("F03")
def test_an_ambiguous_folder_does_only_where_its_content_is_known(tmp_path: Path) -> None:
    """A start is compared with the live bytes, a catch-up with the content digest of what is live."""
    weight = torch.arange(12.0).view(3, 4)
    write_sharded(tmp_path, [{"w": weight}])
    write_checkpoint(tmp_path / "model.safetensors", {"w": weight + 1})
    agent = RankAgent(BareEngine({"w": (3, 4)}, Rules(), dtypes={"w": torch.float32}))
    plan = RankPlan(1, DiskOffer(str(tmp_path)), (str(tmp_path),), "")
    with refused("source_ambiguous", files=["model.safetensors"]):
        agent.plan(plan)
    assert agent.plan(replace(plan, known=True)).bytes_to_read == 48
