"""The rows that benchmarks leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import Report, best_of


@pytest.mark.parametrize(
    ("ratio", "goal", "at_most", "holds"),
    [(0.5, 0.4, False, True), (0.3, 0.4, False, False), (1.0, 1.05, True, True), (1.1, 1.05, True, False),
     (3.0, None, False, None)],
)  # fmt: skip
def test_a_row_says_whether_its_goal_holds(
    tmp_path: Path, ratio: float, goal: float | None, at_most: bool, holds: bool | None
) -> None:
    report = Report("x", tmp_path / "report.json")
    report.add("r", ratio, goal=goal, at_most=at_most, detail="d")
    report.finish()
    (row,) = json.loads(report.path.read_text())
    assert set(row) == {"name", "ratio", "goal", "holds", "detail"}
    assert (row["name"], row["ratio"], row["goal"], row["holds"]) == ("r", ratio, goal, holds)


def test_rows_of_several_benchmarks_are_kept_and_repeated_ones_replaced(tmp_path: Path) -> None:
    for names in (["a", "b"], ["c"], ["a"]):
        report = Report("x", tmp_path / "report.json")
        for name in names:
            report.add(name, float(len(names)))
        report.finish()
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [(row["name"], row["ratio"]) for row in rows] == [("b", 2.0), ("c", 1.0), ("a", 1.0)]


def test_works_take_turns_and_the_first_round_is_not_timed() -> None:
    calls: list[str] = []
    times = best_of(2, lambda: calls.append("a"), lambda: calls.append("b"))
    assert calls == ["a", "b"] * 3
    assert len(times) == 2
