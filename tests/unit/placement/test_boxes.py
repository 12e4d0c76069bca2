"""Box arithmetic against sets of elements."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.placement.boxes import (
    cells,
    cells_within,
    cuts_of,
    first_overlap,
    merge,
    subtract,
    uncovered,
)
from transports.base import Box

SHAPE = (4, 5, 3)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    start = tuple(draw(st.integers(0, limit - 1)) for limit in SHAPE)
    size = tuple(draw(st.integers(1, limit - a)) for a, limit in zip(start, SHAPE, strict=True))
    return Box(start, size)


@given(boxes(), boxes())
def test_intersection_and_difference(a: Box, b: Box) -> None:
    common = a.meet(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    rest = subtract(a, b)
    assert set().union(*(elements(box) for box in rest)) == elements(a) - elements(b)
    assert sum(box.numel for box in rest) == len(elements(a) - elements(b))


@given(st.lists(boxes(), max_size=6))
@settings(max_examples=50)
def test_grid_and_cover(found: list[Box]) -> None:
    grid = cuts_of(SHAPE, found)
    everything = list(cells(grid))
    assert sum(cell.numel for cell in everything) == 60
    assert set().union(*(elements(cell) for cell in everything)) == elements(Box.whole(SHAPE))
    for box in found:
        inside = list(cells_within(grid, box))
        assert set().union(*(elements(cell) for cell in inside)) == elements(box)
    touched = set().union(*(elements(box) for box in found))
    hole = uncovered(SHAPE, found)
    assert (hole is None) == (len(touched) == 60)
    assert hole is None or not elements(hole) & touched
    pair = first_overlap(found)
    clash = [(i, j) for i, a in enumerate(found) for j in range(i) if elements(a) & elements(found[j])]
    assert (pair is None) == (not clash)
    assert pair is None or elements(found[pair[0]]) & elements(found[pair[1]])


@given(st.lists(boxes(), max_size=6))
@settings(max_examples=50)
def test_merging_keeps_every_element_as_often_as_before(found: list[Box]) -> None:
    def counted(some: list[Box]) -> list[tuple[int, ...]]:
        return sorted(element for box in some for element in elements(box))

    assert counted(merge(found)) == counted(found)


def test_neighbours_join_in_any_direction() -> None:
    assert merge([Box((0, 0), (2, 3)), Box((2, 0), (2, 3)), Box((0, 3), (4, 1))]) == [Box((0, 0), (4, 4))]
    assert merge([Box((0, 0), (1, 2)), Box((0, 0), (1, 2))]) == [Box((0, 0), (1, 2)), Box((0, 0), (1, 2))]


def test_scalars_and_empty_tensors() -> None:
    scalar, empty = Box((), ()), Box((0,), (0,))
    assert list(cells(())) == [scalar]
    assert scalar.meet(scalar) == scalar
    assert uncovered((), []) == scalar
    assert uncovered((), [scalar]) is None
    assert first_overlap([scalar, scalar]) == (0, 1)
    assert list(cells(cuts_of((0, 3), []))) == []
    assert uncovered((0,), []) is None
    assert merge([empty, empty]) == []
    assert Box((3, 4), (1, 1)).within(Box((2, 4), (5, 5))) == Box((1, 0), (1, 1))
