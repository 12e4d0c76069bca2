"""Both coverages, and the vote that atoms add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_adapter.placement.atoms import combine, make_cuts
from engine_adapter.placement.coverage import check_destination, check_rows, check_sources, source_boxes
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow, Placement, Row
from engine_adapter.placement.values import AtomDigest, RankVerifyReply, SourceBoxes, WireTensor
from transports.base import Box
from updater.protocol.manifest import TensorSpec

W = WireTensor("w", "BF16", (4,), "")


def span(low: int, high: int) -> Box:
    return Box((low,), (high - low,))


def placed(*rows: Row) -> Placement:
    return Placement(0, 1, rows, frozenset())


def copy(low: int, high: int, source: str = "w") -> CopyRow:
    return CopyRow(source, span(0, high - low), "p", span(low, high))


def codes(*rows: Row) -> list[str]:
    return [failure.code for failure in check_destination(placed(*rows), {"p": (4,)})]


def test_every_element_needs_a_writer() -> None:
    assert codes(copy(0, 2), copy(2, 4)) == []
    assert codes(copy(0, 2), FillRow("p", span(2, 4))) == []
    assert codes(copy(0, 2), CarryRow("p", span(2, 4))) == []
    assert codes(copy(0, 3)) == ["tensor_unwritten"]
    assert codes() == ["tensor_unwritten"]


def test_copies_may_lie_over_an_earlier_fill_but_nothing_over_a_copy() -> None:
    assert codes(FillRow("p", span(0, 4)), copy(0, 3)) == []
    assert codes(copy(0, 3), FillRow("p", span(0, 4))) == ["placement_refused"]
    assert codes(copy(0, 3), copy(2, 4, "x")) == ["placement_refused"]
    assert codes(copy(0, 4), CarryRow("p", span(0, 1))) == ["placement_refused"]


def test_a_hole_between_overlapping_copies_is_seen() -> None:
    """Counting elements would say four of four."""
    assert codes(copy(0, 2), copy(1, 3, "x")) == ["tensor_unwritten", "placement_refused"]


@pytest.mark.parametrize(
    "row",
    [
        CopyRow("nobody", span(0, 4), "p", span(0, 4)),
        CopyRow("w", span(2, 6), "p", span(0, 4)),
        CopyRow("w", span(0, 4), "nobody", span(0, 4)),
        CopyRow("w", span(0, 4), "p", span(2, 6)),
        CopyRow("w", span(0, 3), "p", span(0, 4)),
        CopyRow("w", span(0, 4), "p", span(0, 4), permute=(1,)),
    ],
)
def test_rows_that_cannot_be_replayed_are_refused(row: CopyRow) -> None:
    specs = {"w": TensorSpec("w", "BF16", (4,))}
    assert check_rows(placed(copy(0, 4)), specs, {"p": (4,)}) == []
    assert [failure.code for failure in check_rows(placed(row), specs, {"p": (4,)})] == ["placement_refused"]


def test_a_permuted_row_must_fit_after_the_permutation() -> None:
    specs = {"w": TensorSpec("w", "BF16", (2, 3))}
    row = CopyRow("w", Box((0, 0), (2, 3)), "p", Box((0, 0), (3, 2)), permute=(1, 0))
    assert check_rows(placed(row), specs, {"p": (3, 2)}) == []
    assert check_rows(placed(replace(row, permute=None)), specs, {"p": (3, 2)})


def held(*ranks: tuple[Box, ...]) -> list[tuple[SourceBoxes, ...]]:
    return [(SourceBoxes("w", boxes),) if boxes else () for boxes in ranks]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (held((span(0, 2),), (span(2, 4),)), []),
        (held((span(0, 4),), (span(0, 4),)), []),
        (held((span(0, 2),), (span(0, 2),), (span(2, 4),), (span(2, 4),)), []),
        # Both ranks keep rank 0's slice.
        pytest.param(held((span(0, 2),), (span(0, 2),)), ["tensor_unwritten"], marks=pytest.mark.case("B061")),
        # The tail is lost.
        pytest.param(held((span(0, 2),), (span(2, 3),)), ["tensor_unwritten"], marks=pytest.mark.case("B064")),
        (held((span(0, 3),), (span(2, 4),)), ["placement_refused"]),
        (held((), ()), ["tensor_unwritten"]),
    ],
)
def test_every_source_element_lands_and_regions_do_not_overlap_in_part(
    ranks: list[tuple[SourceBoxes, ...]], expected: list[str]
) -> None:
    assert [failure.code for failure in check_sources([W], ranks)] == expected


def test_spread_out_neighbours_are_reported_as_one_region() -> None:
    spread = placed(*(CopyRow("w", span(i, i + 1), "p", span(2 * i, 2 * i + 1)) for i in range(2)))
    assert source_boxes(spread) == (SourceBoxes("w", (span(0, 2),)),)


def test_parts_of_a_fused_tensor_stay_apart_and_may_be_replicated_by_themselves() -> None:
    """Query heads once, key and value heads on both ranks: uniform per region, not per tensor."""
    ranks = [
        source_boxes(placed(*(CopyRow("w", box, "p", target) for box, target in rows)))
        for rows in (
            [(span(0, 1), span(0, 1)), (span(2, 3), span(1, 2)), (span(3, 4), span(2, 3))],
            [(span(1, 2), span(0, 1)), (span(2, 3), span(1, 2)), (span(3, 4), span(2, 3))],
        )
    ]
    assert [each.boxes for rank in ranks for each in rank] == [
        (span(0, 1), span(2, 3), span(3, 4)),
        (span(1, 2), span(2, 3), span(3, 4)),
    ]
    assert check_sources([W], ranks) == []


# the vote


def reply(*atoms: tuple[Box, int], changed: tuple[str, ...] = ("p",), zero: tuple[str, ...] = ()) -> RankVerifyReply:
    found = tuple(AtomDigest("w", box, f"{digest:016x}") for box, digest in atoms)
    return RankVerifyReply(found, 1, changed, zero)


LEFT, RIGHT = span(0, 2), span(2, 4)
CUTS = make_cuts([W], held((LEFT,), (RIGHT,)))
PROMISED = replace(W, digest=f"{7:016x}")


def test_cuts_are_the_borders_of_all_ranks() -> None:
    assert CUTS[0].cuts == ((0, 2, 4),)
    assert make_cuts([W], held((span(0, 3),), (span(2, 4),)))[0].cuts == ((0, 2, 3, 4),)
    assert make_cuts([WireTensor("s", "F32", (), "")], [()])[0].cuts == ()


def test_atoms_add_up_modulo_two_to_the_64() -> None:
    top = (1 << 64) - 1
    found = combine([W], (), CUTS, [reply((LEFT, top)), reply((RIGHT, 8))])
    assert (found.digests, found.failures) == ({"w": f"{7:016x}"}, ())


def test_copies_count_once_and_must_agree() -> None:
    pair = [reply((LEFT, 3)), reply((LEFT, 3)), reply((RIGHT, 4)), reply((RIGHT, 4))]
    found = combine([PROMISED], (), CUTS, pair)
    assert (found.failures, found.proof) == ((), "digests")
    bad = combine([PROMISED], (), CUTS, [*pair[:3], reply((RIGHT, 5))])
    assert [(failure.code, failure.tensor) for failure in bad.failures] == [("copies_differ", "w")]
    assert "[2]" in bad.failures[0].message
    assert "[3]" in bad.failures[0].message
    assert bad.observed == ""


def test_copies_on_one_rank_must_agree_too() -> None:
    found = combine([W], (), CUTS, [reply((LEFT, 3), (LEFT, 4)), reply((RIGHT, 4))])
    assert [failure.code for failure in found.failures] == ["copies_differ"]


def test_a_wrong_digest_names_tensor_and_holders() -> None:
    found = combine([PROMISED], (), CUTS, [reply((LEFT, 3)), reply((RIGHT, 5))])
    assert [(failure.code, failure.tensor, failure.rank) for failure in found.failures] == [
        ("tensor_digest", "w", None)
    ]
    alone = combine([PROMISED], (), make_cuts([W], held((span(0, 4),))), [reply((span(0, 4), 5))])
    assert [failure.rank for failure in alone.failures] == [0]


def test_missing_and_foreign_atoms_are_no_proof() -> None:
    assert [f.code for f in combine([W], (), CUTS, [reply((LEFT, 3))]).failures] == ["tensor_unwritten"]
    off = combine([W], (), CUTS, [reply((LEFT, 3), (RIGHT, 3), (span(1, 2), 0))])
    assert [f.code for f in off.failures] == ["placement_refused"]
    assert [f.code for f in combine([W], (), (), [reply((LEFT, 3))]).failures] == ["placement_refused"]
    assert [f.code for f in combine([], (), (), [reply((LEFT, 3))]).failures] == ["placement_refused"]


def test_one_tensor_without_a_promise_makes_the_proof_structural() -> None:
    other = WireTensor("v", "F32", (0,), "")
    found = combine([PROMISED, other], (), (*CUTS, *make_cuts([other], [()])), [reply((LEFT, 3), (RIGHT, 4))])
    assert (found.failures, found.proof) == ((), "structure_only")
    assert found.digests["v"] == f"{0:016x}"


def test_the_content_digest_does_not_depend_on_how_ranks_cut() -> None:
    split = combine([W], (), CUTS, [reply((LEFT, 3)), reply((RIGHT, 4))])
    whole = combine([W], (), make_cuts([W], held((span(0, 4),))), [reply((span(0, 4), 7))])
    other = combine([W], (), CUTS, [reply((LEFT, 3)), reply((RIGHT, 5))])
    assert split.observed == whole.observed != other.observed


def test_redundant_ties_must_be_equal_and_stay_out_of_the_content() -> None:
    head = WireTensor("h", "BF16", (4,), "")
    cuts = make_cuts([W, head], held((span(0, 4),)))
    atoms = reply((span(0, 4), 7)).atoms
    same = replace(reply(), atoms=(*atoms, AtomDigest("h", span(0, 4), f"{7:016x}")))
    found = combine([W, head], (("h", "w"),), cuts, [same])
    assert (found.failures, len(found.warnings)) == ((), 1)
    assert found.observed == combine([W], (), cuts, [reply((span(0, 4), 7))]).observed
    wrong = replace(reply(), atoms=(*atoms, AtomDigest("h", span(0, 4), f"{8:016x}")))
    bad = combine([W, head], (("h", "w"),), cuts, [wrong])
    assert [(f.code, f.tensor) for f in bad.failures] == [("tensor_digest", "h")]


def test_unchanged_and_all_zero_parameters_are_warned_of() -> None:
    still = combine([W], (), CUTS, [reply((LEFT, 3), changed=()), reply((RIGHT, 4), changed=())])
    assert (still.changed, len(still.warnings)) == (0, 1)
    zero = combine([W], (), CUTS, [reply((LEFT, 3), zero=("norm",)), reply((RIGHT, 4), zero=("norm",))])
    assert (zero.changed, len(zero.warnings)) == (1, 1)
    assert "norm" in zero.warnings[0]
