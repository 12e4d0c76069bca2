"""Names and coverage of recorded placements: what is missing, unknown, ignored, tied, or was never fed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from engine_adapter.placement.coverage import check_destination, check_rows
from engine_adapter.placement.recorded.record import StartCheckpoint, place, record
from engine_adapter.placement.recorded.twin import Pairs, Twin
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow, Placement
from transports.base import Box
from transports.testing import refused
from updater.core.errors import Rejected
from updater.protocol.manifest import TensorSpec

START = {"embed": (5, 4), "q": (4, 4), "k": (2, 4), "norm": (4,), "head": (5, 4)}


class Decoder(nn.Module):
    """Padded vocabulary, fused projections, a scale that no checkpoint has, tables, and a head that may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = _parameter(8, 4)
        self.qk = _parameter(6, 4)
        self.norm = _parameter(4)
        self.scale = _parameter(1)
        self.head = self.embed if tied else _parameter(8, 4)
        self.register_buffer("bias", torch.zeros(4, device="meta"))
        self.register_buffer("table", torch.zeros(4, device="meta"), persistent=False)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, device="meta"), requires_grad=False)


def load(model: Decoder, pairs: Pairs) -> None:
    """Knows its names, drops rotary tables and experts in silence, skips a tied head, asserts shapes."""
    for name, w in pairs:
        if name == "rotary.inv_freq" or name.startswith("expert.") or (name == "head" and model.head is model.embed):
            continue
        if name in ("q", "k"):
            model.qk.data.narrow(0, 0 if name == "q" else 4, w.shape[0]).copy_(w)
        elif name in ("embed", "head"):
            getattr(model, name).data[:5].copy_(w)
            getattr(model, name).data[5:].fill_(0)
        else:
            target = dict(model.named_parameters()) | dict(model.named_buffers())
            assert target[name].shape == w.shape, "shapes differ"
            target[name].data.copy_(w)


def specs(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in START.items() if name not in names}


def twin(tied: bool = False) -> Twin:
    model = Decoder(tied)
    return Twin(model, lambda pairs: load(model, pairs))


def started(on: Twin, shapes: dict[str, tuple[int, ...]] = START) -> StartCheckpoint:
    given = specs(shapes)
    return StartCheckpoint(given, place(on, given, 0, 1))


def carried(placement: Placement) -> list[CarryRow]:
    return [row for row in placement.rows if isinstance(row, CarryRow)]


def check_covered(placement: Placement, given: dict[str, TensorSpec], on: Twin, names: Iterable[str]) -> None:
    shapes = {name: on.tensors[name].shape for name in names}
    assert check_rows(placement, given, shapes) == []
    assert check_destination(placement, shapes) == []


def test_the_start_is_covered_and_what_nobody_feeds_is_carried() -> None:
    on = twin()
    start = started(on)
    assert carried(start.placement) == [CarryRow("scale", Box((0,), (1,))), CarryRow("bias", Box((0,), (4,)))]
    assert start.placement.loaded == set(START)
    assert [row.target_box for row in start.placement.rows if isinstance(row, FillRow)] == [Box((5, 0), (3, 4))] * 2
    check_covered(start.placement, specs(START), on, on.tensors)


def test_the_same_names_again_give_the_same_rows() -> None:
    on = twin()
    start = started(on)
    assert place(on, specs(START), 0, 1, start) == start.placement


def test_a_missing_tensor_is_named() -> None:
    on = twin()
    start = started(on)
    with refused("tensor_missing", tensors=["k", "norm"]):
        place(on, specs(without("k", "norm")), 0, 1, start)


def test_missing_and_unknown_are_reported_together() -> None:
    on = twin()
    start = started(on)
    with refused("tensor_missing", "tensor_unexpected", tensors=["norm", "norn", "extra"]) as caught:
        place(on, specs(without("norm") | {"norn": (4,), "extra": (1,)}), 0, 1, start)
    assert any("norm" in failure.message for failure in caught[0].failures if failure.tensor == "norn")


