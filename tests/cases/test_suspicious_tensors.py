"""F05: tensors that arrive without one normal number, where the live ones have some. Ranks and rules are real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_adapter.placement.declared.rules import Rules
from engine_adapter.placement.suspicious import judge, suspects
from engine_adapter.placement.values import BlankTensor, RankVerifyReply, WireTensor
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import Tensors, checkpoint, holds, manifest_of, replica, sliced
from transports.testing import MemorySource
from updater.core.errors import LiveweightsError

pytestmark = pytest.mark.case("F05")

Q, UP, NORM = "l.attn.q_proj.weight", "l.mlp.up_proj.weight", "norm.weight"
TINY = torch.finfo(torch.bfloat16).tiny


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with their bytes in the other order."""
    octets = tensor.contiguous().view(torch.uint8).view(-1, tensor.element_size())
    return octets.flip(1).contiguous().view(tensor.dtype).view(tensor.shape)


def suspicious(made: BareReplica, **plan: Any) -> set[str]:
    """Names that the vote refuses so; what was live stays."""
    before = [{name: t.clone() for name, t in engine.bound.items()} for engine in made.engines]
    with pytest.raises(LiveweightsError) as caught:
        made.update(1, "0-1", **plan)
    assert {failure.code for failure in caught.value.failures} == {"tensor_suspicious"}
    assert all(failure.hint for failure in caught.value.failures)
    assert holds(made, before)
    return {failure.tensor for failure in caught.value.failures}


def test_swapped_bytes_of_float32_that_fit_bfloat16_are_refused() -> None:
    """Every element is below 1e-40, finite, and may be narrowed."""
    tensors = {name: swapped(tensor.float()) for name, tensor in checkpoint(1).items()}
    assert max(float(tensor.abs().max()) for tensor in tensors.values()) < 1e-40
    made = replica(tensors, digests=False)
    assert suspicious(made, allow_narrowing=(("F32", "BF16"),)) == set(tensors) - {NORM}


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_zeros_is_refused(size: int) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in checkpoint(1).items()}
    assert suspicious(replica(tensors, size, digests=False)) == set(tensors) - {NORM}


def test_one_tensor_of_a_fused_parameter_is_named() -> None:
    tensors = checkpoint(1)
    tensors[Q] = torch.full_like(tensors[Q], TINY / 2)
    assert suspicious(replica(tensors, digests=False)) == {Q}


def test_it_is_judged_over_all_ranks() -> None:
    """One normal number on either rank is enough, in the new bytes as in the live ones."""
    tensors, live = checkpoint(1), checkpoint(99)
    tensors[UP] = torch.zeros_like(tensors[UP])
    live[UP] = torch.zeros_like(live[UP])
    for half in (0, -1):  # on the first rank, on the last
        tensors[UP][half, 0] = 1
        replica(tensors, 2, digests=False).update(1, "0-1")
        tensors[UP][half, 0] = 0
        live[UP][half, 0] = 1
        assert suspicious(replica(tensors, 2, digests=False, live=live)) == {UP}
        live[UP][half, 0] = 0


@pytest.mark.parametrize("live", ["blank too", "known"])
def test_it_is_not_judged_where_nothing_was_lost(live: str) -> None:
    """`known`: a catch-up, whose content the vote compares with what is live."""
    tensors = checkpoint(1)
    tensors[Q] = torch.zeros_like(tensors[Q])
    old = checkpoint(99) | ({Q: tensors[Q]} if live == "blank too" else {})
    made = replica(tensors, digests=False, live=old)
    made.update(1, "0-1", known=live == "known")
    assert holds(made, [sliced(tensors, 0, 1)])


def test_what_is_the_trainers_word_is_warned_of() -> None:
    tensors = checkpoint(1)
    tensors[Q] = torch.zeros_like(tensors[Q])
    found = replica(tensors).update(1, "0-1")
    assert any(Q in line.split() and "digest" in line for line in found.warnings)


def test_the_policy_names_what_may_look_so_and_the_receipt_says_it() -> None:
    tensors = checkpoint(1)
    tensors[Q], tensors[UP] = torch.zeros_like(tensors[Q]), torch.zeros_like(tensors[UP])
    assert suspicious(replica(tensors, digests=False), allow_suspicious=("*.q_proj.*",)) == {UP}
    found = replica(tensors, digests=False).update(1, "0-1", allow_suspicious=("*.q_proj.*", UP))
    assert any(Q in line.split() and "(*.q_proj.*)" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("wire", "parameter", "value"),
    [
        (torch.float16, torch.float32, 1e-6),  # subnormal on the wire, normal where it lands
        (torch.float32, torch.float32, 1e-40),
        (torch.float64, torch.float64, 1e-310),
        (torch.float64, torch.float32, 1e-310),
        (torch.bfloat16, torch.bfloat16, 1e-39),
    ],
)
@pytest.mark.parametrize("normal", [False, True])
def test_it_is_judged_in_the_dtype_of_the_wire(
    wire: torch.dtype, parameter: torch.dtype, value: float, normal: bool
) -> None:
    tensors: Tensors = {"w": torch.full((4, 6), value, dtype=wire)}
    if normal:
        tensors["w"][3, 5] = 1
    engine = BareEngine({"w": (4, 6)}, Rules(), dtypes={"w": parameter})
    engine.bound["w"].fill_(1)
    made = BareReplica([engine], lambda _rank: MemorySource(tensors, manifest_of(tensors, digests=False)))
    narrowing = {"allow_narrowing": (("F64", "F32"),)}
    if normal:
        made.update(1, "0-1", **narrowing)
    else:
        assert suspicious(made, **narrowing) == {"w"}


def test_a_redundant_copy_is_judged_under_its_canonical_name_alone() -> None:
    names = ("embed", "head")
    tensors = [WireTensor(name, "F32", (2, 2), "") for name in names]
    blank = tuple(BlankTensor(name, True) for name in names)
    reply = RankVerifyReply((), 1, (), (), blank)
    assert suspects(tensors, (), [reply]) == ["embed", "head"]
    assert suspects(tensors, {"head"}, [reply]) == ["embed"]
    assert suspects(tensors[1:], (), [reply]) == ["head"]
    # One rank of two has live bytes that say something.
    other = replace(reply, blank=tuple(BlankTensor(name, False) for name in names))
    assert suspects(tensors, (), [reply, other]) == suspects(tensors, (), [other, reply]) == ["embed", "head"]
    assert suspects(tensors, (), [other]) == []


def test_an_answer_about_very_many_is_bounded() -> None:
    names = [f"w{number}" for number in range(150)]
    failures, warnings = judge(names, {}, ())
    assert (len(failures), warnings) == (100, ())
    assert all(failure.hint for failure in failures)
    for digests, allowed in ((dict.fromkeys(names, "0" * 16), ()), ({}, ("w*",))):
        failures, warnings = judge(names, digests, allowed)
        assert (failures, len(warnings)) == ((), 11)
        assert "140" in warnings[-1]
    assert len(judge(names[:10], {}, ("w*",))[1]) == 10
