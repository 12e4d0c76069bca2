"""Coordinate tracing by itself: codes, parts, and what stops it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine_adapter.placement.recorded.affine import UNWRITTEN, AffinePart, affine_parts, constant_class
from engine_adapter.placement.recorded.traced import CODES, CoordinateCode, trace
from engine_adapter.placement.recorded.twin import Pairs, Twin
from engine_adapter.placement.recorded.views import NotBoxes, Strided, boxes_of, pieces_of
from engine_adapter.placement.rows import CopyRow, FillRow
from transports.base import Box
from transports.testing import refused
from updater.protocol.manifest import TensorSpec


class One(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(shape, device="meta"), requires_grad=False)


def twin(shape: tuple[int, ...], load: Callable[[One, dict[str, torch.Tensor]], object]) -> Twin:
    module = One(*shape)

    def loader(pairs: Pairs) -> object:
        return load(module, dict(pairs))

    return Twin(module, loader)


def specs(dtype: str = "F32", **shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("code", CODES)
def test_codes_come_back_and_nothing_else_does(code: CoordinateCode) -> None:
    coordinates = torch.arange(5000)
    values = code.encode(coordinates)
    assert torch.equal(code.decode(values), coordinates)
    assert values.unique().numel() == 5000
    assert bool((values < 0).all()) is code.negative
    strange = torch.cat([values + 1, -values, values * 2, torch.arange(-9, 9), torch.tensor([code.blank])])
    assert not ((code.decode(strange) >= 0) & (code.decode(strange) < 5000)).any()


def test_two_codes_of_a_coordinate_have_nothing_in_common() -> None:
    first, second = (code.encode(torch.arange(5000)) for code in CODES)
    assert not set(first.abs().tolist()) & set(second.abs().tolist())
    assert not torch.equal(first.argsort(), second.argsort())


def test_parts_tile_the_array() -> None:
    blank, seven = UNWRITTEN, constant_class(7)
    array = torch.tensor([[0, 1, 2], [3, 4, 5], [10, 11, 12], [blank, blank, blank], [seven, seven, 20]])
    assert list(affine_parts(array, [0, 10])) == [
        AffinePart((0, 0), (2, 3), 0, 0, (3, 1)),
        AffinePart((2, 0), (1, 3), 1, 10, (0, 1)),
        AffinePart((3, 0), (1, 3), None, blank, (0, 0)),
        AffinePart((4, 0), (1, 2), None, seven, (0, 0)),
        AffinePart((4, 2), (1, 1), 1, 20, (0, 0)),
    ]


def test_a_region_that_stays_unwritten_has_no_row_and_a_filled_one_has() -> None:
    def load(m: One, held: dict[str, torch.Tensor]) -> None:
        m.p.data[:2] = held["w"].flip(0)
        m.p.data[2:4].fill_(3)

    rows = trace(twin((5, 2), load), specs(w=(2, 2)), ["w"], ["p"])
    assert [row.target_box for row in rows if isinstance(row, FillRow)] == [Box((2, 0), (2, 2))]
    assert {row.target_box.start[0] for row in rows} == {0, 1, 2}


def test_other_tensors_are_handed_over_on_meta() -> None:
    def load(m: One, held: dict[str, torch.Tensor]) -> None:
        assert held["other"].is_meta
        m.p.data.copy_(held["w"].t().contiguous())

    rows = trace(twin((2, 3), load), specs(other=(7,), w=(3, 2)), ["w"], ["p"])
    assert rows == [CopyRow("w", Box((0, 0), (3, 2)), "p", Box((0, 0), (2, 3)), (1, 0))]


def test_what_is_too_large_is_refused() -> None:
    load = lambda m, held: m.p.data.copy_(held["w"].flip(0))  # noqa: E731
    with refused("placement_refused", tensors=["p"]):
        trace(twin((4,), load), specs(w=(4,)), ["w"], ["p"], limit=7)
    assert trace(twin((4,), load), specs(w=(4,)), ["w"], ["p"], limit=8)


def test_a_loader_that_hides_what_stopped_it_is_refused() -> None:
    def load(m: One, held: dict[str, torch.Tensor]) -> None:
        try:
            m.p.data.fill_(0.5)
        except RuntimeError:
            m.p.data.copy_(held["w"])

    with refused("placement_refused", tensors=["p"]):
        trace(twin((4,), load), specs(w=(4,)), ["w"], ["p"])


def whole(m: One, w: torch.Tensor) -> object:
    return m.p.data.copy_(w)


STOPPED: dict[str, Callable[[One, torch.Tensor], object]] = {
    "a fraction": lambda m, w: whole(m, w)[0].fill_(0.25),
    "narrowed on the way": lambda m, w: whole(m, w.to(torch.float16).to(torch.float32)),
    "floats": lambda m, w: whole(m, w * 0.0),
    "branch on what was there": lambda m, w: None if m.p.data[0] != 1 else whole(m, w),
    "comparison with what was there": lambda m, w: None if torch.equal(m.p.data, w) else whole(m, w),
    "branch on a value": lambda m, w: None if w[0].item() == 5 else whole(m, w),
}


@pytest.mark.parametrize("how", sorted(STOPPED))
def test_no_copying_is_refused(how: str) -> None:
    with refused("placement_refused", tensors=["p"]):
        trace(twin((4,), lambda m, held: STOPPED[how](m, held["w"])), specs(w=(4,)), ["w"], ["p"])


def test_a_cast_to_the_parameter_s_own_type_is_the_row_s_cast() -> None:
    load = lambda m, held: m.p.data.copy_(held["w"].to(torch.float32).t().contiguous())  # noqa: E731
    assert len(trace(twin((2, 3), load), specs("F64", w=(3, 2)), ["w"], ["p"])) == 1


def test_an_exact_cast_on_the_way_changes_nothing() -> None:
    load = lambda m, held: m.p.data.copy_(held["w"].to(torch.float64).t().contiguous())  # noqa: E731
    assert len(trace(twin((2, 3), load), specs(w=(3, 2)), ["w"], ["p"])) == 1


def test_pieces_of_views_cover_what_torch_copies() -> None:
    source, target = torch.arange(60).view(3, 4, 5), torch.full((6, 10), -1)
    cases = [
        (source[1], target[2:4].view(-1)[:20].view(4, 5)),
        (source[1], target.view(-1)[3:23].view(4, 5)),
        (source.permute(2, 0, 1), target.view(5, 3, 4)),
        (source[:, 1:3, 2:4], target[:3, :4].unflatten(1, (2, 2))),
        (source.view(6, 10)[:, ::3], target[:, 1:5]),
        (source[0, 0, 0], target[1]),
    ]
    for read, write in cases:
        _check_pieces(source, read, target, write)


def _check_pieces(source: torch.Tensor, read: torch.Tensor, target: torch.Tensor, write: torch.Tensor) -> None:
    target.fill_(-1)
    write.copy_(read)
    wanted = target.clone()
    target.fill_(-1)
    for piece in pieces_of(_view(source), _view(read), _view(target), _view(write)):
        region = source[piece.source.slices()]
        region = region if piece.permute is None else region.permute(piece.permute)
        target[piece.target.slices()] = region.reshape(piece.target.size)
    assert torch.equal(target, wanted)


def _view(tensor: torch.Tensor) -> Strided:
    return Strided(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def test_a_view_outside_its_tensor_is_no_box() -> None:
    with pytest.raises(NotBoxes):
        boxes_of(Strided(4, (2, 2), (2, 1)), Strided(2, (2,), (1,)))


def test_dimensions_of_one_element_have_no_say() -> None:
    assert Strided(0, (1, 4), (0, 1)).coordinates(2) == [0, 2]


def test_a_region_that_ends_within_a_row_is_two_boxes() -> None:
    owner, view = Strided.contiguous((5, 4)), Strided(0, (14,), (1,))
    assert boxes_of(owner, view) == [Box((0, 0), (3, 4)), Box((3, 0), (1, 2))]


def test_empty_views_have_no_boxes() -> None:
    assert boxes_of(Strided.contiguous((3, 2)), Strided(0, (0, 2), (2, 1))) == []