def test_a_foreign_checkpoint_does_not_take_one_run_per_name() -> None:
    on = twin()
    start = started(on)
    runs = 0
    inner = on.load

    def counted(pairs: Pairs) -> object:
        nonlocal runs
        runs += 1
        return inner(pairs)

    on.load = counted
    with refused("tensor_unexpected"):
        place(on, specs({f"layer.{i}": (1,) for i in range(5000)}), 0, 1, start)
    assert runs < 200


def test_a_name_that_needs_the_others_is_not_blamed() -> None:
    model = Decoder()

    def paired(pairs: Pairs) -> None:
        held = dict(pairs)
        if "k" in held and "q" not in held:
            raise ValueError("a key without its query")
        load(model, iter(held.items()))

    on = Twin(model, paired)
    start = started(on)
    with refused("tensor_unexpected", tensors=["extra"]) as caught:
        place(on, specs(START | {"extra": (1,)}), 0, 1, start)
    assert [failure.tensor for failure in caught[0].failures] == ["extra"]


def test_another_shape_is_named() -> None:
    on = twin()
    start = started(on)
    with refused("tensor_shape", tensors=["norm"]):
        place(on, specs(START | {"norm": (5,)}), 0, 1, start)


def test_a_shape_that_the_loader_accepts_leaves_a_hole() -> None:
    on = twin()
    start = started(on)
    given = specs(START | {"k": (1, 4)})
    found = place(on, given, 0, 1, start)
    assert carried(found) == carried(start.placement)
    shapes = {name: on.tensors[name].shape for name in on.tensors}
    assert [failure.tensor for failure in check_destination(found, shapes)] == ["qk"]


def test_ignored_names_have_a_reason() -> None:
    on = twin()
    given = specs(START | {"rotary.inv_freq": (2,)})
    found = place(on, given, 0, 1, started(on))
    assert [name for name, _ in found.ignored] == ["rotary.inv_freq"]
    assert all(reason for _, reason in found.ignored)
    assert "rotary.inv_freq" not in found.loaded


def test_what_a_loader_passes_over_in_silence_is_unexpected_unless_the_start_had_it() -> None:
    on = twin()
    given = specs(START | {"expert.4.w1": (2,)})
    with pytest.raises(Rejected) as caught:
        place(on, given, 0, 1, started(on))
    (failure,) = caught.value.failures
    assert (failure.code, failure.tensor) == ("tensor_unexpected", "expert.4.w1")
    had = StartCheckpoint(given, place(on, given, 0, 1))
    assert [name for name, _ in place(on, given, 0, 1, had).ignored] == ["expert.4.w1"]


def test_a_tied_head_is_redundant_beside_the_embedding() -> None:
    on = twin(tied=True)
    assert on.tensors["embed"].aliases == ("head",)
    start = started(on, without("head"))
    assert start.placement.redundant == ()
    found = place(on, specs(START), 0, 1, start)
    assert found.redundant == (("head", "embed"),)
    assert found.ignored == ()
    assert "head" not in found.loaded


def test_a_tied_head_of_another_shape_is_refused() -> None:
    on = twin(tied=True)
    start = started(on, without("head"))
    with refused("tensor_shape", tensors=["head"]):
        place(on, specs(START | {"head": (6, 4)}), 0, 1, start)


def test_a_loader_that_writes_a_tied_copy_over_its_twin() -> None:
    model = Decoder(tied=True)

    def both(pairs: Pairs) -> None:
        for name, w in pairs:
            dict(model.named_parameters(remove_duplicate=False))[name].data[:5].copy_(w)

    found = place(Twin(model, both), specs({"embed": (5, 4), "head": (5, 4)}), 0, 1)
    assert found.redundant == (("head", "embed"),)
    assert [row.source for row in found.rows if isinstance(row, CopyRow)] == ["embed"]
    assert found.tied == ()


@pytest.mark.case("F34")
def test_a_tied_head_alone_is_named_with_all_that_it_feeds() -> None:
    model = Decoder(tied=True)

    def either(pairs: Pairs) -> None:
        for name, w in pairs:
            dict(model.named_parameters(remove_duplicate=False))[name].data[:5].copy_(w)

    found = place(Twin(model, either), specs({"head": (5, 4)}), 0, 1)
    assert found.tied == (("head", ("embed", "head")),)


def test_a_persistent_buffer_is_a_target_like_a_parameter() -> None:
    on = twin()
    fed = START | {"bias": (4,)}
    start = started(on, fed)
    assert any(isinstance(row, CopyRow) and row.target == "bias" for row in start.placement.rows)
    with refused("tensor_missing", tensors=["bias"]):
        place(on, specs(START), 0, 1, start)


def test_what_was_carried_may_be_fed_later() -> None:
    on = twin()
    found = place(on, specs(START | {"scale": (1,), "bias": (4,)}), 0, 1, started(on))
    assert carried(found) == []


def test_two_sources_over_one_region_are_refused() -> None:
    model = Decoder()

    def over(pairs: Pairs) -> None:
        for _, w in pairs:
            model.norm.data.copy_(w)

    with refused("placement_refused", tensors=["norm"]):
        place(Twin(model, over), specs({"a": (4,), "b": (4,)}), 0, 1)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_packed_types_are_refused(dtype: str) -> None:
    with refused("tensor_dtype", tensors=["norm"]):
        place(twin(), specs({"norm": (4,)}, dtype), 0, 1)


def test_parameters_in_one_arena_are_told_apart() -> None:
    model = nn.Module()
    arena = torch.zeros(10, device="meta")
    model.a = nn.Parameter(arena[:4].view(2, 2), requires_grad=False)
    model.b = nn.Parameter(arena[4:10].view(2, 3), requires_grad=False)

    def each(pairs: Pairs) -> None:
        for name, w in pairs:
            model.get_parameter(name).data.copy_(w)

    found = record(Twin(model, each), specs({"a": (2, 2), "b": (2, 3)}))
    assert found.unread == ()
    assert set(found.rows) == {
        CopyRow("a", Box((0, 0), (2, 2)), "a", Box((0, 0), (2, 2))),
        CopyRow("b", Box((0, 0), (2, 3)), "b", Box((0, 0), (2, 3))),
    }


def test_a_transposed_parameter_is_read_in_its_own_coordinates() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(4, 3, device="meta").t(), requires_grad=False)

    def whole(pairs: Pairs) -> None:
        for _, w in pairs:
            model.p.data.copy_(w)

    found = place(Twin(model, whole), specs({"p": (3, 4)}), 0, 1)
    assert found.rows == (CopyRow("p", Box((0, 0), (3, 4)), "p", Box((0, 0), (3, 4))),)


def test_what_is_wrong_names_the_rank() -> None:
    on = twin()
    start = started(on)
    with refused("tensor_missing") as caught:
        place(on, specs(without("q")), 1, 2, start)
    assert {failure.rank for failure in caught[0].failures} == {1}


@pytest.mark.case("F29")
def test_a_wrong_number_of_rows_shows_both_shapes_and_what_the_loader_asserts() -> None:
    def bare(model: Decoder, pairs: Pairs) -> None:
        for name, w in pairs:
            if name == "q" and w.shape[0] != 4:
                raise AssertionError
            load(model, [(name, w)])

    model = Decoder()
    on = Twin(model, lambda pairs: bare(model, pairs))
    start = started(on)
    with refused("tensor_shape", tensors=["q"]) as caught:
        place(on, specs(START | {"q": (3, 4)}), 0, 1, start)
    message = caught[0].failures[0].message
    assert "[3, 4]" in message
    assert "[4, 4]" in message
    assert "raise AssertionError (in bare)" in message


@pytest.mark.case("F29")
def test_a_loader_that_fails_at_the_start_names_the_shape_and_the_assertion() -> None:
    def bare(_model: Decoder, pairs: Pairs) -> None:
        for _name, w in pairs:
            if w.shape[0] != 4:
                raise AssertionError

    model = Decoder()
    with refused("placement_refused") as caught:
        place(Twin(model, lambda pairs: bare(model, pairs)), specs({"q": (3, 4)}), 0, 1)
    message = caught[0].failures[0].message
    assert "[3, 4]" in message
    assert "raise AssertionError (in bare)" in message
